"""Two evaluation servers share a run's checkpoints."""

from collections import Counter

from longtake.drill.evaluators import (
    Evaluator,
    events,
    must_be_evaluated_once,
    must_be_undisturbed,
    recipe,
)
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict

_NAME = "two-evaluators"
_SLOW_FROM = 20  # from there on a checkpoint is due each 2.5 s, and both have long been there
_SOLVER_STEPS = 40


def drill(ground: Ground) -> Result:
    """Let two servers, started at once, look at one run until it ends."""
    place = ground.fresh(_NAME, recipe(_SOLVER_STEPS))
    with (
        Evaluator(place, "--until-finished") as first,
        Evaluator(place, "--until-finished") as second,
        place.launch("checkpoint.keep=100", sabotage=Sabotage("dawdle", _SLOW_FROM)) as launch,
    ):
        launch.finish()
        first.finish()
        second.finish()
    shares = shares_of(place)
    verdict = judge(place, shares, (first.server, second.server), ground.undisturbed)
    counts = " and ".join(str(shares[each]) for each in sorted(shares))
    return verdict.result(
        f"They evaluated {counts} checkpoints, each once; every step of the training is the "
        "undisturbed run's to the bit."
    )


def shares_of(place: Place) -> Counter[str]:
    """How many checkpoints each server has evaluated."""
    return Counter(each["server"] for each in events(place.run) if each["event"] == "evaluated")


def judge(
    place: Place, shares: Counter[str], servers: tuple[str, str], undisturbed: Place
) -> Verdict:
    """Both have worked, no checkpoint was done twice, none was left out.

    Args:
        place: of the run.
        shares: see `shares_of`.
        servers: their names.
        undisturbed: the run that this one must be equal to.
    """
    verdict = Verdict(_NAME)
    for server in servers:
        verdict.must(shares[server] > 0, f"server {server} has evaluated nothing")
    must_be_evaluated_once(verdict, place.run, place.run.checkpoint_steps())
    must_be_undisturbed(verdict, place, undisturbed)
    return verdict


FAULT = Fault(
    _NAME,
    does="Lets two evaluation servers look at one run.",
    must="They share its checkpoints; each is evaluated once; the run is the same to the bit.",
    drill=drill,
)
