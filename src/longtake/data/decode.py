"""Decodes one video file: `probe` reads all of it, `read_frames` the frames that are wanted.

Files are hostile until proven good: a header may promise frames that are not there, and a cut
file may end without an error. So decoding is strict, one thread decodes one file, nothing but
local files is ever opened (FFmpeg lets a local playlist refer to nothing else), and whatever goes
wrong is a ClipError. PyAV keeps FFmpeg's own log off by default, and nothing here turns it on.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from longtake.errors import ClipError

# What PyAV raises for files that it cannot read: FFmpeg's errors and, depending on where it
# stumbles, Python's own.
_FAILURES = (
    av.FFmpegError,
    ArithmeticError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True)
class Probe:
    """What one video file holds, found by decoding all of it.

    Attributes:
        identity: BLAKE2b-128 of the file's bytes as 32 hex digits; the path plays no part.
        stream_index: the video stream that was decoded, as an index into all streams.
        num_frames: frames that decoding yields, whatever the header says.
        width: pixels of the upright picture.
        height: pixels of the upright picture.
        rotation: degrees counterclockwise that turn a decoded frame upright: 0, 90, 180 or 270.
        fps: average frame rate by the frames' timestamps.
        duration_seconds: from the first frame's start to the last one's end.
        pix_fmt: FFmpeg's name of the decoded pixel format.
        codec: FFmpeg's name of the compression format, such as `h264` or `av1`.
    """

    identity: str
    stream_index: int
    num_frames: int
    width: int
    height: int
    rotation: int
    fps: float
    duration_seconds: float
    pix_fmt: str
    codec: str


@dataclass(frozen=True)
class _Timing:
    """Start and end of what was decoded, in seconds of the stream's clock."""

    start: float
    end: float
    fps: float


def probe(path: Path) -> Probe:
    """Decode the whole file and return what is in it.

    The first video stream that is not a cover picture is taken. A file that ends early without an
    error is found by time: it is refused when its frames end before the declared end by more than
    2.5 frame intervals and more than 5 % of the declared duration. Frame counts in headers are not
    compared, because edit lists and dropped lead-in frames make them differ in good files.

    Raises:
        ClipError: the file cannot be read, holds no video, is damaged or is cut short.
    """
    identity = _hash(path)
    with _opened(path) as (container, stream):
        frames = _decode(path, container, stream)
        first = next(frames, None)
        if first is None:
            raise ClipError(path, "no frame could be decoded")
        _rgb(first)  # what cannot become RGB cannot be trained on
        last, num_frames = first, 1
        for last in frames:
            num_frames += 1
            if (last.width, last.height) != (first.width, first.height):
                raise ClipError(path, f"the frame size changes at frame {num_frames - 1}")
        timing = _timing(path, stream, first, last, num_frames)
        _check_whole(path, container, stream, timing)
        rotation = _rotation(path, first)
        width, height = first.width, first.height
        return Probe(
            identity=identity,
            stream_index=stream.index,
            num_frames=num_frames,
            width=height if rotation in (90, 270) else width,
            height=width if rotation in (90, 270) else height,
            rotation=rotation,
            fps=timing.fps,
            duration_seconds=timing.end - timing.start,
            pix_fmt=first.format.name,
            codec=stream.codec_context.codec.canonical_name,
        )


def read_frames(
    path: Path,
    *,
    stream_index: int,
    start: int,
    num_frames: int,
    stride: int = 1,
    rotation: int = 0,
) -> NDArray[np.uint8]:
    """Return the frames `start`, `start + stride`, ... in presentation order.

    Args:
        path: the video file.
        stream_index: as in Probe.
        start: index of the first frame wanted, from 0.
        num_frames: how many frames to return, at least 1.
        stride: distance between two wanted frames, at least 1.
        rotation: as in Probe.

    Returns:
        [F, H, W, 3] uint8 RGB, upright, exactly as PyAV converts each frame to rgb24.

    Raises:
        ClipError: the file has too few frames, or is damaged at or before the last one wanted.
    """
    assert min(start, num_frames - 1, stride - 1) >= 0
    assert rotation in (0, 90, 180, 270)
    end = start + (num_frames - 1) * stride + 1
    pictures: NDArray[np.uint8] | None = None
    num_read = 0
    with _opened(path, stream_index) as (container, stream):
        # From the first frame on: seeking lands on the wrong frame in too many real files.
        for frame in islice(_decode(path, container, stream), start, end, stride):
            picture = np.rot90(_rgb(frame), rotation // 90)
            if pictures is None:
                pictures = np.empty((num_frames, *picture.shape), dtype=np.uint8)
            elif picture.shape != pictures.shape[1:]:
                raise ClipError(
                    path, f"the frame size changes by frame {start + num_read * stride}"
                )
            pictures[num_read] = picture
            num_read += 1
    if pictures is None or num_read < num_frames:
        raise ClipError(
            path,
            f"ends before frame {start + num_read * stride}; {num_frames} frames from {start} in "
            f"steps of {stride} were wanted",
        )
    return pictures


def _hash(path: Path) -> str:
    try:
        if not path.is_file():  # reading a pipe or a device would never end
            raise ClipError(path, "is not a file" if path.exists() else "does not exist")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            if not file.tell():
                raise ClipError(path, "is empty (0 bytes)")
    except OSError as error:
        raise ClipError(path, f"cannot be read: {_reason(error)}") from error
    return digest.hexdigest()


@contextmanager
def _opened(
    path: Path, stream_index: int | None = None
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file for strict decoding; whatever fails inside becomes a ClipError."""
    try:
        with av.open(
            str(path.absolute()),  # absolute, so that no name can look like a URL
            metadata_errors="replace",  # a title in Latin-1 is no damage
        ) as container:
            stream = _video_stream(path, container, stream_index)
            if getattr(stream, "codec_context", None) is None:  # PyAV's types rule this out
                raise ClipError(path, "no decoder for its video codec")
            stream.codec_context.thread_count = 1
            stream.codec_context.options = {"err_detect": "explode"}
            yield container, stream
    except _FAILURES as error:
        raise ClipError(path, f"not a readable video: {_reason(error)}") from error


def _video_stream(path: Path, container: InputContainer, index: int | None) -> VideoStream:
    for stream in container.streams.video:
        is_cover = bool(stream.disposition & Disposition.attached_pic)
        if stream.index == index or (index is None and not is_cover):
            return stream
    wanted = "no video stream" if index is None else f"no video stream with index {index}"
    raise ClipError(path, wanted)


def _decode(path: Path, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Yield the frames in presentation order; the first sign of damage raises."""
    num_decoded = 0
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:  # a demuxer's word for a packet that the file's end cut off
                raise ClipError(path, f"cut short or damaged after {num_decoded} frames")
            for frame in packet.decode():
                yield frame
                num_decoded += 1
    except _FAILURES as error:
        reason = f"damaged after {num_decoded} frames: {_reason(error)}"
        raise ClipError(path, reason) from error


def _rgb(frame: VideoFrame) -> NDArray[np.uint8]:
    """Convert to [H, W, 3]; PyAV's default of many threads gives the same, 50 times slower."""
    return np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _timing(
    path: Path, stream: VideoStream, first: VideoFrame, last: VideoFrame, num_frames: int
) -> _Timing:
    start, last_start = _seconds(first, first.pts), _seconds(last, last.pts)
    rate = float(stream.guessed_rate or stream.average_rate or 0)
    if start is not None and last_start is not None and last_start > start:
        rate = (num_frames - 1) / (last_start - start)
    elif rate > 0:  # one frame, or a container without timestamps
        start = start or 0.0
        last_start = start + (num_frames - 1) / rate
    else:
        raise ClipError(path, "has neither timestamps nor a frame rate")
    return _Timing(start, last_start + (_seconds(last, last.duration) or 1 / rate), rate)


def _seconds(frame: VideoFrame, ticks: int | None) -> float | None:
    return None if ticks is None or frame.time_base is None else float(ticks * frame.time_base)


def _check_whole(
    path: Path, container: InputContainer, stream: VideoStream, timing: _Timing
) -> None:
    """Refuse a file whose frames end clearly before its header says (see `probe`)."""
    declared_end = _declared_end(container, stream, timing.start)
    if declared_end is None:
        return
    missing = declared_end - timing.end
    if missing > 2.5 / timing.fps and missing > 0.05 * (declared_end - timing.start):
        raise ClipError(
            path,
            f"cut short: {timing.end - timing.start:.2f} s of video, "
            f"{declared_end - timing.start:.2f} s declared",
        )


def _declared_end(container: InputContainer, stream: VideoStream, start: float) -> float | None:
    """When the last frame should end, in seconds; None where the file does not say.

    Streams of mp4, mov and avi declare a length. Matroska has only the length of the whole file
    and, as a tag, the time at which each track ends.
    """
    if stream.duration is not None and stream.time_base is not None:
        return start + float(stream.duration * stream.time_base)
    if tag := stream.metadata.get("DURATION"):
        hours, minutes, seconds = tag.split(":")
        return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    if container.duration is not None and len(container.streams) == 1:
        return container.duration / av.time_base  # with audio it may be the audio that is longer
    return None


def _rotation(path: Path, frame: VideoFrame) -> int:
    """Degrees counterclockwise, from FFmpeg's display matrix (av_display_rotation_get)."""
    rotation = frame.rotation % 360
    if rotation % 90:
        raise ClipError(path, f"is to be shown turned by {rotation} degrees; only quarter turns")
    return rotation
