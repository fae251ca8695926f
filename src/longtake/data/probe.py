"""Reads one video or image from its first byte to its last frame, and returns what is in it."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange
from av.video.stream import VideoStream

from longtake.data.clip import Item, Kind, Media, Timing
from longtake.data.decode import (
    DEFAULT,
    Limits,
    OutOfTimeError,
    decode_image,
    decoded,
    opened,
    reason_of,
    rgb,
)
from longtake.data.workers import SILENCE_SECONDS, Task
from longtake.errors import ClipError

_COLOR_RANGES = {int(ColorRange.MPEG): "limited", int(ColorRange.JPEG): "full"}
# ITU-T H.273, table 3; FFmpeg's names but for the two of HDR.
_COLOR_TRANSFERS = {
    1: "bt709",
    4: "gamma22",
    5: "gamma28",
    6: "smpte170m",
    7: "smpte240m",
    8: "linear",
    9: "log100",
    10: "log316",
    11: "iec61966-2-4",
    12: "bt1361e",
    13: "iec61966-2-1",
    14: "bt2020-10",
    15: "bt2020-12",
    16: "pq",
    17: "smpte428",
    18: "hlg",
}
_READ_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Probe:
    """What one video or image holds, found by decoding all of it.

    The fields are those of `longtake.data.clip.Clip`, which explains them.
    """

    identity: str
    kind: Kind
    num_frames: int
    width: int
    height: int
    fps: float
    duration_seconds: float
    stream_index: int
    rotation: int
    codec: str
    pix_fmt: str
    color_range: str = ""
    color_transfer: str = ""
    timing: Timing | None = None
    keyframes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Span:
    start: float
    end: float
    fps: float


def probe(media: Media, progress: Callable[[], object] = lambda: None) -> Probe:
    """Decode the whole file and return what is in it.

    The first video stream that is not a cover picture is taken. A file that ends early without an
    error is found by time: it is refused when its frames end before the declared end by more than
    2.5 frame intervals and more than 5 % of the declared duration. Frame counts in headers are not
    compared, because edit lists and dropped lead-in frames make them differ in good files.
    """
    identity = content_hash(media, progress)
    with opened(media) as (container, stream):
        frames = decoded(media, container, stream)
        first = next(frames, None)
        if first is None:
            raise ClipError(str(media), "no frame could be decoded")
        rgb(first)  # what cannot become RGB cannot be trained on
        last, pts, keyframes = _read_on(media, first, frames, progress)
        span = _span(media, stream, first, last, len(pts))
        _check_whole(media, container, stream, span)
        rotation = rotation_of(media, first)
        width, height = first.width, first.height
        return Probe(
            identity=identity,
            kind="video",
            num_frames=len(pts),
            width=height if rotation in (90, 270) else width,
            height=width if rotation in (90, 270) else height,
            fps=span.fps,
            duration_seconds=span.end - span.start,
            stream_index=stream.index,
            rotation=rotation,
            codec=stream.codec_context.codec.canonical_name,
            pix_fmt=first.format.name,
            color_range=_COLOR_RANGES.get(int(first.color_range), ""),
            color_transfer=_COLOR_TRANSFERS.get(int(stream.codec_context.color_trc), ""),
            timing=_timing(pts),
            keyframes=keyframes,
        )


def content_hash(media: Media, progress: Callable[[], object] = lambda: None) -> str:
    """BLAKE2b-128 of the bytes as 32 hex digits; where they lie plays no part."""
    path = Path(media.path)
    digest, num_read = hashlib.blake2b(digest_size=16), 0
    try:
        if not path.is_file():  # reading a pipe or a device would never end
            raise ClipError(str(media), "is not a file" if path.exists() else "does not exist")
        for piece in _pieces(media):
            digest.update(piece)
            num_read += len(piece)
            progress()
    except OSError as error:
        raise ClipError(str(media), f"cannot be read: {reason_of(error)}") from error
    if num_read < (media.num_bytes or 0):
        raise ClipError(str(media), f"ends after {num_read} of {media.num_bytes} bytes")
    if not num_read:
        raise ClipError(str(media), "is empty (0 bytes)")
    return digest.hexdigest()


def _pieces(media: Media) -> Iterator[bytes]:
    with Path(media.path).open("rb") as file:
        file.seek(media.offset)
        left = media.num_bytes
        while left is None or left > 0:
            piece = file.read(_READ_BYTES if left is None else min(left, _READ_BYTES))
            if not piece:
                return
            left = None if left is None else left - len(piece)
            yield piece


def _read_on(
    media: Media, first: VideoFrame, frames: Iterator[VideoFrame], progress: Callable[[], object]
) -> tuple[VideoFrame, list[int | None], tuple[int, ...]]:
    """Decode to the end; return the last frame, all timestamps, and which are keyframes."""
    last, pts = first, [first.pts]
    keyframes = [0] if first.key_frame else []
    for last in frames:
        if (last.width, last.height) != (first.width, first.height):
            raise ClipError(str(media), f"the frame size changes at frame {len(pts)}")
        if last.key_frame:
            keyframes.append(len(pts))
        pts.append(last.pts)
        progress()
    return last, pts, tuple(keyframes)


def _timing(pts: Sequence[int | None]) -> Timing | None:
    """The timestamps, or None unless they name every frame and ascend."""
    known = [each for each in pts if each is not None]
    steps = {after - before for before, after in pairwise(known)}
    if len(known) < len(pts) or min(steps, default=1) <= 0:
        return None
    if len(steps) > 1:
        return Timing(known[0], 0, tuple(known))
    return Timing(known[0], max(steps, default=0))


def _span(
    media: Media, stream: VideoStream, first: VideoFrame, last: VideoFrame, num_frames: int
) -> _Span:
    start, last_start = _seconds(first, first.pts), _seconds(last, last.pts)
    rate = float(stream.guessed_rate or stream.average_rate or 0)
    if start is not None and last_start is not None and last_start > start:
        rate = (num_frames - 1) / (last_start - start)
    elif rate > 0:  # one frame, or a container without timestamps
        start = start or 0.0
        last_start = start + (num_frames - 1) / rate
    else:
        raise ClipError(str(media), "has neither timestamps nor a frame rate")
    return _Span(start, last_start + (_seconds(last, last.duration) or 1 / rate), rate)


def _seconds(frame: VideoFrame, ticks: int | None) -> float | None:
    return None if ticks is None or frame.time_base is None else float(ticks * frame.time_base)


def _check_whole(media: Media, container: InputContainer, stream: VideoStream, span: _Span) -> None:
    """Refuse a file whose frames end clearly before its header says (see `probe`)."""
    declared_end = _declared_end(container, stream, span.start)
    if declared_end is None:
        return
    missing = declared_end - span.end
    if missing > 2.5 / span.fps and missing > 0.05 * (declared_end - span.start):
        raise ClipError(
            str(media),
            f"cut short: {span.end - span.start:.2f} s of video, "
            f"{declared_end - span.start:.2f} s declared",
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


def rotation_of(media: Media, frame: VideoFrame) -> int:
    """Degrees counterclockwise, by FFmpeg's display matrix; ClipError if no multiple of 90."""
    rotation = frame.rotation % 360
    if rotation % 90:
        raise ClipError(str(media), f"is to be shown turned by {rotation} degrees; only quarters")
    return rotation


def probe_image(media: Media) -> Probe:
    """Decode the image and return what is in it."""
    identity = content_hash(media)
    pixels, codec, mode = decode_image(media)
    height, width, _ = pixels.shape
    return Probe(
        identity=identity,
        kind="image",
        num_frames=1,
        width=width,
        height=height,
        fps=0.0,
        duration_seconds=0.0,
        stream_index=0,
        rotation=0,
        codec=codec,
        pix_fmt=mode,
        keyframes=(0,),
    )


@dataclass(frozen=True)
class ProbeTask(Task[Item, tuple[Probe | ClipError, bool]]):
    """Probes one file; also returns whether the same bytes always give the same result."""

    limits: Limits = DEFAULT
    silence_seconds: float = SILENCE_SECONDS

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # it follows from the limits
        return self.limits.memory_gib

    def do(self, item: Item, progress: Callable[[], object]) -> tuple[Probe | ClipError, bool]:
        try:
            str(item.media).encode()  # what is no text cannot be written into a catalog
            progress = self.limits.timed(item.media, progress)
            is_image = item.kind == "image"
            return probe_image(item.media) if is_image else probe(item.media, progress), True
        except UnicodeEncodeError:
            return ClipError(str(item.media), "its name is not valid UTF-8; rename it"), True
        except OutOfTimeError as error:
            return ClipError(error.path, error.reason), False
        except ClipError as error:
            return error, True

    def lost(self, item: Item, reason: str) -> tuple[Probe | ClipError, bool]:
        return ClipError(str(item.media), reason), False

    def reads(self, item: Item) -> str:
        return item.media.path
