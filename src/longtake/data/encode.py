"""Writes frames as a video file that plays everywhere."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Literal

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake.errors import DataError
from longtake.fsio import atomic_write

# Without CABAC and deblocking, windows of 448x256 are read in half the time, for 8 % more bytes.
_FAST_TO_READ = {"preset": "veryfast", "tune": "fastdecode"}


def write_video(
    path: Path,
    frames: NDArray[np.uint8],
    fps: float,
    crf: int = 12,
    pixel_format: Literal["yuv420p", "rgb24"] = "yuv420p",
) -> None:
    """Write frames as H.264 in an mp4 file, written aside and renamed when whole.

    Args:
        path: the file to write, ending in `.mp4`.
        frames: [F, H, W, 3] uint8 RGB; H and W even, as 4:2:0 chroma wants.
        fps: frames per second.
        crf: constant rate factor of x264, 0 (lossless) to 51; smaller is larger and better.
        pixel_format: rgb24 keeps the colour of every pixel, but browsers do not play it.

    Raises:
        DataError: the frames' shape or type does not fit, or the file cannot be written.
    """
    num_frames, height, width = _check(frames, path)
    try:
        with atomic_write(path) as aside, av.open(aside, "w", format="mp4") as container:
            codec = "libx264rgb" if pixel_format == "rgb24" else "libx264"
            stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
            assert isinstance(stream, av.VideoStream)
            stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
            # Without mbtree=0 x264 encodes tiny pictures differently from run to run, and a clip's
            # identity is the hash of its content.
            params = {"x264-params": "mbtree=0"}
            stream.options = {"crf": str(crf), "preset": "veryfast", **params}
            stream.thread_count = 1  # small clips: threads cost more than they give
            for index in range(num_frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frames[index]), "rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    except (OSError, av.FFmpegError) as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def write_image(path: Path, frame: NDArray[np.uint8]) -> None:
    """Write a picture [H, W, 3] uint8 RGB as PNG, written aside and renamed when whole.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with atomic_write(path) as aside:
            Image.fromarray(np.ascontiguousarray(frame)).save(aside, format="PNG")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def _check(frames: NDArray[np.uint8], path: Path) -> tuple[int, int, int]:
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise DataError(
            f"{path} was not written: the frames are {frames.dtype} {list(frames.shape)}; "
            "expected uint8 [frames, height, width, 3] with at least one frame."
        )
    num_frames, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise DataError(
            f"{path} was not written: {width}x{height} pixels; H.264 in 4:2:0 needs an even "
            f"size. Crop or pad to {width + width % 2}x{height + height % 2}."
        )
    return num_frames, height, width


def encode_frames(
    path: Path,
    frames: Iterable[av.VideoFrame],
    *,
    fps: float,
    crf: int,
    gop: int,
    by_many: bool = False,
) -> None:
    """Write frames as they come, at their own timestamps, as H.264 (4:2:0) in an mp4 file.

    Every `gop`th frame is a keyframe, no other is, and no frame refers past one: so decoding can
    begin at each of them, and a window is read by decoding at most `gop` - 1 frames too many.

    Args:
        path: the file to write, ending in `.mp4`; written aside and renamed when whole.
        frames: all of one even size, yuv420p or yuvj420p, with ascending timestamps. How the
            first says its colours are to be understood is written into the file.
        fps: average frames per second.
        crf: as `write_video`.
        gop: distance of keyframes in frames.
        by_many: several processes may write it at a time; see `atomic_write`.

    Raises:
        DataError: the file cannot be written; and whatever `frames` raises.
    """
    waiting = iter(frames)
    first = next(waiting)
    params = f"mbtree=0:keyint={gop}:min-keyint={gop}:scenecut=0:open-gop=0"
    try:
        with (
            atomic_write(path, by_many=by_many) as aside,
            av.open(aside, "w", format="mp4") as container,
        ):
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
            stream.options = {"crf": str(crf), **_FAST_TO_READ, "x264-params": params}
            stream.thread_count = 1
            _describe(stream, first)
            for frame in chain([first], waiting):
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    except (OSError, av.FFmpegError) as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def _describe(stream: av.VideoStream, frame: av.VideoFrame) -> None:
    """Give the stream the shape, the clock and the colours of its frames."""
    stream.width, stream.height, stream.pix_fmt = frame.width, frame.height, frame.format.name
    assert frame.time_base is not None
    codec = stream.codec_context
    codec.time_base = stream.time_base = frame.time_base
    codec.color_range, codec.colorspace = frame.color_range, frame.colorspace
    codec.color_trc, codec.color_primaries = frame.color_trc, frame.color_primaries
