"""A run that was ended by force is started again: what must hold then."""

from pathlib import Path

from longtake.drill.ground import Ground
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.verdict import Verdict, identities_of

SAME = "every step, weights, averages and optimizer are the undisturbed run's to the bit"
"""What is said of a run that has come to the same."""


def go_on(fault: str, place: Place, ground: Ground) -> Verdict:
    """Start the same command again, to the run's end, and judge.

    Raises:
        RunError: the training process ended with an error.
    """
    newest = place.run.checkpoint_steps()[-1]
    with place.launch() as launch:
        found = launch.find("resumed")
        launch.finish()
    verdict = judge(fault, place, newest, found, launch.began, ground.undisturbed)
    verdict.complaints += judge_loss(found, newest, verdict.steps_lost or 0, launch.said)
    return verdict


def judge(
    fault: str,
    place: Place,
    newest: int,
    found: Sighting | None,
    began: float,
    undisturbed: Place,
) -> Verdict:
    """It goes on from its newest whole checkpoint, and is the undisturbed run in the end."""
    verdict, run = Verdict(fault), place.run
    verdict.must(found is not None, "no event says that it went on")
    if found:
        step = found.event["step"]
        verdict.detected_seconds = found.at - began
        verdict.must(
            step == newest,
            f"it went on from step {step}, and its newest whole checkpoint was of step {newest}",
        )
    everything = identities_of(place.catalog())
    verdict.must_be_exact(run, everything, everything)
    verdict.must_be_equal(run, undisturbed.run)
    must_have_no_leftovers(verdict, place)
    return verdict


def must_have_no_leftovers(verdict: Verdict, place: Place) -> None:
    """Demand that nothing of a checkpoint that never became whole takes up room."""
    leftovers = sorted(path.name for path in place.run.checkpoints_path.glob(".*"))
    verdict.must(not leftovers, f"what was half saved was left: {', '.join(leftovers)}")


def fall_back(fault: str, place: Place, damaged: str, ground: Ground) -> Verdict:
    """Go on though a file of the newest checkpoint is damaged, and judge.

    Args:
        fault: the fault's name.
        place: with a run that was killed, and has an older checkpoint.
        damaged: the file, by its name in the checkpoint.
        ground: where it was made.

    Raises:
        RunError: the training process ended with an error.
    """
    older, newest = place.run.checkpoint_steps()[-2:]
    with place.launch() as launch:
        told = launch.find("checkpoint_damaged")
        found = launch.find("resumed")
        launch.finish()
    verdict = judge(fault, place, older, found, launch.began, ground.undisturbed)
    name = place.run.checkpoint_path(newest).name
    verdict.complaints[:0] = judge_warning(told, name, damaged, older, launch.said)
    verdict.complaints += judge_loss(found, older, verdict.steps_lost or 0, launch.said)
    if told:
        verdict.detected_seconds = told.at - launch.began
    return verdict


def judge_loss(found: Sighting | None, newest: int, lost: int, said: str) -> list[str]:
    """What is wrong with how many steps it says it has to train again."""
    verdict = Verdict("")
    told = found.event.get("lost_steps") if found else None
    verdict.must(told == lost, f"the event tells of {told} lost steps, and {lost} were")
    sentence = f"{lost} step{'s' * (lost > 1)} since the checkpoint of step {newest}"
    verdict.must(not lost or sentence in _on_one_line(said), f"nobody is told of the {sentence}")
    return verdict.complaints


def judge_warning(
    told: Sighting | None, checkpoint: str, damaged: str, older: int, said: str
) -> list[str]:
    """What is wrong with how a damaged checkpoint was told of: by an event and by a sentence."""
    verdict = Verdict("")
    verdict.must(told is not None, "no event says that a checkpoint is damaged")
    if told:
        path, reason = told.event["path"], told.event["reason"]
        verdict.must(path == checkpoint, f"it calls {path} damaged, and {checkpoint} is")
        verdict.must(damaged in reason, f"the reason does not name {damaged}: {reason}")
    sentence = f"training goes on from step {older}"
    verdict.must(sentence in _on_one_line(said), f"nobody is told that {sentence}")
    return verdict.complaints


def file_of_newest(place: Place, name: str) -> Path:
    """A file of a run's newest checkpoint."""
    return place.run.checkpoint_path(place.run.checkpoint_steps()[-1]) / name


def _on_one_line(said: str) -> str:
    return " ".join(said.split())
