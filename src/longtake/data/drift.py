"""How different the clips of a coming stage are from those of the one before."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longtake.data.plan import Plan, StagePlan, Stream

_NUMBERS = ("num_frames", "width", "height", "fps", "duration_seconds")


@dataclass(frozen=True)
class Drift:
    """How an attribute changes from one stage to the next."""

    stage: str
    attribute: str
    before: float
    after: float
    """Means over the clips of the stage before, and of this one, as they are mixed by weights."""
    distance: float
    """Of the means, in standard deviations of the stage before; infinite where its clips are all
    alike and those of this stage are not like them."""

    def __str__(self) -> str:
        apart = f"{self.distance:.1f} standard deviations"
        if np.isinf(self.distance):
            apart = "and it was the same for all clips before"
        return (
            f"stage {self.stage}: mean {self.attribute} goes from {self.before:.4g} to "
            f"{self.after:.4g}, {apart}"
        )


def drifts(plan: Plan) -> list[Drift]:
    """What changes at each border of stages, by attribute, of what is known on both sides."""
    found = []
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        for attribute in _attributes(before, after):
            old, new = _moments(before, attribute), _moments(after, attribute)
            if old and new:
                distance = _distance(old, new)
                found.append(Drift(after.stage.name, attribute, old[0], new[0], distance))
    return found


def _attributes(*stages: StagePlan) -> Iterator[str]:
    scores = (_catalog_scores(stream) for stage in stages for stream in stage.streams)
    yield from _NUMBERS
    yield from sorted(set.intersection(*scores))


def _catalog_scores(stream: Stream) -> set[str]:
    return set(stream.parts[-1].catalog.attribute_names)


def _moments(stage: StagePlan, attribute: str) -> tuple[float, float] | None:
    """Mean and variance over a stage's batches: a mixture of its catalogs' clips."""
    means, squares, weights = [], [], []
    for stream, weight in zip(stage.streams, stage.weights, strict=True):
        part = stream.parts[-1]
        column = part.catalog.column(attribute)[part.members.all_rows()].astype(np.float64)
        known = column[np.isfinite(column)]
        if len(known):
            means.append(known.mean())
            squares.append(known.var() + known.mean() ** 2)
            weights.append(weight)
    if not means:
        return None
    mean = float(np.average(means, weights=weights))
    return mean, max(0.0, float(np.average(squares, weights=weights)) - mean**2)


def _distance(old: tuple[float, float], new: tuple[float, float]) -> float:
    (before, variance), (after, _) = old, new
    apart, spread = abs(after - before), float(np.sqrt(variance))
    if spread > 1e-9 * max(1.0, abs(before)):  # not only rounding
        return apart / spread
    return 0.0 if np.isclose(before, after) else float("inf")
