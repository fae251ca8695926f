"""A rank is lost, and all are started again by whoever launched them: what must hold then."""

import time
from dataclasses import dataclass

from longtake.drill.end_state import largest_distance
from longtake.drill.looking import Looking, Sighting
from longtake.drill.place import Place
from longtake.drill.verdict import Verdict, identities_of, largest_error

LIMIT_SECONDS = 120.0
"""From the loss until a step is trained again; a quiet machine takes 3 to 15."""
_LARGEST_ERROR = 1e-3
"""Relative, of a loss after some dozens of steps whose sums are rounded otherwise."""
_LARGEST_DISTANCE = 1e-5
"""Likewise, of weights."""
_LOST = ("rank_failed", "rank_died")


@dataclass(frozen=True)
class Comeback:
    """How a run went on.

    Attributes:
        resumed: the word that it did, if there was one.
        newest: the newest whole checkpoint then.
        seconds: from the loss until a step had been trained again.
    """

    resumed: Sighting | None
    newest: int
    seconds: float

    @property
    def step(self) -> int | None:
        """The step from which it went on."""
        return self.resumed.event["step"] if self.resumed else None


def await_comeback(looking: Looking, place: Place, lost_at: float) -> Comeback:
    """Return when a run that has lost a rank has trained a step again.

    Args:
        looking: what trains it.
        place: where.
        lost_at: when the rank was lost, by the monotonic clock.

    Raises:
        RunError: the run ends before.
    """
    resumed = looking.find("resumed")
    newest = max(place.run.checkpoint_steps(), default=0)
    looking.wait_for_rows(looking.num_rows() + 1)
    return Comeback(resumed, newest, time.monotonic() - lost_at)


def judge(verdict: Verdict, comeback: Comeback, limit_seconds: float = LIMIT_SECONDS) -> None:
    """It went on from its newest checkpoint, in time."""
    verdict.must(comeback.resumed is not None, "no event says that it went on")
    verdict.must(
        comeback.step == comeback.newest,
        f"it went on from step {comeback.step}, and its newest checkpoint was of step "
        f"{comeback.newest}",
    )
    verdict.must(
        comeback.seconds <= limit_seconds,
        f"after {comeback.seconds:.1f} s it trained again, not within {limit_seconds:g}",
    )


def judge_same_end(verdict: Verdict, place: Place, undisturbed: Place) -> None:
    """Each clip was seen once in each epoch, and all came to the same, to the bit."""
    everything = identities_of(place.catalog())
    verdict.must_be_exact(place.run, everything, everything)
    verdict.must_be_equal(place.run, undisturbed.run)


def judge_near_end(verdict: Verdict, place: Place, undisturbed: Place) -> float:
    """Each clip was seen once in each epoch, and losses are as they were but for rounding.

    Returns:
        By how much a loss differs at most, relative.
    """
    everything = identities_of(place.catalog())
    verdict.must_be_exact(place.run, everything, everything)
    error = largest_error(place.run, undisturbed.run)
    verdict.must(error <= _LARGEST_ERROR, f"a loss differs by {error:.1e} from the undisturbed")
    return error


def judge_near_weights(verdict: Verdict, place: Place, undisturbed: Place) -> float:
    """Weights and averages are in the end as they would have been, but for rounding.

    Returns:
        How far they are apart, relative.
    """
    distance = largest_distance(place.run, undisturbed.run)
    far = f"weights end {distance:.1e} (relative) from the undisturbed run's"
    verdict.must(distance <= _LARGEST_DISTANCE, far)
    return distance


def must_name(verdict: Verdict, looking: Looking, words: str) -> None:
    """Demand that people are told who was lost, in such words."""
    said = " ".join(looking.said.split())
    verdict.must(words in said, f"nobody is told who was lost: {words!r} is not said")


def must_note(verdict: Verdict, looking: Looking, rank: int) -> None:
    """Demand that a node's event names a rank that is gone."""
    named = {each.get("rank") for each in looking.node_events() if each["event"] in _LOST}
    verdict.must(rank in named, f"events name {named or 'no rank'}, and rank {rank} was lost")
