"""Checks of a plan before training: small buckets, drift between stages, missing files."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.config import DataSection, Recipe
from longtake.data.catalog import Catalog
from longtake.data.plan import Plan, StagePlan, begin
from longtake.data.window import reference_path
from longtake.errors import DataError

_MAX_FILES = 20_000  # that are looked for
_EXAMPLES = 3
_NUMBERS = ("num_frames", "width", "height", "fps", "duration_seconds")


@dataclass(frozen=True)
class Drift:
    """How an attribute changes from one stage to the next."""

    stage: str
    attribute: str
    before: float  # mean over the clips of the stage before, weighted as they are mixed
    after: float  # mean over the clips of this stage
    distance: float  # of the means, in standard deviations before; infinite if that is 0

    def __str__(self) -> str:
        distance = f"{self.distance:.1f} standard deviations"
        if np.isinf(self.distance):
            distance = "and it was the same for all clips before"
        return (
            f"stage {self.stage}: mean {self.attribute} changes from {self.before:.4g} to "
            f"{self.after:.4g}, {distance}"
        )


def drifts(plan: Plan) -> list[Drift]:
    """The change of each attribute that is known on both sides of a border of stages."""
    found = []
    for before, after in pairwise(plan.stages):
        streams = [*before.streams, *after.streams]
        scores = (set(stream.parts[-1].catalog.attribute_names) for stream in streams)
        for attribute in [*_NUMBERS, *sorted(set.intersection(*scores))]:
            old, new = _moments(before, attribute), _moments(after, attribute)
            if old and new:
                distance = _distance(old, new)
                found.append(Drift(after.stage.name, attribute, old[0], new[0], distance))
    return found


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
    spread = float(np.sqrt(variance))
    if spread > 1e-9 * max(1.0, abs(before)):  # not only rounding
        return abs(after - before) / spread
    return 0.0 if np.isclose(before, after) else float("inf")


def review(plan: Plan, data: DataSection, num_steps: int | None) -> list[str]:
    """Warnings about a plan; `num_steps` is the global step at which training ends, if known.

    Raises:
        DataError: the stages end before the training, or a coming stage is too different and
            `data.on_drift` is `refuse`.
    """
    _refuse_an_early_end(plan, num_steps)
    too_far = [str(each) for each in drifts(plan) if each.distance > data.drift_limit]
    if too_far and data.on_drift == "refuse":
        raise DataError(
            "\n  ".join(["Stages are too different (data.on_drift = refuse):", *too_far])
            + f"\nThe limit is data.drift_limit = {data.drift_limit} standard deviations. Put a "
            "stage between, drop the hardest clips (drop_hardest), or raise the limit."
        )
    return [*_small_buckets(plan), *_overlaps(plan), *too_far, *_unreached(plan, num_steps)]


def review_catalogs(recipe: Recipe) -> list[str]:
    """Warnings about the data of a new run; none if a catalog is not indexed yet."""
    data, training = recipe.data, recipe.training
    if not all(path.is_file() for path in data.sources().values()):
        return []
    try:
        catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        plan = begin(catalogs, data, training.global_batch_size, recipe.seed)
        return review(plan, data, training.steps)
    except DataError as error:
        return [f"training would refuse its data: {error}"]


def _small_buckets(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        for stream in stage.streams:
            members = stream.parts[-1].members
            where = f"stage {stream.stage}"
            if len(stage.streams) > 1:
                where += f", catalog {stream.source}"
            sizes = list(zip(map(str, members.shapes), members.sizes, strict=True))
            empty = [name for name, num_clips in sizes if not num_clips]
            small = [f"{name} ({n} clips)" for name, n in sizes if 0 < n < plan.batch_size]
            if empty:
                yield f"{where}: no clip is for {'; '.join(empty)}"
            if small:
                yield (
                    f"{where}: fewer clips than a batch of {plan.batch_size} are for "
                    f"{'; '.join(small)}: its batches reach over several epochs, and a clip may be "
                    "in one batch twice"
                )


def _overlaps(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        for one, other in combinations(stage.streams, 2):
            parts = (stream.parts[-1] for stream in (one, other))
            mine, theirs = (
                part.catalog.identities.take(pa.array(part.members.all_rows())) for part in parts
            )
            shared = pc.sum(pc.is_in(mine, value_set=theirs)).as_py() or 0
            if shared:
                yield (
                    f"stage {stage.stage.name}: the catalogs {one.source} and {other.source} share "
                    f"{shared} clips, which are trained in the epochs of both"
                )


def _unreached(plan: Plan, num_steps: int | None) -> Iterator[str]:
    borders = [plan.first_step + border for border in plan.timeline.borders]
    for stage, border in zip(plan.stages, borders, strict=True):
        if num_steps is not None and border >= num_steps:
            yield f"stage {stage.stage.name} would begin at step {border}; training ends before"


def _refuse_an_early_end(plan: Plan, num_steps: int | None) -> None:
    if num_steps is None or plan.end_step is None or plan.end_step >= num_steps:
        return
    lengths = ", ".join(
        f"{stage.stage.name}: {length}"
        for stage, length in zip(plan.stages, plan.timeline.lengths, strict=True)
    )
    raise DataError(
        f"The stages end after step {plan.end_step} ({lengths or 'none is left'}), but "
        f"training.steps is {num_steps}. Set training.steps = {plan.end_step}, or give the last "
        "stage more epochs or steps, or neither: then it does not end."
    )


def refuse_archives(catalog: Catalog, references: Mapping[str, str]) -> None:
    """Refuse reference pictures of clips in tars, as there is no folder to look for them in."""
    inside = catalog.table.filter(pc.not_equal(catalog.table["member"], ""))
    if references and len(inside):
        names = ", ".join(references)
        raise DataError(
            f"{len(inside)} clips lie in tars, such as {inside['path'][0]}/{inside['member'][0]}: "
            f"data.references ({names}) are found beside a clip's own file. Unpack the tars, and "
            "run longtake data index again."
        )


def refuse_missing(
    catalog: Catalog, allowed: int, references: Mapping[str, str] | None = None
) -> list[str]:
    """Look for a catalog's files, or for a random part of very many, and reference pictures.

    Returns:
        A warning if some are missing, but not too many; else nothing.

    Raises:
        DataError: more than `allowed` are missing.
    """
    paths: list[str] = pc.unique(catalog.table["path"]).to_pylist()
    looked_for = paths
    if len(paths) > _MAX_FILES:
        chosen = np.random.default_rng(0).choice(len(paths), _MAX_FILES, replace=False)
        looked_for = [paths[number] for number in chosen]
    patterns = list((references or {}).values())

    def first_missing(clip_path: str) -> str | None:
        needed = [clip_path, *(reference_path(clip_path, pattern) for pattern in patterns)]
        return next((path for path in needed if not Path(path).is_file()), None)

    with ThreadPoolExecutor(16) as pool:
        missing = [path for path in pool.map(first_missing, looked_for) if path is not None]
    if not missing:
        return []
    of = "" if len(looked_for) == len(paths) else " that were looked for"
    lack = "clips{} lack their file or a reference picture" if patterns else "files{} are gone"
    said = (
        f"{len(missing)} of the catalog's {len(looked_for)} {lack.format(of)}, such as "
        f"{', '.join(missing[:_EXAMPLES])}"
    )
    if len(missing) * len(paths) > allowed * len(looked_for):
        raise DataError(
            f"{said}. At most {allowed} (data.max_quarantined_clips) may fail. Are the files "
            "still where they were indexed? Put them back, or run longtake data index again."
        )
    return [said]
