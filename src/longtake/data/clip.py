"""One clip: what the catalog knows of a video or an image."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["video", "image"]


@dataclass(frozen=True, slots=True)
class Media:
    """Where the bytes of a clip lie: a file, or a member of an uncompressed tar.

    Attributes:
        path: absolute path of the file, or of the tar.
        member: the name inside the tar; empty for a file of its own.
        offset: where the member's bytes begin in the tar.
        num_bytes: how many there are; None: all of the file.
    """

    path: str
    member: str = ""
    offset: int = 0
    num_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.path}/{self.member}" if self.member else self.path


@dataclass(frozen=True, slots=True)
class Timing:
    """Presentation timestamps of a clip's frames, in ticks of its stream's time base.

    Attributes:
        first: of frame 0.
        step: between two neighbours, where it is always the same; else 0.
        listed: all of them, where they are not equally spaced; strictly ascending.
    """

    first: int
    step: int
    listed: tuple[int, ...] = ()

    def of(self, frame: int) -> int:
        return self.listed[frame] if self.listed else self.first + frame * self.step


@dataclass(frozen=True)
class Clip:
    """One video, or one image (a clip of one frame), that can be trained on.

    Attributes:
        identity: BLAKE2b-128 of the content as 32 hex digits; path and name play no part.
        caption: what it shows; empty where none is known.
        num_frames: frames that decoding yields, whatever the header says.
        width: pixels of the upright picture.
        height: pixels of the upright picture.
        fps: average frame rate by the frames' timestamps; 0 for an image.
        duration_seconds: from the first frame's start to the last one's end; 0 for an image.
        stream_index: the video stream that is read, as an index into all streams.
        rotation: degrees counterclockwise that turn a decoded frame upright: 0, 90, 180 or 270.
        codec: FFmpeg's name of the compression format, such as `h264`; Pillow's for an image.
        pix_fmt: FFmpeg's name of the decoded pixel format; Pillow's mode for an image.
        color_range: `limited`, `full`, or empty where the file does not say.
        color_transfer: `pq` and `hlg` are HDR; FFmpeg's name of any other, empty if unspecified.
        timing: the frames' timestamps; None where the file's cannot be relied on to find frames.
        keyframes: frames that decoding can begin at, as indices in presentation order, ascending.
        prepared_from: identity of the clip that this one was transcoded from; else empty.
        attributes: scores by name, such as `nouns`, that a curriculum can select by.
    """

    identity: str
    media: Media
    kind: Kind
    caption: str
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
    prepared_from: str = ""
    attributes: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return str(self.media)
