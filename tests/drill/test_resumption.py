"""A drill of a run that is started again can fail: whatever it does wrong is said."""

from longtake.drill import resumption
from longtake.drill.faults import disk_full_while_saving
from longtake.drill.looking import Sighting
from longtake.drill.place import STEPS, Place

_FILE = "model/__0_0.distcp"
_REASON = f"{_FILE} has 7 bytes, and had 8 when it was saved"
_SAID = "warning: step_00000010 is not whole; training goes on\nfrom step 5"


def test_a_run_that_goes_on_as_it_must_passes(trained: Place) -> None:
    """From its newest checkpoint, to the same end."""
    found = Sighting({"step": 5}, at=2.5)
    verdict = resumption.judge("a-fault", trained, 5, found, 1.0, trained)
    assert verdict.complaints == []
    assert verdict.detected_seconds == 1.5
    assert verdict.is_equal is True


def test_a_run_that_begins_anew_fails_the_drill(place: Place, trained: Place) -> None:
    """So does one that goes on from elsewhere, or leaves half a checkpoint behind."""
    verdict = resumption.judge("a-fault", trained, 5, None, 1.0, trained)
    assert verdict.complaints == ["no event says that it went on"]
    (place.run.checkpoints_path / ".step_00000010.partial").mkdir()
    verdict = resumption.judge("a-fault", place, 10, Sighting({"step": 5}, 2.0), 1.0, trained)
    assert verdict.complaints == [
        "it went on from step 5, and its newest whole checkpoint was of step 10",
        "what was half saved was left: .step_00000010.partial",
    ]


def test_damage_has_to_be_told_of() -> None:
    """By an event that names checkpoint and file, and by a sentence on where it goes on."""
    told = Sighting({"path": "step_00000010", "reason": _REASON}, at=1.0)
    assert resumption.judge_warning(told, "step_00000010", _FILE, 5, _SAID) == []
    assert resumption.judge_warning(None, "step_00000010", _FILE, 15, _SAID) == [
        "no event says that a checkpoint is damaged",
        "nobody is told that training goes on from step 15",
    ]
    wrong = resumption.judge_warning(told, "step_00000015", "optimizer/__0_0.distcp", 5, _SAID)
    assert wrong == [
        "it calls step_00000010 damaged, and step_00000015 is",
        f"the reason does not name optimizer/__0_0.distcp: {_REASON}",
    ]


def test_what_is_lost_has_to_be_told() -> None:
    """As many steps as were, by the event and by a sentence; of none there is nothing to say."""
    found = Sighting({"lost_steps": 8}, at=1.0)
    said = "8 steps since the checkpoint of\nstep 5 had not been saved"
    assert resumption.judge_loss(found, 5, 8, said) == []
    assert resumption.judge_loss(Sighting({"lost_steps": 0}, at=1.0), 5, 0, "") == []
    assert resumption.judge_loss(found, 5, 1, said) == [
        "the event tells of 8 lost steps, and 1 were",
        "nobody is told of the 1 step since the checkpoint of step 5",
    ]
    assert resumption.judge_loss(None, 10, 8, said) == [
        "the event tells of None lost steps, and 8 were",
        "nobody is told of the 8 steps since the checkpoint of step 10",
    ]


def test_an_end_that_is_not_saved_is_no_good_end(trained: Place) -> None:
    """A run on a full disk ends with an error that says what is lost."""
    said = "cannot be written; nothing is lost but the steps since step_00000050, which is whole"
    found = Sighting({"reason": said}, at=1.0)
    assert disk_full_while_saving.judge_loss(trained, STEPS, found, 2, said) == []
    assert disk_full_while_saving.judge_loss(trained, STEPS, None, 0, "Done.") == [
        "no event says that a checkpoint failed",
        "though its end was not saved, it ended with exit code 0",
        "nobody is told that nothing is lost but the steps since step_00000050",
    ]
