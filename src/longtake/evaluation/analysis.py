"""Analyses a result: drift over checkpoints, and the range of the clips that were trained on."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from longtake.config import Bucket, Recipe
from longtake.data.buckets import sample_window, span
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Media
from longtake.data.decode import opened
from longtake.data.order import derive
from longtake.data.window import read_window
from longtake.errors import ClipError, DataError, RecordError
from longtake.evaluation.measures import MEASURES, measure
from longtake.evaluation_dir import Alarm, EvaluationDirectory
from longtake.fsio import Count, read_record, write_json
from longtake.run_dir import RunDirectory

_LOW, _MIDDLE, _HIGH = 0.01, 0.5, 0.99
_MOST_UNREADABLE = 8
"""After so many in a row, and none that can be read, the clips are taken to lie elsewhere."""


@dataclass(frozen=True)
class Spread:
    """How a measure is spread over clips: its 1 %, 50 % and 99 % quantiles, and its mean."""

    low: float
    median: float
    high: float
    mean: float


@dataclass(frozen=True)
class Reference:
    """Measures of clips that were trained on."""

    num_clips: int
    measures: Mapping[str, Spread]


def reference_of(
    run: RunDirectory,
    recipe: Recipe,
    preset: str,
    bucket: Bucket,
    fps: float,
    on_clip: Callable[[], None] | None = None,
) -> tuple[Reference | None, str]:
    """The reference of a preset, kept or made; None with a remark where the clips are not here."""
    path = EvaluationDirectory(run).reference_path(preset)
    asked = {
        "bucket": bucket.model_dump(),
        "fps": fps,
        "clips": recipe.evaluation.reference_clips,
        "frame_stride": recipe.data.frame_stride,
        "catalogs": [each.stem for each in _catalog_paths(run)],
    }
    if kept := _kept(path, asked):
        return kept, ""
    try:
        made = _made(run, recipe, bucket, fps, on_clip)
    except DataError as error:  # a clip's, a catalog's: they may lie on another machine
        return None, f"{preset} is compared with no training clips: {error}"
    if made is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"of": asked, **asdict(made)}, by_many=True)
    return made, ""


def _made(
    run: RunDirectory,
    recipe: Recipe,
    bucket: Bucket,
    fps: float,
    on_clip: Callable[[], None] | None,
) -> Reference | None:
    count = recipe.evaluation.reference_clips
    rows = list(islice(_measured(run, recipe, bucket, fps, on_clip), count)) if count else []
    if not rows:
        return None
    names = sorted({name for row in rows for name in row})
    spread = {name: _spread([row[name] for row in rows if name in row]) for name in names}
    return Reference(len(rows), spread)


def _measured(
    run: RunDirectory,
    recipe: Recipe,
    bucket: Bucket,
    fps: float,
    on_clip: Callable[[], None] | None,
) -> Iterator[dict[str, float]]:
    """Measures of clips that can be read, by their identities."""
    any_read, unreadable = False, 0
    for clip in _clips(run, bucket, recipe.data.frame_stride):
        if on_clip is not None:
            on_clip()
        seed = derive("reference", clip.identity)
        try:
            video = read_window(sample_window(clip, bucket, recipe.data, seed))
        except ClipError:
            unreadable += 1
            if not any_read and unreadable == _MOST_UNREADABLE:
                raise
            continue
        any_read = True
        yield measure(np.ascontiguousarray(video.transpose(1, 2, 3, 0)), fps)


def _clips(run: RunDirectory, bucket: Bucket, stride: int) -> Iterator[Clip]:
    """Clips of all catalogs that are long enough, each once, in the order of their identities.

    Identities are hashes, so that the first ones are as good as drawn.
    """
    catalogs = [Catalog.load(path) for path in _catalog_paths(run)]
    if not catalogs:
        raise DataError(f"{run.catalogs_path} has no copies of the catalogs that were trained on.")
    last, is_any = "", False
    for clip in heapq.merge(
        *(_long_enough(catalog, bucket, stride) for catalog in catalogs),
        key=lambda clip: clip.identity,
    ):
        if clip.identity != last:
            yield clip
        last, is_any = clip.identity, True
    if not is_any:
        raise DataError(f"no clip has {span(bucket, stride)} frames, as {bucket} takes.")


def _long_enough(catalog: Catalog, bucket: Bucket, stride: int) -> Iterator[Clip]:
    rows = np.flatnonzero(catalog.column("num_frames") >= span(bucket, stride))
    return (catalog.clip(int(row)) for row in rows)


class _Kept(TypedDict):
    of: dict[str, Any]
    num_clips: Count
    measures: dict[str, Spread]


def _catalog_paths(run: RunDirectory) -> list[Path]:
    return sorted(run.catalogs_path.glob("*.parquet"))


def _spread(values: list[float]) -> Spread:
    low, middle, high = np.quantile(values, [_LOW, _MIDDLE, _HIGH]).tolist()
    return Spread(low, middle, high, float(np.mean(values)))


def _kept(path: Path, asked: Mapping[str, Any]) -> Reference | None:
    """What an earlier evaluation has written, if it is of the same."""
    try:
        record = read_record(path, _Kept)
    except RecordError:
        return None
    return (
        None
        if record is None or record["of"] != asked
        else Reference(record["num_clips"], record["measures"])
    )


_MARGIN = 0.1
"""Of a reference's own width: the quantiles of a few dozen clips are rough."""


def find_drift(
    preset: str,
    history: Sequence[Mapping[str, float]],
    steps: Sequence[int],
    checkpoints: int,
    change: float,
    reference: Reference | None = None,
) -> list[Alarm]:
    """Measures of ours that have risen, or fallen, at each of the last checkpoints.

    While a model learns, all measures move: a row counts from the checkpoint on that `learnt`
    gives. No alarm is given for a measure that has come nearer to what the training's clips have,
    for one that moved in a direction that is no failure (`bad` of `MEASURES`), nor for a user's
    own, which may be meant to rise. What counts is the row that ends at the highest step. Its
    change is stated as a share of `base`. A checkpoint that lacks a measure is passed over.
    """
    assert len(history) == len(steps)
    rows = dict(zip(steps, history, strict=True))
    alarms = []
    for name in dict.fromkeys(name for row in history for name in row if name in MEASURES):
        series = [(step, rows[step][name]) for step in sorted(rows) if name in rows[step]]
        start = learnt(name, [value for _, value in series], checkpoints, reference)
        row = last_row([value for _, value in series])
        row = row[-max(1, len(series) - start) :]
        share = (row[-1] - row[0]) / base(name, row)
        is_drift = len(row) > checkpoints and abs(share) >= change
        is_drift = is_drift and MEASURES[name].bad in ("both", "up" if share > 0 else "down")
        if is_drift and not _comes_nearer(name, row, reference):
            first_step, last_step = series[-len(row)][0], series[-1][0]
            text = _drift_text(preset, name, row, share)
            message = f"{text} (from step {first_step} to {last_step})."
            alarms.append(Alarm(measure=name, kind="drift", message=message))
    return alarms


def learnt(
    name: str, values: Sequence[float], checkpoints: int, reference: Reference | None
) -> int:
    """The place of the first value that shows a trained model: what moved before was learning.

    The last of the first `checkpoints` values, or the first one within the range of the training's
    clips, whichever is later; the number of values where none is within that range.
    """
    inside = 0
    if reference is not None and name in reference.measures:
        low, high = _range(name, reference.measures[name])
        inside = next(
            (place for place, value in enumerate(values) if low <= value <= high), len(values)
        )
    return max(checkpoints - 1, inside)


def last_row(values: Sequence[float]) -> list[float]:
    """The longest end of a series that only rises, or only falls; at least its last value."""
    backwards = [values[-1]]
    for earlier in values[-2::-1]:
        continues = len(backwards) == 1 or (backwards[0] > backwards[1]) == (
            backwards[-1] > earlier
        )
        if earlier == backwards[-1] or not continues:
            break
        backwards.append(earlier)
    return backwards[::-1]


def base(name: str, row: Sequence[float]) -> float:
    """What a change of a measure is stated as a share of.

    Its first value, but not less than the measure's `floor`: near 0 any change would be a multiple.
    """
    return max(abs(row[0]), MEASURES[name].floor) or 1.0


def _comes_nearer(name: str, row: Sequence[float], reference: Reference | None) -> bool:
    """Whether a measure ends nearer to the median of the training's clips than it began."""
    if reference is None or name not in reference.measures:
        return False
    median = reference.measures[name].median
    return abs(row[-1] - median) < abs(row[0] - median)


def find_out_of_range(
    preset: str, measures: Mapping[str, float], reference: Reference
) -> list[Alarm]:
    """Measures whose mean lies outside of what 98 % of the training's clips have, and a margin.

    The margin is a tenth of that range, or the measure's `floor` where that is more.
    """
    alarms = []
    for name, value in measures.items():
        if name not in reference.measures or name not in MEASURES:
            continue
        span = reference.measures[name]
        low, high = _range(name, span)
        if not low <= value <= high:
            message = (
                f"{name} of {preset} is {_short(value)}; of {reference.num_clips} training clips "
                f"98 % lie between {_short(span.low)} and {_short(span.high)}."
            )
            alarms.append(Alarm(measure=name, kind="range", message=message))
    return alarms


def _range(name: str, span: Spread) -> tuple[float, float]:
    margin = max(_MARGIN * (span.high - span.low), MEASURES[name].floor)
    return span.low - margin, span.high + margin


def _drift_text(preset: str, name: str, row: Sequence[float], share: float) -> str:
    verb = "rose" if share > 0 else "fell"
    return f"{name} of {preset} {verb} {len(row) - 1} checkpoints in a row, {100 * share:+.0f} %"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


Video = NDArray[np.uint8]


class Reread(Sequence[Video]):
    """A sequence of videos, [F, H, W, 3] each."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> Video: ...
    @overload
    def __getitem__(self, index: slice) -> "Reread": ...
    def __getitem__(self, index: int | slice) -> "Video | Reread":
        if isinstance(index, slice):
            return Reread(self._paths[index])
        with opened(Media(str(self._paths[index]))) as (container, stream):
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames)
