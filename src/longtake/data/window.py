"""Reads one window of a clip in the size in which it is trained.

If timestamps are known, decoding begins at a keyframe before the window, and frames are recognised
by their exact timestamps. swscale converts and scales each frame in one pass, into RGB planes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from longtake.data import stores
from longtake.data.clip import MIRRORED, Kind, Media, is_turned
from longtake.data.decode import decoded, opened, read_image, square_size, upright
from longtake.data.tone_map import to_sdr
from longtake.errors import ClipError

_AGAIN = "index it again"


@dataclass(frozen=True)
class Crop:
    """Scaling of a frame so that it covers a training size, and the position of the crop in it."""

    scaled_height: int
    scaled_width: int
    top: int
    left: int


class Size(Protocol):
    """Anything with a height and a width in pixels, such as a bucket."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSpan:
    """The frames to read for a sample: of a clip's window, or of a conditioning input."""

    start: int = 0  # index of the first frame
    num_frames: int = 1
    stride: int = 1  # distance between two frames, unless `frames` lists them
    frames: tuple[int, ...] = ()
    """Indices of the frames, where some may repeat (`data.fps`). Empty if `stride` gives them."""

    def indices(self) -> Sequence[int]:
        """Return the indices in the video of the frames to read, from 0, not descending."""
        end = self.start + (self.num_frames - 1) * self.stride + 1
        return self.frames or range(self.start, end, self.stride)


def crop(height: int, width: int, shape: Size, across: float = 0.5, down: float = 0.5) -> Crop:
    """Return the crop of a picture that covers a training size, cut at `across` and `down`.

    Both are from 0 to 1; 0.5 is the middle.
    """
    scale = max(shape.height / height, shape.width / width)
    # Rounding must not make the picture smaller than the bucket.
    scaled_height = max(shape.height, round(height * scale))
    scaled_width = max(shape.width, round(width * scale))
    # Each offset from 0 to the surplus gets an equal part of the interval from 0 to 1.
    top = max(0, math.ceil((scaled_height - shape.height + 1) * down) - 1)
    left = max(0, math.ceil((scaled_width - shape.width + 1) * across) - 1)
    return Crop(scaled_height, scaled_width, top, left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(FrameSpan):
    """Specification of the pixels to read from a clip: its frames, scaling and crop."""

    # Without the defaults of a span: a window whose frames were forgotten would show others.
    start: int
    num_frames: int
    stride: int
    identity: str  # identity of the clip
    media: Media
    kind: Kind  # an image needs only `media` and the sizes
    stream_index: int  # index into all streams of the file
    rotation: int  # degrees counterclockwise that turn a decoded frame upright, and `MIRRORED`
    source_height: int  # height of the upright picture when it was indexed
    source_width: int
    # Timestamps of the frames in ticks of the stream's time base, not descending. Empty if frames
    # are found by counting.
    timestamps: tuple[int, ...]
    seek_to: int | None  # timestamp of the keyframe to begin at; None for the beginning
    scaled_height: int  # size of the upright picture before it is cut
    scaled_width: int
    top: int  # number of rows cut off at the top
    left: int  # number of columns cut off on the left
    height: int  # size of the result
    width: int
    is_flipped: bool  # mirrored, left to right
    untagged: str = "bt709"  # matrix of HD video that names none; see `data.untagged`
    is_untagged: bool = False  # the clip is such a video
    hdr: str = ""  # transfer characteristics of a clip in HDR that becomes SDR; see `data.hdr`

    def __post_init__(self) -> None:
        assert min(self.start, self.num_frames - 1, self.stride - 1) >= 0
        assert len(self.timestamps) in (0, self.num_frames)
        assert len(self.frames) in (0, self.num_frames)
        assert self.seek_to is None or self.timestamps
        assert self.rotation in range(0, 2 * MIRRORED, 90)
        assert 0 <= self.top <= self.scaled_height - self.height
        assert 0 <= self.left <= self.scaled_width - self.width

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 3, self.num_frames, self.height, self.width


def some_frames(window: Window, number: int, count: int = 1) -> Window:
    """Return a window of only `count` frames of this one, from its frame `number` on."""
    only = slice(number, number + count)
    return replace(
        window,
        start=window.start + number * window.stride * (not window.frames),
        num_frames=count,
        timestamps=window.timestamps[only],
        frames=window.frames[only],
    )


def read_window(window: Window, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode a window to [3, F, H, W] uint8 RGB: scaled (bicubic, antialiased), cut and upright.

    Raises:
        ClipError: the file is missing, damaged, or differs from its record in the catalog.
    """
    video = np.empty(window.shape, dtype=np.uint8) if out is None else out
    assert video.shape == window.shape
    with stores.local(window.media) as media:
        window = replace(window, media=media) if media.local else window
        if window.kind == "image":
            picture = read_image(window.media)
            _check_size(window, *picture.shape[:2])
            picture = resized(picture, window.scaled_height, window.scaled_width)
            video[:, 0] = cut(window, picture.transpose(2, 0, 1))
            return video
        if window.seek_to is not None:
            with suppress(ClipError):  # not every file can be decoded from a keyframe in its middle
                _read_from(window, window.seek_to, video)
                return video
        _read_from(window, None, video)
    return video


def resized(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if picture.shape[:2] == (height, width):
        return picture
    resized = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized)


def _read_from(window: Window, seek_to: int | None, video: NDArray[np.uint8]) -> None:
    # One reformatter for all frames: it keeps its scaling tables.
    reformatter, num_read = VideoReformatter(), 0
    with opened(window.media, window.stream_index) as (container, stream):
        if seek_to is not None:
            container.seek(seek_to, stream=stream)
        if window.timestamps:
            first = window.timestamps[0]
            frames = decoded(
                window.media,
                container,
                stream,
                keyframe=seek_to,
                first=first,
                untagged=window.untagged,
            )
            wanted = at_timestamps(window.media, window.timestamps, frames)
        else:
            frames = decoded(window.media, container, stream, untagged=window.untagged)
            wanted = counted(window.indices(), frames)
        for number, frame in enumerate(wanted):
            for channel, plane in enumerate(planes(window, stream, frame, reformatter)):
                video[channel, number] = plane
            num_read = number + 1
    if num_read < window.num_frames:
        how = f"in steps of {window.stride}" if not window.frames else f"to {window.frames[-1]}"
        raise ClipError(
            str(window.media),
            f"ends before frame {window.indices()[num_read]}; {window.num_frames} frames from "
            f"{window.start} {how} were wanted",
        )


def counted(indices: Sequence[int], frames: Iterator[VideoFrame]) -> Iterator[VideoFrame]:
    """Yield a video's frames with these indices; a repeated index repeats its frame."""
    place = 0
    for number, frame in enumerate(frames):
        while place < len(indices) and indices[place] == number:
            yield frame
            place += 1
        if place == len(indices):
            return


def at_timestamps(
    media: Media, timestamps: Iterable[int], frames: Iterator[VideoFrame]
) -> Iterator[VideoFrame]:
    """Yield a video's frames with these timestamps; raise if one is missing."""
    frame: VideoFrame | None = None
    for wanted in timestamps:
        # Frames before the wanted one are dropped; a repeated timestamp keeps its frame.
        while frame is None or (frame.pts is not None and frame.pts < wanted):
            frame = next(frames, None)
            if frame is None:
                return
        if frame.pts != wanted:
            reason = f"has no frame at its timestamp {wanted}, found one at {frame.pts}; {_AGAIN}"
            raise ClipError(str(media), reason)
        yield frame


def planes(
    window: Window, stream: VideoStream, frame: VideoFrame, reformatter: VideoReformatter
) -> Sequence[NDArray[np.uint8]]:
    """Return the red, green and blue plane [height, width] of a frame, scaled for a window."""
    turned = is_turned(window.rotation)
    shown = square_size(window.media, stream, frame)
    _check_size(window, *(shown[::-1] if turned else shown))
    height, width = window.scaled_height, window.scaled_width
    # Without scaling, swscale's fast path loses columns after the 16th: in FFmpeg 8.1 on x86 the
    # last 8 of 568 columns of yuv420p are not written in gbrp. ACCURATE_RND avoids that path.
    interpolation = Interpolation.BICUBIC
    if frame.width % 16:
        interpolation |= Interpolation.ACCURATE_RND
    scaled = reformatter.reformat(
        frame,
        width=height if turned else width,
        height=width if turned else height,
        format="gbrp12le" if window.hdr else "gbrp",
        interpolation=interpolation,
        threads=1,  # many threads give the same result, 50 times slower
    )
    green, blue, red = (
        # Rows of a plane are padded to `line_size` bytes.
        np.frombuffer(memoryview(plane), "<u2" if window.hdr else "u1").reshape(plane.height, -1)[
            :, : plane.width
        ]
        for plane in scaled.planes
    )
    picture = [cut(window, upright(plane, window.rotation)) for plane in (red, green, blue)]
    return list(to_sdr(np.stack(picture), window.hdr)) if window.hdr else picture


def cut(window: Window, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows = slice(window.top, window.top + window.height)
    kept = picture[..., rows, window.left : window.left + window.width]
    return kept[..., ::-1] if window.is_flipped else kept


def _check_size(window: Window, height: int, width: int) -> None:
    if (height, width) != (window.source_height, window.source_width):
        indexed = f"was indexed with {window.source_width}x{window.source_height}"
        raise ClipError(str(window.media), f"has {width}x{height} pixels, {indexed}; {_AGAIN}")
