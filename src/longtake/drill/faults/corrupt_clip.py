"""A file is damaged after it was indexed."""

from pathlib import Path

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict, identities_of, paths_at

_NAME = "corrupt-clip"
_STEP = 8


def drill(ground: Ground) -> Result:
    """Damage a clip that is due at a step, and train."""
    place = ground.fresh(_NAME)
    clip = place.clips / paths_at(ground.undisturbed, _STEP)[0].name
    damage(clip)
    with place.launch() as launch:
        found = launch.find("sample_rejected")
        launch.finish()
    return judge(place, clip, found, launch.began, ground.undisturbed)


def damage(clip: Path) -> None:
    """Invert all bits in the middle third of a file; its ends and its length stay."""
    data = bytearray(clip.read_bytes())
    third = len(data) // 3
    data[third : 2 * third] = bytes(0xFF ^ octet for octet in data[third : 2 * third])
    clip.write_bytes(data)


def judge(
    place: Place, clip: Path, found: Sighting | None, began: float, undisturbed: Place
) -> Result:
    """The clip is left out from its first step on; nothing else is left out or repeated."""
    verdict = Verdict(_NAME)
    everything = identities_of(place.catalog())
    verdict.must(found is not None, "no event says that a clip could not be decoded")
    step, reason = 0, ""
    if found:
        verdict.detected_seconds = found.at - began
        step, reason = found.event["step"], found.event["reason"]
        verdict.must(step == _STEP, f"it was rejected at step {step}; it was due at {_STEP}")
        verdict.must(clip.name in reason, f"another clip was rejected: {reason}")
    verdict.must_be_exact(place.run, everything, everything, rejected=1)
    verdict.must_be_equal(place.run, undisturbed.run, until=step)
    return verdict.result(
        f"The clip was set aside at step {step}, when it was due, and a place of the batch was "
        f"left empty; the run went on. The reason it gives: {reason.rpartition(': ')[2]}."
    )


FAULT = Fault(
    _NAME,
    does="Overwrites the middle of a clip's file after it was indexed.",
    must="The run sets the clip aside with a reason and goes on with all others.",
    drill=drill,
)
