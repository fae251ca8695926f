"""What `longtake data show` reports of a catalog and a recipe: as JSON, and as tables."""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from longtake.config import Bucket, DataSection, Recipe, Stage
from longtake.data.auto_buckets import propose_buckets
from longtake.data.buckets import (
    CROPPED,
    NO_STILLS,
    ONLY_STILLS,
    TOO_SHORT,
    Rows,
    frame_counts,
    shares_cut,
    sort_into_buckets,
)
from longtake.data.caption_text import all_captions
from longtake.data.catalog import MATRIX, Catalog
from longtake.data.checks import drifts, large_crops, refuse_wrong_catalogs, review, tail_drifts
from longtake.data.clip import MIRRORED
from longtake.data.decode import HD_LINES
from longtake.data.plan import Plan, StagePlan, Stream, begin
from longtake.data.stages import drop_in_turn, select
from longtake.errors import DataError
from longtake.formatting import escape, escape_lines, format_duration, plural

MOST_SIZES = 20  # picture sizes that are listed; of more, the most frequent
NUM_EXAMPLES = 3  # paths for each reason to drop clips
TIMELINE_SPANS = 60  # spans of the timeline, or one a step if there are fewer

_ASPECTS = ((9, 16), (2, 3), (3, 4), (1, 1), (4, 3), (3, 2), (16, 9), (21, 9))
_QUANTILES = dict(
    zip(
        ("min", "q5", "q25", "median", "q75", "q95", "max"),
        (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0),
        strict=True,
    )
)
_HDR = pa.array(["pq", "hlg"])


def catalog_stats(catalog: Catalog) -> dict[str, Any]:
    table = catalog.table
    kinds = _counted(table["kind"])
    is_video = pc.equal(table["kind"], "video").to_numpy().astype(bool)
    return {
        "clips": len(catalog),
        "videos": kinds.get("video", 0),
        "images": kinds.get("image", 0),
        "hours": float(catalog.column("duration_seconds").sum()) / 3600,
        "frames": int(catalog.column("num_frames").sum(dtype=np.int64)),
        "captioned": _count(pc.not_equal(table["caption"], "")),
        "duplicates": len(catalog.duplicates),
        "rejected": [{"path": each.path, "reason": each.reason} for each in catalog.rejected],
        "reject_reasons": dict(Counter(each.reason for each in catalog.rejected).most_common()),
        "hdr": _count(pc.is_in(table["color_transfer"], value_set=_HDR)),
        "variable_frame_rate": _count(pc.is_valid(table["pts"])),
        "unreliable_timestamps": int(
            np.count_nonzero(is_video & table["first_pts"].is_null().to_numpy())
        ),
        "prepared": _count(pc.not_equal(table["prepared_from"], "")),
        "sizes": _sizes(catalog),
        "aspects": _aspects(catalog),
        "codecs": _counted(table["codec"]),
        "pixel_formats": _counted(table["pix_fmt"]),
        "color_ranges": _counted(table["color_range"]),
        "color_transfers": _counted(table["color_transfer"]),
        "color_matrices": _counted(table[MATRIX].fill_null("not read; index again")),
        "untagged_hd": _count(_is_untagged_hd(catalog)),
        "rotations": {str(angle): n for angle, n in _counted(table["rotation"]).items()},
        "numbers": _numbers(catalog, is_video),
        "attributes": {name: spread(catalog.column(name)) for name in catalog.attribute_names},
    }


def spread(values: NDArray[Any]) -> dict[str, Any]:
    """Quantiles, mean and standard deviation of the finite values."""
    known = values[np.isfinite(values)].astype(np.float64)
    if not len(known):
        return {"known": 0, **dict.fromkeys([*_QUANTILES, "mean", "std"])}
    quantiles = np.quantile(known, list(_QUANTILES.values())).tolist()
    return {
        "known": len(known),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
        "mean": float(known.mean()),
        "std": float(known.std()),
    }


def _numbers(catalog: Catalog, is_video: NDArray[np.bool_]) -> dict[str, Any]:
    # Of videos only: an image has neither length nor rate.
    lengths = pc.list_value_length(catalog.table["keyframes"]).to_numpy()
    frames = catalog.column("num_frames")
    return {
        "num_frames": spread(frames[is_video]),
        "duration_seconds": spread(catalog.column("duration_seconds")[is_video]),
        "fps": spread(catalog.column("fps")[is_video]),
        "frames_per_keyframe": spread((frames / np.maximum(lengths, 1))[is_video]),
    }


def _sizes(catalog: Catalog) -> list[dict[str, int]]:
    widths, heights = (catalog.column(name).astype(np.int64) for name in ("width", "height"))
    different, counts = np.unique(widths << 32 | heights, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:MOST_SIZES]
    return [
        {"width": int(size >> 32), "height": int(size & 0xFFFFFFFF), "clips": int(count)}
        for size, count in zip(different[most], counts[most], strict=True)
    ]


def _aspects(catalog: Catalog) -> dict[str, int]:
    aspects = np.log(catalog.column("width") / catalog.column("height"))
    known = np.log([width / height for width, height in _ASPECTS])
    nearest = np.searchsorted((known[1:] + known[:-1]) / 2, aspects)
    counts = np.bincount(nearest, minlength=len(_ASPECTS)).tolist()
    return {f"{w}:{h}": n for (w, h), n in zip(_ASPECTS, counts, strict=True) if n}


def _counted(column: pa.ChunkedArray) -> dict[Any, int]:
    rows = pc.value_counts(column).to_pylist()
    return {row["values"]: row["counts"] for row in sorted(rows, key=lambda row: -row["counts"])}


def _angle(rotation: int) -> str:
    return f"{rotation % MIRRORED}°" + ", mirrored" * (rotation >= MIRRORED)


def _is_untagged_hd(catalog: Catalog) -> pa.ChunkedArray:
    table = catalog.table
    turned = pa.array([90, 270, MIRRORED + 90, MIRRORED + 270], pa.int32())
    is_turned = pc.is_in(table["rotation"], value_set=turned)
    lines = pc.if_else(is_turned, table["width"], table["height"])
    is_untagged = pc.and_(pc.equal(table["kind"], "video"), pc.equal(table[MATRIX], ""))
    return pc.and_(is_untagged, pc.greater_equal(lines, HD_LINES))


def _count(mask: pa.ChunkedArray) -> int:
    return int(pc.sum(mask).as_py() or 0)


@dataclass(frozen=True)
class BucketCosts:
    """What a clip of each bucket costs, as far as it is known."""

    tokens: Mapping[Bucket, int] = field(default_factory=dict)
    seconds: Mapping[Bucket, float] = field(default_factory=dict)  # of one GPU, predicted
    device: str = ""  # that GPU


@dataclass(frozen=True)
class ClipAssignment:
    """The bucket of each clip of a catalog in one stage, and the reason if it is dropped."""

    shapes: tuple[Bucket, ...]  # the stage's buckets
    reasons: tuple[str, ...]  # why clips are dropped, in the order in which reasons are tried
    # [N] index of each clip's bucket, also if it is dropped. A clip that no bucket takes belongs to
    # that of the nearest aspect ratio, then of the nearest size, then of the fewest frames.
    home: NDArray[np.int16]
    code: NDArray[np.int16]  # [N] index of the reason why it is dropped; -1: it is trained on
    # [N] whether a bucket that would crop a clip less was not used as the clip is too short for it
    is_displaced: NDArray[np.bool_]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        shape = (len(self.shapes), 1 + len(self.reasons))
        flat = self.home.astype(np.int64) * shape[1] + self.code + 1
        return np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)

    def in_first_epoch(self, stream: Stream) -> "ClipAssignment":
        """With clips of several buckets (`Bucket.share`) where the first whole epoch has them."""
        part = stream.parts[-1]
        if not part.members.shared:
            return self
        home = self.home.copy()
        for bucket in range(len(self.shapes)):
            home[part.rows_in(part.epoch_span.first_epoch, bucket)] = bucket
        return replace(self, home=home)

    def kept(self, bucket: int) -> Rows:
        return np.flatnonzero((self.home == bucket) & (self.code < 0)).astype(np.uint32)

    def dropped(self, reason: int) -> Rows:
        return np.flatnonzero(self.code == reason).astype(np.uint32)


def assign_clips(catalog: Catalog, stage: Stage, data: DataSection) -> ClipAssignment:
    shapes = stage.buckets or data.buckets
    selection = select(catalog, stage, data)
    reasons = tuple(selection.dropped)
    code, is_left = np.full(len(catalog), -1, np.int16), np.ones(len(catalog), bool)
    stills = data.stills_from_videos
    best = _best(catalog, dict(enumerate(shapes)), data.frame_stride, stills=stills, fps=data.fps)
    has_bucket = np.flatnonzero(best >= 0).astype(np.uint32)
    # If no condition drops them, no bucket takes them, or theirs would crop too much.
    no_bucket = next((reason for reason in (TOO_SHORT, ONLY_STILLS) if reason in reasons), "")
    is_still = catalog.column("num_frames") == 1
    for reason, rows in [
        *drop_in_turn(catalog, stage, data),
        (NO_STILLS, np.flatnonzero((best >= 0) | ~is_still).astype(np.uint32)),
        (no_bucket, has_bucket),
        (CROPPED, selection.members.all_rows()),
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
    """[N] the best bucket of every clip if it were long enough.

    For a video: of the buckets with several frames, unless all buckets take videos.
    """
    brief = [shape.model_copy(update={"num_frames": 1}) for shape in shapes]
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
) -> NDArray[np.int16]:
    everyone = np.arange(len(catalog), dtype=np.uint32)
    members, _ = sort_into_buckets(
        catalog, everyone, list(shapes.values()), stride, stills=stills, fps=fps
    )
    best = np.full(len(catalog), -1, np.int16)
    for index, rows in zip(shapes, members.rows, strict=True):
        best[rows] = index
    return best


def _off(
    catalog: Catalog, shapes: Sequence[Bucket], bucket: NDArray[np.int16]
) -> NDArray[np.float64]:
    """[N] distance of each clip's aspect ratio from its bucket's, rounded to 1 %."""
    aspects = np.log(catalog.column("width") / catalog.column("height"))
    wanted = np.log([shape.width / shape.height for shape in shapes])
    off: NDArray[np.float64] = np.round(np.abs(aspects - wanted[bucket]), 2)
    return off


def plan_summary(plan: Plan, recipe: Recipe, costs: BucketCosts | None = None) -> dict[str, Any]:
    """Describe what a new run trains on.

    stages: for each catalog of each stage: `stage`, `source` (the catalog's name), `share` of
        the stage's batches, `first_step`, `steps` (null: endless), `ramp_steps`,
        `trained_steps` of this catalog until training ends, `epochs` that these make, `clips`,
        `selected`, `dropped` {reason: clips}, `examples` {reason: paths} and `buckets`.
    buckets: those of the first stage. Each has `num_frames`, `height`, `width`, `batch_size`,
        `tokens` of a clip and `batch_tokens` (null: not known), `padding` (share of the places of
        all batches that stay empty as the last one is smaller; null: endless), `batch_seconds`
        (predicted for one GPU; null: not known), `time_share` (of an epoch's time) and, of all
        clips, each in one bucket: `clips` = `kept` + `dropped`, the latter by `reasons`;
        `displaced` of the kept (too short for a bucket that would crop them less),
        `batches_per_epoch`, `tail` (clips of the first epoch carried into the next),
        `last_batch` (samples of the last batch; null: endless), and of the kept clips the mean
        `share_cut`, the mean `scale` and how many are `enlarged`.
    timeline: for each stage its share of the batches in up to 60 spans of the training.
    drift: how clips differ from the stage before; `distance` is null where all were alike.
    tails: of the clips that a stage adds, those that are far harder than all before it.
    warnings, refusal: sentences; why training would refuse to begin, or null.
    steps, planned_steps, batch_size: of the training, of all stages (null: endless), samples.
    device: that `batch_seconds` are predicted for.
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
    except DataError as error:  # shown together with what led to it
        refusal = str(error)
        lenient = recipe.data.model_copy(update={"on_drift": "warn"})
        warnings = review(plan, lenient, _end(plan, steps))
    first = plan.stages[0].stage.name
    return {
        "stages": stages,
        "buckets": [
            {"stage": entry["stage"], "source": entry["source"], **bucket}
            for entry in stages
            if entry["stage"] == first
            for bucket in entry["buckets"]
        ],
        "timeline": _timeline(plan, steps),
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
    end = _end(plan, recipe.training.steps)
    trained, total = plan.taken(end)[number], sum(stage.weights)
    for stream, weight, count in zip(stage.streams, stage.weights, trained, strict=True):
        catalog = stream.parts[-1].catalog
        assignment = assign_clips(catalog, stage.stage, recipe.data).in_first_epoch(stream)
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
    catalog, epochs = stream.parts[-1].catalog, stream.parts[-1].epoch_span
    rows, shape = assignment.kept(index), assignment.shapes[index]
    kept, *dropped = assignment.counts[index].tolist()
    batch_size = epochs.batch_size_of(index)
    last = padding = None
    if epochs.num_epochs is not None and kept:
        samples = epochs.num_epochs * kept
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


def _fit(catalog: Catalog, rows: Rows, shape: Bucket) -> dict[str, Any]:
    if not len(rows):
        return {"share_cut": None, "scale": None, "enlarged": 0, "enlarged_by": None}
    across = shape.width / catalog.column("width")[rows]
    down = shape.height / catalog.column("height")[rows]
    scale = np.maximum(across, down)
    enlarged = scale[scale > 1]
    return {
        "share_cut": float(shares_cut(catalog, rows, shape).mean()),
        "scale": float(scale.mean()),
        "enlarged": len(enlarged),
        "enlarged_by": float(enlarged.mean()) if len(enlarged) else None,
    }


def _timeline(plan: Plan, steps: int) -> dict[str, list[float]]:
    end = _end(plan, steps)
    spans = min(end, TIMELINE_SPANS)
    edges = [end * place // spans for place in range(spans + 1)]
    taken = np.array([plan.timeline.taken(edge) for edge in edges])
    shares = np.diff(taken, axis=0) / np.diff(edges)[:, None]
    return {stage.stage.name: shares[:, i].tolist() for i, stage in enumerate(plan.stages)}


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
"""Maps captions to facts, None if they cannot be known, and a warning, if there is one."""


def show(
    path: Path,
    recipe: Recipe | None = None,
    out: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    review_captions: ReviewCaptions | None = None,
    costs: BucketCosts | None = None,
) -> dict[str, Any]:
    """Describe a catalog, and what a recipe would train on.

    A recipe of one catalog is shown with the catalog at `path` in its place. Of a recipe of
    several, `path` has to be one, and all of them are shown.

    Args:
        path: the catalog.
        recipe: what is planned; None: only the catalog is shown.
        out: a folder to draw pictures in; None: none are drawn.
        progress: called with (pictures done, pictures in all).
        review_captions: counts the tokens of all captions that the recipe trains on.
        costs: tokens and seconds of a clip of each bucket, for the model.

    Returns:
        JSON-able: `catalog` (the path), the keys of `catalog_stats` and `plan_summary`, `captions`
        (facts of `review_captions`), `catalogs` (by name, if several) and `pictures` (paths).

    Raises:
        DataError: a catalog cannot be read, a stage selects nothing, or `path` is not one of the
            recipe's catalogs.
        RunError: a picture cannot be written.
    """
    paths = {"catalog": path} if recipe is None else _paths(path, recipe)
    catalogs = {name: Catalog.load(each) for name, each in paths.items()}
    facts = {
        name: {"catalog": str(paths[name]), **catalog_stats(catalog)}
        for name, catalog in catalogs.items()
    }
    mine = next(name for name, each in paths.items() if each.resolve() == path.resolve())
    result = {**facts[mine], "catalog": str(path), "pictures": []}
    if len(facts) > 1:
        result["catalogs"] = facts
    plan = None
    if recipe is not None:
        plan = begin(catalogs, recipe.data, recipe.training.global_batch_size, recipe.seed)
        result |= plan_summary(plan, recipe, costs)
        try:
            refuse_wrong_catalogs(catalogs, recipe.data)
        except DataError as error:
            result["refusal"] = str(error)
        result["proposal"] = propose(list(catalogs.values()), recipe.data)
        if review_captions is not None:
            captions = all_captions(catalogs, recipe.data)
            result["captions"], warning = review_captions(captions)
            result["warnings"] += [warning] if warning else []
    if out is not None:
        from longtake.data.figures import write_pictures  # matplotlib takes a second

        stages = result.get("stages", ())
        written = write_pictures(out, catalogs[mine], plan, recipe, progress, stages)
        result["pictures"] = list(map(str, written))
    return result


def propose(catalogs: Sequence[Catalog], data: DataSection) -> dict[str, Any] | None:
    """Buckets that keep more clips, and how many more; None if the given ones keep nearly all."""
    if any(stage.buckets for stage in data.stages):
        return None
    frames, aspects = [], []
    for catalog in catalogs:
        frames.append(frame_counts(catalog, data.fps))
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


def _paths(path: Path, recipe: Recipe) -> dict[str, Path]:
    paths = recipe.data.sources()
    if len(paths) == 1:
        return dict.fromkeys(paths, path)
    if path.resolve() not in {each.resolve() for each in paths.values()}:
        known = ", ".join(f"{name} ({each})" for name, each in paths.items())
        raise DataError(
            f"{path} is not one of the recipe's catalogs: {known}. Name one of these; or set "
            "data.catalogs and data.weights with --set."
        )
    return paths


MOST_ROWS = 10
"""Reasons that files were rejected for, and values of one kind, that are listed."""

_PIPE_WIDTH = 100
_LEVELS = " ▁▂▃▄▅▆▇█"
_MUCH_IS_CUT = 0.25
_LITTLE_DRIFT = 0.05
_LEGEND = {
    "begins": "between two numbers, a stage is mixed with the one before",
    "size": "width x height",
    "cut": "share of the picture that is cropped away",
    "scale": "above 1, pictures are enlarged",
    "enlarged": "clips whose pictures are enlarged",
    "dropped": "counted in the bucket that a clip would be trained in otherwise",
    "tokens": "of a clip",
    "batch": "clips in an update",
    "batches": "in an epoch",
    "carried over": "clips that the first epoch leaves over; they begin the next one",
    "last batch": "clips in it, where epochs end",
    "padding": "share of all batches that stays empty because of it",
    "seconds": "of a batch in the model's forward and backward pass, predicted, without decoding",
    "time": "share of an epoch's",
}


def print_show(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `longtake.data.summary.show` returned, at least 100 columns wide in a pipe."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    catalogs = result.get("catalogs", {"": result})
    for name, facts in catalogs.items():
        print_catalog(console, facts, name)
    if "stages" in result:
        print_plan(console, result)
    for picture in result["pictures"]:
        _print(console, escape(f"wrote {picture}"))


def print_catalog(console: Console, facts: Mapping[str, Any], name: str = "") -> None:
    called = f"Catalog {name}: {facts['catalog']}" if name else f"Catalog {facts['catalog']}"
    _title(console, called)
    _print(console, f"{_clips_sentence(facts)}\n")
    _print(console, _properties(facts))
    if facts["clips"]:
        _print(console, _spreads(facts))
    if facts["reject_reasons"]:
        _print(console, _rejections(facts))


def print_plan(console: Console, facts: Mapping[str, Any]) -> None:
    _title(console, "Plan")
    planned = facts["planned_steps"]
    stages = "the last stage has no end" if planned is None else f"the stages have {planned:,}"
    buckets = (bucket for each in facts["stages"] for bucket in each["buckets"])
    sizes = " or ".join(f"{n:,}" for n in sorted({each["batch_size"] for each in buckets}))
    _print(
        console,
        f"Training ends after {plural(facts['steps'], 'step')} of {sizes} clips; {stages}.\n",
    )
    _print(console, _stages(facts))
    if len(facts["timeline"]) > 1:
        _print(console, _timeline_bars(facts))
    sources = {entry["source"] for entry in facts["stages"]}
    for entry in facts["stages"]:
        catalog = f", catalog {entry['source']}" if len(sources) > 1 else ""
        _title(console, f"Stage {entry['stage']}{catalog}")
        _print(console, _buckets(entry))
        _print(console, _batches(entry))
        if entry["dropped"] and len(entry["buckets"]) > 1:
            _print(console, _drops(entry))
        if entry["dropped"]:
            _print(console, _examples(entry))
    used = {name for entry in facts["stages"] for name in _columns(entry)}
    legend = Table.grid(padding=(0, 2))
    for name, meaning in _LEGEND.items():
        if name in used:
            on = f"; on {facts['device']}" if name == "seconds" and facts["device"] else ""
            legend.add_row(f"[dim]{name}[/]", f"[dim]{escape(meaning + on)}[/]")
    _print(console, legend)
    if (found := facts.get("proposal")) is not None:
        _title(console, "Other buckets", "yellow")
        clips = plural(found["more_clips"], "more clip")
        _print(console, f"These keep {clips}; `longtake plan` says whether they fit:")
        console.print(f"  --set {shlex.quote(found['set'])}", markup=False, soft_wrap=True)
    if (drift := _drift(facts)).row_count:
        _title(console, "Drift from stage to stage")
        _print(console, drift)
    if facts["warnings"]:
        _title(console, "Warnings", "yellow")
        grid = Table.grid(padding=(0, 1))
        for sentence in facts["warnings"]:
            grid.add_row("-", escape_lines(sentence))
        _print(console, grid)
    if facts["refusal"]:
        _title(console, "Training would refuse to begin", "red")
        _print(console, escape_lines(facts["refusal"]))


def _clips_sentence(facts: Mapping[str, Any]) -> str:
    count, seconds = facts["clips"], facts["hours"] * 3600
    parts = [
        f"{plural(count, 'clip')}: {plural(facts['videos'], 'video')} ({format_duration(seconds)}, "
        f"{plural(facts['frames'] - facts['images'], 'frame')}) and "
        f"{plural(facts['images'], 'image')}",
        f"{facts['captioned']:,} with a caption, {count - facts['captioned']:,} without",
        f"{plural(facts['duplicates'], 'duplicate')} left out, "
        f"{plural(len(facts['rejected']), 'file')} rejected",
    ]
    return "; ".join(parts) + "."


def _properties(facts: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    sizes = {f"{size['width']}x{size['height']}": size["clips"] for size in facts["sizes"]}
    counted = {
        "sizes": sizes,
        "aspect ratios": facts["aspects"],
        "codecs": facts["codecs"],
        "pixel formats": facts["pixel_formats"],
        "colour range": facts["color_ranges"],
        "colour transfer": facts["color_transfers"],
        "colour matrix": facts["color_matrices"],
        "rotation": {_angle(int(each)): count for each, count in facts["rotations"].items()},
    }
    for name, counts in counted.items():
        grid.add_row(name, _listed(counts, facts["clips"]))
    special = {
        "HDR": facts["hdr"],
        "720 lines and more without a colour matrix (data.untagged)": facts["untagged_hd"],
        "variable frame rate": facts["variable_frame_rate"],
        "decoded from the beginning for want of timestamps": facts["unreliable_timestamps"],
        "transcoded by `data prepare`": facts["prepared"],
    }
    special = {name: count for name, count in special.items() if count}
    if special:
        grid.add_row("of these", _listed(special, facts["clips"]))
    return grid


def _listed(counts: Mapping[str, int], total: int) -> str:
    """The most frequent values, and how many clips have each."""
    shown = list(counts.items())[:MOST_ROWS]
    said = [f"{escape(name) or 'unspecified'} [dim]({count:,})[/]" for name, count in shown]
    if len(counts) > MOST_ROWS:
        said.append(f"others [dim]({total - sum(count for _, count in shown):,})[/]")
    return " · ".join(said) or "-"


def _spreads(facts: Mapping[str, Any]) -> Table:
    names = ("of clips", "min", "5 %", "25 %", "median", "75 %", "95 %", "max", "mean")
    table = _table("", numbers=names)
    for name, spread in [*facts["numbers"].items(), *facts["attributes"].items()]:
        keys = ("min", "q5", "q25", "median", "q75", "q95", "max", "mean")
        if spread["known"]:
            label = escape(name.replace("_", " "))
            table.add_row(label, _number(spread["known"]), *(_number(spread[key]) for key in keys))
    return table


def _rejections(facts: Mapping[str, Any]) -> Table:
    table = _table("files", "rejected because", "such as")
    table.columns[0].justify = "right"
    first = {entry["reason"]: entry["path"] for entry in reversed(facts["rejected"])}
    reasons = facts["reject_reasons"]
    for reason, count in list(reasons.items())[:MOST_ROWS]:
        table.add_row(_number(count), escape(reason), escape(_short(first[reason])))
    if len(reasons) > MOST_ROWS:
        rest = sum(list(reasons.values())[MOST_ROWS:])
        table.add_row(_number(rest), f"{len(reasons) - MOST_ROWS} other reasons (--json)", "")
    return table


def _stages(facts: Mapping[str, Any]) -> Table:
    names = ("share", "begins", "steps", "epochs", "clips", "kept", "dropped")
    table = _table("stage", "catalog", numbers=names)
    before = None
    for entry in facts["stages"]:
        is_new, before = entry["stage"] != before, entry["stage"]
        name, begins = (entry["stage"], _beginning(entry)) if is_new else ("", "")
        keys = ("trained_steps", "epochs", "clips", "selected")
        table.add_row(
            escape(name),
            escape(entry["source"]),
            f"{entry['share']:.0%}",
            begins,
            *(_number(entry[key]) for key in keys),
            _number(entry["clips"] - entry["selected"]),
        )
    return table


def _beginning(entry: Mapping[str, Any]) -> str:
    first, half = entry["first_step"], entry["ramp_steps"] // 2
    return f"{first - half:,} to {first + half:,}" if half else f"{first:,}"


def _timeline_bars(facts: Mapping[str, Any]) -> Table:
    """One line a stage: how high its share of the batches is, from the first step to the last."""
    grid = Table.grid(padding=(0, 2))
    for stage, shares in facts["timeline"].items():
        levels = (max(round(share * (len(_LEVELS) - 1)), int(share > 0)) for share in shares)
        bars = "".join(_LEVELS[level] for level in levels)
        grid.add_row(f"  {escape(stage)}", bars)
    width = len(next(iter(facts["timeline"].values())))
    planned = facts["planned_steps"]
    end = facts["steps"] if planned is None else min(facts["steps"], planned)
    grid.add_row("", f"0{f'step {end:,}':>{max(0, width - 1)}}")
    return grid


def _buckets(entry: Mapping[str, Any]) -> Table:
    names = ("clips", "kept", "dropped", "cut", "scale", "enlarged")
    table = _table(numbers=("frames", "size", *names))
    for bucket in entry["buckets"]:
        table.add_row(
            *_shape(bucket),
            *(_number(bucket[key]) for key in ("clips", "kept", "dropped")),
            _share_cut(bucket["share_cut"]),
            _number(bucket["scale"]),
            f"[yellow]{_number(bucket['enlarged'])}[/]" if bucket["enlarged"] else "0",
        )
    return table


def _columns(entry: Mapping[str, Any]) -> set[str]:
    """Names of the columns of a stage's tables."""
    tables = (_buckets(entry), _batches(entry))
    begins = {"begins"} if entry["ramp_steps"] else set[str]()
    return {str(column.header) for table in tables for column in table.columns} | begins


def _batches(entry: Mapping[str, Any]) -> Table:
    """Without columns in which no bucket has anything to say."""
    columns = {
        "tokens": [_number(each["tokens"]) for each in entry["buckets"]],
        "batch": [_number(each["batch_size"]) for each in entry["buckets"]],
        "batches": [f"{each['batches_per_epoch']:,.2f}" for each in entry["buckets"]],
        "carried over": [_number(each["tail"]) for each in entry["buckets"]],
        "last batch": [_number(each["last_batch"]) for each in entry["buckets"]],
        "padding": [_percent(each["padding"]) for each in entry["buckets"]],
        "seconds": [_number(each["batch_seconds"]) for each in entry["buckets"]],
        "time": [_percent(each["time_share"]) for each in entry["buckets"]],
    }
    shown = {name: each for name, each in columns.items() if not set(each) <= {"-", "0", "0.0%"}}
    if len(entry["buckets"]) == 1:
        shown.pop("time", None)
    table = _table(numbers=("frames", "size", *shown))
    for number, bucket in enumerate(entry["buckets"]):
        table.add_row(*_shape(bucket), *(cells[number] for cells in shown.values()))
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _shape(bucket: Mapping[str, Any]) -> tuple[str, str]:
    return str(bucket["num_frames"]), f"{bucket['width']}x{bucket['height']}"


def _share_cut(share: float | None) -> str:
    if share is None:
        return "-"
    return f"[yellow]{share:.0%}[/]" if share > _MUCH_IS_CUT else f"{share:.0%}"


def _drops(entry: Mapping[str, Any]) -> Table:
    table = _table(numbers=("frames", "size", "dropped"))
    for reason in entry["dropped"]:
        table.add_column(escape(reason), justify="right", max_width=18, overflow="fold")
    for bucket in entry["buckets"]:
        counts = (bucket["reasons"].get(reason, 0) for reason in entry["dropped"])
        table.add_row(*_shape(bucket), _number(bucket["dropped"]), *map(_number, counts))
    return table


def _examples(entry: Mapping[str, Any]) -> Table:
    table = _table("clips", "dropped because", "such as")
    table.columns[0].justify = "right"
    for reason, count in entry["dropped"].items():
        paths = ", ".join(map(_short, entry["examples"][reason]))
        table.add_row(_number(count), escape(reason), escape(paths))
    return table


def _drift(facts: Mapping[str, Any]) -> Table:
    numbers = ("before", "after", "standard deviations")
    table = _table("into stage", "mean of", numbers=numbers)
    for drift in facts["drift"]:
        if drift["distance"] is not None and drift["distance"] < _LITTLE_DRIFT:
            continue
        distance = "all alike before" if drift["distance"] is None else f"{drift['distance']:.2f}"
        table.add_row(
            escape(drift["stage"]),
            escape(drift["attribute"].replace("_", " ")),
            _number(drift["before"]),
            _number(drift["after"]),
            f"[red]{distance}[/]" if drift["is_above_limit"] else distance,
        )
    return table


def _table(*texts: str, numbers: Sequence[str] = ()) -> Table:
    """One with columns of text and, after these, of numbers, which are never cut short."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _short(path: str) -> str:
    return "/".join(PurePath(path).parts[-2:])


def _title(console: Console, text: str, colour: str = "default") -> None:
    _print(console, escape(text), style=f"bold {colour}")


def _print(console: Console, what: RenderableType, style: str | None = None) -> None:
    console.print(what, style=style, soft_wrap=False)  # tables have to know how wide they may be
