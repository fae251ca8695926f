"""A clip, as the catalog knows it, and an item, as a source names it; imports nothing heavy."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Literal

MIRRORED = 360
"""Added to a rotation in degrees: the turned picture is then mirrored, left to right."""
Kind = Literal["video", "image"]
Given = str | tuple[float, ...]
"""What a table gives of a further input of a clip: the absolute path of a file, or numbers."""


def is_turned(rotation: int) -> bool:
    """Return True if width and height change places."""
    return rotation % 180 == 90


@dataclass(frozen=True, slots=True)
class Indexed:
    """The facts of a clip's content that a catalog holds: see `longtake.data.content`."""

    identity: str  # empty: the content is not known
    num_frames: int
    fps: float
    file_bytes: int | None  # of the file or tar; None: not known
    mtime_ns: int | None
    is_by_run: bool = False  # of a further input's file: what a run first found there


@dataclass(frozen=True, slots=True)
class Media:
    """Where a clip's bytes lie: a file or a member of an uncompressed tar, here or in a store."""

    path: str  # absolute path of the file, or of the tar; of an object in a store its URL
    member: str = ""  # the name inside the tar; empty for a file of its own
    offset: int = 0  # where the member's bytes begin in the tar
    num_bytes: int | None = None  # how many there are; None: all of the file
    span: tuple[float, float | None] | None = None  # seconds from the first frame; None: all of it
    stamp: int = 0  # of an object: another one when it has changed; 0: not known
    local: str = field(default="", compare=False)  # where an object's bytes were fetched to
    indexed: Indexed | None = field(default=None, compare=False)  # of a catalog's clip

    def __str__(self) -> str:
        name = f"{self.path}/{self.member}" if self.member else self.path
        if self.span is None:
            return name
        start, end = self.span
        return f"{name}#t={start:.12g}" + ("" if end is None else f",{end:.12g}")

    @property
    def whole(self) -> "Media":
        """All of the file, if this is a span of it."""
        return self if self.span is None else replace(self, span=None, indexed=None)

    def cut(self, span: tuple[float, float | None] | None) -> "Media":
        return self if span is None else replace(self, span=span)

    @property
    def is_remote(self) -> bool:
        return "://" in self.path

    @property
    def file(self) -> Path:
        """What is to be opened: see `stores.local` for objects."""
        return Path(self.local or self.path)


@dataclass(frozen=True, slots=True)
class Timing:
    """Presentation timestamps of a clip's frames, in ticks of its stream's time base."""

    first: int  # of frame 0
    step: int  # between two frames; 0 if it varies
    listed: tuple[int, ...] = ()  # all of them if the step varies; strictly ascending

    def of(self, frame: int) -> int:
        return self.listed[frame] if self.listed else self.first + frame * self.step


@dataclass(frozen=True)
class Clip:
    """One video, or one image (a clip of one frame), that can be trained on."""

    identity: str  # BLAKE2b-128 of the content as 32 hex digits; path and name play no part
    media: Media
    kind: Kind
    caption: str  # what it shows; empty where none is known
    num_frames: int  # frames that decoding yields, whatever the header says
    width: int  # pixels of the upright picture as it is shown, in square pixels
    height: int  # as `width`
    fps: float  # average frame rate by the frames' timestamps; 0 for an image
    duration_seconds: float  # from the first frame's start to the last one's end; 0 for an image
    stream_index: int  # the video stream that is read, as an index into all streams
    rotation: int  # degrees counterclockwise that turn a decoded frame upright, and `MIRRORED`
    codec: str  # FFmpeg's name of the compression format, such as `h264`; Pillow's for an image
    pix_fmt: str  # FFmpeg's name of the decoded pixel format; Pillow's mode for an image
    color_range: str = ""  # `limited`, `full`, or empty where the file does not say
    color_transfer: str = ""  # `pq` and `hlg` are HDR; FFmpeg's name of any other, or empty
    color_matrix: str | None = None  # FFmpeg's name; empty: none is named; None: not yet read
    timing: Timing | None = None  # None: the file's timestamps do not identify its frames
    keyframes: tuple[int, ...] = ()  # indices in presentation order, ascending
    seek_pts: int | None = None  # of a span: of the keyframe before its first; None: the file's
    prepared_from: str = ""  # identity of the clip that this one was transcoded from; else empty
    attributes: Mapping[str, float] = field(default_factory=dict)  # scores by name, such as `nouns`
    conditioning: Mapping[str, Given] = field(default_factory=dict)  # by column, as its source says

    @property
    def path(self) -> str:
        return str(self.media)

    def keyframe_before(self, frame: int) -> int | None:
        """The timestamp of the keyframe that decoding may begin at; None: from the beginning."""
        place = bisect_right(self.keyframes, frame)
        if self.timing is None:
            return None
        if not place:
            return self.seek_pts
        if self.keyframes[place - 1] == 0 and self.media.span is None:
            return None
        return self.timing.of(self.keyframes[place - 1])


# A GIF is decoded by FFmpeg whether it moves or not. docs/guides/fine-tuning-data.md lists all.
VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".m4v", ".ts", ".gif"),
    *(".mts", ".m2ts", ".wmv", ".flv", ".3gp", ".mxf"),
)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif")
MEDIA_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)


@dataclass(frozen=True)
class Item:
    """One video or image that a source names."""

    media: Media
    caption: str | None = None  # None: its source has none
    attributes: Mapping[str, float] = field(default_factory=dict)  # scores that its source gives
    conditioning: Mapping[str, Given] = field(default_factory=dict)  # of the columns asked for

    @property
    def kind(self) -> Kind:
        suffix = PurePath(self.media.member or self.media.path).suffix
        return "image" if suffix.lower() in IMAGE_SUFFIXES else "video"


def is_media(name: str) -> bool:
    return PurePath(name).suffix.lower() in MEDIA_SUFFIXES
