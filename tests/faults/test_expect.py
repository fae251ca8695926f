"""A drill can fail: whatever a run does wrong, its evidence says."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from longtake.faults import health, numerics
from longtake.faults.data import flip
from longtake.faults.expect import (
    Evidence,
    Recovery,
    SampleCounts,
    clips_between,
    count_samples,
    identities_of,
    saved_differences,
    steps_given_up,
    steps_skipped,
)
from longtake.faults.faulty_processes import CLOCK_FILE
from longtake.faults.health import expect_clock_event
from longtake.faults.sandbox import (
    BATCH_SIZE,
    STEPS_PER_EPOCH,
    ObservedEvent,
    TrainingProcess,
    TrainingSite,
)
from longtake.fsio import now
from longtake.node_dir import this_node
from longtake.run_dir import RolledBack

_RECORD_BYTES = 16
_NOWHERE = TrainingSite(Path())


def _ledger(site: TrainingSite) -> Path:
    (path,) = site.run.ledger_path.glob("launch_*/rank_0000.bin")
    return path


def _exact(site: TrainingSite, **options: Any) -> Evidence:
    evidence = Evidence(site, lambda: site)
    evidence.expect_exact(**options)
    return evidence


def _write_rows(site: TrainingSite, rows: list[Any]) -> None:
    site.run.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_an_undisturbed_run_passes(trained: TrainingSite) -> None:
    evidence = Evidence(trained, lambda: trained, message="All is well.")
    evidence.expect_undisturbed()
    assert evidence.expect_near() == 0
    assert evidence.expect_near_weights() == 0
    outcome = evidence.outcome()
    assert (outcome["passed"], outcome["message"]) == (True, "All is well.")
    assert (outcome["samples_repeated"], outcome["samples_missing"]) == (0, 0)
    assert outcome["equal_to_undisturbed"] is True
    assert outcome["detected_seconds"] is None


def test_repeated_and_missing_samples_are_complaints(site: TrainingSite) -> None:
    data = _ledger(site).read_bytes()
    for changed, complaint in (
        (data + data[:_RECORD_BYTES], "1 samples were repeated"),
        (data[_RECORD_BYTES:], "1 samples are missing"),
    ):
        _ledger(site).write_bytes(changed)
        outcome = _exact(site).outcome()
        assert not outcome["passed"]
        assert complaint in outcome["message"]
        assert "audit" not in outcome["message"]
        assert outcome["samples_repeated"] + outcome["samples_missing"] == 1


def test_a_sample_that_an_epoch_must_not_hold_is_a_complaint(trained: TrainingSite) -> None:
    clips = identities_of(trained.catalog())
    assert count_samples(trained.run, {}, clips) == SampleCounts(0, 0, 0, 0)
    assert count_samples(trained.run, {0: clips[1:]}, clips) == SampleCounts(0, 0, 1, 0)
    foreign = np.append(clips, np.uint64(1))
    assert count_samples(trained.run, {0: foreign}, clips) == SampleCounts(0, 1, 0, 0)
    skipped = {0: foreign[-1:]}
    assert count_samples(trained.run, {0: foreign}, clips, skipped) == SampleCounts(0, 0, 0, 0, 1)
    complaints = _exact(trained, skipped={0: clips[:2]}).complaints
    assert "2 samples belong to no such epoch" in complaints
    assert "audit counts (0, 0, 0, 0, 0) and the drill (0, 0, 2, 0, 2)" in complaints[-1]


def test_a_wrong_plan_and_clips_that_were_not_rejected_are_complained_of(
    trained: TrainingSite,
) -> None:
    first = np.append(identities_of(trained.catalog()), np.uint64(1))
    complaints = _exact(trained, first=first).complaints
    counts = "longtake data audit counts (0, 0, 0, 0, 0) and the drill (0, 1, 0, 0, 0)"
    assert counts in complaints[-1]
    (complaint,) = _exact(trained, rejected=1).complaints
    assert complaint.startswith("0 samples were rejected, in epochs of [0] each, and 1 cannot")


def test_steps_given_up_and_skipped_are_counted(trained: TrainingSite, site: TrainingSite) -> None:
    assert (steps_given_up(trained.run), steps_skipped(trained.run)) == (0, [])
    rows: list[Any] = list(site.run.metrics())
    rows[3]["verdict"] = "skip"
    _write_rows(site, [*rows[:9], *rows[5:20], *rows[2:]])
    assert steps_given_up(site.run) == 4 + 18
    assert steps_skipped(site.run) == [4]
    evidence = _exact(site)
    assert (evidence.steps_lost, evidence.samples_skipped) == (22, BATCH_SIZE)


def test_the_clips_of_batches_are_found_by_epoch(trained: TrainingSite) -> None:
    found = clips_between(trained.run, 0, STEPS_PER_EPOCH)
    assert found.keys() == {0}
    assert set(found[0]) == set(identities_of(trained.catalog()))
    assert clips_between(trained.run, 5, 5) == {}
    two = clips_between(trained.run, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH + 2)
    assert {epoch: len(clips) for epoch, clips in two.items()} == {0: BATCH_SIZE, 1: 2 * BATCH_SIZE}


def test_the_last_bit_of_one_loss_is_a_complaint(trained: TrainingSite, site: TrainingSite) -> None:
    rows: list[Any] = list(site.run.metrics())
    rows[6]["loss"] = float(np.nextafter(rows[6]["loss"], 2.0))
    _write_rows(site, rows)
    evidence = Evidence(site, lambda: trained)
    evidence.expect_equal(until=6)
    assert evidence.complaints == []
    assert evidence.is_equal is None, "part of a run says nothing of the whole"
    evidence.expect_equal()
    assert evidence.complaints == ["step 7 is not the undisturbed run's"]
    assert evidence.outcome()["equal_to_undisturbed"] is False


@pytest.mark.parametrize(("share", "is_near"), [(1.0005, True), (1.0015, False)])
def test_losses_may_differ_by_a_thousandth_where_sums_round_differently(
    trained: TrainingSite, site: TrainingSite, share: float, is_near: bool
) -> None:
    rows: list[Any] = list(site.run.metrics())
    rows[6]["loss"] *= share
    _write_rows(site, rows)
    evidence = Evidence(site, lambda: trained)
    assert evidence.expect_near() == pytest.approx(share - 1)
    assert (evidence.complaints == []) is is_near


@pytest.mark.parametrize("name", ["model", "ema/main", "optimizer"])
def test_one_bit_of_what_was_saved_is_a_complaint(
    trained: TrainingSite, site: TrainingSite, name: str
) -> None:
    path = site.newest_file(f"{name}/__0_0.distcp")
    flip(path, 4 * path.stat().st_size)
    evidence = Evidence(site, lambda: trained)
    evidence.expect_equal()
    (complaint,) = evidence.complaints
    assert complaint.startswith(f"it ends with another {name}/__0_0.distcp than")
    assert evidence.is_equal is False


def test_the_state_of_the_next_step_is_compared(trained: TrainingSite, site: TrainingSite) -> None:
    assert saved_differences(site.run, trained.run) == []
    path = site.newest_file("trainer.json")
    trainer = json.loads(path.read_text())
    path.write_text(json.dumps(trainer | {"guard": {}, "world_size": 2}))
    (path.parent / "model" / ".metadata").write_bytes(b"")
    assert saved_differences(site.run, trained.run) == ["guard"]
    (path.parent / "COMMITTED").unlink()
    lost = ["all of it: one of them has no checkpoint"]
    assert saved_differences(site.run, trained.run) == lost


def test_a_run_that_ended_early_is_complained_of(trained: TrainingSite, site: TrainingSite) -> None:
    data, lines = _ledger(site).read_bytes(), site.run.metrics_path.read_text().splitlines(True)
    _ledger(site).write_bytes(data[: 40 * 4 * _RECORD_BYTES])
    site.run.metrics_path.write_text("".join(lines[:40]))
    evidence = Evidence(site, lambda: trained)
    evidence.expect_undisturbed()
    evidence.expect_world_sizes(1, 2)
    assert {
        "the run ended at step 40",
        "step 41 is not the undisturbed run's",
        "it was trained by [1] ranks, not by [1, 2]",
    } <= set(evidence.complaints)


def test_events_exit_codes_and_output_are_expected() -> None:
    evidence = Evidence(_NOWHERE, lambda: _NOWHERE)
    evidence.expect_event(ObservedEvent({}, 3.5), 1.0, "no event", within=2.5)
    evidence.expect_exit(2, 2, "at the end")
    evidence.expect_output("the steps\nsince 5", "steps since 5", "the")
    assert (evidence.complaints, evidence.detected_seconds) == ([], 2.5)
    evidence.expect_event(ObservedEvent({}, 3.5), 1.0, "no event", within=2.0)
    evidence.expect_event(None, 1.0, "no event")
    evidence.expect_exit(0, 2, "at the end")
    evidence.expect_output("the steps", "steps since 5", "six")
    assert evidence.complaints == [
        "it was reported after 2.5 s, not within 2",
        "no event",
        "at the end it ended with exit code 0, not 2",
        "the output does not say 'steps since 5' or 'six'",
    ]


def test_lost_steps_must_be_reported() -> None:
    eight, none = ObservedEvent({"lost_steps": 8}, 1.0), ObservedEvent({"lost_steps": 0}, 1.0)
    output = "8 steps since the checkpoint of\nstep 5"
    for lost, found, said in ((8, eight, output), (0, none, "")):
        good = Evidence(_NOWHERE, lambda: _NOWHERE, steps_lost=lost)
        good.expect_lost_steps_reported(found, 5, said)
        assert good.complaints == []
    bad = Evidence(_NOWHERE, lambda: _NOWHERE, steps_lost=1)
    bad.expect_lost_steps_reported(eight, 5, output)
    assert bad.complaints == [
        "the event reports 8 lost steps, and 1 were",
        "the output does not say '1 step since the checkpoint of step 5'",
    ]


def test_a_run_must_recover_from_its_newest_checkpoint_in_time() -> None:
    none, bad, good = (Evidence(_NOWHERE, lambda: _NOWHERE) for _ in range(3))
    none.expect_recovered(Recovery(None, 10, 3.0))
    assert none.complaints == ["no event says that it resumed"]
    bad.expect_recovered(Recovery(ObservedEvent({"step": 5}, 0.0), 10, 61.0), within=60)
    assert bad.complaints == [
        "it resumed from step 5, and its newest whole checkpoint was of step 10",
        "after 61.0 s it trained again, not within 60",
    ]
    good.expect_recovered(Recovery(ObservedEvent({"step": 10}, 0.0), 10, 3.0))
    assert (good.complaints, good.detected_seconds) == ([], 3.0)


def test_a_wrong_clock_must_be_reported_in_time(site: TrainingSite) -> None:
    (site.folder / CLOCK_FILE).write_text(json.dumps({"at": 100.0}))
    evidence = Evidence(site, lambda: site)
    found = ObservedEvent({"message": "It was set back."}, 102.0)
    expect_clock_event(evidence, found, "clock_stepped", within=3.0)
    assert (evidence.complaints, evidence.detected_seconds) == ([], 2.0)
    expect_clock_event(evidence, found, "clock_stepped", within=1.0)
    assert evidence.complaints == ["it was reported after 2.0 s, not within 1"]


def test_a_rollback_to_after_the_fault_is_a_complaint(site: TrainingSite) -> None:
    back = RolledBack(
        time=now(), from_step=40, to_step=30, skipped=[20, 21], reason="spike", message=""
    )
    site.run.append_rollback(back)
    evidence = Evidence(site, lambda: site)
    numerics._expect_rollback(evidence, 20, "spike", 0)
    assert "it rolled back to step 30, and it began in 20" in evidence.complaints
    assert not any("it excludes batches" in each for each in evidence.complaints)


def test_a_drill_of_the_clock_compares_with_the_undisturbed_run(
    trained: TrainingSite, site: TrainingSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as it should be, but one loss is not."""
    rows: list[Any] = list(site.run.metrics())
    rows[6]["loss"] *= 2
    _write_rows(site, rows)
    process = MagicMock(output="Rank 1 of 2: the clock was set back by 2.500 s")
    for name in ("_watcher_with_wrong_clock", "os"):
        monkeypatch.setattr(health, name, MagicMock())
    monkeypatch.setattr(health, "launch_with_hang", lambda *_, **__: nullcontext(process))
    monkeypatch.setattr(health, "expect_rank_named", lambda *_: process.output)
    evidence = Evidence(site, lambda: trained)
    health.clock_step_during_collective(site, evidence)
    assert evidence.complaints == ["a loss differs by 1.0e+00 from the undisturbed"]


def test_a_lost_rank_must_be_named(tmp_path: Path) -> None:
    evidence = Evidence(_NOWHERE, lambda: _NOWHERE)
    with TrainingProcess(tmp_path) as process:
        process.wait()
        evidence.expect_lost_rank_named(process, 1)
        assert evidence.complaints == ["events name no rank, and rank 1 was lost"]
        this_node(TrainingSite(tmp_path).run).append_event("rank_failed", rank=1)
        evidence.expect_lost_rank_named(process, 1)
        assert len(evidence.complaints) == 1
