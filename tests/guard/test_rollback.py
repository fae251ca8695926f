"""Which checkpoint a rollback restores, which batches it skips, and when a run stops."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.guard.runs import healthy, history_of

from longtake.guard.detectors import GuardVerdict, VerdictReason
from longtake.guard.history import GuardSettings, History, StepStatistics
from longtake.guard.rollback import RollBack, plan_rollback
from longtake.run_dir import RolledBack

_SECTION = GuardSettings()
_STEPS = [100, 200, 300]


def _before(from_step: int, reason: str = "divergence") -> RolledBack:
    return RolledBack(
        time="",
        from_step=from_step,
        to_step=from_step - 50,
        skipped=[from_step - 10, from_step],
        reason=reason,
        message="",
    )


def _plan(
    began: int,
    previous: list[RolledBack] | None = None,
    *,
    steps: list[StepStatistics] | None = None,
    history: History | None = None,
    reason: VerdictReason = "divergence",
    section: GuardSettings = _SECTION,
    checkpoints: list[int] = _STEPS,
) -> RollBack | str:
    """Plan what a rollback from the last of some steps does; by default of 311 healthy ones."""
    steps = healthy(311) if steps is None else steps
    history = history_of(steps[-311:-1]) if history is None else history
    verdict = GuardVerdict("roll_back", reason, "It went wrong.", began)
    return plan_rollback(verdict, history, steps[-1], checkpoints, previous or [], section)


def test_it_restores_a_checkpoint_from_before_the_divergence() -> None:
    assert _plan(290) == RollBack(200, (282, 319))


def test_a_checkpoint_of_the_step_where_it_began_is_good() -> None:
    """It holds what that step began with; no batch is skipped that it has already trained."""
    assert _plan(300) == RollBack(300, (300, 319))


def test_unlike_replicas_skip_no_batch() -> None:
    assert _plan(310, reason="replicas") == RollBack(300, (310, 310))


def test_a_history_may_contain_the_step_itself_or_nothing() -> None:
    """What is not remembered is counted back."""
    for history in (history_of(healthy(311)), History(128)):
        assert _plan(290, history=history) == RollBack(200, (282, 319))


def test_batches_are_counted_apart_from_steps() -> None:
    """After 40 batches were skipped from batch 150 on, a step's batch is 40 further."""
    steps = [replace(s, batch=s.step + 40 * (s.step >= 150)) for s in healthy(311)]
    history = history_of(steps[:-1])
    assert _plan(290, steps=steps, history=history) == RollBack(200, (322, 359))
    found = _plan(155, steps=steps, history=history, checkpoints=[150])
    assert found == RollBack(150, (190, 359))


@pytest.mark.parametrize("checkpoints", [[], [300]])
def test_without_a_checkpoint_from_before_it_says_so(checkpoints: list[int]) -> None:
    said = _plan(290, checkpoints=checkpoints)
    assert isinstance(said, str)
    assert said.startswith("The divergence began after step 290, and there is no checkpoint")
    assert ("300" if checkpoints else "none at all") in said
    assert "checkpoint.every" in said


def test_it_gives_up_after_some_rollbacks_without_progress() -> None:
    two = [_before(305), _before(308)]
    assert isinstance(_plan(290, two), RollBack)
    said = _plan(290, [*two, _before(300)])
    assert isinstance(said, str)
    assert "It has rolled back 3 times without progress" in said
    assert "from step 308 to 258 (divergence)" in said


@pytest.mark.parametrize(
    ("before", "gives_up"),
    [
        pytest.param([480, 500, 490], False, id="counted from the furthest step given up"),
        pytest.param([480, 501, 490], True, id="which is less than 500 steps ago"),
        pytest.param([100, 110, 120, 700, 710], False, id="progress forgives what was before"),
        pytest.param([100, 110, 120, 700, 710, 720], True, id="but not what was after"),
    ],
)
def test_progress_in_between_is_counted(before: list[int], gives_up: bool) -> None:
    said = _plan(990, [_before(at) for at in before], steps=healthy(1001), checkpoints=[800, 900])
    assert isinstance(said, str) == gives_up


def test_the_same_at_every_edge_is_no_progress() -> None:
    """However long epochs are: what goes wrong at their ends goes wrong at the next one."""
    edges = [_before(at, "edge_step") for at in (10, 340, 670)]
    section, steps = GuardSettings(progress_steps=100), healthy(1001)
    said = _plan(990, edges, steps=steps, reason="edge_step", section=section, checkpoints=[900])
    assert isinstance(said, str)
    assert "at every edge" in said
    other = _plan(990, edges, steps=steps, section=section, checkpoints=[900])
    assert isinstance(other, RollBack)


def test_max_rollbacks_0_stops_at_the_first_rollback() -> None:
    said = _plan(290, section=GuardSettings(max_rollbacks=0))
    assert isinstance(said, str)
    assert "guard.max_rollbacks" in said


@given(
    began=st.integers(0, 310),
    checkpoints=st.lists(st.integers(0, 400), max_size=6),
    margin=st.integers(0, 400),
)
def test_a_plan_is_always_sound(began: int, checkpoints: list[int], margin: int) -> None:
    """It restores a state from before the divergence and skips its batches up to now.

    It skips no batch that the checkpoint has trained.
    """
    section = GuardSettings(margin_batches=margin)
    plan = _plan(began, history=History(128), checkpoints=checkpoints, section=section)
    if isinstance(plan, str):
        assert not [step for step in checkpoints if step <= began]
        return
    first, end = plan.skipped
    assert plan.step in checkpoints
    assert plan.step <= first <= began < 311 <= end == 310 + margin + 1
