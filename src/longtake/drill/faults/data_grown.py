"""The catalog grows while the run is down."""

import re

from longtake.data.catalog import Catalog
from longtake.drill.data_change import go_on, sentence
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import NUM_CLIPS, Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict

_NAME = "data-grown"
_ADDED = NUM_CLIPS // 10
_WAYS = ("merge", "finish", "restart")


def drill(ground: Ground) -> Result:
    """Kill a run in mid-epoch, add clips, and resume it without and with a word about it."""
    place = ground.stopped(_NAME)
    old = place.catalog()
    place.write_clips(NUM_CLIPS + _ADDED, seed=0)
    place.index()
    refusal, seconds = refused(place, old)
    verdict = go_on(_NAME, place, old, "merge", ground)
    verdict.complaints[:0] = refusal.complaints
    verdict.detected_seconds = seconds
    return verdict.result(f"Refused, saying why. {sentence(place, old, 'merge', verdict)}")


def refused(place: Place, old: Catalog) -> tuple[Verdict, float]:
    """Resume without a word; returns the verdict and the seconds after which it had ended."""
    before, added = len(place.run.metrics()), len(place.catalog()) - len(old)
    with place.launch() as launch:
        code = launch.wait()
        seconds = launch.looked_at - launch.began
    has_trained = len(place.run.metrics()) > before
    return judge_refusal(code, launch.said, added, has_trained=has_trained), seconds


def judge_refusal(code: int, said: str, added: int, *, has_trained: bool) -> Verdict:
    """It must refuse, say why and how to go on, and train no step."""
    verdict = Verdict(_NAME)
    verdict.must(code == 2, f"without data.on_change it ended with exit code {code} and not 2")
    verdict.must(
        f"{added} clips added" in said, f"the refusal does not say that {added} clips were added"
    )
    unnamed = [way for way in _WAYS if not re.search(rf"^  {way}\b", said, re.MULTILINE)]
    verdict.must(not unnamed, f"the refusal does not offer {', '.join(unnamed)}")
    verdict.must(not has_trained, "it trained, though the data had changed")
    return verdict


FAULT = Fault(
    _NAME,
    does="Kills a run in mid-epoch and adds a tenth more clips to its catalog.",
    must="It refuses to go on; told to merge, it repeats no clip and misses none.",
    drill=drill,
)
