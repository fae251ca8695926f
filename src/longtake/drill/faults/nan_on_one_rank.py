"""One rank of two loses a number, and the other does not."""

from longtake.drill.divergence import judge_skip, reports
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import LOST_PARAMETER, Sabotage
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import largest_error

_NAME = "nan-on-one-rank"
_STEP = 20
_RANKS = 2
_LARGEST_ERROR = 1e-3
"""Relative, of a loss whose sums are rounded otherwise."""


def drill(ground: Ground) -> Result:
    """Make a number of a gradient NaN on rank 1 alone, after it was reduced over the ranks."""
    place = ground.fresh(_NAME)
    sabotage = Sabotage("lose-gradient-on-rank-1", _STEP)
    with place.launch("data.workers=0", processes=_RANKS, sabotage=sabotage) as launch:
        launch.finish()
    return judge(place, ground.undisturbed)


def judge(place: Place, undisturbed: Place) -> Result:
    """Both ranks leave that update out, and end with the same weights; the rank is named."""
    verdict = judge_skip(_NAME, place, _STEP, undisturbed)
    error = largest_error(place.run, undisturbed.run, until=_STEP)
    verdict.must(error <= _LARGEST_ERROR, f"a loss before it differs by {error:.1e}")
    said = " ".join(report["message"] for report in reports(place.run))
    for name in (f"rank 1 of {_RANKS} alone", LOST_PARAMETER):
        verdict.must(name in said, f"the message does not name {name}: {said}")
    sums = [path.read_text(encoding="utf-8") for path in place.folder.glob("weights_of_rank_*")]
    verdict.must(len(sums) == _RANKS, f"{len(sums)} ranks have told what weights they ended with")
    verdict.must(len(set(sums)) == 1, "the ranks ended with different weights")
    return verdict.result(
        f"Both ranks left that update out and ended with the same weights. It said: {said}"
    )


FAULT = Fault(
    _NAME,
    does="Makes one number of a gradient NaN on one rank of two, in one step.",
    must="Both leave that update out, and stay the same; the message names the rank.",
    drill=drill,
)
