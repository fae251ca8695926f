"""Reads the frames of videos that were sampled, at the size in which they are shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from PIL import Image

from longtake.data.clip import Media
from longtake.data.decode import decoded, opened, rgb
from longtake.errors import ClipError, RunError
from longtake.fsio import open_regular

Size = tuple[int, int]
"""Width and height in pixels."""


def size_of(path: Path) -> Size:
    """Of a video's pictures.

    Raises:
        RunError: it cannot be read.
    """
    with _reading(path) as (_, stream):
        return stream.codec_context.width, stream.codec_context.height


def num_frames(path: Path) -> int:
    """How many a video really has, whatever its header says.

    Raises:
        RunError: it cannot be read.
    """
    with _reading(path) as (container, stream):
        return sum(1 for _ in decoded(Media(str(path)), container, stream))


def frames(path: Path, size: Size, only: frozenset[int] | None = None) -> Iterator[Image.Image]:
    """The pictures of a video, one after another, scaled; enlarged ones keep their pixels sharp.

    Args:
        path: the file.
        size: in which they are shown.
        only: leave all but these out, counted from 0.

    Raises:
        RunError: it cannot be read.
    """
    with _reading(path) as (container, stream):
        for place, frame in enumerate(decoded(Media(str(path)), container, stream)):
            if only is None or place in only:
                yield _scaled(Image.fromarray(rgb(frame)), size)


def chosen_frames(path: Path, size: Size, count: int) -> list[Image.Image]:
    """The picture in the middle, or so many evenly spaced, the first and the last among them.

    Raises:
        RunError: the video cannot be read.
    """
    total = num_frames(path)
    places = [total // 2]
    if count > 1:
        places = np.linspace(0, total - 1, count).round().astype(int).tolist()
    found = dict(zip(sorted(set(places)), frames(path, size, frozenset(places)), strict=True))
    return [found[place] for place in places]


def copied_picture(path: Path, size: Size) -> Image.Image:
    """A picture that videos go by, scaled as they are.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with open_regular(path) as file, Image.open(file) as picture:
            return _scaled(picture.convert("RGB"), size)
    except OSError as error:
        reason = error.strerror or "it is no picture"
        raise RunError(f"{path} cannot be read: {reason}. Is it still being copied?") from error


@contextmanager
def _reading(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    try:
        open_regular(path).close()  # a named pipe would be waited for
        with opened(Media(str(path))) as both:
            yield both
    except (ClipError, OSError) as error:
        reason = error.reason if isinstance(error, ClipError) else error.strerror or error
        raise RunError(
            f"{path}, which was sampled, cannot be read: {reason}. Is it still being copied?"
        ) from error


def _scaled(picture: Image.Image, size: Size) -> Image.Image:
    if picture.size == size:
        return picture
    is_enlarged = size[0] >= 2 * picture.width
    way = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.LANCZOS
    return picture.resize(size, way)
