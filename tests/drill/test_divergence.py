"""A drill of the guard can fail: whatever a run does wrong is said."""

import pytest

from longtake.drill import divergence
from longtake.drill.faults import nan_gradient, nan_on_one_rank, weight_norm_step_at_epoch_end
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.fsio import now
from longtake.run_dir import RolledBack

_AT = 20


def test_a_fault_that_nobody_saw_fails_the_drill(trained: Place) -> None:
    """A run that just goes on has not repaired itself."""
    verdict = divergence.judge_repair("a-fault", trained, _AT, "spike", trained)
    assert verdict.complaints == [
        "no event says that the guard saw anything",
        "it went back 0 times, not once",
    ]
    assert verdict.detected_steps is None
    verdict = divergence.judge_skip("a-fault", trained, _AT, trained)
    assert verdict.complaints == [
        "no event says that the guard saw anything",
        "updates of steps [] were left out, not of 21",
    ]


def test_what_is_found_late_or_taken_for_another_thing_fails_the_drill(
    place: Place, trained: Place
) -> None:
    """So does what was not kept to be looked at."""
    _report(place, step=_AT + 3, reason="divergence", path="guard/none.json")
    verdict = divergence.judge_repair("a-fault", place, _AT, "spike", trained, within=2)
    assert verdict.complaints[:3] == [
        f"it was found in step {_AT + 3}, and it began in {_AT}",
        "it was taken for divergence, not spike",
        "what the guard saw was not kept",
    ]
    assert verdict.detected_steps == 3
    assert verdict.detected_seconds is not None


def test_a_rollback_to_after_the_fault_fails_the_drill(place: Place, trained: Place) -> None:
    """So does one that goes round other batches; those that it goes round have to be missing."""
    _report(place, step=_AT, reason="spike")
    _roll_back(place, to_step=_AT + 5, skipped=[_AT + 6, _AT + 8])
    verdict = divergence.judge_repair("a-fault", place, _AT, "spike", trained)
    assert verdict.complaints[:2] == [
        f"it went back to step {_AT + 5}, and it began in {_AT}",
        f"it goes round batches {_AT + 6} to {_AT + 7}, not {_AT}",
    ]
    assert "8 samples belong to no such epoch" in verdict.complaints


def test_a_run_that_ends_worse_fails_the_drill(place: Place, trained: Place) -> None:
    """Its losses are compared on the batches that both have trained."""
    assert divergence.harm(place.run, trained.run) == 1
    text = place.run.metrics_path.read_text()
    place.run.metrics_path.write_text(text.replace('"loss":0.', '"loss":1.'))
    assert divergence.harm(place.run, trained.run) > 4
    verdict = divergence.judge_skip("a-fault", place, _AT, trained)
    assert "times the undisturbed run's loss" in verdict.complaints[-1]


def test_the_message_has_to_name_what_was_lost(place: Place, trained: Place) -> None:
    """The parameter, the rank, the edge."""
    for result, what in (
        (nan_gradient.judge(place, trained), "does not name blocks.1.attention.to_out.weight"),
        (nan_on_one_rank.judge(place, trained), "does not name rank 1 of 2 alone"),
        (weight_norm_step_at_epoch_end.judge(place, trained), "epoch 7 of stage all begins"),
    ):
        assert what in _failed(result)


@pytest.mark.parametrize(
    ("sums", "complaint"),
    [
        (("a",), "1 ranks have told what weights they ended with"),
        (("a", "b"), "the ranks ended with different weights"),
    ],
)
def test_ranks_that_drift_apart_fail_the_drill(
    place: Place, trained: Place, sums: tuple[str, ...], complaint: str
) -> None:
    """Both have to tell what they have come to, and it has to be the same."""
    for rank, checksum in enumerate(sums):
        (place.folder / f"weights_of_rank_{rank}.sha256").write_text(checksum)
    assert complaint in _failed(nan_on_one_rank.judge(place, trained))


def _report(place: Place, step: int, reason: str, path: str = "recipe.toml") -> None:
    facts = {"step": step, "reason": reason, "message": "The loss is high.", "report": path}
    place.run.append_event("suspected", **facts)


def _roll_back(place: Place, to_step: int, skipped: list[int]) -> None:
    facts = {"time": now(), "from_step": 30, "reason": "spike", "message": ""}
    place.run.append_rollback(RolledBack(to_step=to_step, skipped=skipped, **facts))  # type: ignore[typeddict-item]


def _failed(result: Result) -> str:
    assert not result.passed
    return result.message
