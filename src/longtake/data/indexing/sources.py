"""From what people name to the media in it: folders, files, lists, tables and tars.

folder                        searched with its subfolders, and with the tars in it; hidden
                              names are passed over, links to folders not followed
.txt .csv .jsonl .parquet     see `longtake.data.indexing.listing`
.tar                          see `longtake.data.indexing.tars`
any other file                a video, or an image where its suffix says so

What a search passes over, because its ending is not known or its folder cannot be read, is counted.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from longtake.data.catalog import Rejection
from longtake.data.clip import Media
from longtake.data.indexing.item import MEDIA_SUFFIXES, Item, is_media
from longtake.data.indexing.listing import MAX_ATTRIBUTES, read_listing
from longtake.data.indexing.tars import read_tar
from longtake.errors import ClipError, DataError

_LISTINGS = (".txt", ".csv", ".jsonl", ".parquet")
_TAR = ".tar"
_BESIDE = (*_LISTINGS, ".json")  # what is kept beside clips: captions, tables, catalogs


@dataclass(frozen=True)
class Found:
    """What is in the sources.

    Attributes:
        items: by `str(item.media)`, each there once, sorted by it.
        folders: absolute paths of the folders that were searched or that files were named in.
        refused: tars that cannot be read.
        passed_over: how many files in the searched folders have another ending, by ending.
        unreadable: folders that cannot be searched, with the reason.
    """

    items: list[Item]
    folders: list[Path]
    refused: list[ClipError]
    passed_over: Counter[str]
    unreadable: list[ClipError]


def find(sources: Sequence[Path]) -> Found:
    """Return all media that the sources name.

    Raises:
        DataError: a source is missing or cannot be read, a list names missing files, two sources
            caption one file differently, or there is nothing at all.
    """
    folders, items, tars = [], [], set()
    passed_over, unreadable = Counter[str](), list[ClipError]()
    for source in sources:
        folders.append(_folder_of(source))
        files = [folders[-1] / source.name]
        if source.is_dir():
            files = _search(folders[-1], passed_over, unreadable)
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
        raise DataError(_nothing(sources, passed_over, unreadable))
    merged = _merged(items)
    names = {name for item in merged for name in item.attributes}
    if len(names) > MAX_ATTRIBUTES:
        raise DataError(
            f"The sources name {len(names):,} different numbers of clips, and a catalog has at "
            f"most {MAX_ATTRIBUTES:,}. Remove the columns that no recipe selects by."
        )
    return Found(merged, list(dict.fromkeys(folders)), refused, passed_over, unreadable)


def _folder_of(source: Path) -> Path:
    why = "does not exist"
    try:
        mode = source.stat().st_mode
        if stat.S_ISDIR(mode):
            return source.resolve()
        if stat.S_ISREG(mode):
            return source.parent.resolve()  # the file itself may be a link: keep its name
        why = "is neither a file nor a folder"
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise DataError(
        f"{source} {why}. Name a folder of videos, video or image files, a list or a "
        "table of paths, or a tar."
    )


def _search(folder: Path, passed_over: Counter[str], unreadable: list[ClipError]) -> list[Path]:
    """Return the media and tars of a folder and its subfolders; count what is passed over."""

    def refuse(error: OSError) -> None:
        unreadable.append(ClipError(error.filename, error.strerror or str(error)))

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            suffix = PurePath(name).suffix.lower()
            if name.startswith("."):
                continue
            if is_media(name) or suffix == _TAR:
                found.append(Path(parent, name))
            elif suffix not in _BESIDE:
                passed_over[suffix or "no ending"] += 1
    return found


def _merged(items: Iterable[Item]) -> list[Item]:
    """Make one of all that is said about the same media."""
    merged: dict[str, Item] = {}
    for item in items:
        name = str(item.media)
        known = merged.get(name, item)
        if None is not known.caption != item.caption is not None:
            raise DataError(
                f"{name} has two captions: {known.caption!r:.200} and {item.caption!r:.200}. "
                "A clip has one caption; correct one of the sources."
            )
        caption = item.caption if known.caption is None else known.caption
        attributes = {**known.attributes, **item.attributes}
        merged[name] = Item(item.media, caption, attributes)
    return [merged[name] for name in sorted(merged)]


def told(passed_over: Mapping[str, int], unreadable: Sequence[ClipError | Rejection]) -> list[str]:
    """A sentence for each kind of what a search has passed over."""
    said = []
    if passed_over:
        kinds = [f"{count} {ending}" for ending, count in Counter(passed_over).most_common(8)]
        more = f" and {len(passed_over) - 8} other endings" if len(passed_over) > 8 else ""
        total = sum(passed_over.values())
        files = "1 file has" if total == 1 else f"{total:,} files have"
        said.append(f"{files} another ending and were left out: {', '.join(kinds)}{more}.")
    if unreadable:
        shown = ", ".join(f"{error.path} ({error.reason})" for error in unreadable[:3])
        more = f" and {len(unreadable) - 3} more" if len(unreadable) > 3 else ""
        folders = "1 folder" if len(unreadable) == 1 else f"{len(unreadable)} folders"
        said.append(f"{folders} cannot be read: {shown}{more}.")
    return said


def _nothing(
    sources: Sequence[Path], passed_over: Counter[str], unreadable: Sequence[ClipError]
) -> str:
    where = ", ".join(str(source) for source in sources) or "no folder at all"
    return (
        f"No video or image was found. Looked in: {where}; for files that end in "
        f"{' '.join((*MEDIA_SUFFIXES, _TAR))}. Name a folder that holds some."
        + "".join(f" {each}" for each in told(passed_over, unreadable))
    )
