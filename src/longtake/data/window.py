"""Reads one window of a clip: the frames that are wanted, in the size that is wanted.

Decoding begins at a keyframe shortly before the window where the clip's timestamps are known, and
the frames are recognised by their exact timestamps, so that it makes no difference to the result.
swscale converts and scales each frame in one pass, into planes of red, green and blue: twice as
fast as into interleaved pixels, with all of the chroma's resolution, and in the layout of a video.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from longtake.data.clip import Kind, Media
from longtake.data.decode import decoded, opened
from longtake.data.image import read_image
from longtake.errors import ClipError

_AGAIN = "index it again"


@dataclass(frozen=True, slots=True)
class Window:
    """All that decides which pixels are read of a clip.

    Attributes:
        identity: of the clip.
        media: where its bytes lie.
        kind: whether it is a video, or an image (then only `media` and the sizes matter).
        stream_index: the video stream, as an index into all streams.
        rotation: degrees counterclockwise that turn a decoded frame upright: 0, 90, 180 or 270.
        source_height: pixels of the upright picture, as it was indexed.
        source_width: pixels of the upright picture, as it was indexed.
        start: index of the first frame that is wanted.
        num_frames: how many are wanted.
        stride: distance between two of them.
        timestamps: of the frames that are wanted, in ticks of the stream's time base, ascending;
            empty: frames are counted from the beginning.
        seek_to: timestamp of a keyframe to begin at; None: from the beginning.
        scaled_height: pixels of the upright picture before it is cut.
        scaled_width: pixels of the upright picture before it is cut.
        top: rows that are cut off above.
        left: columns that are cut off on the left.
        height: rows that are kept.
        width: columns that are kept.
        is_flipped: whether the result is mirrored, left to right.
    """

    identity: str
    media: Media
    kind: Kind
    stream_index: int
    rotation: int
    source_height: int
    source_width: int
    start: int
    num_frames: int
    stride: int
    timestamps: tuple[int, ...]
    seek_to: int | None
    scaled_height: int
    scaled_width: int
    top: int
    left: int
    height: int
    width: int
    is_flipped: bool

    def __post_init__(self) -> None:
        assert min(self.start, self.num_frames - 1, self.stride - 1) >= 0
        assert len(self.timestamps) in (0, self.num_frames)
        assert self.seek_to is None or self.timestamps
        assert self.rotation in (0, 90, 180, 270)
        assert 0 <= self.top <= self.scaled_height - self.height
        assert 0 <= self.left <= self.scaled_width - self.width

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[3, F, H, W] of what is read."""
        return 3, self.num_frames, self.height, self.width


def read_window(window: Window, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode a window, scaled (bicubic, antialiased) and cut.

    Args:
        window: what to read.
        out: where to write it, [3, F, H, W]; None: a new array.

    Returns:
        [3, F, H, W] uint8 RGB, upright.

    Raises:
        ClipError: the file is gone, damaged, or not what its record says.
    """
    video = np.empty(window.shape, dtype=np.uint8) if out is None else out
    assert video.shape == window.shape
    if window.kind == "image":
        video[:, 0] = cut(window, _scaled_image(window).transpose(2, 0, 1))
    else:
        _read_video(window, video)
    return video


def _scaled_image(window: Window) -> NDArray[np.uint8]:
    picture = read_image(window.media)
    check_size(window, *picture.shape[:2])
    size = (window.scaled_width, window.scaled_height)
    if size == (window.source_width, window.source_height):
        return picture
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))


def _read_video(window: Window, video: NDArray[np.uint8]) -> None:
    if window.seek_to is not None:
        try:
            _read_from(window, window.seek_to, video)
        except ClipError:
            pass  # not every file can be entered in its middle
        else:
            return
    _read_from(window, None, video)


def _read_from(window: Window, seek_to: int | None, video: NDArray[np.uint8]) -> None:
    reformatter, num_read = VideoReformatter(), 0
    with opened(window.media, window.stream_index) as (container, stream):
        if seek_to is not None:
            container.seek(seek_to, stream=stream)
        if window.timestamps:
            first = window.timestamps[0]
            frames = decoded(window.media, container, stream, keyframe=seek_to, first=first)
            wanted = _at(window, frames)
        else:
            end = window.start + (window.num_frames - 1) * window.stride + 1
            frames = decoded(window.media, container, stream)
            wanted = islice(frames, window.start, end, window.stride)
        for number, frame in enumerate(wanted):
            for channel, plane in enumerate(_planes(window, frame, reformatter)):
                video[channel, number] = plane
            num_read = number + 1
    if num_read < window.num_frames:
        raise ClipError(
            str(window.media),
            f"ends before frame {window.start + num_read * window.stride}; {window.num_frames} "
            f"frames from {window.start} in steps of {window.stride} were wanted",
        )


def _at(window: Window, frames: Iterator[VideoFrame]) -> Iterator[VideoFrame]:
    """The frames that carry the wanted timestamps; none may be missing."""
    for wanted in window.timestamps:
        for frame in frames:
            if frame.pts is None or frame.pts >= wanted:
                break
        else:
            return
        if frame.pts != wanted:
            found = f"found one at {frame.pts}; {_AGAIN}"
            raise ClipError(str(window.media), f"has no frame at its timestamp {wanted}, {found}")
        yield frame


def _planes(
    window: Window, frame: VideoFrame, reformatter: VideoReformatter
) -> Sequence[NDArray[np.uint8]]:
    """Red, green and blue of one frame, each [height, width]."""
    is_turned = window.rotation in (90, 270)
    upright = (frame.width, frame.height) if is_turned else (frame.height, frame.width)
    check_size(window, *upright)
    height, width = window.scaled_height, window.scaled_width
    scaled = reformatter.reformat(
        frame,
        width=height if is_turned else width,
        height=width if is_turned else height,
        format="gbrp",
        interpolation=_interpolation(frame),
        threads=1,  # many give the same, 50 times slower
    )
    green, blue, red = (
        np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)[
            :, : plane.width
        ]
        for plane in scaled.planes
    )
    return [cut(window, np.rot90(plane, window.rotation // 90)) for plane in (red, green, blue)]


def _interpolation(frame: VideoFrame) -> Interpolation:
    """Bicubic; without scaling swscale has a fast way, by which it forgets columns after the 16th.

    Seen in FFmpeg 8.1 on x86 from yuv420p to gbrp: of 568 columns the last 8 are never written.
    ACCURATE_RND, which costs nothing where frames are scaled, keeps it from the fast way.
    """
    if frame.width % 16:
        return Interpolation.BICUBIC | Interpolation.ACCURATE_RND
    return Interpolation.BICUBIC


def cut(window: Window, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., height, width] of [..., scaled_height, scaled_width]."""
    kept = picture[
        ...,
        window.top : window.top + window.height,
        window.left : window.left + window.width,
    ]
    return kept[..., ::-1] if window.is_flipped else kept


def check_size(window: Window, height: int, width: int) -> None:
    if (height, width) != (window.source_height, window.source_width):
        indexed = f"was indexed with {window.source_width}x{window.source_height}"
        raise ClipError(str(window.media), f"has {width}x{height} pixels, {indexed}; {_AGAIN}")
