"""Records of clips in a catalog, and of the videos and images that a source names.

Nothing heavy is imported.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Literal

MIRRORED = 360
"""Flag that is added to a clip's rotation in degrees: the turned picture is then mirrored, left to
right."""
Kind = Literal["video", "image"]
_SEPARATOR = "\x1e"
"""Stands between the captions of a clip that has several: ASCII's record separator."""
HDR = ("pq", "hlg")
"""Transfer characteristics of HDR, as a catalog names them."""
Given = str | tuple[float, ...]
"""Conditioning input of a clip as a table has it: the absolute path of a file, or numbers."""


def join_captions(texts: Iterable[str | None]) -> str:
    """Return the text of a catalog for a clip that has several captions; each counts once."""
    parts = (part.strip() for text in texts for part in (text or "").split(_SEPARATOR))
    return _SEPARATOR.join(dict.fromkeys(filter(None, parts)))


def captions_of(caption: str) -> list[str]:
    """Return all captions of a clip, from their text in a catalog; one, mostly."""
    return caption.split(_SEPARATOR)


def is_turned(rotation: int) -> bool:
    """Return whether a rotation exchanges width and height."""
    return rotation % 180 == 90


@dataclass(frozen=True, slots=True)
class Indexed:
    """Facts of a clip's content when it was indexed, which `longtake.data.content` compares."""

    identity: str  # empty if the content is not known
    num_frames: int
    fps: float
    file_bytes: int | None  # size of the file or tar; None if unknown
    mtime_ns: int | None
    is_by_run: bool = False  # these are the facts of a further input that a run first found


@dataclass(frozen=True, slots=True)
class Media:
    """Location of a clip's bytes: a file or a member of a tar, on disk or in an object store.

    Tars are not compressed.
    """

    path: str  # absolute path of the file or tar, or the URL of an object
    member: str = ""  # name inside the tar; empty for a file of its own
    offset: int = 0  # position of the member's first byte in the tar
    num_bytes: int | None = None  # None for the whole file
    span: tuple[float, float | None] | None = None  # seconds from the first frame; None: all
    stamp: int = 0  # changes with an object in a store; 0 if unknown
    local: str = field(default="", compare=False)  # path to which an object was fetched
    indexed: Indexed | None = field(default=None, compare=False)  # None: not known

    def __str__(self) -> str:
        name = f"{self.path}/{self.member}" if self.member else self.path
        if self.span is None:
            return name
        start, end = self.span
        return f"{name}#t={start:.12g}" + ("" if end is None else f",{end:.12g}")

    @property
    def whole(self) -> "Media":
        """The whole file, if these media are a span (start and end in seconds) of it."""
        return self if self.span is None else replace(self, span=None, indexed=None)

    def cut(self, span: tuple[float, float | None] | None) -> "Media":
        """Return a span of this file (start and end in seconds), or the file itself without one."""
        return self if span is None else replace(self, span=span)

    @property
    def is_remote(self) -> bool:
        return "://" in self.path

    @property
    def file(self) -> Path:
        """Path to open; an object of a store is fetched to a file first (`stores.local`)."""
        return Path(self.local or self.path)


@dataclass(frozen=True, slots=True)
class Timing:
    """Presentation timestamps of a clip's frames, in ticks of its stream's time base."""

    first: int  # timestamp of frame 0
    step: int  # distance of two frames; 0 if it varies
    listed: tuple[int, ...] = ()  # all timestamps if the step varies; strictly ascending

    def of(self, frame: int) -> int:
        """Return the timestamp of a frame by its number, in ticks."""
        return self.listed[frame] if self.listed else self.first + frame * self.step


@dataclass(frozen=True)
class Footage:
    """Properties of one video, or of one image (a video of one frame)."""

    identity: str  # BLAKE2b-128 of the content as 32 hex digits, independent of path and name
    kind: Kind
    num_frames: int  # number of frames that decoding yields, whatever the header says
    width: int  # pixels of the upright picture as it is shown, in square pixels
    height: int  # pixels of the upright picture as it is shown, in square pixels
    fps: float  # average frame rate by the frames' timestamps; 0 for an image
    duration_seconds: float  # from the first frame's start to the last frame's end; 0 for an image
    stream_index: int  # index of the video stream among all streams
    rotation: int  # degrees counterclockwise that turn a decoded frame upright, and `MIRRORED`
    codec: str  # FFmpeg's name of the codec, such as `h264`; Pillow's format for an image
    pix_fmt: str  # FFmpeg's name of the decoded pixel format; Pillow's mode for an image
    color_range: str = ""  # `limited`, `full`, or empty if unknown
    color_transfer: str = ""  # FFmpeg's name or empty; see `HDR`
    color_matrix: str | None = None  # FFmpeg's name; empty if unknown; None if not yet read
    timing: Timing | None = None  # None if the file's timestamps do not identify its frames
    keyframes: tuple[int, ...] = ()  # indices in presentation order, ascending
    seek_pts: int | None = None  # timestamp of the keyframe before a span; None: file's start


@dataclass(frozen=True, kw_only=True)
class Clip(Footage):
    """One video or image that can be trained on."""

    media: Media
    caption: str  # description of the content; empty if unknown
    prepared_from: str = ""  # identity of the original, if this clip was transcoded; else empty
    attributes: Mapping[str, float] = field(default_factory=dict)  # scores by name, such as `nouns`
    conditioning: Mapping[str, Given] = field(default_factory=dict)  # further inputs by column

    @property
    def path(self) -> str:
        return str(self.media)

    def keyframe_before(self, frame: int) -> int | None:
        """Return the timestamp of the keyframe to begin decoding at; None for the beginning."""
        # Keyframes ascend: the one at `place` - 1 is the last that is not after the frame.
        place = bisect_right(self.keyframes, frame)
        if self.timing is None:
            return None
        if not place:
            return self.seek_pts
        if self.keyframes[place - 1] == 0 and self.media.span is None:
            return None
        return self.timing.of(self.keyframes[place - 1])


# FFmpeg decodes GIFs, moving or not. docs/guides/fine-tuning-data.md lists all formats.
VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".m4v", ".ts", ".gif"),
    *(".mts", ".m2ts", ".wmv", ".flv", ".3gp", ".mxf"),
)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif")
MEDIA_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)


@dataclass(frozen=True)
class Item:
    """One video or image that a source (folder, list, table or tar) of `data index` names."""

    media: Media
    caption: str | None = None  # None if its source has none
    attributes: Mapping[str, float] = field(default_factory=dict)  # scores from its source
    conditioning: Mapping[str, Given] = field(default_factory=dict)  # by requested column

    @property
    def kind(self) -> Kind:
        suffix = PurePath(self.media.member or self.media.path).suffix
        return "image" if suffix.lower() in IMAGE_SUFFIXES else "video"


def is_media(name: str) -> bool:
    return PurePath(name).suffix.lower() in MEDIA_SUFFIXES
