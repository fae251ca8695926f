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


def _verdict(began: int, reason: VerdictReason = "divergence") -> GuardVerdict:
    return GuardVerdict("roll_back", reason, "It went wrong.", began)


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
    steps: list[StepStatistics],
    history: History,
    began: int,
    previous: list[RolledBack] | None = None,
    *,
    reason: VerdictReason = "divergence",
    section: GuardSettings = _SECTION,
    checkpoints: list[int] = _STEPS,
) -> RollBack | str:
    verdict = _verdict(began, reason)
    return plan_rollback(verdict, history, steps[-1], checkpoints, previous or [], section)


def test_it_restores_a_checkpoint_from_before_the_divergence() -> None:
    steps = healthy(311)
    assert _plan(steps, history_of(steps[:-1]), 290) == RollBack(200, (282, 319))


def test_a_checkpoint_of_the_step_where_it_began_is_good() -> None:
    """It holds what that step began with; no batch is skipped that it has already trained."""
    steps = healthy(311)
    assert _plan(steps, history_of(steps[:-1]), 300) == RollBack(300, (300, 319))


def test_unlike_replicas_skip_no_batch() -> None:
    steps = healthy(311)
    found = _plan(steps, history_of(steps[:-1]), steps[-1].step, reason="replicas")
    assert found == RollBack(300, (steps[-1].batch, steps[-1].batch))


def test_a_history_may_contain_the_step_itself() -> None:
    steps = healthy(311)
    assert _plan(steps, history_of(steps), 290) == RollBack(200, (282, 319))


def test_batches_are_counted_apart_from_steps() -> None:
    """After 40 batches were skipped from batch 150 on, a step's batch is 40 further."""
    steps = [replace(s, batch=s.step + 40 * (s.step >= 150)) for s in healthy(311)]
    assert _plan(steps, history_of(steps[:-1]), 290) == RollBack(200, (322, 359))
    assert _plan(steps, history_of(steps[:-1]), 155, checkpoints=[150]) == RollBack(150, (190, 359))


def test_what_is_not_remembered_is_counted_back() -> None:
    steps = healthy(311)
    assert _plan(steps, History(128), 290) == RollBack(200, (282, 319))


@pytest.mark.parametrize("checkpoints", [[], [300]])
def test_without_a_checkpoint_from_before_it_says_so(checkpoints: list[int]) -> None:
    steps = healthy(311)
    said = _plan(steps, history_of(steps[:-1]), 290, checkpoints=checkpoints)
    assert isinstance(said, str)
    assert said.startswith("The divergence began after step 290, and there is no checkpoint")
    assert ("300" if checkpoints else "none at all") in said
    assert "checkpoint.every" in said


def test_it_gives_up_after_some_rollbacks_without_progress() -> None:
    steps = healthy(311)
    history = history_of(steps[:-1])
    two, three = [_before(305), _before(308)], [_before(305), _before(308), _before(300)]
    assert isinstance(_plan(steps, history, 290, two), RollBack)
    said = _plan(steps, history, 290, three)
    assert isinstance(said, str)
    assert "It has rolled back 3 times without progress" in said
    assert "from step 308 to 258 (divergence)" in said


def test_progress_is_counted_from_the_furthest_step_that_was_given_up() -> None:
    steps = healthy(1001)
    history = history_of(steps[-301:-1])
    there = [800, 900]
    reached = [_before(480), _before(500), _before(490)]
    assert isinstance(_plan(steps, history, 990, reached, checkpoints=there), RollBack)
    missed = [_before(480), _before(501), _before(490)]
    assert isinstance(_plan(steps, history, 990, missed, checkpoints=there), str)


def test_progress_in_between_forgives_what_was_before() -> None:
    steps = healthy(1001)
    history = history_of(steps[-301:-1])
    long_run = [_before(100), _before(110), _before(120), _before(700), _before(710)]
    assert isinstance(_plan(steps, history, 990, long_run, checkpoints=[900]), RollBack)
    assert isinstance(_plan(steps, history, 990, [*long_run, _before(720)], checkpoints=[900]), str)


def test_the_same_at_every_edge_is_no_progress() -> None:
    """However long epochs are: what goes wrong at their ends goes wrong at the next one."""
    steps = healthy(1001)
    history = history_of(steps[-301:-1])
    edges = [_before(at, "edge_step") for at in (10, 340, 670)]
    section = GuardSettings(progress_steps=100)
    said = _plan(steps, history, 990, edges, reason="edge_step", section=section, checkpoints=[900])
    assert isinstance(said, str)
    assert "at every edge" in said
    other = _plan(steps, history, 990, edges, section=section, checkpoints=[900])
    assert isinstance(other, RollBack)


def test_max_rollbacks_0_stops_at_the_first_rollback() -> None:
    steps = healthy(311)
    said = _plan(steps, history_of(steps[:-1]), 290, section=GuardSettings(max_rollbacks=0))
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
    steps = healthy(311)
    section = GuardSettings(margin_batches=margin)
    plan = _plan(steps, History(128), began, checkpoints=checkpoints, section=section)
    if isinstance(plan, str):
        assert not [step for step in checkpoints if step <= began]
        return
    first, end = plan.skipped
    assert plan.step in checkpoints
    assert plan.step <= first <= began < 311 <= end == 310 + margin + 1
