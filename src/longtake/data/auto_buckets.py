"""Buckets chosen from the catalogs by a pixel budget (`data.auto_buckets`), torch-free.

A pure function of the recipe and the catalogs. A run keeps those that it began with.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from longtake import errors
from longtake.config import AutoBucketsSection, Bucket, DataSection, Recipe
from longtake.data import buckets, catalog, stages
from longtake.run_dir import RunDirectory

_ASPECTS = (21 / 9, 16 / 9, 3 / 2, 4 / 3, 1.0, 3 / 4, 2 / 3, 9 / 16, 9 / 21)
_LEAST_AREA = 0.9  # of the budget, unless no shape comes so near to it


def with_buckets(recipe: Recipe) -> Recipe:
    """A recipe whose `data.buckets` are known: its own, the run's, or chosen from the catalogs.

    Raises:
        DataError: a catalog cannot be read, or no clip would go to any bucket.
    """
    data = recipe.data
    if data.buckets or data.auto_buckets is None:
        return recipe
    found: tuple[Bucket, ...] = ()
    run = RunDirectory(recipe.out)
    if run.exists():
        kept = run.recipe().data
        found = kept.buckets if kept.auto_buckets == data.auto_buckets else ()
    if not found:
        catalogs = {name: catalog.Catalog.load(path) for name, path in data.sources().items()}
        found = choose_buckets(catalogs, data.auto_buckets, data)
    return recipe.model_copy(update={"data": data.model_copy(update={"buckets": found})})


def choose_buckets(
    catalogs: Mapping[str, catalog.Catalog], auto: AutoBucketsSection, data: DataSection
) -> tuple[Bucket, ...]:
    """The buckets that captioned clips would go to, each with at least `min_clips` of them.

    The bucket with the fewest clips is left out until all have enough; its clips go to the next.
    """
    sizes = dict.fromkeys(_size(auto, aspect) for aspect in auto.aspects or _ASPECTS)
    shapes = [
        Bucket(num_frames=frames, height=height, width=width)
        for frames in sorted(set(auto.frames))
        for height, width in sorted(sizes, key=lambda size: size[1] / size[0])
    ]
    while shapes:
        counts = sum(
            (_counts(clips, shapes, data) for clips in catalogs.values()),
            np.zeros(len(shapes), np.int64),
        )
        fewest = int(np.argmin(counts))
        if counts[fewest] >= auto.min_clips:
            return tuple(shapes)
        del shapes[fewest]
    total = sum(map(len, catalogs.values()))
    raise errors.DataError(
        f"data.auto_buckets: of {total} clips not {auto.min_clips} with a caption go to any bucket "
        f"of {_listed(auto.frames)} frames and at most {auto.pixels:,} pixels. Lower frames or "
        "min_clips, or index clips with captions."
    )


def _counts(clips: catalog.Catalog, shapes: Sequence[Bucket], data: DataSection) -> np.ndarray:
    rows = stages.captioned_rows(clips)
    stills, fps = data.stills_from_videos, data.fps
    choice = buckets.choose(clips, rows, shapes, data.frame_stride, stills=stills, fps=fps)
    return np.bincount(choice[choice >= 0], minlength=len(shapes))


def _size(auto: AutoBucketsSection, aspect: float) -> tuple[int, int]:
    """Height and width, both multiples, within the budget: the nearest aspect ratio near to it."""
    step, found = auto.multiple_of, []
    for height in range(step, auto.pixels // step + 1, step):
        width = min(max(step, round(height * aspect / step) * step), auto.pixels // height)
        width -= width % step
        if width:
            error = abs(float(np.log(width / height / aspect)))
            area = height * width
            is_small = area < _LEAST_AREA * auto.pixels
            found.append((is_small, 0.0 if is_small else error, -area, height, width))
    return min(found)[-2:]


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
