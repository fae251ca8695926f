"""What a person should know of a plan before it is trained."""

from collections.abc import Iterator
from itertools import combinations

import pyarrow as pa
import pyarrow.compute as pc

from longtake.config import DataSection, Recipe
from longtake.data.catalog import Catalog
from longtake.data.drift import drifts
from longtake.data.plan import Plan, StagePlan, Stream, begin
from longtake.errors import DataError


def review(plan: Plan, data: DataSection, num_steps: int | None) -> list[str]:
    """Warnings, a sentence each.

    Args:
        plan: what is to be trained.
        data: the recipe's section.
        num_steps: the global step at which training ends; None: nobody says.

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
    """Warnings about what a new run would train on; none as long as a catalog is not indexed."""
    data, training = recipe.data, recipe.training
    if not all(path.is_file() for path in data.sources().values()):
        return []
    try:
        catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        plan = begin(catalogs, data, training.batch_size, recipe.seed)
        return review(plan, data, training.steps)
    except DataError as error:
        return [f"training would refuse its data: {error}"]


def _small_buckets(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        for where, sizes in _bucket_sizes(stage):
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


def _bucket_sizes(stage: StagePlan) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """For each catalog of a stage, how many clips its buckets hold."""
    for stream in stage.streams:
        members = stream.parts[-1].members
        catalog = f", catalog {stream.source}" if len(stage.streams) > 1 else ""
        sizes = zip(map(str, members.shapes), members.sizes, strict=True)
        yield f"stage {stream.stage}{catalog}", list(sizes)


def _overlaps(plan: Plan) -> Iterator[str]:
    """Catalogs of a stage that share clips: each trains them in epochs of its own."""
    for stage in plan.stages:
        for one, other in combinations(stage.streams, 2):
            mine, theirs = (_identities(stream) for stream in (one, other))
            shared = pc.sum(pc.is_in(mine, value_set=theirs)).as_py() or 0
            if shared:
                yield (
                    f"stage {stage.stage.name}: the catalogs {one.source} and {other.source} share "
                    f"{shared} clips, which are trained in the epochs of both"
                )


def _identities(stream: Stream) -> pa.Array:
    part = stream.parts[-1]
    return part.catalog.identities.take(pa.array(part.members.all_rows()))


def _unreached(plan: Plan, num_steps: int | None) -> Iterator[str]:
    if num_steps is None:
        return
    borders = [plan.first_step + border for border in plan.timeline.borders]
    for stage, border in zip(plan.stages, borders, strict=True):
        if border >= num_steps:
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
