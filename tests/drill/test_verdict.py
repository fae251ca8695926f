"""A drill can fail: whatever a run does wrong, its verdict says."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from longtake.drill import data_change, decoder_fault
from longtake.drill.end_state import differences
from longtake.drill.faults import (
    bit_rot_in_checkpoint,
    corrupt_clip,
    data_grown,
    processes_changed,
)
from longtake.drill.ground import STEPS_PER_EPOCH
from longtake.drill.looking import Sighting
from longtake.drill.place import BATCH_SIZE, STEPS, Place
from longtake.drill.result import Result
from longtake.drill.resumption import file_of_newest
from longtake.drill.verdict import (
    Tally,
    Verdict,
    clips_between,
    count,
    identities_of,
    paths_at,
    steps_given_up,
    steps_skipped,
)
from longtake.drill.workers import Stopped

_RECORD_BYTES = 16


def _ledger(place: Place) -> Path:
    (path,) = place.run.ledger_path.glob("launch_*/rank_0000.bin")
    return path


def _verdict(place: Place) -> Verdict:
    verdict, clips = Verdict("a-fault"), identities_of(place.catalog())
    verdict.must_be_exact(place.run, clips, clips)
    return verdict


def _write_rows(place: Place, rows: list[Any]) -> None:
    place.run.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _failed(result: Result) -> str:
    assert not result.passed
    assert result.message.startswith("Failed: ")
    return result.message


def test_an_undisturbed_run_is_exact_and_equal_to_itself(trained: Place) -> None:
    """Nothing is complained of, and the result has the counts."""
    verdict = _verdict(trained)
    verdict.must_be_equal(trained.run, trained.run)
    result = verdict.result("All is well.")
    assert result.passed
    assert result.message == "All is well."
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is True
    assert result.detected_seconds is None


def test_a_repeated_sample_fails_the_drill(place: Place) -> None:
    """A record more in the ledger is a sample that was repeated; the audit agrees."""
    data = _ledger(place).read_bytes()
    _ledger(place).write_bytes(data + data[:_RECORD_BYTES])
    result = _verdict(place).result("All is well.")
    message = _failed(result)
    assert result.samples_repeated == 1
    assert "1 samples were repeated" in message
    assert "audit" not in message


def test_a_missing_sample_fails_the_drill(place: Place) -> None:
    """So does a record less."""
    _ledger(place).write_bytes(_ledger(place).read_bytes()[_RECORD_BYTES:])
    result = _verdict(place).result("All is well.")
    message = _failed(result)
    assert result.samples_missing == 1
    assert "1 samples are missing" in message
    assert "audit" not in message


def test_a_sample_of_another_catalog_fails_the_drill(place: Place) -> None:
    """A clip that the epoch must not hold is neither missing nor repeated, and fails it, too."""
    clips = identities_of(place.catalog())
    assert count(place.run, {}, clips) == Tally(0, 0, 0, 0)
    assert count(place.run, {0: clips[1:]}, clips) == Tally(0, 0, 1, 0)
    foreign = np.append(clips, np.uint64(1))
    assert count(place.run, {0: foreign}, clips) == Tally(0, 1, 0, 0)


def test_a_drill_that_disagrees_with_the_audit_fails(trained: Place) -> None:
    """A run that follows its own plan exactly fails where the plan was not what it had to be."""
    verdict, clips = Verdict("a-fault"), identities_of(trained.catalog())
    verdict.must_be_exact(trained.run, np.append(clips, np.uint64(1)), clips)
    message = _failed(verdict.result("All is well."))
    assert "longtake data audit counts (0, 0, 0, 0, 0) and the drill (0, 1, 0, 0, 0)" in message


def test_a_sample_that_had_to_be_skipped_is_not_missing(trained: Place) -> None:
    """But to have trained it is as wrong as to train one of another catalog."""
    clips = identities_of(trained.catalog())
    foreign = np.append(clips, np.uint64(1))
    assert count(trained.run, {0: foreign}, clips, {0: foreign[-1:]}) == Tally(0, 0, 0, 0, 1)
    assert count(trained.run, {}, clips, {0: clips[:2]}) == Tally(0, 0, 2, 0, 2)
    verdict = Verdict("a-fault")
    verdict.must_be_exact(trained.run, clips, clips, skipped={0: clips[:2]})
    message = _failed(verdict.result("All is well."))
    assert "2 samples belong to no such epoch" in message
    assert "audit counts (0, 0, 0, 0, 0) and the drill (0, 0, 2, 0, 2)" in message


def test_what_was_given_up_is_counted(trained: Place, place: Place) -> None:
    """Steps that come again in the metrics, however often; updates that were left out."""
    assert (steps_given_up(trained.run), steps_skipped(trained.run)) == (0, [])
    rows: list[Any] = list(place.run.metrics())
    rows[3]["verdict"] = "skip"
    _write_rows(place, [*rows[:9], *rows[5:20], *rows[2:]])
    assert steps_given_up(place.run) == 4 + 18
    assert steps_skipped(place.run) == [4]
    result = _verdict(place).result("All is well.")
    assert (result.steps_lost, result.samples_skipped) == (22, BATCH_SIZE)


def test_the_clips_of_some_batches_are_found_by_epoch(trained: Place) -> None:
    """All of an epoch's in its batches; a batch across its end has some of each."""
    everything = identities_of(trained.catalog())
    found = clips_between(trained.run, 0, STEPS_PER_EPOCH)
    assert found.keys() == {0}
    assert set(found[0]) == set(everything)
    assert clips_between(trained.run, 5, 5) == {}
    two = clips_between(trained.run, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH + 2)
    assert {epoch: len(clips) for epoch, clips in two.items()} == {0: BATCH_SIZE, 1: 2 * BATCH_SIZE}


def test_another_loss_fails_the_drill(trained: Place, place: Place) -> None:
    """The last bit of one loss is enough; the step is named."""
    rows: list[Any] = list(place.run.metrics())
    rows[6]["loss"] = float(np.nextafter(rows[6]["loss"], 2.0))
    _write_rows(place, rows)
    verdict = _verdict(place)
    verdict.must_be_equal(place.run, trained.run, until=6)
    assert not verdict.complaints
    assert verdict.is_equal is None, "a part of a run says nothing of the whole"
    verdict.must_be_equal(place.run, trained.run)
    result = verdict.result("All is well.")
    assert "step 7 is not the undisturbed run's" in _failed(result)
    assert result.equal_to_undisturbed is False


@pytest.mark.parametrize("name", ["model", "ema/main", "optimizer"])
def test_another_end_fails_the_drill(trained: Place, place: Place, name: str) -> None:
    """Though no loss shows it; a bit of what was saved is enough."""
    path = file_of_newest(place, f"{name}/__0_0.distcp")
    bit_rot_in_checkpoint.flip(path, 4 * path.stat().st_size)
    verdict = _verdict(place)
    verdict.must_be_equal(place.run, trained.run)
    result = verdict.result("All is well.")
    assert f"it ends with another {name}/__0_0.distcp than" in _failed(result)
    assert result.equal_to_undisturbed is False


def test_what_the_next_step_needs_besides_is_compared(trained: Place, place: Place) -> None:
    """Such as what the guard remembers; how the save went is not."""
    assert differences(place.run, trained.run) == []
    path = file_of_newest(place, "trainer.json")
    trainer = json.loads(path.read_text())
    path.write_text(json.dumps(trainer | {"guard": {}, "world_size": 2}))
    (path.parent / "model" / ".metadata").write_bytes(b"")
    assert differences(place.run, trained.run) == ["guard"]
    (path.parent / "COMMITTED").unlink()
    assert differences(place.run, trained.run) == ["all of it: one of them has no checkpoint"]


def test_a_run_that_ended_early_fails_the_drill(trained: Place, place: Place) -> None:
    """Losses that are not there are not equal, and the step at which it ended is named."""
    data, lines = _ledger(place).read_bytes(), place.run.metrics_path.read_text().splitlines(True)
    _ledger(place).write_bytes(data[: 40 * 4 * _RECORD_BYTES])
    place.run.metrics_path.write_text("".join(lines[:40]))
    verdict = _verdict(place)
    verdict.must_be_equal(place.run, trained.run)
    message = _failed(verdict.result("All is well."))
    assert "the run ended at step 40" in message
    assert "step 41 is not the undisturbed run's" in message


@pytest.mark.parametrize("kind", ["decoder_stalled", "decoder_died"])
def test_a_worker_that_nothing_befell_is_not_found(
    trained: Place, kind: Literal["decoder_stalled", "decoder_died"]
) -> None:
    """A run without the fault does not pass as one that has dealt with it."""
    stopped = Stopped(pid=2**30, clip=trained.clips / "shapes_0_00001.mp4", at=0.0)
    verdict = decoder_fault.judge("a-fault", kind, trained, stopped, None, trained)
    result = verdict.result("All is well.")
    assert f"no event {kind} tells of process {2**30}" in _failed(result)
    assert result.detected_seconds is None
    assert result.equal_to_undisturbed is True


def test_an_event_of_another_clip_is_not_the_fault(trained: Place) -> None:
    """The event must name what the worker was doing, and its stacks must be there."""
    stopped = Stopped(pid=2**30, clip=trained.clips / "shapes_0_00001.mp4", at=1.0)
    event = {"path": "/clips/other.mp4", "stacks": "nodes/here/stacks/none.json"}
    found = Sighting(event, at=2.5)
    verdict = decoder_fault.judge("a-fault", "decoder_stalled", trained, stopped, found, trained)
    message = _failed(verdict.result("All is well."))
    assert "names the clip other.mp4, and it was decoding shapes_0_00001.mp4" in message
    assert "its stacks were not kept" in message
    assert verdict.detected_seconds == 1.5


def test_a_damaged_clip_that_is_trained_on_fails_the_drill(trained: Place) -> None:
    """Nothing was rejected, though a clip cannot be decoded."""
    clip = paths_at(trained, 8)[0]
    result = corrupt_clip.judge(trained, clip, None, 0.0, trained)
    message = _failed(result)
    assert "no event says that a clip could not be decoded" in message
    assert "0 samples were rejected" in message


def test_a_change_that_went_unnoticed_fails_the_drill(place: Place, trained: Place) -> None:
    """A run that trains the old clips in every epoch has not gone on with the new ones."""
    old = place.catalog()
    (place.clips / paths_at(trained, 15)[0].name).unlink()
    place.index()
    found = Sighting({"step": 5}, at=2.0)
    verdict = data_change.judge("a-fault", place, old, "merge", found, 1.0, trained)
    message = _failed(verdict.result("All is well."))
    assert "samples belong to no such epoch" in message
    verdict = data_change.judge("a-fault", place, old, "merge", None, 1.0, trained)
    assert "no event says that the data changed (merge)" in _failed(verdict.result(""))


def test_a_run_that_goes_on_without_a_word_has_not_refused() -> None:
    """Nor has one that refuses without saying why, or how one can go on."""
    message = "6 clips added\n  merge     some way\n  restart   another"
    verdict = data_grown.judge_refusal(0, message, 6, has_trained=True)
    assert verdict.complaints == [
        "without data.on_change it ended with exit code 0 and not 2",
        "the refusal does not offer finish",
        "it trained, though the data had changed",
    ]
    verdict = data_grown.judge_refusal(2, message.replace("6", "5"), 6, has_trained=False)
    assert "does not say that 6 clips were added" in verdict.complaints[0]


def test_a_run_on_as_many_processes_as_before_fails_the_drill(trained: Place) -> None:
    """It was to go on with two."""
    message = _failed(processes_changed.judge(trained, trained))
    assert "it was trained by [1] processes, not by [1, 2]" in message


def test_the_steps_of_a_drill_hold_whole_epochs(trained: Place) -> None:
    """Two epochs are certainly over at the end, or nothing could be found missing in them."""
    epochs = [row["epoch"] for row in trained.run.metrics()]
    assert len(epochs) == STEPS
    assert max(epochs) >= 3
