"""Further pictures of clips, such as the one that an edit began with: found by name, cut alike.

A recipe names them by patterns (`data.references`). A picture of the clip's own size is scaled, cut
and mirrored exactly as the clip is, so that what belongs to one place in it still does. Any other
size is scaled to cover, cut in the middle, and mirrored where the clip is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake.config import STEM
from longtake.data.clip import Media
from longtake.data.crop import Crop, crop
from longtake.data.decode import decoded, opened, rgb
from longtake.data.image import read_image
from longtake.data.indexing.item import IMAGE_SUFFIXES
from longtake.data.indexing.probe import rotation_of
from longtake.data.window import Window, read_window
from longtake.errors import ClipError


@dataclass(frozen=True, slots=True)
class Reference:
    """All that decides which pixels are read of a further picture.

    Attributes:
        identity: of the clip.
        media: where the picture's bytes lie: an image, or a video, of which the first frame counts.
        clip_height: pixels of the upright clip; a picture of the same size is cut as the clip is.
        clip_width: likewise.
        clip_crop: how the clip is scaled and cut.
        height: rows that are kept.
        width: columns that are kept.
        is_flipped: whether the result is mirrored, left to right.
    """

    identity: str
    media: Media
    clip_height: int
    clip_width: int
    clip_crop: Crop
    height: int
    width: int
    is_flipped: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[3, 1, H, W] of what is read."""
        return 3, 1, self.height, self.width


def reference_path(clip_path: str, pattern: str) -> str:
    path = PurePath(clip_path)
    return os.path.normpath(path.parent / pattern.replace(STEM, path.stem))


def references_of(window: Window, patterns: Mapping[str, str]) -> dict[str, Reference]:
    """The further pictures of a clip of which a window is read, by name."""
    cut = Crop(window.scaled_height, window.scaled_width, window.top, window.left)
    return {
        name: Reference(
            identity=window.identity,
            media=Media(reference_path(window.media.path, pattern)),
            clip_height=window.source_height,
            clip_width=window.source_width,
            clip_crop=cut,
            height=window.height,
            width=window.width,
            is_flipped=window.is_flipped,
        )
        for name, pattern in patterns.items()
    }


def without_reference(window: Window, name: str, error: ClipError) -> ClipError:
    return ClipError(str(window.media), f"its {name}, {error.path}: {error.reason}")


def read(wanted: Window | Reference, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode a window of a clip, or a further picture.

    Args:
        wanted: what to read.
        out: where to write it, of its shape; None: a new array.

    Returns:
        [3, F, H, W] uint8 RGB, upright; F is 1 for a picture.

    Raises:
        ClipError: the file is gone, damaged, or not what its record says.
    """
    if isinstance(wanted, Window):
        return read_window(wanted, out)
    picture = np.empty(wanted.shape, np.uint8) if out is None else out
    assert picture.shape == wanted.shape
    picture[:, 0] = _fitted(wanted, _upright(wanted.media)).transpose(2, 0, 1)
    return picture


def _upright(media: Media) -> NDArray[np.uint8]:
    """The picture, [H, W, 3]."""
    if PurePath(media.path).suffix.lower() in IMAGE_SUFFIXES:
        return read_image(media)
    with opened(media) as (container, stream):
        for frame in decoded(media, container, stream):
            return np.rot90(rgb(frame), rotation_of(media, frame) // 90)
    raise ClipError(str(media), "holds no frame")


def _fitted(reference: Reference, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[height, width, 3] of a picture of any size."""
    height, width, _ = picture.shape
    is_alike = (height, width) == (reference.clip_height, reference.clip_width)
    how = reference.clip_crop if is_alike else crop(height, width, reference)
    if (height, width) != (how.scaled_height, how.scaled_width):
        size = (how.scaled_width, how.scaled_height)
        picture = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
    rows = slice(how.top, how.top + reference.height)
    kept = picture[rows, how.left : how.left + reference.width]
    return kept[:, ::-1] if reference.is_flipped else kept
