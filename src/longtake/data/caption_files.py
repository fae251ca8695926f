"""Captions from files beside clips, and from a file of JSON lines that names them."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from longtake import fsio
from longtake.data.clip import join_captions
from longtake.data.tables import CAPTION_COLUMNS, PATH_COLUMNS
from longtake.data.text_files import read_text
from longtake.errors import DataError, RecordError

SIDECAR = "sidecar"
SIDECAR_SUFFIXES = (".txt", ".TXT", ".caption")
_UNREAD_SUFFIXES = (".json", ".tags", ".prompt", ".cap")
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)


class _CaptionLine(NamedTuple):
    number: int
    video: str
    caption: str


def read_captions(
    captions: Path | None,
    folders: Sequence[Path],
    videos: Callable[[], Iterable[Path]],
    notes: list[str] | None = None,
    chosen: Sequence[str] = (),
) -> tuple[dict[Path, str], list[str]]:
    """Return the captions of videos from JSON lines, and the names in them that match no video.

    `videos` returns the paths of all videos; it is called once for each file of JSON lines. `notes`
    gets a sentence about keys that are not read. `chosen` are the fields of captions; by default
    the first of the usual ones that a line has.

    Raises:
        DataError: a line is not a caption, or a video has two captions.
    """
    texts: dict[Path, str] = {}
    unmatched: list[str] = []
    tables = [captions] if captions and not is_sidecar(captions) else []
    if captions is None:
        named = dict.fromkeys(folder / "captions.jsonl" for folder in folders)
        tables = [table for table in named if table.is_file()]
    for table in tables:
        unread = dict[str, None]()
        found, left = _match(table, _caption_lines(table, unread, chosen), folders, videos())
        if unread and notes is not None:
            notes.append(f"{table}: not read: {', '.join(unread)[:500]}.")
        texts.update(found)
        unmatched.extend(left)
    return texts, unmatched


def is_sidecar(captions: Path) -> bool:
    return str(captions) == SIDECAR


def _match(
    table: Path, lines: Sequence[_CaptionLine], folders: Sequence[Path], videos: Iterable[Path]
) -> tuple[dict[Path, str], list[str]]:
    """Match each caption of a file of JSON lines to a video: by path, or by a unique file name."""
    # Names in the file may be relative to it, or to any of the searched folders.
    roots = [table.parent.resolve(), *folders]
    # Videos are looked at once and only matches are kept: there may be millions.
    asked = {os.path.normpath(root / line.video) for line in lines for root in roots}
    names = {Path(line.video).name for line in lines}
    # A name that two videos have says nothing, and a video with a line of its own needs no other.
    by_name: dict[str, list[Path]] = defaultdict(list)
    known = set[Path]()
    for video in videos:
        if str(video) in asked:
            known.add(video)
        if video.name in names:
            by_name[video.name] = [*by_name[video.name], video][:2]  # two: it is not unique
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


def _caption_lines(
    path: Path, unread: dict[str, None], chosen: Sequence[str]
) -> list[_CaptionLine]:
    if path.suffix.lower() in (".csv", ".parquet"):
        raise DataError(
            f"--captions {path}: captions are read from JSON lines. A table of paths and captions "
            f"is given as a source: longtake data index {path} --out clips.parquet."
        )
    lines = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        entry = None
        try:
            entry = json.loads(line)
            key = next(name for name in PATH_COLUMNS if name in entry)
            texts = chosen or [next(name for name in CAPTION_COLUMNS if name in entry)]
            # Keys and texts of other types raise here, and are reported with their line.
            video, caption = entry[key], _caption_in(entry, texts)
            f"{video}{caption}".encode()  # fails for half of a surrogate pair
            lines.append(_CaptionLine(number, os.fspath(video), caption))
            unread.update(dict.fromkeys(name for name in entry if name not in (key, *texts)))
        except (*_MALFORMED, RecursionError, StopIteration) as error:
            names = ", ".join(map(str, entry))[:200] if isinstance(entry, dict) else ""
            keys = f" Its keys: {names}." if names else ""
            asked = '": "what it shows", "'.join(chosen or ["caption"])
            raise DataError(
                f"{path}, line {number} is no caption: {line.strip()[:80]!r}. Expected one object "
                f'on each line: {{"video": "clip.mp4", "{asked}": "what it shows"}}.{keys}'
            ) from error
    return lines


def _caption_in(entry: dict[str, Any], fields: Sequence[str]) -> str:
    """Return the texts, and lists of texts, in some fields of a JSON object, joined to a caption.

    Raises:
        TypeError: a field holds something else.
        LookupError: there is none of the fields.
    """
    values = [entry[name] for name in fields if name in entry]
    if not values:
        raise LookupError
    texts = [text for each in values for text in (each if isinstance(each, list) else [each])]
    if wrong := [each for each in texts if not isinstance(each, str | None)]:
        raise TypeError(f"{wrong[0]!r:.80} is no text")
    return join_captions(texts)


def fields_beside(video: Path, fields: Sequence[str]) -> str | None:
    """Return the caption in some fields of clip.json beside clip.mp4, or None if there is none.

    Raises:
        DataError: the file is not a JSON object, or a field holds no text.
    """
    path = video.with_suffix(".json")
    try:
        if not fields or not path.is_file():
            return None
        entry = fsio.parse_record(fsio.read_regular(path), dict[str, Any], path)
        return _caption_in(entry, fields)
    except LookupError:  # a file without any of the fields
        return None
    except (RecordError, OSError, TypeError) as error:
        raise DataError(
            f"{path} has no caption in {', '.join(fields)}: {error}. Expected an object with a "
            "text, or a list of texts, in each of these fields."
        ) from error


def unread_beside(video: Path) -> Path | None:
    """Return a file beside a clip that may hold a caption but is not read, or None."""
    places = [video.with_name(f"{video.name}.txt"), *map(video.with_suffix, _UNREAD_SUFFIXES)]
    return next((path for path in places if fsio.is_there(path)), None)


def sidecar_of(video: Path) -> str | None:
    """Return the text of a file beside a video, such as clip.txt beside clip.mp4, or None.

    Raises:
        DataError: the file is not text, or cannot be read.
    """
    for ending in SIDECAR_SUFFIXES:
        path = video.with_suffix(ending)
        with suppress(OSError):  # the name may be too long with this ending
            if path.is_file():
                return read_text(path).strip()
    return None
