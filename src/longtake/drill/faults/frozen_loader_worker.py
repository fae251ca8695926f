"""A decoding process freezes, as in a library's lock; its clip is read again by another."""

from collections.abc import Callable
from functools import partial

from longtake.drill import culprit
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.hangs import Hang
from longtake.drill.harms import Harm, Sabotage
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict, identities_of
from longtake.drill.workers import stop_while_decoding

_FAMILY = "frozen-loader-worker"
_CHANGES = ("watch.action=restart-worker", "data.sample_timeout_seconds=60")
_WINDOWS = 40
"""That it reads until it freezes."""

Freeze = Callable[[Launch, Place], Hang]


def drill(ground: Ground, name: str, freeze: Freeze, harm: Harm | None) -> Result:
    """Train until a decoding process has frozen and another has its work, and to the end."""
    place = ground.fresh(name)
    sabotage = Sabotage(harm, _WINDOWS) if harm else None
    verdict = Verdict(name)
    with place.launch(*_CHANGES, sabotage=sabotage) as launch:
        hang = freeze(launch, place)
        found, said = culprit.find_stall(launch, place)
        culprit.judge(verdict, found, said, hang, rank=0)
        culprit.must_wait(verdict, said, [0])
        restarted = launch.find_on_node("restarted_worker") if found else None
        launch.finish()
        culprit.must_be_the_only_alarm(verdict, launch)
    judge_end(verdict, place, hang, restarted, ground.undisturbed)
    return verdict.result(
        f"{said.get('sentence')} It was ended, another read its clip, and every step is the "
        "undisturbed run's to the bit."
    )


def judge_end(
    verdict: Verdict, place: Place, hang: Hang, restarted: Sighting | None, undisturbed: Place
) -> None:
    """It was ended by the watcher, and the run is what it would have been without it."""
    pid = restarted.event["pid"] if restarted else None
    verdict.must(
        pid == hang.pid, f"process {hang.pid} was to be ended by the watcher, and {pid} was"
    )
    everything = identities_of(place.catalog())
    verdict.must_be_exact(place.run, everything, everything)
    verdict.must_be_equal(place.run, undisturbed.run)


def wait(launch: Launch, place: Place) -> Hang:
    """Return when one has frozen by itself."""
    return launch.wait_for_hang()


def stop(launch: Launch, place: Place) -> Hang:
    """Stop one from outside while it has a clip open."""
    launch.wait_for_rows(8)  # so that a clip's usual time is known
    stopped = stop_while_decoding(launch, place.clips)
    return Hang(stopped.pid, stopped.at, "", "", 0, path=str(stopped.clip))


def _fault(how: str, does: str, freeze: Freeze, harm: Harm | None) -> Fault:
    name = f"{_FAMILY}-{how}"
    return Fault(
        name,
        does=does,
        must="It is named with its line and clip in 15 s, and replaced; every step stays the same.",
        drill=partial(drill, name=name, freeze=freeze, harm=harm),
    )


IN_C = _fault(
    "in-c",
    "Lets a decoding process wait for ever in a C library that has given Python's lock back.",
    wait,
    "freeze-worker-in-c",
)
HOLDING_GIL = _fault(
    "holding-gil",
    "Lets a decoding process wait for ever in a C library that keeps Python's lock.",
    wait,
    "freeze-worker-holding-gil",
)
STOPPED = _fault(
    "stopped", "Stops a decoding process (SIGSTOP) while it decodes a clip.", stop, None
)
