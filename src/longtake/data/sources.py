"""Finds media and their captions in folders, lists, tables and WebDataset tars.

Hidden names are ignored, links to folders not followed. Paths in a list are relative to its folder.
What a clip's file says itself (size, frames) is measured, not taken from a table; integers of 2**53
and more are ids and no scores. Tars are read in place.
"""

import codecs
import csv
import dataclasses
import hashlib
import json
import math
import os
import re
import stat
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from longtake import fsio
from longtake.data.catalog import Rejection
from longtake.data.clip import MEDIA_SUFFIXES, Clip, Given, Item, Media, is_media
from longtake.errors import ClipError, DataError, RecordError

_LISTINGS = (".txt", ".csv", ".jsonl", ".parquet")
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
SIDECAR = "sidecar"
_TAR = ".tar"
_SIDECARS = (".txt", ".caption")
_BESIDE = (*_LISTINGS, ".json", ".caption")  # kept beside clips: captions, tables, catalogs
_CLASS_FOLDER = re.compile(r"([1-9]\d{0,5})_(.+)")
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""What Hugging Face's imagefolder and videofolder read in each folder, if it has `file_name`."""
_FILE_NAME = "file_name"


@dataclass(frozen=True)
class FoundMedia:
    """What is in the sources."""

    items: list[Item]  # sorted by `str(item.media)`, without duplicates
    folders: list[Path]  # absolute paths of the searched folders, and of those of named files
    refused: list[ClipError]  # tars that cannot be read
    passed_over: Counter[str]  # files in the searched folders with another ending, by ending
    unreadable: list[ClipError]  # folders that cannot be searched


def find(
    sources: Sequence[Path], conditioning: Sequence[str] = (), extracted: Path | None = None
) -> FoundMedia:
    """The media that sources name, each with what they say of it.

    `conditioning` names the columns of tables whose paths or numbers clips are given. Media inside
    of tables are written to the folder `extracted`.
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
                is_named = not source.is_dir()
                items.extend(read_listing(file, conditioning, extracted, is_named=is_named))
            else:
                items.append(Item(Media(str(file))))
    refused = []
    for tar in sorted(tars):
        try:
            items.extend(read_tar(tar, conditioning))
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
    _refuse_incomplete(merged, conditioning)
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
            if is_media(name) or suffix == _TAR or name in _METADATA:
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
        conditioning = {**known.conditioning, **item.conditioning}
        merged[name] = Item(item.media, caption, attributes, conditioning)
    return [merged[name] for name in sorted(merged)]


def _refuse_incomplete(items: Sequence[Item], columns: Sequence[str]) -> None:
    """Refuse clips that lack a further input, or whose file of it does not exist."""
    for column in columns:
        given = [item.conditioning.get(column) for item in items]
        lacking = [
            f"{item.media} has none" if each is None else f"{each}, of {item.media}, does not exist"
            for item, each in zip(items, given, strict=True)
            if each is None or (isinstance(each, str) and not fsio.is_there(Path(each)))
        ]
        if lacking:
            shown = "".join(f"\n  {each[:500]}" for each in lacking[:5])
            more = f"\n  and {len(lacking) - 5} more" if len(lacking) > 5 else ""
            raise DataError(
                f"--conditioning {column}: {len(lacking)} of {len(items)} clips lack theirs:"
                f"{shown}{more}\nAdd them to the table, or leave these clips out of it."
            )
        if len({isinstance(each, str) for each in given}) > 1:
            raise DataError(
                f"--conditioning {column}: some clips have a path there and others numbers. Make "
                "two columns of it, or give all of them the same."
            )


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
        found, left = _match(table, _caption_lines(table), folders, videos)
        texts.update(found)
        unmatched.extend(left)
    if captions is None or is_sidecar(captions):
        texts = {video: _sidecar(video) for video in videos} | texts
    return texts, unmatched


@dataclass(frozen=True)
class ClassFolder:
    """A folder of pictures as Kohya's trainers want them: repeats, and what the pictures show."""

    path: Path
    repeats: int
    label: str  # the caption of pictures that have none
    name: str  # for a catalog of it; no other of the folders has it


def class_folders(root: Path) -> list[ClassFolder]:
    """The folders in a folder that are named like `10_sks dog`, by name.

    Raises:
        DataError: there is none, or the folder cannot be read.
    """
    try:
        inside = sorted(each for each in root.iterdir() if each.is_dir())
    except OSError as error:
        raise DataError(f"The folder {root} cannot be read: {error.strerror}.") from error
    found: list[ClassFolder] = []
    for path in inside:
        parsed = _CLASS_FOLDER.fullmatch(path.name)
        if parsed is not None and (label := parsed[2].strip()):
            stem = re.sub(r"\W+", "_", label.lower()).strip("_") or "clips"
            same = sum(re.sub(r"_\d+$", "", each.name) == stem for each in found)
            name = f"{stem}_{same + 1}" if same else stem
            found.append(ClassFolder(path, int(parsed[1]), label, name))
    if not found:
        shown = ", ".join(path.name for path in inside[:5]) or "none"
        raise DataError(
            f"{root} has no folder that is named like `10_sks dog` (repeats and class); its "
            f"folders: {shown}. Index it without --kohya, or rename them."
        )
    return found


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


def _caption_lines(path: Path) -> list[_CaptionLine]:
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
            text = next(name for name in CAPTION_COLUMNS if name in entry)
            video, caption = entry[key], entry[text].strip()
            f"{video}{caption}".encode()  # half of a surrogate pair is no text
            lines.append(_CaptionLine(number, os.fspath(video), caption))
        except (*_MALFORMED, RecursionError, StopIteration) as error:
            raise DataError(
                f"{path}, line {number} is no caption: {line.strip()[:80]!r}. Expected one object "
                'on each line: {"video": "clip.mp4", "caption": "what it shows"}.'
            ) from error
    return lines


def _sidecar(video: Path) -> str:
    for ending in _SIDECARS:
        path = video.with_suffix(ending)
        with suppress(OSError):  # a name that is too long with this ending
            if path.is_file():
                return _read_text(path).strip()
    return ""


def _read_text(path: Path) -> str:
    try:
        return fsio.read_regular(path).removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"The captions {path} cannot be read: {error.strerror}.") from error


PATH_COLUMNS = ("video", "image", "path", "file", _FILE_NAME)
CAPTION_COLUMNS = ("caption", "text")
MAX_ATTRIBUTES = 1000  # names of scores in a catalog

MEASURED = {field.name for field in dataclasses.fields(Clip)} | {"offset", "num_bytes", "member"}

_MAX_EXACT = 2**53
_MAX_TEXT_BYTES = 2**20  # of a caption, a .json, or a header that names a member
_END_BYTES = 2**20  # of padding after the last member of a tar
_ANY = TypeAdapter[Any](Any)
_SURE_ROWS = 1_000_000  # so many may lie in a few bytes; of more, each takes at least one
_UNKNOWN = ("", "na", "n/a", "nan", "-nan", "null", "none", "#n/a")
_WORDS = dict.fromkeys(_UNKNOWN, None) | {"true": 1.0, "false": 0.0}


@dataclasses.dataclass(frozen=True)
class _Table:
    """The columns of a table that are used, by name, all of the same length."""

    names: Sequence[str]  # of all columns
    texts: dict[str, list[str | None]]
    numbers: dict[str, list[float | None]]
    types: dict[str, str]  # of columns that are neither texts nor numbers
    conditioning: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)  # asked for


def read_listing(
    path: Path,
    conditioning: Sequence[str] = (),
    extracted: Path | None = None,
    *,
    is_named: bool = True,
) -> list[Item]:
    """The media of a list or a table; none of a table without `file_name` that was only found."""
    if path.suffix.lower() == ".txt":
        items = _read_list(path)
    else:
        items = _read_table(path, conditioning, extracted, is_named=is_named)
    missing = [item.media.path for item in items if not fsio.is_there(Path(item.media.path))]
    if missing:
        shown = "".join(f"\n  {each[:500]}" for each in missing[:5])
        more = f"\n  and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise DataError(
            f"{path} names {len(items)} files, and {len(missing)} of them do not exist:"
            f"{shown}{more}\nPaths are relative to {path.resolve().parent}. "
            "Correct them, or remove those lines."
        )
    return items


def _read_list(path: Path) -> list[Item]:
    try:
        with fsio.open_regular(path) as file:
            lines = file.read().removeprefix(codecs.BOM_UTF8).decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"The list {path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from error
    return [Item(_media(path, line.strip())) for line in lines if line.strip()]


def _media(listing: Path, name: str) -> Media:
    return Media(os.path.normpath(listing.resolve().parent / name))


def _read_table(
    path: Path, conditioning: Sequence[str], extracted: Path | None, *, is_named: bool
) -> list[Item]:
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    try:
        if path.suffix.lower() in readers:
            table = readers[path.suffix.lower()](path, conditioning)
        else:
            table = _read_parquet(path, conditioning, extracted)
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"it is not UTF-8 text: {error}") from error
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or error) from error
    if not is_named and _FILE_NAME not in table.names:
        return []
    paths = _texts(path, table, _column(path, table, PATH_COLUMNS))
    if None in paths:
        raise DataError(f"{path}: row {paths.index(None) + 1} has no path. Add it or remove it.")
    caption = next((name for name in CAPTION_COLUMNS if name in table.names), None)
    captions = _texts(path, table, caption) if caption else [None] * len(paths)
    if len(table.numbers) > MAX_ATTRIBUTES:
        raise _unreadable(
            path,
            f"it has {len(table.numbers):,} numeric columns, at most {MAX_ATTRIBUTES:,} can be",
        )
    return [
        Item(
            _media(path, name or ""),
            None if text is None else text.strip(),
            {
                score: value
                for score, values in table.numbers.items()
                if (value := values[row]) is not None
            },
            {
                column: given
                for column, values in table.conditioning.items()
                if (given := _given(path, row, column, values[row])) is not None
            },
        )
        for row, (name, text) in enumerate(zip(paths, captions, strict=True))
    ]


def _given(path: Path, row: int, column: str, value: object) -> Given | None:
    """A further input of a clip: a path is made absolute, lists of numbers are made one."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and value.lstrip()[:1] != "[":
        return _media(path, value).path
    where = f"row {row + 1}, column {column!r}"
    try:
        if isinstance(value, str):  # of a CSV
            value = fsio.parse_record(value.encode(), _ANY, path)
        numbers = np.ravel(np.array(value, np.float64))  # refuses lists of different lengths
        if isinstance(value, bool) or not np.isfinite(numbers).all() or not numbers.size:
            raise ValueError("NaN, infinite or none")
    except (RecordError, TypeError, ValueError) as error:
        raise _unreadable(
            path, f"{where} is {value!r:.80}; expected a path, or a list of numbers"
        ) from error
    return tuple(numbers.tolist())


def _read_csv(path: Path, conditioning: Sequence[str]) -> _Table:
    with fsio.open_regular(path) as binary, codecs.getreader("utf-8-sig")(binary) as file:
        reader = csv.reader(file, strict=True)  # an unclosed quote must not swallow rows
        rows: list[list[str]] = []
        try:
            for row in reader:
                if row and len(row) != len(rows[0] if rows else row):
                    raise csv.Error(f"{len(row)} columns instead of the header's {len(rows[0])}")
                if row:
                    rows.append(row)
        except csv.Error as error:
            start = f", in the row that begins after row {len(rows) - 1}" if rows else ""
            raise _unreadable(path, f"line {reader.line_num}{start}: {error}") from error
    if not rows:
        raise _unreadable(path, "it is empty")
    names = _different(path, rows[0])
    columns = dict(zip(names, zip(*rows[1:], strict=True), strict=True)) if rows[1:] else {}
    numbers = {name: _parsed(columns[name]) for name in columns if _may_be_score(name)}
    return _Table(
        names,
        {name: [text or None for text in columns.get(name, ())] for name in names},
        {name: values for name, values in numbers.items() if values is not None},
        {},
        {name: columns[name] for name in conditioning if name in columns},
    )


def _parsed(texts: Iterable[str]) -> list[float | None] | None:
    """The numbers of a column; None if it has others."""
    values: list[float | None] = []
    for text in texts:
        word = text.strip().lower()
        try:
            value = _WORDS[word] if word in _WORDS else float(word)
        except ValueError:
            return None
        is_id = value is not None and abs(value) >= _MAX_EXACT and word.lstrip("+-").isdecimal()
        if "_" in word or is_id:
            return None
        values.append(_finite(value))
    return values if any(value is not None for value in values) else None


def _read_jsonl(path: Path, conditioning: Sequence[str]) -> _Table:
    rows: list[dict[str, Any]] = []
    for number, line in _lines(path):
        try:
            rows.append(fsio.parse_record(line, dict[str, Any], path, fsio.MAX_LINE_DEPTH))
        except RecordError as error:
            raise _unreadable(path, f"line {number}: {error.reason}") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts: dict[str, list[str | None]] = {}
    numbers: dict[str, list[float | None]] = {}
    types: dict[str, str] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if _is_text(name):
            other = next((each for each in values if not isinstance(each, str | None)), None)
            if other is not None:
                types[name] = type(other).__name__
            elif any(values):
                texts[name] = [each or None for each in values]
        elif _may_be_score(name):
            found = [score_of(value) for value in values]
            if any(value is not None for value in found):
                numbers[name] = found
    given: dict[str, Sequence[Any]] = {
        name: [row.get(name) for row in rows] for name in conditioning if name in names
    }
    return _Table([*texts, *types], texts, numbers, types, given)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with fsio.open_regular(path) as file:
        for number in count(1):
            line = file.readline(fsio.MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > fsio.MAX_LINE_BYTES:
                raise _unreadable(
                    path, f"line {number} has more than {fsio.MAX_LINE_BYTES:,} bytes"
                )
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def score_of(value: object) -> float | None:
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= _MAX_EXACT):
        return None
    return _finite(float(value))


def _read_parquet(path: Path, conditioning: Sequence[str], extracted: Path | None) -> _Table:
    with fsio.open_regular(path) as binary, pq.ParquetFile(binary) as file:
        num_rows, num_bytes = file.metadata.num_rows, path.stat().st_size
        if num_rows > max(_SURE_ROWS, num_bytes):
            raise _unreadable(
                path,
                f"{num_rows:,} rows in {num_bytes:,} bytes repeat the same values; make "
                "each row name a file of its own",
            )
        names = _different(path, file.schema_arrow.names)
        fields = {name: file.schema_arrow.field(name).type for name in names}
        wanted = [name for name in names if _is_text(name) or _is_numeric(name, fields[name])]
        given = [name for name in conditioning if name in names]
        inside = next((name for name in PATH_COLUMNS if _holds_media(fields.get(name))), None)
        columns = [name for name in [*wanted, *given] if name != inside]
        table = file.read(list(dict.fromkeys(columns)))
        paths: dict[str, list[str | None]] = {}
        if inside is not None and extracted is not None:
            paths[inside] = list(_extract(path, file, inside, extracted))
    strings = pa.string(), pa.large_string()
    texts = {name: table[name].to_pylist() for name in wanted if fields[name] in strings} | paths
    numbers = {name: _floats(table[name]) for name in wanted if _is_numeric(name, fields[name])}
    return _Table(
        names,
        {name: [text or None for text in column] for name, column in texts.items()},
        {name: values for name, values in numbers.items() if values is not None},
        {name: str(fields[name]) for name in names if name not in texts},
        {name: table[name].to_pylist() for name in given},
    )


def _holds_media(kind: Any) -> bool:
    """Whether a column holds media as Hugging Face data sets do: structs of bytes and a path."""
    return (
        kind is not None
        and pa.types.is_struct(kind)
        and {"bytes", "path"} <= {kind.field(index).name for index in range(kind.num_fields)}
    )


def _extract(path: Path, file: pq.ParquetFile, name: str, folder: Path) -> Iterator[str]:
    """Write the media of a column to files of their own, and yield their paths.

    A file that is there with this content stays as it is, so that it is not indexed again.
    """
    name_of_table = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    inside, row = folder / f"{path.stem}-{name_of_table}", 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[name]):
        for value in batch.column(0).to_pylist():
            row += 1
            data: bytes | None = value and value["bytes"]
            original: str = (value and value["path"]) or ""
            if data is None and original:
                yield _media(path, original).path
                continue
            data = data or b""
            suffix = _suffix_of(data, original)
            if suffix is None:
                raise _unreadable(
                    path,
                    f"row {row}, column {name!r} holds {len(data):,} bytes that are no "
                    "image or video of a known kind",
                )
            target = inside / f"{row - 1:08d}{suffix}"
            if not (target.is_file() and target.read_bytes() == data):
                inside.mkdir(parents=True, exist_ok=True)
                with fsio.atomic_write(target) as partial:
                    partial.write_bytes(data)
            yield str(target.resolve())


def _suffix_of(data: bytes, name: str) -> str | None:
    """The ending of a file with this content, by its first bytes, or else by its older name."""
    if not data:
        return None
    for start, offset, suffix in _MAGIC:
        if data[offset : offset + len(start)] == start:
            return suffix
    return PurePath(name).suffix.lower() if is_media(name) else None


_ROWS_AT_ONCE = 16  # whose media are in memory
_MAGIC = (
    (b"\x89PNG", 0, ".png"),
    (b"\xff\xd8\xff", 0, ".jpg"),
    (b"WEBP", 8, ".webp"),
    (b"GIF8", 0, ".gif"),
    (b"ftypavif", 4, ".avif"),
    (b"ftypqt", 4, ".mov"),
    (b"ftyp", 4, ".mp4"),
    (b"\x1a\x45\xdf\xa3", 0, ".mkv"),
)


def _floats(column: pa.ChunkedArray) -> list[float | None] | None:
    if pa.types.is_integer(column.type):
        bounds = pc.min_max(column).as_py()
        if any(abs(bound or 0) >= _MAX_EXACT for bound in bounds.values()):
            return None
    return [_finite(value) for value in column.cast(pa.float64()).to_pylist()]


def _is_numeric(name: str, kind: Any) -> bool:
    tests = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    return _may_be_score(name) and any(test(kind) for test in tests)


def _may_be_score(name: str) -> bool:
    return name not in MEASURED and not _is_text(name)


def _is_text(name: str) -> bool:
    return name in PATH_COLUMNS or name in CAPTION_COLUMNS


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _different(path: Path, names: Sequence[str]) -> list[str]:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise _unreadable(path, f"it has several columns {twice[0]!r:.80}")
    return list(names)


def _column(path: Path, table: _Table, wanted: Sequence[str]) -> str:
    for name in wanted:
        if name in table.names:
            return name
    known = ", ".join(table.names)
    raise DataError(
        f"{path} has no column of paths; its columns are {known[:500]}. "
        f"Name the one with the paths {' or '.join(wanted)}."
    )


def _texts(path: Path, table: _Table, name: str) -> list[str | None]:
    if name not in table.texts:
        raise DataError(
            f"{path}: column {name!r} holds {table.types[name][:200]}; expected text. Media inside "
            "a table cannot be read in place: write them to files or tars, and their paths here."
        )
    return table.texts[name]


def _unreadable(path: Path, why: object) -> DataError:
    return DataError(f"{path} cannot be read: {str(why).rstrip('.')}.")


def read_tar(path: Path, conditioning: Sequence[str] = ()) -> list[Item]:
    """The media of a tar, in its order.

    Members with the same key (the name up to the first dot of its last part) are one sample: its
    videos and images are captioned by its .txt, or by `caption` or `text` of its .json.
    """
    try:
        members = _members(path)
        texts, entries = _beside(path, members)
    except RecordError as error:
        reason = f"{error.path}: {error.reason}"
        raise ClipError(path, f"not a readable tar: {reason}") from error
    except RecursionError as error:
        raise ClipError(path, "not a readable tar: too many headers for one member") from error
    except (OSError, tarfile.TarError, LookupError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ClipError(path, f"not a readable tar: {reason}") from error
    media = [member for member in members if is_media(member.name)]
    if not media:
        raise ClipError(path, f"no video or image among its {len(members)} members")
    items = [_item(path, member, texts, entries, conditioning) for member in media]
    names = {name for item in items for name in item.attributes}
    if len(names) > MAX_ATTRIBUTES:
        raise ClipError(
            path, f"its .json files name {len(names):,} numbers; at most {MAX_ATTRIBUTES:,} can be"
        )
    return items


class _Member(tarfile.TarInfo):
    """Checks the size in a header, as tarfile reads and seeks by it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.size < 0:
            raise tarfile.ReadError(f"a member of {found.size} bytes")
        if found.type in _HEADERS and found.size > _MAX_TEXT_BYTES:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def _members(path: Path) -> list[tarfile.TarInfo]:
    with (
        fsio.open_regular(path) as file,
        tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar,
    ):
        members, before = [], -1
        while (member := tar.next()) is not None:
            if tar.offset <= before:  # an extended header may name a negative size, too
                raise ValueError(f"the member after byte {before} does not end behind it")
            before = tar.offset
            if not any(part.startswith(".") for part in Path(member.name).parts):
                members.append(member)
        end = tar.offset
        file.seek(end)
        padding = file.read(_END_BYTES)
    if not padding:
        raise ValueError("it ends without an end marker, so it is cut short")
    if padding.strip(b"\0"):
        raise ValueError(f"damaged at byte {end}, or several tars in one file")
    wanted = [
        each for each in members if is_media(each.name) or each.name.endswith((".txt", ".json"))
    ]
    for member in wanted:
        if not member.isreg() or member.issparse():
            raise ValueError(f"{member.name} is not a plain file")
    if len({member.name for member in wanted}) < len(wanted):
        raise ValueError("two members have the same name")
    return wanted


def _beside(
    path: Path, members: Iterable[tarfile.TarInfo]
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The contents of all .txt, and of all .json that are objects, by key."""
    texts, entries = {}, {}
    with fsio.open_regular(path) as file:
        for member in members:
            if is_media(member.name):
                continue
            if member.size > _MAX_TEXT_BYTES:
                raise ValueError(
                    f"{member.name} has {member.size:,} bytes; a text has at most "
                    f"{_MAX_TEXT_BYTES:,}"
                )
            file.seek(member.offset_data)
            data = file.read(member.size).removeprefix(codecs.BOM_UTF8)
            if member.name.endswith(".txt"):
                texts[_key(member.name)] = data.decode().strip()
            elif isinstance(entry := fsio.parse_record(data, _ANY, Path(member.name)), dict):
                entries[_key(member.name)] = entry
    return texts, entries


def _item(
    path: Path,
    member: tarfile.TarInfo,
    texts: Mapping[str, str],
    entries: Mapping[str, dict[str, Any]],
    conditioning: Sequence[str],
) -> Item:
    key = _key(member.name)
    entry = entries.get(key, {})
    captions = [texts.get(key), *(entry.get(name) for name in CAPTION_COLUMNS)]
    values = ((name, score_of(value)) for name, value in entry.items() if name not in MEASURED)
    numbers = {name: value for name, value in values if value is not None}
    return Item(
        Media(str(path), member.name, member.offset_data, member.size),
        next((text.strip() for text in captions if isinstance(text, str)), None),
        numbers,
        {
            name: given
            for name in conditioning
            if (given := _given(path, 0, name, entry.get(name))) is not None
        },
    )


def _key(name: str) -> str:
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.split('.')[0]}"
