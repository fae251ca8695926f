"""An evaluation server is killed while it samples."""

import os
import signal
import time

from longtake.drill.evaluators import (
    Evaluator,
    attempts,
    events,
    must_be_evaluated_once,
    must_be_undisturbed,
    partial_videos,
    recipe,
    step_of,
)
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict

_NAME = "evaluator-killed-while-sampling"
_WITHIN_SECONDS = 5.0
_SLOW_FROM = 30
_SOLVER_STEPS = 40


def drill(ground: Ground) -> Result:
    """Kill one of two servers beside a run, in the middle of a result."""
    place = ground.fresh(_NAME, recipe(_SOLVER_STEPS))
    with (
        Evaluator(place, "--until-finished") as first,
        Evaluator(place, "--until-finished") as second,
        place.launch("checkpoint.keep=100", sabotage=Sabotage("dawdle", _SLOW_FROM)) as launch,
    ):
        step = wait_for_video(place, first)
        os.kill(first.pid, signal.SIGKILL)
        at = time.monotonic()
        seconds = wait_for_loss(place, second, step, at)
        launch.finish()
        second.finish()
    verdict = judge(place, step, first.server, second.server, seconds, ground.undisturbed)
    count = len(place.run.checkpoint_steps())
    return verdict.result(
        f"{seconds:.1f} s after server {first.pid} was killed over step {step}, another began it "
        f"anew; all {count} checkpoints were evaluated once, and every step of the training is the "
        "undisturbed run's to the bit."
    )


def wait_for_video(place: Place, server: Evaluator) -> int:
    """The step of which a server has written the first video, and not the last.

    Raises:
        RunError: there never is one.
    """
    for _ in server.looks():
        if videos := partial_videos(place.run, server.server):
            return step_of(videos[0])
    raise AssertionError("looks() ends with an error")


def wait_for_loss(place: Place, server: Evaluator, step: int, since: float) -> float:
    """How long it takes a server to tell that the one before it is lost, in seconds.

    Raises:
        RunError: it never does.
    """
    for _ in server.looks():
        if any((e["event"], e["step"]) == ("evaluation_lost", step) for e in events(place.run)):
            return time.monotonic() - since
    raise AssertionError("looks() ends with an error")


def judge(
    place: Place, step: int, killed: str, other: str, seconds: float, undisturbed: Place
) -> Verdict:
    """It was taken over in time, and all else is as if nobody had died.

    Args:
        place: of the run.
        step: that the killed server was sampling.
        killed: its name.
        other: the name of the one that lives.
        seconds: until that one told of it.
        undisturbed: the run that this one must be equal to.
    """
    verdict = Verdict(_NAME, detected_seconds=seconds)
    verdict.must(
        seconds <= _WITHIN_SECONDS,
        f"it was taken over after {seconds:.1f} s, not within {_WITHIN_SECONDS:g}",
    )
    found = [(each.get("server"), each["ended"]) for each in attempts(place.run, step)]
    verdict.must(
        found == [(killed, None), (other, "done")],
        f"step {step} was to be lost by {killed} and done by {other}, and there is {found}",
    )
    must_be_evaluated_once(verdict, place.run, place.run.checkpoint_steps())
    must_be_undisturbed(verdict, place, undisturbed)
    return verdict


FAULT = Fault(
    _NAME,
    does="Kills one of two evaluation servers beside a run while it samples (SIGKILL).",
    must=(
        "The other takes its checkpoint over within 5 s; each checkpoint is evaluated once; the "
        "run is the same to the bit."
    ),
    drill=drill,
)
