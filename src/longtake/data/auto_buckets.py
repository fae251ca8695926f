"""Chooses buckets (clip shapes) from the catalogs by a pixel budget: `data.auto_buckets`.

The choice is a pure function of the recipe and the catalogs. A run keeps the buckets that it began
with. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake import errors
from longtake.config import AutoBucketsSection, Bucket, DataSection, Recipe
from longtake.data import buckets, catalog, sources, stages
from longtake.run_dir import RunDirectory

_ASPECTS = (21 / 9, 16 / 9, 3 / 2, 4 / 3, 1.0, 3 / 4, 2 / 3, 9 / 16, 9 / 21)
_MOST_OPENED = 200  # number of files of a folder that `glance` opens, spread evenly
_SECONDS = 2.0  # time limit for opening one file
_MOST_LOST = 0.1  # another shape is proposed if more than this share of the clips is lost
_SQUARE = 1.2  # a picture with sides of up to this ratio counts as square
_LEAST_AREA = 0.9  # share of the budget to use, unless no shape comes near to it


def with_buckets(recipe: Recipe, shown: Path | None = None) -> Recipe:
    """Return a recipe with `data.buckets` (clip shapes): its own, the run's, or newly chosen.

    With `shown` the buckets are chosen from that catalog, in place of the recipe's only one.

    Raises:
        DataError: a catalog cannot be read, or no clip would go to any bucket.
    """
    data = recipe.data
    if data.buckets or data.auto_buckets is None:
        return recipe
    found: tuple[Bucket, ...] = ()
    run = RunDirectory(recipe.out)
    paths = data.sources()
    is_other = shown is not None and shown.resolve() not in {p.resolve() for p in paths.values()}
    if shown is not None and is_other and len(paths) == 1:
        paths = dict.fromkeys(paths, shown)
    elif run.exists():
        # A resumed run must keep its buckets even if the catalogs have changed.
        kept = run.recipe().data
        found = kept.buckets if kept.auto_buckets == data.auto_buckets else ()
    if not found:
        catalogs = {name: catalog.Catalog.load(path) for name, path in paths.items()}
        found = choose_buckets(catalogs, data.auto_buckets, data)
    return recipe.model_copy(update={"data": data.model_copy(update={"buckets": found})})


def choose_buckets(
    catalogs: Mapping[str, catalog.Catalog], auto: AutoBucketsSection, data: DataSection
) -> tuple[Bucket, ...]:
    """Return the clip shapes that `auto` allows and that at least `min_clips` captioned clips fit.

    The bucket with the fewest clips is removed until all have enough; its clips then go to others.

    Raises:
        DataError: no bucket gets enough clips.
    """
    sizes = dict.fromkeys(_size(auto, aspect) for aspect in auto.aspects or _ASPECTS)
    shapes = [
        Bucket(num_frames=frames, height=height, width=width)
        for frames in sorted(set(auto.frames))
        for height, width in sorted(sizes, key=lambda size: size[1] / size[0])
    ]
    how: Any = {"stills": data.stills_from_videos, "fps": data.fps, "upscale": data.upscale}
    while shapes:
        counts = np.zeros(len(shapes), np.int64)
        for clips in catalogs.values():
            rows = stages.captioned_rows(clips, data)
            choice = buckets.choose(clips, rows, shapes, data.frame_stride, **how)
            counts += np.bincount(choice[choice >= 0], minlength=len(shapes))
        fewest = int(np.argmin(counts))
        if counts[fewest] >= auto.min_clips:
            return tuple(shapes)
        # One at a time: its clips may give another bucket enough.
        del shapes[fewest]
    total = sum(map(len, catalogs.values()))
    raise errors.DataError(
        f"data.auto_buckets: of {total} clips not {auto.min_clips} with a caption go to any bucket "
        f"of {' or '.join(map(str, auto.frames))} frames and at most {auto.pixels:,} pixels. Lower "
        "frames or min_clips, or index clips with captions."
        + ("" if data.upscale else " Or lower pixels, or set data.upscale = true.")
    )


def glance(
    data: Path, indexed: Path, fps: float | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the numbers of frames [N] of clips at a frame rate, and their aspect ratios [N].

    They come from the catalog if it exists, else from the headers of some files of the folder
    `data`, whose rotation is not read. Files that cannot be opened are left out; indexing reports
    them.

    Raises:
        DataError: the catalog cannot be read, or the folder holds no clips.
    """
    if indexed.is_file():
        clips = catalog.Catalog.load(indexed)
        aspects = clips.column("width") / clips.column("height")
        return buckets.frame_counts(clips, fps), aspects.astype(np.float64)
    media = sources.find([data])  # its items are on disk while it lives
    items = list(media.items)
    found: list[tuple[int, float]] = []
    for item in items[:: max(1, -(-len(items) // _MOST_OPENED))]:
        if item.media.member or "://" in item.media.path:
            continue
        try:
            if item.kind == "image":
                with Image.open(item.media.path) as image:
                    found.append((1, image.width / image.height))
                continue
            with av.open(item.media.path, timeout=_SECONDS) as container:
                stream = container.streams.video[0]
                own = float(stream.average_rate or 0)
                length = stream.duration
                if length is not None and stream.time_base is not None:
                    seconds = float(length * stream.time_base)
                else:
                    seconds = (container.duration or 0) / av.time_base
                # Headers round durations, so that a frame may be missing by a little.
                count = int(seconds * (fps or own) + 0.01)
                if count > 1:
                    found.append((count, stream.width / stream.height))
        except Exception:  # noqa: S112 - a damaged file can fail in any way
            continue
    frames = np.array([frames for frames, _ in found], np.int64)
    return frames, np.array([aspect for _, aspect in found], np.float64)


def propose_buckets(
    frames: NDArray[np.int64], aspects: NDArray[np.float64], shapes: Sequence[Bucket], stride: int
) -> tuple[Bucket, ...]:
    """Return the recipe's buckets (clip shapes), and more if many clips fit none of them.

    A shape is turned for clips that lie the other way. It is shortened for clips that are too
    short, to the most frames (`most_frames`) that keep nine of ten of them.

    Args:
        frames: [N] number of frames of each clip, at the rate at which they are trained.
        aspects: [N] width of each clip divided by its height.
        shapes: the recipe's buckets.
        stride: `data.frame_stride`.
    """
    found = list(shapes)
    tall = np.array([shape.height > shape.width for shape in shapes])
    for lying, is_tall in ((aspects > _SQUARE, False), (aspects < 1 / _SQUARE, True)):
        if len(frames) and lying.mean() > _MOST_LOST and (tall != is_tall).all():
            first = shapes[0]
            if first.height != first.width:
                turned = {"height": first.width, "width": first.height}
                found.append(first.model_copy(update=turned))
    shortest = min((shape.num_frames for shape in shapes if shape.num_frames > 1), default=1)
    counts = []
    # Stills are counted below: no shorter video bucket would keep them.
    lost = np.sort(frames[(frames > 1) & ((frames - 1) // stride + 1 < shortest)])
    if len(lost) > _MOST_LOST * len(frames):
        enough = (int(lost[len(lost) // 10]) - 1) // stride + 1
        counts.append(most_frames(shortest, enough))
    stills = np.count_nonzero(frames == 1)
    if stills > _MOST_LOST * len(frames) and all(shape.num_frames > 1 for shape in shapes):
        counts.append(1)
    for count in filter(None, counts):
        short = [shape.model_copy(update={"num_frames": count}) for shape in found]
        found += [each for each in dict.fromkeys(short) if each not in found]
    return tuple(found)


def most_frames(longest: int, enough: int) -> int | None:
    """Return the largest usual number of frames of a clip up to `enough`; None if there is none.

    Usual are 8 n + 1, 4 n + 1 or 17 n + 5 if `longest` has this form, else `longest` halved until
    it fits.
    """
    for step, rest in ((8, 1), (4, 1), (17, 5)):
        if longest % step == rest:
            found = (enough - rest) // step * step + rest
            return found if found > step else None
    while longest > enough and longest % 2 == 0:
        longest //= 2
    return longest if 1 < longest <= enough else None


def _size(auto: AutoBucketsSection, aspect: float) -> tuple[int, int]:
    """Return the height and width, within the pixel budget, that are nearest to an aspect ratio.

    Both are multiples of `auto.multiple_of`.
    """
    step, found = auto.multiple_of, []
    for height in range(step, auto.pixels // step + 1, step):
        width = min(max(step, round(height * aspect / step) * step), auto.pixels // height)
        width -= width % step
        if width:
            error = abs(float(np.log(width / height / aspect)))
            area = height * width
            is_small = area < _LEAST_AREA * auto.pixels
            # Sizes that use the budget come first, among them the nearest aspect ratio, then the
            # largest area.
            found.append((is_small, 0.0 if is_small else error, -area, height, width))
    return min(found)[-2:]
