"""The pictures of `longtake data show`: of a catalog, and of what a recipe makes of it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection, Recipe
from longtake.data.buckets import Members, Rows
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.decode_worker import DecodePool
from longtake.data.pictures import buckets_picture, histogram_picture
from longtake.data.plan import Plan, Stream
from longtake.data.sample import sample_seed, sample_window
from longtake.data.show.contact_sheet import MAX_FRAMES, CropRow, contact_sheet, frame_size
from longtake.data.stages import attribute_of, values
from longtake.data.window import Window
from longtake.errors import ClipError, DataError

MOST_ROWS = 36
"""Clips on a contact sheet."""
CLIPS_PER_BUCKET = 3

_Drawing = tuple[str, Callable[[Path], None]]
"""The name of a picture, and what draws it to a path."""

_MOST_FRAMES = 121  # of a clip that no recipe gives a length


def write_pictures(
    folder: Path,
    catalog: Catalog,
    plan: Plan | None = None,
    recipe: Recipe | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Draw a catalog or, with a plan, what is trained on.

    `buckets.png` (of the first stage; further ones are `buckets_STAGE_CATALOG.png`),
    `histogram_ATTRIBUTE.png` for each score that clips have and each number that a stage asks for,
    and `contact_sheet.png`: real frames of a few clips of each bucket, from the least to the most
    cropped, with what the crop keeps. A clip that cannot be decoded is shown as such.

    Args:
        folder: where; made if need be.
        catalog: what is drawn where there is no plan.
        plan: of a new run.
        recipe: that the plan was made from; given exactly with a plan.
        progress: called with (pictures done, pictures in all).

    Returns:
        The pictures, in the order in which they are to be looked at.

    Raises:
        DataError: a picture cannot be written.
    """
    assert (plan is None) == (recipe is None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    with DecodePool(1) as pool:  # so that no file can hang or crash this process
        if plan is None or recipe is None:
            drawings = [*_histograms(catalog), *_sheet(_whole(catalog, pool))]
        else:
            drawings = [
                *_buckets(plan, recipe.data),
                *_stage_histograms(plan, recipe.data),
                *_sheet(_crops(plan, recipe, pool)),
            ]
        for done, (name, draw) in enumerate(drawings, start=1):
            draw(folder / name)
            if progress is not None:
                progress(done, len(drawings))
    return [folder / name for name, _ in drawings]


def _sheet(rows: Iterator[CropRow]) -> Iterator[_Drawing]:
    first = next(rows, None)
    if first is not None:
        chosen = islice(chain([first], rows), MOST_ROWS)
        yield "contact_sheet.png", lambda path: contact_sheet(path, list(chosen))


def _buckets(plan: Plan, data: DataSection) -> Iterator[_Drawing]:
    sources = {stream.source for stream in plan.streams()}
    name = "buckets.png"
    for stage in plan.stages:
        for stream in stage.streams:
            catalog, members = stream.parts[-1].catalog, stream.parts[-1].members
            known = (stream.stage, *([stream.source] if len(sources) > 1 else []))
            draw = partial(
                buckets_picture,
                shapes=members.shapes,
                choices=_choices(members, len(catalog)),
                clip_sizes=np.column_stack([catalog.column("height"), catalog.column("width")]),
                clip_frames=catalog.column("num_frames"),
                dropped=stage.dropped[stream.source],
                stride=data.frame_stride,
                title=f"Stage {', catalog '.join(known)}",
            )
            yield (name if stream is plan.streams()[0] else _file("buckets", *known)), draw


def _choices(members: Members, num_clips: int) -> NDArray[np.int64]:
    choices = np.full(num_clips, -1)
    for index, rows in enumerate(members.rows):
        choices[rows] = index
    return choices


def _file(*parts: str) -> str:
    """The name of a picture."""
    return "_".join(re.sub(r"[^\w.-]+", "-", part) for part in parts) + ".png"


def _histograms(catalog: Catalog) -> Iterator[_Drawing]:
    for name in _scores(catalog):
        numbers = catalog.column(name).astype(np.float64)
        yield _file("histogram", name), partial(histogram_picture, name=name, values=numbers)


def _stage_histograms(plan: Plan, data: DataSection) -> Iterator[_Drawing]:
    """Of each catalog and each number: over all clips, and over those of each stage."""
    by_source: dict[str, list[Stream]] = {}
    for stream in plan.streams():
        by_source.setdefault(stream.source, []).append(stream)
    for source, streams in by_source.items():
        catalog = streams[0].parts[-1].catalog
        for name, numbers in _numbers_of_interest(catalog, plan, data).items():
            known = (name, source) if len(by_source) > 1 else (name,)
            stages = [
                (f"stage {stream.stage}", numbers[stream.parts[-1].members.all_rows()])
                for stream in streams
            ]
            label = " in catalog ".join(known)
            draw = partial(histogram_picture, name=label, values=numbers, stages=stages)
            yield _file("histogram", *known), draw


def _numbers_of_interest(
    catalog: Catalog, plan: Plan, data: DataSection
) -> Mapping[str, NDArray[np.float64]]:
    """[N] values by name: all scores, and what stages have conditions on."""
    conditions = (condition for stage in plan.stages for condition in stage.stage.where)
    asked = list(map(attribute_of, conditions))
    found = {}
    asked += [data.difficulty] if data.difficulty else []
    for name in dict.fromkeys([*_scores(catalog), *asked]):
        if name == "difficulty":  # another name for one of the others
            continue
        try:
            column = values(catalog, name, data)
        except DataError:  # another catalog has it
            continue
        if np.issubdtype(column.dtype, np.number):
            found[name] = column.astype(np.float64)
    return found


def _scores(catalog: Catalog) -> tuple[str, ...]:
    return catalog.attribute_names or ("duration_seconds",)


def _crops(plan: Plan, recipe: Recipe, pool: DecodePool) -> Iterator[CropRow]:
    """Clips of every bucket that is trained in, each bucket of a catalog once."""
    sources = {stream.source for stream in plan.streams()}
    shown: set[tuple[str, Bucket]] = set()
    for stream in plan.streams():
        part = stream.parts[-1]
        for shape, rows in zip(part.members.shapes, part.members.rows, strict=True):
            if len(rows) and (stream.source, shape) not in shown:
                shown.add((stream.source, shape))
                label = f"{shape}, catalog {stream.source}" if len(sources) > 1 else str(shape)
                for row in _least_to_most_cropped(part.catalog, rows, shape):
                    yield _crop(label, part.catalog.clip(row), shape, stream, recipe, pool)


def _least_to_most_cropped(catalog: Catalog, rows: Rows, shape: Bucket) -> list[int]:
    widths, heights = catalog.column("width")[rows], catalog.column("height")[rows]
    cut = np.abs(np.log(widths / heights) - np.log(shape.width / shape.height))
    count = min(CLIPS_PER_BUCKET, len(rows))
    places = np.linspace(0, len(rows) - 1, count).round().astype(int)
    chosen: list[int] = rows[np.argsort(cut, kind="stable")[places]].tolist()
    return chosen


def _crop(
    label: str, clip: Clip, shape: Bucket, stream: Stream, recipe: Recipe, pool: DecodePool
) -> CropRow:
    """A clip as the first epoch takes it."""
    seed = sample_seed(recipe.seed, stream.stage, stream.source, 0, clip)
    window = sample_window(clip, shape, recipe.data, seed)
    kept = (
        window.top / window.scaled_height,
        window.left / window.scaled_width,
        window.height / window.scaled_height,
        window.width / window.scaled_width,
    )
    return _row(label, clip, window, kept, pool)


def _whole(catalog: Catalog, pool: DecodePool) -> Iterator[CropRow]:
    """Clips that are evenly spread over a catalog, whole."""
    count = min(MOST_ROWS // 3, len(catalog))
    for row in np.linspace(0, len(catalog) - 1, count).round().astype(int).tolist():
        clip = catalog.clip(row)
        frames = min(clip.num_frames, _MOST_FRAMES)
        shape = Bucket(num_frames=frames, height=clip.height, width=clip.width)
        window = sample_window(clip, shape, DataSection(catalog=Path(), buckets=(shape,)), 0)
        length = "image" if clip.kind == "image" else f"{clip.num_frames:,} frames"
        yield _row(f"{length} of {clip.width}x{clip.height}", clip, window, None, pool)


def _row(
    bucket: str,
    clip: Clip,
    window: Window,
    kept: tuple[float, float, float, float] | None,
    pool: DecodePool,
) -> CropRow:
    caption = clip.caption or f"(no caption) {Path(clip.path).name}"
    try:
        frames = pool.submit(_overview(window)).result()
    except ClipError as error:
        return CropRow(bucket, caption, np.empty((0, 1, 1, 3), np.uint8), kept, error.reason)
    return CropRow(bucket, caption, frames.transpose(1, 2, 3, 0), kept)


def _overview(window: Window) -> Window:
    """The same time and the whole picture, but small, and few frames."""
    apart = max(1, -(-(window.num_frames - 1) // (MAX_FRAMES - 1)))
    height, width = frame_size(window.source_height, window.source_width)
    return replace(
        window,
        num_frames=(window.num_frames - 1) // apart + 1,
        stride=window.stride * apart,
        timestamps=window.timestamps[::apart],
        scaled_height=height,
        scaled_width=width,
        top=0,
        left=0,
        height=height,
        width=width,
        is_flipped=False,
    )
