"""Reads one video file from its first byte to its last frame, and tells what is in it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from longtake.data.decode import decoded, opened, reason_of, rgb
from longtake.errors import ClipError


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
    with opened(path) as (container, stream):
        frames = decoded(path, container, stream)
        first = next(frames, None)
        if first is None:
            raise ClipError(path, "no frame could be decoded")
        rgb(first)  # what cannot become RGB cannot be trained on
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


def _hash(path: Path) -> str:
    try:
        if not path.is_file():  # reading a pipe or a device would never end
            raise ClipError(path, "is not a file" if path.exists() else "does not exist")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            if not file.tell():
                raise ClipError(path, "is empty (0 bytes)")
    except OSError as error:
        raise ClipError(path, f"cannot be read: {reason_of(error)}") from error
    return digest.hexdigest()


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
