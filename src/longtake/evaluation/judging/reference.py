"""The same measures of clips that were trained on: what a preset's videos should look like.

Clips are read as training reads them, in the preset's size and length. Which ones follows from
their identities alone, so that every server takes the same. It takes a while, once: the result is
kept in the run directory.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from longtake.config import Bucket, Recipe
from longtake.data.buckets import span
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.order import derive
from longtake.data.sample import sample_window
from longtake.data.window import read_window
from longtake.errors import ClipError, DataError, RecordError
from longtake.evaluation.measures import measure
from longtake.evaluation_dir import EvaluationDirectory
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
    """Measures of clips that were trained on.

    Attributes:
        num_clips: how many were measured.
        measures: the spread of each measure.
    """

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
    """The reference of a preset, kept or made; None with a remark where the clips are not here.

    Args:
        run: whose catalogs' copies say where clips lie.
        recipe: the run's; says how clips are read, and how many.
        preset: its name.
        bucket: its size.
        fps: frames a second that its videos are shown at.
        on_clip: called before each clip that is decoded; not at all where a reference is kept.
    """
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
