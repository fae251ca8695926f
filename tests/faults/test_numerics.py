import pytest

from longtake.faults.expect import Evidence
from longtake.faults.numerics import (
    expect_rank_named,
    expect_rollback,
    expect_skip,
    relative_end_loss,
)
from longtake.faults.sandbox import TrainingSite
from longtake.fsio import now
from longtake.run_dir import RolledBack

_AT = 20


def test_a_fault_that_the_guard_missed_is_complained_of(trained: TrainingSite) -> None:
    rollback, skip = Evidence(), Evidence()
    expect_rollback(rollback, trained, _AT, "spike", trained)
    assert rollback.complaints == [
        "no event says that the guard found anything",
        "it rolled back 0 times, not once",
    ]
    expect_skip(skip, trained, _AT, trained)
    assert skip.complaints == [
        "no event says that the guard found anything",
        "updates of steps [] were skipped, not of 21",
    ]


def test_a_late_or_wrong_report_is_complained_of(site: TrainingSite, trained: TrainingSite) -> None:
    evidence = Evidence()
    _report(site, step=_AT + 3, reason="divergence", path="guard/none.json")
    expect_rollback(evidence, site, _AT, "spike", trained, within_steps=2)
    assert evidence.complaints[:3] == [
        f"it was found in step {_AT + 3}, and it began in {_AT}",
        "it was taken for divergence, not spike",
        "the guard's report was not kept",
    ]
    assert evidence.detected_steps == 3
    assert evidence.detected_seconds is not None


def test_a_rollback_past_the_fault_is_complained_of(
    site: TrainingSite, trained: TrainingSite
) -> None:
    evidence = Evidence()
    _report(site, step=_AT, reason="spike")
    facts = {"time": now(), "from_step": 30, "reason": "spike", "message": ""}
    site.run.append_rollback(RolledBack(to_step=_AT + 5, skipped=[_AT + 6, _AT + 8], **facts))  # type: ignore[typeddict-item]
    expect_rollback(evidence, site, _AT, "spike", trained)
    assert evidence.complaints[:2] == [
        f"it rolled back to step {_AT + 5}, and it began in {_AT}",
        f"it excludes batches {_AT + 6} to {_AT + 7}, not {_AT}",
    ]
    assert "8 samples belong to no such epoch" in evidence.complaints


def test_a_higher_loss_at_the_end_is_complained_of(
    site: TrainingSite, trained: TrainingSite
) -> None:
    assert relative_end_loss(site.run, trained.run) == 1
    text = site.run.metrics_path.read_text()
    site.run.metrics_path.write_text(text.replace('"loss":0.', '"loss":1.'))
    assert relative_end_loss(site.run, trained.run) > 4
    evidence = Evidence()
    expect_skip(evidence, site, _AT, trained)
    assert "times the undisturbed run's loss" in evidence.complaints[-1]


@pytest.mark.parametrize(
    ("sums", "complaint"),
    [
        (("a",), "1 ranks have reported the weights they ended with"),
        (("a", "b"), "the ranks ended with different weights"),
    ],
)
def test_ranks_that_differ_or_are_not_named_are_complained_of(
    site: TrainingSite, trained: TrainingSite, sums: tuple[str, ...], complaint: str
) -> None:
    for rank, checksum in enumerate(sums):
        (site.folder / f"weights_of_rank_{rank}.sha256").write_text(checksum)
    evidence = Evidence()
    expect_rank_named(evidence, site, trained)
    assert complaint in evidence.complaints
    for name in ("rank 1 of 2 alone", "blocks.1.attention.to_out.weight"):
        assert f"the message does not name {name}: " in evidence.complaints


def _report(site: TrainingSite, step: int, reason: str, path: str = "recipe.toml") -> None:
    facts = {"step": step, "reason": reason, "message": "The loss is high.", "report": path}
    site.run.append_event("anomaly_detected", **facts)
