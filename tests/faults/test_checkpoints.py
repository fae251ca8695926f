from pathlib import Path

from longtake.faults.checkpoints import (
    expect_resumed_run,
    expect_unsaved_end,
    expect_warning,
    flip,
)
from longtake.faults.expect import Evidence
from longtake.faults.sandbox import ObservedEvent, TrainingSite

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
