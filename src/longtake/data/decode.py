"""Opens one video and decodes its frames, strictly.

Files are hostile until proven good: a header may promise frames that are not there, and a cut
file may end without an error. So decoding is strict, one thread decodes one file, nothing but
local files is ever opened (FFmpeg lets a local playlist refer to nothing else), and whatever goes
wrong is a ClipError. PyAV keeps FFmpeg's own log off by default, and nothing here turns it on.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from longtake.data.clip import Media
from longtake.data.limits import check_pixels, max_pixels, out_of_memory
from longtake.errors import ClipError

# Files and parts of files: a playlist may ask for http and much else.
_PROTOCOLS = {"protocol_whitelist": "file,subfile"}

_GIF_HEADER = struct.Struct("<6sHH")

# Codecs whose decoders know, from a frame alone, that no other refers to it.
_SKIPPING = ("h264", "mpeg1video", "mpeg2video", "mpeg4", "vp8", "vp9")

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


@contextmanager
def opened(
    media: Media, stream_index: int | None = None
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video for strict decoding; whatever fails inside becomes a ClipError."""
    limit = {"max_pixels": str(max_pixels())}
    try:
        _check_gif(media)
        with av.open(
            _url(media),
            options=_PROTOCOLS | limit,
            metadata_errors="replace",  # a title in Latin-1 is no damage
        ) as container:
            stream = _video_stream(media, container, stream_index)
            if getattr(stream, "codec_context", None) is None:  # PyAV's types rule this out
                raise ClipError(str(media), "no decoder for its video codec")
            stream.codec_context.thread_count = 1
            check_pixels(media, stream.codec_context.width, stream.codec_context.height)
            stream.codec_context.options = {"err_detect": "explode", **limit}
            yield container, stream
    except _FAILURES as error:
        raise ClipError(str(media), f"not a readable video: {reason_of(error)}") from error


def _check_gif(media: Media) -> None:
    """Check the size that a GIF's header names: FFmpeg takes it from the first decoded frame."""
    path = Path(media.path)
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(media.offset)
        header = file.read(_GIF_HEADER.size)
    if header.startswith(b"GIF8") and len(header) == _GIF_HEADER.size:
        _, width, height = _GIF_HEADER.unpack(header)
        check_pixels(media, width, height)


def _url(media: Media) -> str:
    """An absolute path, so that no name can look like a URL, or FFmpeg's name of a byte range."""
    path = Path(media.path).absolute()
    if media.num_bytes is None:
        return str(path)
    end = media.offset + media.num_bytes
    return f"subfile,,start,{media.offset},end,{end},,:{path}"


def _video_stream(media: Media, container: InputContainer, index: int | None) -> VideoStream:
    for stream in container.streams.video:
        is_cover = bool(stream.disposition & Disposition.attached_pic)
        if stream.index == index or (index is None and not is_cover):
            return stream
    wanted = "no video stream" if index is None else f"no video stream with index {index}"
    raise ClipError(str(media), wanted)


def decoded(
    media: Media,
    container: InputContainer,
    stream: VideoStream,
    *,
    keyframe: int | None = None,
    first: int | None = None,
) -> Iterator[VideoFrame]:
    """Yield the frames in presentation order; the first sign of damage raises.

    Args:
        media: what was opened, for messages.
        container: as `opened` gives it.
        stream: as `opened` gives it.
        keyframe: after a seek, the timestamp of the keyframe to begin at. Earlier frames that are
            stored behind it (an open group of pictures) refer to what was not decoded; left out.
        first: frames with an earlier timestamp may be left out, where no other refers to them.
    """
    codec, num_decoded = stream.codec_context, 0
    may_skip = first is not None and codec.codec.canonical_name in _SKIPPING
    try:
        packets = container.demux(stream)
        if keyframe is not None:
            packets = _from_keyframe(media, packets, keyframe)
        for packet in packets:
            if packet.is_corrupt:  # a demuxer's word for a packet that the file's end cut off
                raise ClipError(str(media), f"cut short or damaged after {num_decoded} frames")
            if may_skip:
                codec.skip_frame = "NONREF" if _is_before(packet, first) else "DEFAULT"
            for frame in packet.decode():
                yield frame
                num_decoded += 1
    except _FAILURES as error:
        reason = f"damaged after {num_decoded} frames: {reason_of(error)}"
        raise ClipError(str(media), reason) from error


def _from_keyframe(
    media: Media, packets: "Iterator[Packet[VideoStream]]", keyframe: int
) -> "Iterator[Packet[VideoStream]]":
    """Leave out what comes before a keyframe, in the file or in presentation order."""
    keyframes = (each for each in packets if each.is_keyframe and not _is_before(each, keyframe))
    first = next(keyframes, None)
    if first is None or first.pts != keyframe:
        raise ClipError(str(media), f"has no keyframe at its timestamp {keyframe}")
    yield first
    yield from (packet for packet in packets if not _is_before(packet, keyframe))


def _is_before(packet: "Packet[VideoStream]", timestamp: int | None) -> bool:
    return timestamp is not None and packet.pts is not None and packet.pts < timestamp


def rgb(frame: VideoFrame) -> NDArray[np.uint8]:
    """Convert to [H, W, 3]; PyAV's default of many threads gives the same, 50 times slower."""
    return np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)


def reason_of(error: BaseException) -> str:
    """What an error says, without its class where it says anything."""
    if isinstance(error, MemoryError):
        return out_of_memory()
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
