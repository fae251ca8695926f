"""Something befalls a process that decodes: what must hold then."""

from pathlib import Path
from typing import Literal

from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.verdict import Verdict, identities_of
from longtake.drill.workers import Stopped


def judge(
    fault: str,
    kind: Literal["decoder_stalled", "decoder_died"],
    place: Place,
    stopped: Stopped,
    found: Sighting | None,
    undisturbed: Place,
) -> Verdict:
    """Its loss is told, with the clip and its stacks, and the run is the undisturbed one."""
    verdict = Verdict(fault)
    verdict.must(found is not None, f"no event {kind} tells of process {stopped.pid}")
    if found:
        verdict.detected_seconds = found.at - stopped.at
        event = found.event
        path = Path(event["path"])
        verdict.must(
            path.name == stopped.clip.name,
            f"the event names the clip {path.name}, and it was decoding {stopped.clip.name}",
        )
        stacks = place.run.path / event["stacks"]
        verdict.must(stacks.is_file(), f"its stacks were not kept: there is no {stacks}")
    verdict.must(not Path(f"/proc/{stopped.pid}").exists(), f"process {stopped.pid} still lives")
    everything = identities_of(place.catalog())
    verdict.must_be_exact(place.run, everything, everything)
    verdict.must_be_equal(place.run, undisturbed.run)
    return verdict
