"""From what people name to the media in it: folders, files, lists, tables and tars.

folder                        searched with its subfolders, and with the tars in it; hidden
                              names are passed over, links to folders not followed
.txt .csv .jsonl .parquet     see `longtake.data.indexing.listing`
.tar                          see `longtake.data.indexing.tars`
any other file                a video, or an image where its suffix says so
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake.data.clip import Media
from longtake.data.indexing.item import MEDIA_SUFFIXES, Item, is_media
from longtake.data.indexing.listing import read_listing
from longtake.data.indexing.tars import read_tar
from longtake.errors import ClipError, DataError

_LISTINGS = (".txt", ".csv", ".jsonl", ".parquet")
_TAR = ".tar"


@dataclass(frozen=True)
class Found:
    """What is in the sources.

    Attributes:
        items: by `str(item.media)`, each there once, sorted by it.
        folders: absolute paths of the folders that were searched or that files were named in.
        refused: tars that cannot be read.
    """

    items: list[Item]
    folders: list[Path]
    refused: list[ClipError]


def find(sources: Sequence[Path]) -> Found:
    """Return all media that the sources name.

    Raises:
        DataError: a source is missing or cannot be read, a list names missing files, two sources
            caption one file differently, or there is nothing at all.
    """
    folders, items, tars = [], [], set()
    for source in sources:
        folders.append(_folder_of(source))
        files = _search(folders[-1]) if source.is_dir() else [folders[-1] / source.name]
        for file in files:
            if file.suffix.lower() == _TAR:
                tars.add(file)
            elif file.suffix.lower() in _LISTINGS:
                items.extend(read_listing(file))
            else:
                items.append(Item(Media(str(file))))
    refused = []
    for tar in sorted(tars):
        try:
            items.extend(read_tar(tar))
        except ClipError as error:
            refused.append(error)
    if not items and not refused:
        raise DataError(_nothing(sources))
    return Found(_merged(items), list(dict.fromkeys(folders)), refused)


def _folder_of(source: Path) -> Path:
    if source.is_dir():
        return source.resolve()
    if source.is_file():
        return source.parent.resolve()  # the file itself may be a link: keep its name
    raise DataError(
        f"{source} does not exist. Name a folder of videos, video or image files, a list or a "
        "table of paths, or a tar."
    )


def _search(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        is_wanted = is_media(path.name) or path.suffix.lower() == _TAR
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if is_wanted and not hidden and not path.is_dir():
            found.append(path)
    return found


def _merged(items: Iterable[Item]) -> list[Item]:
    """Make one of all that is said about the same media."""
    merged: dict[str, Item] = {}
    for item in items:
        name = str(item.media)
        known = merged.get(name, item)
        if None is not known.caption != item.caption is not None:
            raise DataError(
                f"{name} has two captions: {known.caption!r} and {item.caption!r}. "
                "A clip has one caption; correct one of the sources."
            )
        caption = item.caption if known.caption is None else known.caption
        attributes = {**known.attributes, **item.attributes}
        merged[name] = Item(item.media, caption, attributes)
    return [merged[name] for name in sorted(merged)]


def _nothing(sources: Sequence[Path]) -> str:
    where = ", ".join(str(source) for source in sources) or "no folder at all"
    return (
        f"No video or image was found. Looked in: {where}; for files that end in "
        f"{' '.join((*MEDIA_SUFFIXES, _TAR))}. Name a folder that holds some."
    )
