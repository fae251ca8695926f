"""The run is trained by two ranks, by one, and by two again."""

from longtake.drill.comeback import judge_near_end, judge_near_weights
from longtake.drill.fault import Fault
from longtake.drill.ground import ON_TWO, Ground
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict, world_sizes
from longtake.errors import RunError

_NAME = "world-2-1-2"
_SIZES = (2, 1, 2)


def drill(ground: Ground) -> Result:
    """End the run twice, at checkpoints, and each time go on with another number of ranks."""
    place = ground.fresh(_NAME)
    first, second, third = _SIZES
    _train_until(place, first, num_checkpoints=2)
    _train_until(place, second, num_checkpoints=4)
    with place.launch(*ON_TWO, processes=third) as launch:
        launch.finish()
    return judge(place, ground.undisturbed_on_two)


def judge(place: Place, undisturbed: Place) -> Result:
    """No clip repeated or missing, and losses and weights as they were but for rounding."""
    verdict = Verdict(_NAME)
    sizes = world_sizes(place.run)
    verdict.must(sizes == [*_SIZES], f"it was trained by {sizes} ranks, not by {[*_SIZES]}")
    judge_near_end(verdict, place, undisturbed)
    distance = judge_near_weights(verdict, place, undisturbed)
    return verdict.result(
        f"Two ranks, one, and two again trained it, and {verdict.steps_lost} steps twice: no clip "
        f"was repeated or missing, and the weights end {distance:.0e} (relative: rounding) from "
        "those of two ranks all the time."
    )


def _train_until(place: Place, ranks: int, num_checkpoints: int) -> None:
    """Train on so many ranks, and kill the run when it has so many checkpoints.

    Raises:
        RunError: it had ended before.
    """
    with place.launch(*ON_TWO, processes=ranks) as launch:
        launch.wait_for_checkpoints(num_checkpoints)
        if not launch.kill():
            raise RunError(f"The run was over before {ranks} ranks could be killed.")


FAULT = Fault(
    _NAME,
    does="Trains on two ranks, goes on with one, and then with two again.",
    must="No clip is repeated or missing; losses and weights are the same but for rounding.",
    drill=drill,
)
