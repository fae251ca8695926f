"""Finds media and their captions in folders, files, lists, tables and tars.

A folder is searched with its subfolders and tars; hidden names are ignored and links to folders
not followed. Files with an unknown ending and folders that cannot be read are counted.
"""

import codecs
import json
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from longtake.data.catalog import Rejection
from longtake.data.clip import MEDIA_SUFFIXES, Item, Media, is_media
from longtake.data.listing import MAX_ATTRIBUTES, PATH_COLUMNS, read_listing, read_tar
from longtake.errors import ClipError, DataError
from longtake.fsio import read_regular

_LISTINGS = (".txt", ".csv", ".jsonl", ".parquet")
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
SIDECAR = "sidecar"
_TAR = ".tar"
_BESIDE = (*_LISTINGS, ".json")  # what is kept beside clips: captions, tables, catalogs


@dataclass(frozen=True)
class FoundMedia:
    """What is in the sources."""

    items: list[Item]  # sorted by `str(item.media)`, without duplicates
    folders: list[Path]  # absolute paths of the searched folders, and of those of named files
    refused: list[ClipError]  # tars that cannot be read
    passed_over: Counter[str]  # files in the searched folders with another ending, by ending
    unreadable: list[ClipError]  # folders that cannot be searched


def find(sources: Sequence[Path]) -> FoundMedia:
    """Return all media that the sources name."""
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
        where = ", ".join(str(source) for source in sources) or "no folder at all"
        raise DataError(
            f"No video or image was found. Looked in: {where}; for files that end in "
            f"{' '.join((*MEDIA_SUFFIXES, _TAR))}. Name a folder that holds some."
            + "".join(f" {each}" for each in describe_ignored(passed_over, unreadable))
        )
    merged = _merged(items)
    names = {name for item in merged for name in item.attributes}
    if len(names) > MAX_ATTRIBUTES:
        raise DataError(
            f"The sources name {len(names):,} different numbers of clips, and a catalog has at "
            f"most {MAX_ATTRIBUTES:,}. Remove the columns that no recipe selects by."
        )
    return FoundMedia(merged, list(dict.fromkeys(folders)), refused, passed_over, unreadable)


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
    """The media and tars of a folder and its subfolders; counts what is ignored."""

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
    """One item for each media, from all its mentions."""
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


def describe_ignored(
    passed_over: Mapping[str, int], unreadable: Sequence[ClipError | Rejection]
) -> list[str]:
    """A sentence about files with another ending, and one about unreadable folders."""
    sentences = []
    if passed_over:
        kinds = [f"{count} {ending}" for ending, count in Counter(passed_over).most_common(8)]
        more = f" and {len(passed_over) - 8} other endings" if len(passed_over) > 8 else ""
        total = sum(passed_over.values())
        files = "1 file has" if total == 1 else f"{total:,} files have"
        sentences.append(f"{files} another ending and were left out: {', '.join(kinds)}{more}.")
    if unreadable:
        shown = ", ".join(f"{error.path} ({error.reason})" for error in unreadable[:3])
        more = f" and {len(unreadable) - 3} more" if len(unreadable) > 3 else ""
        folders = "1 folder" if len(unreadable) == 1 else f"{len(unreadable)} folders"
        sentences.append(f"{folders} cannot be read: {shown}{more}.")
    return sentences


class _CaptionLine(NamedTuple):
    number: int
    video: str
    caption: str


def read_captions(
    captions: Path | None, folders: Sequence[Path], videos: Sequence[Path]
) -> tuple[dict[Path, str], list[str]]:
    """The caption of each video that has one, and the names that match no video."""
    texts: dict[Path, str] = {}
    unmatched: list[str] = []
    tables = [captions] if captions and not is_sidecar(captions) else []
    if captions is None:
        named = dict.fromkeys(folder / "captions.jsonl" for folder in folders)
        tables = [table for table in named if table.is_file()]
    for table in tables:
        found, left = _match(table, _read_jsonl(table), folders, videos)
        texts.update(found)
        unmatched.extend(left)
    if captions is None or is_sidecar(captions):
        texts = {video: _sidecar(video) for video in videos} | texts
    return texts, unmatched


def is_sidecar(captions: Path) -> bool:
    return str(captions) == SIDECAR


def _match(
    table: Path, lines: Iterable[_CaptionLine], folders: Sequence[Path], videos: Sequence[Path]
) -> tuple[dict[Path, str], list[str]]:
    """Match each line to a video by path, or else by a unique file name."""
    roots = [table.parent.resolve(), *folders]
    by_name: dict[str, list[Path]] = defaultdict(list)
    for video in videos:
        by_name[video.name].append(video)
    known = set(videos)
    exact: dict[Path, _CaptionLine] = {}
    inexact: list[_CaptionLine] = []
    for line in lines:
        places = [Path(os.path.normpath(root / line.video)) for root in roots]
        target = next((place for place in places if place in known), None)
        if target is None:
            inexact.append(line)
        else:
            _assign(exact, target, line, table)
    named: dict[Path, _CaptionLine] = {}
    unmatched = []
    for line in inexact:
        same_name = by_name.get(Path(line.video).name, [])
        if len(same_name) == 1 and same_name[0] not in exact:
            _assign(named, same_name[0], line, table)
        else:
            unmatched.append(line.video)
    return {video: line.caption for video, line in (exact | named).items()}, unmatched


def _assign(taken: dict[Path, _CaptionLine], video: Path, line: _CaptionLine, table: Path) -> None:
    first = taken.setdefault(video, line)
    if first.caption != line.caption:
        raise DataError(
            f"{table}, line {line.number}: {video} has another caption in line {first.number}. "
            "A clip has one caption; remove one of the two lines."
        )


def _read_jsonl(path: Path) -> list[_CaptionLine]:
    if path.suffix.lower() in (".csv", ".parquet"):
        raise DataError(
            f"--captions {path}: captions are read from JSON lines. A table of paths and captions "
            f"is given as a source: longtake data index {path} --out clips.parquet."
        )
    lines = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            key = next(name for name in PATH_COLUMNS if name in entry)
            video, caption = entry[key], entry["caption"].strip()
            f"{video}{caption}".encode()  # half of a surrogate pair is no text
            lines.append(_CaptionLine(number, os.fspath(video), caption))
        except (*_MALFORMED, RecursionError, StopIteration) as error:
            if '"file_name"' in line:
                raise DataError(
                    f"{path}, line {number} has Hugging Face's keys: {line.strip()[:80]!r}. "
                    'Expected are "video" and "caption". Rename them: '
                    f"""sed 's/"file_name":/"video":/; s/"text":/"caption":/' {path} > """
                    f"{path.with_name('captions.jsonl')}"
                ) from error
            raise DataError(
                f"{path}, line {number} is no caption: {line.strip()[:80]!r}. Expected one object "
                'on each line: {"video": "clip.mp4", "caption": "what it shows"}.'
            ) from error
    return lines


def _sidecar(video: Path) -> str:
    path = video.with_suffix(".txt")
    try:
        return _read_text(path).strip() if path.is_file() else ""
    except OSError:  # a name that is too long with this ending
        return ""


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"The captions {path} cannot be read: {error.strerror}.") from error
