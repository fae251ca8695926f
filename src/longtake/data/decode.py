"""Strict decoding and probing of videos and images, within limits of memory and time.

Files are hostile until proven good. One thread decodes one file, FFmpeg may open local files only
(a local playlist could name remote ones), and every failure is a ClipError.
"""

import io
import math
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image, ImageOps

from longtake.data import content, decode_limits, stores
from longtake.data.clip import MIRRORED, Footage, Item, Media, Timing, is_turned
from longtake.data.workers import SILENCE_SECONDS, Task
from longtake.errors import ClipError

ALPHA = "alpha"
"""In place of the colour below transparent pixels: the alpha channel itself is read."""


def read_image(media: Media, over: str = "white") -> NDArray[np.uint8]:
    """Return the RGB pixels [H, W, 3] of an image; raises as `decode_image` does."""
    return decode_image(media, over)[0]


def decode_image(media: Media, over: str = "white") -> tuple[NDArray[np.uint8], str, str]:
    """Decode an image to its RGB pixels [H, W, 3], its format and the mode it was stored in.

    Transparent pixels are laid over the colour `over`, 16-bit grey is scaled to 8 bits, colours are
    taken as sRGB. JPEGs with further pictures inside (MPO) give the first. Over `ALPHA`, the
    picture is that of the alpha channel, in grey.

    Raises:
        ClipError: the file is missing, damaged, too large, or has more than one picture.
    """
    with stores.local(media) as media:
        try:
            # Pillow never gets the file itself: an image may be a byte range of an archive.
            with media.file.open("rb") as file:
                file.seek(media.offset)
                data = file.read(-1 if media.num_bytes is None else media.num_bytes)
            # Warnings are about metadata; sizes are checked below.
            with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
                decode_limits.check_pixels(media, image.width, image.height)
                num_pictures = getattr(image, "n_frames", 1)
                if num_pictures > 1 and image.format != "MPO":
                    remedy = "make a video or images of it"
                    raise ClipError(str(media), f"holds {num_pictures} pictures; {remedy}")
                # No value of these modes is defined as white: scaling to 8 bits would be a guess.
                if image.mode in ("I", "F"):
                    reason = f"pixels of mode {image.mode} have no defined white"
                    raise ClipError(str(media), reason)
                codec, mode = (image.format or "").lower(), image.mode
                return np.asarray(_image_rgb(ImageOps.exif_transpose(image), over)), codec, mode
        except ClipError:
            raise
        except Image.DecompressionBombError as error:
            raise ClipError(str(media), "too many pixels for one picture") from error
        except MemoryError as error:
            raise ClipError(
                str(media), f"not a readable image: {decode_limits.out_of_memory()}"
            ) from error
        except Exception as error:  # a hostile file makes Pillow's parsers raise almost anything
            reason = str(error).split(" <_io")[0] or type(error).__name__
            raise ClipError(str(media), f"not a readable image: {reason}") from error


def _image_rgb(image: Image.Image, over: str) -> Image.Image:
    if over == ALPHA:
        opaque = Image.new("L", image.size, 255)
        has_alpha = image.has_transparency_data
        return (image.convert("RGBA").getchannel("A") if has_alpha else opaque).convert("RGB")
    if image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint32)
        # 65535 = 257 * 255, so this rounds 16-bit values to the nearest 8-bit one.
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, over)
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


# The protocols that FFmpeg may open: files and byte ranges of files. A playlist may ask for http
# and much else.
_PROTOCOLS = {"protocol_whitelist": "file,subfile"}

_GIF_HEADER = struct.Struct("<6sHH")

# Codecs whose decoders can tell from a frame alone that no other frame refers to it.
_SKIPPING = ("h264", "mpeg1video", "mpeg2video", "mpeg4", "vp8", "vp9")

# The exceptions that PyAV raises for unreadable files: FFmpeg's errors and, depending on where it
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


@contextmanager
def opened(
    media: Media, stream_index: int | None = None
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video and yield its container and stream; any failure inside becomes a ClipError.

    Decoding is strict (`err_detect=explode`) and single-threaded. Without `stream_index`, the first
    video stream that is not a cover picture is taken.
    """
    limit = {"max_pixels": str(decode_limits.max_pixels())}
    with stores.local(media) as media:
        try:
            _check_gif(media)
            # An absolute path, which FFmpeg cannot take for a URL, or its URL of a byte range.
            url = str(media.file.absolute())
            if media.num_bytes is not None and not media.local:
                end = media.offset + media.num_bytes
                url = f"subfile,,start,{media.offset},end,{end},,:{url}"
            with av.open(
                url,
                options=_PROTOCOLS | limit,
                metadata_errors="replace",  # a title in Latin-1 is no damage
            ) as container:
                stream = _video_stream(media, container, stream_index)
                if getattr(stream, "codec_context", None) is None:  # PyAV's types deny this
                    raise ClipError(str(media), "no decoder for its video codec")
                # One thread decodes one file: parallelism comes from the processes of the pool.
                stream.codec_context.thread_count = 1
                decode_limits.check_pixels(
                    media, stream.codec_context.width, stream.codec_context.height
                )
                stream.codec_context.options = {"err_detect": "explode", **limit}
                yield container, stream
        except _FAILURES as error:
            raise ClipError(str(media), f"not a readable video: {reason_of(error)}") from error


def _check_gif(media: Media) -> None:
    """Check the size in a GIF's header, because FFmpeg reports that of the first decoded frame."""
    path = media.file
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(media.offset)
        header = file.read(_GIF_HEADER.size)
    if header.startswith(b"GIF8") and len(header) == _GIF_HEADER.size:
        _, width, height = _GIF_HEADER.unpack(header)
        decode_limits.check_pixels(media, width, height)


def _video_stream(media: Media, container: InputContainer, index: int | None) -> VideoStream:
    for stream in container.streams.video:
        is_cover = bool(stream.disposition & Disposition.attached_pic)
        if stream.index == index or (index is None and not is_cover):
            return stream
    wanted = "no video stream" if index is None else f"no video stream with index {index}"
    if container.streams.audio and not container.streams.video:
        wanted = "sound alone, without a video stream: such files cannot be trained on"
    raise ClipError(str(media), wanted)


def decoded(
    media: Media,
    container: InputContainer,
    stream: VideoStream,
    *,
    keyframe: int | None = None,
    first: int | None = None,
    untagged: str = "bt709",
) -> Iterator[VideoFrame]:
    """Yield the frames of a video in presentation order, and raise at the first sign of damage.

    Args:
        media: the opened file, for messages.
        container: the container that `opened` yields.
        stream: the stream that `opened` yields.
        keyframe: after a seek, the timestamp of the keyframe to begin at. Earlier frames that are
            stored behind it (an open group of pictures) are left out: their references were not
            decoded.
        first: frames with an earlier timestamp may be left out if no other frame refers to them.
        untagged: the colour matrix of frames of 720 lines and more that name none
            (`data.untagged`).

    Raises:
        ClipError: a packet is damaged or cut off, or the keyframe is missing.
    """
    codec, num_decoded = stream.codec_context, 0
    may_skip = first is not None and codec.codec.canonical_name in _SKIPPING
    try:
        packets = container.demux(stream)
        if keyframe is not None:
            packets = _from_keyframe(media, packets, keyframe)
        for packet in packets:
            if packet.is_corrupt:  # demuxers mark a packet that the end of the file cut off
                raise ClipError(str(media), f"cut short or damaged after {num_decoded} frames")
            if may_skip:
                # Frames before the window that nothing refers to need no decoding; the others do.
                codec.skip_frame = "NONREF" if _is_before(packet, first) else "DEFAULT"
            for frame in packet.decode():
                is_untagged = int(frame.colorspace) == _UNTAGGED and not frame.format.is_rgb
                if untagged == "bt709" and is_untagged and frame.height >= HD_LINES:
                    frame.colorspace = _BT709  # FFmpeg takes it for BT.601
                yield frame
                num_decoded += 1
    except _FAILURES as error:
        reason = f"damaged after {num_decoded} frames: {reason_of(error)}"
        raise ClipError(str(media), reason) from error


def _from_keyframe(
    media: Media, packets: "Iterator[Packet[VideoStream]]", keyframe: int
) -> "Iterator[Packet[VideoStream]]":
    """Yield a video's packets from a keyframe on, without those that are shown before it."""
    keyframes = (each for each in packets if each.is_keyframe and not _is_before(each, keyframe))
    first = next(keyframes, None)
    if first is None or first.pts != keyframe:
        raise ClipError(str(media), f"has no keyframe at its timestamp {keyframe}")
    yield first
    yield from (packet for packet in packets if not _is_before(packet, keyframe))


def _is_before(packet: "Packet[VideoStream]", timestamp: int | None) -> bool:
    return timestamp is not None and packet.pts is not None and packet.pts < timestamp


def rgb(frame: VideoFrame) -> NDArray[np.uint8]:
    return np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)


def reason_of(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return decode_limits.out_of_memory()
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


_ROUNDING_SECONDS = 1e-6  # tolerance in seconds, as times in tables are rounded

HD_LINES = 720  # players take untagged video of at least this height for BT.709, smaller for BT.601
_BT709, _UNTAGGED = 1, 2  # codes of colour matrices in ITU-T H.273, table 4
_COLOR_MATRICES = {
    0: "rgb",
    1: "bt709",
    4: "fcc",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "ycgco",
    9: "bt2020nc",
    10: "bt2020c",
    14: "ictcp",
}
_COLOR_RANGES = {int(ColorRange.MPEG): "limited", int(ColorRange.JPEG): "full"}
# Codes of ITU-T H.273, table 3, and FFmpeg's names, except for the two of HDR ("pq", "hlg").
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


@dataclass(frozen=True)
class Probe(Footage):
    """Properties of one video or image, found by decoding it or from its container's packets."""

    is_trusted: bool = False  # frames were counted as the container's packets, not decoded

    @property
    def clip_fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "is_trusted"}

    def cut(self, media: Media) -> "Probe":
        """Return the properties of the frames that begin in a span (`media.span`) of this file.

        Raises:
            ClipError: no frame begins in the span, or the timestamps do not ascend.
        """
        assert media.span is not None
        timing, (start, end) = self.timing, media.span
        if self.kind == "image" or timing is None or self.num_frames < 2:
            raise ClipError(str(media), "a span is of a video whose frames have ascending times")
        ticks = np.array([timing.of(number) for number in range(self.num_frames)], np.float64)
        # `ticks` have the stream's time base, which a probe does not keep: the frame rate gives
        # their length in seconds.
        seconds = (ticks - ticks[0]) * ((self.num_frames - 1) / self.fps / (ticks[-1] - ticks[0]))
        first, last = np.searchsorted(
            seconds + _ROUNDING_SECONDS, [start, math.inf if end is None else end]
        ).tolist()
        if last <= first:
            raise ClipError(str(media), f"no frame begins in it; the file has {seconds[-1]:.3f} s")
        num_frames = last - first
        rate, ends = self.fps, self.duration_seconds if last == self.num_frames else seconds[last]
        if num_frames > 1:
            rate = float((num_frames - 1) / (seconds[last - 1] - seconds[first]))
        before = [frame for frame in self.keyframes if frame < first]
        listed = timing.listed[first:last]
        return replace(
            self,
            identity=content.span_identity(self.identity, first, num_frames),
            num_frames=num_frames,
            fps=rate,
            duration_seconds=float(ends - seconds[first]),
            timing=Timing(timing.of(first), timing.step, listed),
            keyframes=tuple(frame - first for frame in self.keyframes if first <= frame < last),
            # Decoding of the span begins at the last keyframe before it; frame 0 needs no seek.
            seek_pts=timing.of(before[-1]) if before and before[-1] > 0 else None,
        )


@dataclass(frozen=True)
class _Span:
    start: float
    end: float
    fps: float


def probe(
    media: Media, progress: Callable[[], object] = lambda: None, *, trusts_metadata: bool = False
) -> Probe:
    """Decode a whole video and return its properties.

    With `trusts_metadata` only the first frame is decoded (nothing else tells the rotation); times
    and keyframes are taken from the container's packets. A file whose packets have no ascending
    times is decoded as usual.

    The first video stream that is not a cover picture is taken. A file that ends early without an
    error is refused when its frames end before the declared end by more than 2.5 frame intervals
    and more than 5 % of the declared duration. Frame counts in headers are not compared, because
    edit lists and dropped lead-in frames make them differ in good files.

    Raises:
        ClipError: the file is damaged, cut short, too large, or has no usable video stream.
    """
    identity = content_hash(media, progress)
    with opened(media) as (container, stream):
        first, pts, keyframes, last_seconds = (_packets if trusts_metadata else _frames)(
            media, container, stream, progress
        )
        timing = _timing(pts)
        if trusts_metadata and timing is None:
            return probe(media, progress)
        rgb(first)  # what cannot become RGB cannot be trained on
        span = _span(media, stream, first, pts, last_seconds)
        # Frames may end a little before the declared end in good files.
        declared_end = _declared_end(container, stream, span.start)
        missing = 0.0 if declared_end is None else declared_end - span.end
        if declared_end and missing > max(2.5 / span.fps, 0.05 * (declared_end - span.start)):
            raise ClipError(
                str(media),
                f"cut short: {span.end - span.start:.2f} s of video, "
                f"{declared_end - span.start:.2f} s declared",
            )
        rotation = rotation_of(media, stream, first)
        height, width = square_size(media, stream, first)
        matrix = 0 if first.format.is_rgb else int(stream.codec_context.colorspace)
        return Probe(
            identity=identity,
            kind="video",
            num_frames=len(pts),
            width=height if is_turned(rotation) else width,
            height=width if is_turned(rotation) else height,
            fps=span.fps,
            duration_seconds=span.end - span.start,
            stream_index=stream.index,
            rotation=rotation,
            codec=stream.codec_context.codec.canonical_name,
            pix_fmt=first.format.name,
            color_range=_COLOR_RANGES.get(int(first.color_range), ""),
            color_transfer=_COLOR_TRANSFERS.get(int(stream.codec_context.color_trc), ""),
            color_matrix=_COLOR_MATRICES.get(matrix, ""),
            timing=timing,
            keyframes=keyframes,
            is_trusted=trusts_metadata,
        )


def content_hash(media: Media, progress: Callable[[], object] = lambda: None) -> str:
    """Return BLAKE2b-128 of a file's bytes as 32 hex digits; its path has no influence."""
    with stores.local(media) as here:
        return content.content_hash(here, progress)


_Read = tuple[VideoFrame, list[int | None], tuple[int, ...], float | None]
"""What is read of a video: its first frame, all timestamps, the numbers of the keyframes, and the
seconds for which the last frame is shown."""


def _packets(
    media: Media,
    container: InputContainer,
    stream: VideoStream,
    progress: Callable[[], object],
) -> _Read:
    first: VideoFrame | None = None
    found: list[tuple[int | None, bool, int]] = []
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise ClipError(str(media), f"cut short or damaged after {len(found)} frames")
            if first is None:
                first = next(iter(packet.decode()), None)
            if packet.size and not packet.is_discard:  # an edit list hides discarded ones
                found.append((packet.pts, packet.is_keyframe, packet.duration or 0))
            progress()
    except _FAILURES as error:
        reason = f"damaged after {len(found)} frames: {reason_of(error)}"
        raise ClipError(str(media), reason) from error
    if first is None or not found:
        raise ClipError(str(media), "no frame could be decoded")
    # Packets come in decoding order; frame numbers count in presentation order.
    found.sort(key=lambda packet: packet[0] or 0)
    keyframes = tuple(number for number, packet in enumerate(found) if packet[1])
    pts = [packet[0] for packet in found]
    return first, pts, keyframes, float(found[-1][2] * (stream.time_base or 0))


def _frames(
    media: Media,
    container: InputContainer,
    stream: VideoStream,
    progress: Callable[[], object],
) -> _Read:
    frames = decoded(media, container, stream)
    first = last = next(frames, None)
    if first is None or last is None:
        raise ClipError(str(media), "no frame could be decoded")
    pts, keyframes = [first.pts], [0] if first.key_frame else []
    for last in frames:
        if (last.width, last.height) != (first.width, first.height):
            raise ClipError(str(media), f"the frame size changes at frame {len(pts)}")
        if last.key_frame:
            keyframes.append(len(pts))
        pts.append(last.pts)
        progress()
    return first, pts, tuple(keyframes), _seconds(last, last.duration)


def _timing(pts: Sequence[int | None]) -> Timing | None:
    """Return frames' timestamps in compact form; None if one is missing or out of order."""
    known = [each for each in pts if each is not None]
    steps = {after - before for before, after in pairwise(known)}
    if len(known) < len(pts) or min(steps, default=1) <= 0:
        return None
    # A constant step needs no list: the first timestamp and the step give all others.
    if len(steps) > 1:
        return Timing(known[0], 0, tuple(known))
    return Timing(known[0], max(steps, default=0))


def _span(
    media: Media,
    stream: VideoStream,
    first: VideoFrame,
    pts: Sequence[int | None],
    last_seconds: float | None,
) -> _Span:
    num_frames = len(pts)
    start, last_start = _seconds(first, pts[0]), _seconds(first, pts[-1])
    rate = float(stream.guessed_rate or stream.average_rate or 0)
    if start is not None and last_start is not None and last_start > start:
        rate = (num_frames - 1) / (last_start - start)
    elif rate > 0:  # one frame, or a container without timestamps
        start = start or 0.0
        last_start = start + (num_frames - 1) / rate
    else:
        raise ClipError(str(media), "has neither timestamps nor a frame rate")
    return _Span(start, last_start + (last_seconds or 1 / rate), rate)


def _seconds(frame: VideoFrame, ticks: int | None) -> float | None:
    return None if ticks is None or frame.time_base is None else float(ticks * frame.time_base)


def _declared_end(container: InputContainer, stream: VideoStream, start: float) -> float | None:
    """Return the seconds at which a video's last frame should end; None if not declared.

    Streams of mp4, mov and avi declare a length. Matroska has only the length of the whole file
    and, as a tag, the time at which each track ends.
    """
    if stream.duration is not None and stream.time_base is not None:
        return start + float(stream.duration * stream.time_base)
    if tag := stream.metadata.get("DURATION"):
        hours, minutes, seconds = tag.split(":")
        return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    if container.duration is not None and len(container.streams) == 1:
        return container.duration / av.time_base  # with audio, the audio may be the longer stream
    return None


def rotation_of(media: Media, stream: VideoStream, frame: VideoFrame) -> int:
    """Return how a frame is turned: degrees counterclockwise, plus `MIRRORED` if it is mirrored.

    The source is FFmpeg's display matrix.

    Raises:
        ClipError: the rotation is not a multiple of 90, or the frame has an alpha channel.
    """
    has_alpha = any(each.is_alpha for each in frame.format.components)  # always true of a GIF
    if (has_alpha and stream.codec_context.name != "gif") or stream.metadata.get(
        "alpha_mode"
    ) == "1":
        raise ClipError(
            str(media),
            "has an alpha channel, below which any colours may lie; lay it over black: ffmpeg -i "
            "IN -vf premultiply=inplace=1,format=yuv420p OUT (a WebM: -c:v libvpx-vp9 before -i)",
        )
    rotation, mirror = frame.rotation % 360, 0
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        # The matrix maps one step right to (a, b) and one step down to (c, d), x right and y down.
        # A negative determinant mirrors.
        a, b, _, c, d = struct.unpack("=5i", np.asarray(matrix).tobytes()[:20])
        if a * d < b * c:
            rotation, mirror = round(math.degrees(math.atan2(-b, -a))) % 360, MIRRORED
    if rotation % 90:
        raise ClipError(str(media), f"is to be shown turned by {rotation} degrees; only quarters")
    return rotation + mirror


def upright(picture: NDArray[np.uint8], rotation: int) -> NDArray[np.uint8]:
    """Turn, and mirror, a decoded picture [H, W, ...] as it is shown; returns a view of it."""
    turned = np.rot90(picture, rotation // 90)
    return turned[:, ::-1] if rotation >= MIRRORED else turned


# FFmpeg states a ratio such as 224:225 where it has rounded a size to whole pixels.
_ROUNDED_RATIO = Fraction(2, 100)


def square_size(media: Media, stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    """Return height and width at which an unturned frame is shown in square pixels.

    Raises:
        ClipError: no picture can have this size.
    """
    ratio = stream.sample_aspect_ratio or Fraction(1)
    if abs(ratio - 1) <= _ROUNDED_RATIO:
        return frame.height, frame.width
    width = round(frame.width * ratio)
    if not width:
        raise ClipError(str(media), f"has pixels of the aspect ratio {ratio}: it would have none")
    decode_limits.check_pixels(media, width, frame.height)
    return frame.height, width


def in_square_pixels(media: Media, stream: VideoStream, frame: VideoFrame) -> NDArray[np.uint8]:
    """Return the RGB pixels [H, W, 3] of a frame in square pixels, turned as it is shown."""
    height, width = square_size(media, stream, frame)
    rotation = rotation_of(media, stream, frame)
    if (height, width) != (frame.height, frame.width):
        frame = frame.reformat(width=width, height=height, format="rgb24", threads=1)
    return upright(rgb(frame), rotation)


def probe_image(media: Media) -> Probe:
    """Decode an image and return its properties, as a video of one frame without a frame rate."""
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
        color_matrix="rgb",
        keyframes=(0,),
    )


def name_error(media: Media) -> ClipError | None:
    """Return an error if the name of a clip's file is not valid UTF-8, else None."""
    try:
        str(media).encode()
    except UnicodeEncodeError:
        return ClipError(str(media), "its name is not valid UTF-8; rename it")
    return None


@dataclass(frozen=True)
class ProbeTask(Task[Item, tuple[Probe | ClipError, bool]]):
    """Task of a worker process: finds the properties of one file.

    Returns its properties or an error, and True if a retry is useless.
    """

    limits: decode_limits.Limits = decode_limits.DEFAULT
    trusts_metadata: bool = False  # for videos; see `probe`
    silence_seconds: float = SILENCE_SECONDS

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # the limits decide it
        return self.limits.memory_gib

    def do(self, item: Item, progress: Callable[[], object]) -> tuple[Probe | ClipError, bool]:
        if (unnamed := name_error(item.media)) is not None:
            return unnamed, True
        try:
            with stores.local(item.media) as media:
                progress = self.limits.timed(media, progress)
                if item.kind == "image":
                    return probe_image(media), True
                return probe(media, progress, trusts_metadata=self.trusts_metadata), True
        # A timeout or an unreachable store says nothing about the bytes, so the next call tries
        # again.
        except (decode_limits.OutOfTimeError, stores.UnreachableError) as error:
            return ClipError(error.path, error.reason), False
        except ClipError as error:
            return error, True

    def lost(self, item: Item, reason: str) -> tuple[Probe | ClipError, bool]:
        return ClipError(str(item.media), reason), False

    def reads(self, item: Item) -> str:
        return "" if item.media.is_remote else item.media.path
