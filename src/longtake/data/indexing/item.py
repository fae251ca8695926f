"""One file that a source names, before anybody has looked into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from longtake.data.clip import Kind, Media

# A GIF is decoded by FFmpeg whether it moves or not.
VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".m4v", ".ts"),
    ".gif",
)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif")
MEDIA_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)


@dataclass(frozen=True)
class Item:
    """One video or image to look at.

    Attributes:
        media: where it lies.
        caption: what its source says about it; None where it says nothing.
        attributes: scores that its source gives.
    """

    media: Media
    caption: str | None = None
    attributes: Mapping[str, float] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        suffix = PurePath(self.media.member or self.media.path).suffix
        return "image" if suffix.lower() in IMAGE_SUFFIXES else "video"


def is_media(name: str) -> bool:
    return PurePath(name).suffix.lower() in MEDIA_SUFFIXES
