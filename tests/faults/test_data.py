from pathlib import Path

import pytest

from longtake import config
from longtake.data.buckets import sample_window
from longtake.data.window import read_window
from longtake.errors import ClipError
from longtake.faults.data import (
    damage,
    expect_policy,
    expect_refusal,
    expect_rejected,
    expect_replaced,
    expect_resumed_run,
    expect_unsaved_end,
    expect_warning,
    flip,
)
from longtake.faults.expect import Evidence, clips_at
from longtake.faults.faulty_processes import Hang
from longtake.faults.sandbox import ObservedEvent, TrainingSite


def test_every_damaged_clip_cannot_be_decoded(trained: TrainingSite, site: TrainingSite) -> None:
    data = config.load(trained.folder / "recipe.toml").data
    for clip in site.catalog().clips():
        path = Path(clip.path)
        before = path.stat().st_size
        damage(path)
        assert path.stat().st_size == before
        with pytest.raises(ClipError):
            read_window(sample_window(clip, data.buckets[0], data, seed=0))


def test_a_refusal_must_say_why_and_how_to_resume() -> None:
    output, evidence = "6 clips added\n  merge     some way\n  restart   another", Evidence()
    expect_refusal(evidence, 0, output.replace("6", "5"), added=6)
    assert evidence.complaints == [
        "without data.on_change it ended with exit code 0, not 2",
        "the output does not say '6 clips added'",
        "the refusal does not offer finish",
    ]


def test_a_change_that_went_unnoticed_is_complained_of(
    site: TrainingSite, trained: TrainingSite
) -> None:
    old = site.catalog()
    (site.clips / clips_at(trained, 15)[0].name).unlink()
    site.index()
    late, none = Evidence(), Evidence()
    expect_policy(late, site, old, "merge", ObservedEvent({"step": 5}, 2.0), 1.0, trained)
    assert any("samples belong to no such epoch" in each for each in late.complaints)
    expect_policy(none, site, old, "merge", None, 1.0, trained)
    assert none.complaints[:2] == [
        "no event says that the data changed (merge)",
        "the change was to meet the run in mid-epoch, not at 0",
    ]


def test_a_damaged_clip_that_is_trained_or_another_is_complained_of(trained: TrainingSite) -> None:
    none, other, clip = Evidence(), Evidence(), clips_at(trained, 8)[0]
    expect_rejected(none, trained, clip, None, 0.0, trained)
    assert none.complaints[0] == "no event says that a clip could not be decoded"
    assert "0 samples were rejected" in none.complaints[1]
    event = {"step": 9, "reason": "/clips/other.mp4: damaged"}
    expect_rejected(other, trained, clip, ObservedEvent(event, 1.0), 0.0, trained)
    assert other.complaints[:2] == [
        "it was rejected at step 9; it was due at 8",
        "another clip was rejected: /clips/other.mp4: damaged",
    ]


def test_a_worker_must_be_reported_with_its_clip_and_stacks(trained: TrainingSite) -> None:
    none, wrong, hang = Evidence(), Evidence(), Hang(pid=2**30, at=1.0, path="/clips/a.mp4")
    expect_replaced(none, "decoder_died", trained, hang, None, trained)
    assert none.complaints == [f"no event decoder_died tells of process {2**30}"]
    event = {"path": "/clips/b.mp4", "stacks": "nodes/here/stacks/none.json"}
    expect_replaced(wrong, "decoder_stalled", trained, hang, ObservedEvent(event, 2.5), trained)
    assert wrong.complaints[0] == "the event names the clip b.mp4, and it was decoding a.mp4"
    assert wrong.complaints[1].startswith("its stacks were not kept")
    assert (wrong.detected_seconds, wrong.is_equal) == (1.5, True)


_FILE = "model/__0_0.distcp"


def test_a_flipped_bit_is_the_one_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes([0, 1, 2]))
    flip(path, 8 + 3)
    flip(path, 23)
    assert path.read_bytes() == bytes([0, 1 + 8, 2 + 128])


def test_a_run_must_resume_from_its_newest_checkpoint(
    site: TrainingSite, trained: TrainingSite
) -> None:
    good, anew, other = Evidence(), Evidence(), Evidence()
    expect_resumed_run(good, trained, 5, ObservedEvent({"step": 5}, 2.5), trained)
    assert (good.complaints, good.is_equal) == ([], True)
    expect_resumed_run(anew, trained, 5, None, trained)
    assert anew.complaints == ["no event says that it resumed"]
    (site.run.checkpoints_path / ".step_00000010.partial").mkdir()
    expect_resumed_run(other, site, 10, ObservedEvent({"step": 5}, 2.0), trained)
    assert other.complaints == [
        "it resumed from step 5, and its newest whole checkpoint was of step 10",
        "partial checkpoints were left: .step_00000010.partial",
    ]


def test_damage_must_be_reported_with_checkpoint_file_and_step() -> None:
    reason = f"{_FILE} has 7 bytes, and had 8 when it was saved"
    warning = ObservedEvent({"path": "step_00000010", "reason": reason}, 1.0)
    output = "warning: step_00000010 is not whole; training resumes\nfrom step 5"
    good, none, wrong = Evidence(), Evidence(), Evidence()
    expect_warning(good, warning, "step_00000010", _FILE, 5, output)
    assert good.complaints == []
    expect_warning(none, None, "step_00000010", _FILE, 15, output)
    assert none.complaints == [
        "no event says that a checkpoint is damaged",
        "the output does not say 'training resumes from step 15'",
    ]
    expect_warning(wrong, warning, "step_00000015", "optimizer/__0_0.distcp", 5, output)
    assert wrong.complaints == [
        "it calls step_00000010 damaged, and step_00000015 is",
        f"the reason does not name optimizer/__0_0.distcp: {reason}",
    ]


def test_an_end_that_is_not_saved_must_fail_and_say_what_is_lost(trained: TrainingSite) -> None:
    output = "nothing is lost but the steps since step_00000050, which is whole"
    good, silent = Evidence(), Evidence()
    expect_unsaved_end(good, trained, ObservedEvent({}, 1.0), 2, output)
    assert good.complaints == []
    expect_unsaved_end(silent, trained, None, 0, "Done.")
    assert silent.complaints == [
        "no event says that a checkpoint failed",
        "though its end was not saved, it ended with exit code 0, not 2",
        "the output does not say 'nothing is lost but the steps since step_00000050'",
    ]
