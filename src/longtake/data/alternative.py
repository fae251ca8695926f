"""The same windows by torchcodec, for those who have it: FFmpeg's libraries of the system.

PyAV is the decoder that everything is tested with. This one imports torch into every worker, finds
frames by index (it counts frames that an edit list discards, PyAV does not), scales by Pillow and
has its own chroma filter, so pixels differ a little.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake.data.window import Window, check_size, cut
from longtake.errors import ClipError, DataError


def video_decoder() -> Any:
    """The class `torchcodec.decoders.VideoDecoder`.

    Raises:
        DataError: torchcodec cannot be imported.
    """
    try:
        return importlib.import_module("torchcodec.decoders").VideoDecoder
    except Exception as error:  # it may be absent, or not find FFmpeg's libraries
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"torchcodec was asked for, but cannot be imported: {said} Install a torchcodec that "
            "fits this torch, and FFmpeg's shared libraries; or decode with PyAV, the default."
        ) from error


def pictures(window: Window) -> Iterator[NDArray[np.uint8]]:
    """Red, green and blue of each frame, [3, height, width].

    Raises:
        ClipError: the file is gone, damaged, or not what its record says.
    """
    make, frames = video_decoder(), range(window.num_frames)
    indices = [window.start + number * window.stride for number in frames]
    try:
        decoder = make(_source(window), stream_index=window.stream_index, num_ffmpeg_threads=1)
        batch = decoder.get_frames_at(indices).data.numpy()
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        raise ClipError(str(window.media), f"not readable by torchcodec: {error}") from error
    check_size(window, *batch.shape[2:])
    size = (window.scaled_width, window.scaled_height)
    for frame in batch.transpose(0, 2, 3, 1):  # upright: torchcodec obeys the rotation
        scaled = Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)
        yield cut(window, np.asarray(scaled).transpose(2, 0, 1))


def _source(window: Window) -> str | bytes:
    media = window.media
    if media.num_bytes is None:
        return media.path
    with Path(media.path).open("rb") as file:
        file.seek(media.offset)
        return file.read(media.num_bytes)
