"""Facts of what a recipe trains: clips of each stage and bucket, and why others are dropped."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection, Recipe, Stage
from longtake.data import buckets as bucketing
from longtake.data.auto_buckets import propose_buckets
from longtake.data.catalog import Catalog
from longtake.data.checks import drifts, large_crops, refuse_wrong_catalogs, review, tail_drifts
from longtake.data.plan import Plan, StagePlan, Stream, begin
from longtake.data.stages import drop_in_turn, select
from longtake.data.training_captions import all_captions
from longtake.errors import DataError
from longtake.inspection.catalog_facts import catalog_stats

NUM_EXAMPLES = 3  # paths for each reason to drop clips
TIMELINE_SPANS = 60  # spans of the timeline; a shorter training has one for each step


@dataclass(frozen=True)
class BucketCosts:
    """Tokens and predicted seconds of one clip of each bucket (clip shape), where known."""

    tokens: Mapping[Bucket, int] = field(default_factory=dict)
    seconds: Mapping[Bucket, float] = field(default_factory=dict)  # predicted for one GPU
    device: str = ""  # name of the GPU that `seconds` is predicted for


@dataclass(frozen=True)
class ClipAssignment:
    """The bucket (clip shape) of each clip of a catalog in one stage, and why clips are dropped."""

    shapes: tuple[Bucket, ...]  # the stage's buckets
    reasons: tuple[str, ...]  # why clips are dropped, in the order in which reasons are tried
    # [N] index of each clip's bucket, even if dropped. A clip that fits no bucket is assigned to
    # the bucket with the nearest aspect ratio, then the nearest size, then the fewest frames.
    home: NDArray[np.int16]
    code: NDArray[np.int16]  # [N] index of the reason why it is dropped; -1 if it is trained on
    # [N] whether a bucket that crops the clip less was not used as the clip is too short for it
    is_displaced: NDArray[np.bool_]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """[buckets, 1 + reasons] number of clips: trained ones first, then dropped by reason."""
        shape = (len(self.shapes), 1 + len(self.reasons))
        flat = self.home.astype(np.int64) * shape[1] + self.code + 1
        return np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)

    def in_first_epoch(self, stream: Stream) -> "ClipAssignment":
        """Move clips that several buckets share (`Bucket.share`) to that of their first epoch."""
        part = stream.parts[-1]
        if not part.members.shared:
            return self
        home = self.home.copy()
        for bucket in range(len(self.shapes)):
            home[part.rows_in(part.epoch_span.first_epoch, bucket)] = bucket
        return replace(self, home=home)

    def kept(self, bucket: int) -> bucketing.Rows:
        return np.flatnonzero((self.home == bucket) & (self.code < 0)).astype(np.uint32)

    def dropped(self, reason: int) -> bucketing.Rows:
        return np.flatnonzero(self.code == reason).astype(np.uint32)


def assign_clips(catalog: Catalog, stage: Stage, data: DataSection) -> ClipAssignment:
    """Assign clips of a catalog to a stage's buckets (clip shapes), or to a reason to drop them."""
    shapes = stage.buckets or data.buckets
    selection = select(catalog, stage, data)
    reasons = tuple(selection.dropped)
    code, is_left = np.full(len(catalog), -1, np.int16), np.ones(len(catalog), bool)
    stills, numbered = data.stills_from_videos, dict(enumerate(shapes))
    # By their frames alone, and then by their size.
    fitting, best = (
        _best(catalog, numbered, data.frame_stride, stills=stills, fps=data.fps, upscale=upscale)
        for upscale in (True, data.upscale)
    )
    has_bucket = np.flatnonzero(fitting >= 0).astype(np.uint32)
    # Clips that pass all conditions are dropped if no bucket takes them or theirs crops too much.
    no_bucket = next(
        (reason for reason in (bucketing.TOO_SHORT, bucketing.ONLY_STILLS) if reason in reasons), ""
    )
    is_still = catalog.column("num_frames") == 1
    # A clip is counted under the first reason that drops it.
    for reason, rows in [
        *drop_in_turn(catalog, stage, data),
        (bucketing.NO_STILLS, np.flatnonzero((fitting >= 0) | ~is_still).astype(np.uint32)),
        (no_bucket, has_bucket),
        (bucketing.TOO_SMALL, np.flatnonzero(best >= 0).astype(np.uint32)),
        (bucketing.CROPPED, selection.members.all_rows()),
    ]:
        still = np.zeros(len(catalog), bool)
        still[rows] = True
        if reason in reasons:
            code[is_left & ~still] = reasons.index(reason)
        is_left &= still
    nearest = _nearest(catalog, shapes, stills)
    home = np.where(best < 0, nearest, best)
    is_closer = _off(catalog, shapes, nearest) < _off(catalog, shapes, home)
    return ClipAssignment(shapes, reasons, home, code, is_closer & is_left)


def _nearest(catalog: Catalog, shapes: Sequence[Bucket], stills: bool) -> NDArray[np.int16]:
    """Return [N] the bucket (clip shape) that would suit each clip best if none were too short.

    Unless stills are taken from videos, videos are matched with buckets of several frames only.
    """
    # With buckets of one frame, no clip is too short.
    brief = [shape.model_copy(update={"num_frames": 1}) for shape in shapes]
    # The first of equally good buckets wins, so those with fewer frames come first.
    order = sorted(range(len(shapes)), key=lambda index: shapes[index].num_frames)
    nearest = _best(catalog, {index: brief[index] for index in order}, 1, stills=True)
    of_videos = {index: brief[index] for index in order if shapes[index].num_frames > 1}
    if stills or len(of_videos) in (0, len(shapes)):
        return nearest
    is_video = catalog.column("num_frames") > 1
    return np.where(is_video, _best(catalog, of_videos, 1, stills=True), nearest)


def _best(
    catalog: Catalog,
    shapes: Mapping[int, Bucket],
    stride: int,
    *,
    stills: bool,
    fps: float | None = None,
    upscale: bool = True,
) -> NDArray[np.int16]:
    everyone = np.arange(len(catalog), dtype=np.uint32)
    chosen = bucketing.choose(
        catalog, everyone, list(shapes.values()), stride, stills=stills, fps=fps, upscale=upscale
    )
    return np.array([*shapes, -1], np.int16)[chosen]


def _off(
    catalog: Catalog, shapes: Sequence[Bucket], bucket: NDArray[np.int16]
) -> NDArray[np.float64]:
    """Return [N] the absolute log ratio of the aspects of clips and buckets, rounded to 0.01."""
    aspects = np.log(catalog.column("width") / catalog.column("height"))
    wanted = np.log([shape.width / shape.height for shape in shapes])
    # Rounded, so that a minute difference does not make another bucket the closer one.
    return np.round(np.abs(aspects - wanted[bucket]), 2)


def plan_summary(plan: Plan, recipe: Recipe, costs: BucketCosts | None = None) -> dict[str, Any]:
    """Describe the stages, buckets (clip shapes) and steps that a new run of a recipe trains.

    stages: an entry for each catalog of each stage: see `_streams`.
    buckets: the buckets of the first stage: see `_bucket`.
    timeline: for each stage its share of the batches in up to 60 spans of the training.
    drift: how the clips of each stage differ from those of the stage before; `distance` is null
        if those were all alike.
    tails: clips added by a stage that are far harder than all clips before it.
    warnings, refusal: sentences; why training would refuse to begin, or null.
    steps, planned_steps, batch_size: steps of the training, steps of all stages (null: endless),
        and samples of a batch.
    device: the GPU that `batch_seconds` is predicted for.
    """
    steps = recipe.training.steps
    stages = [
        entry
        for number, stage in enumerate(plan.stages)
        for entry in _streams(plan, number, stage, recipe, costs or BucketCosts())
    ]
    refusal = None
    try:
        warnings = review(plan, recipe.data, steps)
    except DataError as error:  # the facts that led to it are shown all the same
        refusal = str(error)
        # Reviewed again without refusing drift, to collect the other warnings.
        lenient = recipe.data.model_copy(update={"on_drift": "warn"})
        warnings = review(plan, lenient, _end(plan, steps))
    first = plan.stages[0].name
    return {
        "stages": stages,
        "buckets": [
            {"stage": entry["stage"], "source": entry["source"], **bucket}
            for entry in stages
            if entry["stage"] == first
            for bucket in entry["buckets"]
        ],
        "timeline": shares_of_stages([plan], _end(plan, steps)),
        "drift": [
            {
                **asdict(drift),
                "distance": drift.distance if math.isfinite(drift.distance) else None,
                "is_above_limit": drift.distance > recipe.data.drift_limit,
            }
            for drift in drifts(plan.stages)
        ],
        "tails": [asdict(each) for each in tail_drifts(plan.stages, recipe.data.drift_limit)],
        "warnings": [*warnings, *_poor_fits(stages), *large_crops(plan)],
        "refusal": refusal,
        "steps": steps,
        "planned_steps": plan.end_step,
        "batch_size": plan.batch_size,
        "device": costs.device if costs else "",
    }


def _streams(
    plan: Plan, number: int, stage: StagePlan, recipe: Recipe, costs: BucketCosts
) -> Iterator[dict[str, Any]]:
    """Yield the facts of each catalog of a stage of the curriculum.

    It has `stage`, `source` (the catalog's name), `share` of the stage's batches, `first_step`,
    `steps` (null: endless), `ramp_steps`, `trained_steps` of this catalog until training ends,
    `epochs` that these make, `clips`, `selected`, `dropped` {reason: clips}, `examples` {reason:
    paths} and `buckets`.
    """
    end = _end(plan, recipe.training.steps)
    trained, total = plan.taken(end)[number], sum(stage.weights)
    for stream, weight, count in zip(stage.streams, stage.weights, trained, strict=True):
        catalog = stream.parts[-1].catalog
        assignment = assign_clips(catalog, stage.section, recipe.data).in_first_epoch(stream)
        buckets = [_bucket(stream, assignment, i, costs) for i in range(len(assignment.shapes))]
        seconds = [bucket["batch_seconds"] or 0.0 for bucket in buckets]
        times = [
            one * each["batches_per_epoch"] for one, each in zip(seconds, buckets, strict=True)
        ]
        for bucket, time in zip(buckets, times, strict=True):
            bucket["time_share"] = time / sum(times) if sum(times) else None
        dropped = dict(
            zip(assignment.reasons, assignment.counts[:, 1:].sum(0).tolist(), strict=True)
        )
        span = stream.parts[-1].epoch_span
        epochs = count / float(span.batches_per_epoch)
        if span.num_epochs is not None and count == span.num_batches:
            epochs = float(span.num_epochs)  # the last batches are smaller
        yield {
            "stage": stream.stage,
            "source": stream.source,
            "share": weight / total,
            "first_step": plan.timeline.borders[number],
            "steps": plan.timeline.lengths[number],
            "ramp_steps": plan.timeline.ramps[number],
            "trained_steps": count,
            "epochs": epochs,
            "clips": len(catalog),
            "selected": sum(bucket["kept"] for bucket in buckets),
            "dropped": dropped,
            "examples": {
                name: [catalog.clip(int(row)).path for row in assignment.dropped(i)[:NUM_EXAMPLES]]
                for i, name in enumerate(assignment.reasons)
            },
            "buckets": buckets,
        }


def _end(plan: Plan, steps: int) -> int:
    return steps if plan.end_step is None else min(steps, plan.end_step)


def _bucket(
    stream: Stream, assignment: ClipAssignment, index: int, costs: BucketCosts
) -> dict[str, Any]:
    """Describe a bucket (clip shape) of a stage: its batches, and the clips of a catalog in it.

    It has `num_frames`, `height`, `width`, `batch_size`, `tokens` of a clip and `batch_tokens`
    (null: not known), `padding` (share of the places of all batches that stay empty as the last one
    is smaller; null: endless), `batch_seconds` (predicted for one GPU; null: not known) and
    `time_share` (of an epoch's time). Of all clips, each in one bucket, it has `clips` = `kept` +
    `dropped`, the latter by `reasons`; `displaced` of the kept (too short for a bucket that would
    crop them less), `batches_per_epoch`, `tail` (clips of the first epoch carried into the next),
    `last_batch` (samples of the last batch; null: endless), and of the kept clips the mean
    `share_cut`, the mean `scale` and how many are `enlarged`.
    """
    catalog, epochs = stream.parts[-1].catalog, stream.parts[-1].epoch_span
    rows, shape = assignment.kept(index), assignment.shapes[index]
    kept, *dropped = assignment.counts[index].tolist()
    batch_size = epochs.batch_size_of(index)
    last = padding = None
    if epochs.num_epochs is not None and kept:
        samples = epochs.num_epochs * kept
        # Only the last batch is smaller; its empty places are a share of those of all batches.
        padding = 1 - samples / (-(-samples // batch_size) * batch_size)
        last = epochs.num_epochs * kept % batch_size or batch_size
    return {
        **shape.model_dump(),
        "batch_size": batch_size,
        "tokens": costs.tokens.get(shape),
        "batch_tokens": _times(batch_size, costs.tokens.get(shape)),
        "batch_seconds": _times(batch_size, costs.seconds.get(shape)),
        "padding": padding,
        "clips": kept + sum(dropped),
        "kept": kept,
        "dropped": sum(dropped),
        "reasons": {name: n for name, n in zip(assignment.reasons, dropped, strict=True) if n},
        "displaced": int(np.count_nonzero(assignment.is_displaced[rows])),
        "batches_per_epoch": kept / batch_size,
        "tail": kept % batch_size,
        "last_batch": last,
        **_fit(catalog, rows, shape),
    }


def _times(count: int, each: float | None) -> float | None:
    return None if each is None else count * each


def _fit(catalog: Catalog, rows: bucketing.Rows, shape: Bucket) -> dict[str, Any]:
    if not len(rows):
        return {"share_cut": None, "scale": None, "enlarged": 0, "enlarged_by": None}
    across = shape.width / catalog.column("width")[rows]
    down = shape.height / catalog.column("height")[rows]
    scale = np.maximum(across, down)
    enlarged = scale[scale > 1]
    return {
        "share_cut": float(bucketing.shares_cut(catalog, rows, shape).mean()),
        "scale": float(scale.mean()),
        "enlarged": len(enlarged),
        "enlarged_by": float(enlarged.mean()) if len(enlarged) else None,
    }


def shares_of_stages(plans: Sequence[Plan], end: int) -> dict[str, list[float]]:
    """Return each stage's share of the batches before `end`, in up to 60 equal spans of batches.

    `plans` are the run's plans of the order of its clips; each is followed until the next begins.
    """
    num_spans = min(end, TIMELINE_SPANS)
    edges = [end * place // num_spans for place in range(num_spans + 1)]
    counts: dict[str, NDArray[np.float64]] = {}
    for plan, until in zip(plans, [*(plan.first_step for plan in plans[1:]), end], strict=True):
        # Edges outside of the plan's range are clamped to it: its spans there count nothing.
        cut = [min(max(edge, plan.first_step), max(plan.first_step, until)) for edge in edges]
        taken = np.array([plan.timeline.taken(edge - plan.first_step) for edge in cut])
        taken = taken.reshape(len(cut), -1)  # also without stages
        for stage, of_stage in zip(plan.stages, np.diff(taken, axis=0).T, strict=True):
            counts[stage.name] = counts.get(stage.name, 0) + of_stage
    return {name: (count / np.diff(edges)).tolist() for name, count in counts.items()}


def _poor_fits(stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    is_one = len({entry["source"] for entry in stages}) == 1
    for entry in stages:
        buckets = entry["buckets"]
        where = f"stage {entry['stage']}" + ("" if is_one else f", catalog {entry['source']}")
        kept = sum(bucket["kept"] for bucket in buckets)
        if enlarged := sum(bucket["enlarged"] for bucket in buckets):
            times = sum(bucket["enlarged"] * (bucket["enlarged_by"] or 0) for bucket in buckets)
            yield (
                f"{where}: {enlarged:,} of {kept:,} clips are smaller than their bucket and are "
                f"enlarged, {times / enlarged:.2f} times on average"
            )
        if displaced := sum(bucket["displaced"] for bucket in buckets):
            yield (
                f"{where}: {displaced:,} of {kept:,} clips are too short for the bucket that would "
                "crop them least, and are cut to another"
            )


ReviewCaptions = Callable[[Sequence[str]], tuple[dict[str, int] | None, str | None]]
"""Function that checks captions: it returns facts (None: unknown) and a warning (None: all is
well)."""


@dataclass(frozen=True)
class LoadedData:
    """Catalogs that were read, with the plan by which a new run of a recipe would train on them."""

    path: Path  # the catalog that is shown
    paths: Mapping[str, Path]  # paths of all catalogs of the recipe, by name
    catalogs: dict[str, Catalog]
    recipe: Recipe | None
    plan: Plan | None


def load(path: Path, recipe: Recipe | None = None) -> LoadedData:
    """Load a catalog of clips, or all of a recipe's, and make the plan of a new run.

    For a recipe with one catalog, `path` takes that catalog's place. For a recipe with several,
    `path` must be one of them, and all of them are loaded.

    Raises:
        DataError: a catalog cannot be read, a stage selects nothing, or `path` is not one of the
            recipe's catalogs.
    """
    paths, plan = {"catalog": path}, None
    if recipe is not None:
        paths = recipe.data.sources()
        if len(paths) == 1:
            paths = dict.fromkeys(paths, path)
        elif path.resolve() not in {each.resolve() for each in paths.values()}:
            known = ", ".join(f"{name} ({each})" for name, each in paths.items())
            raise DataError(
                f"{path} is not one of the recipe's catalogs: {known}. Name one of these; or set "
                "data.catalogs and data.weights with --set."
            )
    catalogs = {name: Catalog.load(each) for name, each in paths.items()}
    if recipe is not None:
        plan = begin(catalogs, recipe.data, recipe.training.global_batch_size, recipe.seed)
        recipe = recipe.with_steps(plan.end_step)
    return LoadedData(path, paths, catalogs, recipe, plan)


def describe(
    loaded: LoadedData,
    review_captions: ReviewCaptions | None = None,
    costs: BucketCosts | None = None,
) -> dict[str, Any]:
    """Describe the clips of catalogs, and the training that a recipe makes of them.

    Args:
        loaded: what `load` returned.
        review_captions: counts the tokens of all captions that the recipe trains on.
        costs: tokens and seconds of a clip of each bucket, for the model.

    Returns:
        JSON-able: `catalog` (the path), the keys of `catalog_stats` and `plan_summary`, `captions`
        (facts of `review_captions`), and `catalogs` (by name, if several).
    """
    facts = {
        name: {"catalog": str(loaded.paths[name]), **catalog_stats(catalog)}
        for name, catalog in loaded.catalogs.items()
    }
    path, recipe = loaded.path, loaded.recipe
    shown = next(name for name, each in loaded.paths.items() if each.resolve() == path.resolve())
    result = {**facts[shown], "catalog": str(path)}
    if len(facts) > 1:
        result["catalogs"] = facts
    if recipe is None or loaded.plan is None:
        return result
    result |= plan_summary(loaded.plan, recipe, costs)
    try:
        refuse_wrong_catalogs(loaded.catalogs, recipe.data)
    except DataError as error:
        result["refusal"] = str(error)
    result["proposal"] = propose(list(loaded.catalogs.values()), recipe.data)
    if review_captions is not None:
        captions = all_captions(loaded.catalogs, recipe.data)
        result["captions"], warning = review_captions(captions)
        result["warnings"] += [warning] if warning else []
    return result


def propose(catalogs: Sequence[Catalog], data: DataSection) -> dict[str, Any] | None:
    """Propose buckets (clip shapes) that keep more of the clips; None if not needed.

    Returns `set`, a value for --set, and `more_clips`, the number of clips that it keeps in
    addition.
    """
    if any(stage.buckets for stage in data.stages):
        return None
    frames, aspects = [], []
    for catalog in catalogs:
        frames.append(bucketing.frame_counts(catalog, data.fps))
        aspects.append(catalog.column("width") / catalog.column("height"))
    shapes = propose_buckets(
        np.concatenate(frames), np.concatenate(aspects), data.buckets, data.frame_stride
    )
    if len(shapes) == len(data.buckets):
        return None

    def fitting(buckets: Sequence[Bucket]) -> int:
        stride, stills = data.frame_stride, data.stills_from_videos
        numbered = dict(enumerate(buckets))
        each = (_best(one, numbered, stride, stills=stills, fps=data.fps) for one in catalogs)
        return sum(int(np.count_nonzero(best >= 0)) for best in each)

    listed = ", ".join(shape.toml() for shape in shapes)
    more = fitting(shapes) - fitting(data.buckets)
    return {"set": f"data.buckets=[{listed}]", "more_clips": more}
