"""Reads lists and tables that name media: their paths, captions, scores and spans.

A table is read twice, in batches of rows; the first time to learn what its columns hold. Paths are
relative to the folder of their list. Properties of a clip's file (size, frames) are measured, not
taken from a table. Integers of 2**53 and more are ids, not scores.
"""

import codecs
import csv
import dataclasses
import hashlib
import io
import math
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from longtake import fsio
from longtake.data import stores
from longtake.data.clip import Clip, Given, Item, Media, is_media, join_captions
from longtake.data.text_files import encoding_of, read_text
from longtake.errors import DataError, RecordError

LISTING_SUFFIXES = (".txt", ".csv", ".jsonl", ".json", ".parquet")
_PAIRED_LISTS = ("videos.txt", "images.txt")  # the lines of a list beside them are the captions
CAPTION_LISTS = ("prompt.txt", "prompts.txt")
_FILE_NAME = "file_name"
PATH_COLUMNS = (
    *("video", "image", "path", "file", _FILE_NAME),
    *("video_path", "image_path", "file_path"),
)
CAPTION_COLUMNS = ("caption", "text", "prompt", "cap")
SPAN_COLUMNS = ("start", "end")
MAX_ATTRIBUTES = 1000  # maximum number of scores in a catalog

# Properties that are measured from the file: a column of such a name is no score.
MEASURED = {field.name for field in dataclasses.fields(Clip)} | {"offset", "num_bytes", "member"}

# Larger integers are not exact in float64.
_MAX_EXACT = 2**53
ANY_JSON = TypeAdapter[Any](Any)
NUM_SHOWN = 5  # number of lines shown in a message
_ROWS_IN_MEMORY = 4096
_BUFFER_BYTES = 2**20
_T = TypeVar("_T")
_SURE_ROWS = 1_000_000  # accepted in a file of any size; a larger table has a byte for each row
_UNKNOWN = ("", "na", "n/a", "nan", "-nan", "null", "none", "#n/a")
_WORDS = dict.fromkeys(_UNKNOWN, None) | {"true": 1.0, "false": 0.0}


@dataclasses.dataclass(frozen=True)
class _Table:
    """Some rows of a table of media that follow each other: the columns that are used, by name."""

    num_before: int  # number of the table's rows before these
    names: Sequence[str]  # names of all columns
    texts: dict[str, list[str | None]]
    numbers: dict[str, list[float | None]]
    types: dict[str, str]  # types of the columns that hold neither texts nor numbers
    # Further inputs, of the columns that `data index --conditioning` names.
    conditioning: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    spans: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)  # `SPAN_COLUMNS`


def read_listing(
    path: Path,
    conditioning: Sequence[str] = (),
    extracted: Path | None = None,
    *,
    is_named: bool = True,
    at: str = "",
    known: Mapping[str, Media] | None = None,
    notes: list[str] | None = None,
) -> Iterator[Item]:
    """Yield the videos and images that a list or a table names.

    A table that was found in a folder (`is_named` is False) counts only if it names files and
    captions. `at` is the URL that a table was fetched from, and `known` has objects beside it.
    Missing files are refused at the end, so that all of them are counted. `notes` gets a sentence
    about a table without captions whose other columns could hold them.

    Raises:
        DataError: the file cannot be read, or paths in it do not exist.
    """
    if path.suffix.lower() == ".txt":
        named = _read_list(path, at)
    else:
        named = _read_table(path, conditioning, extracted, is_named=is_named, at=at, notes=notes)
    # Items are yielded as they are read, so a missing file is reported at the end.
    num_items, num_missing, shown = 0, 0, list[str]()
    for some in _batches(named):
        items, missing = _measured(some, known or {})
        num_items, num_missing = num_items + len(some), num_missing + len(missing)
        shown += missing[: NUM_SHOWN - len(shown)]
        yield from items
    if num_missing:
        raise DataError(
            f"{at or path} names {num_items} files, and {num_missing} of them do not exist:"
            f"{first_of(shown, num_missing)}\nPaths are relative to "
            f"{posixpath.dirname(at) if at else path.resolve().parent}. "
            "Correct them, or remove those lines."
        )


def _measured(items: Sequence[Item], known: Mapping[str, Media]) -> tuple[list[Item], list[str]]:
    """Return the items, those in stores with their sizes, and the paths that do not exist."""
    # Each object is asked for once, however many spans of it are named.
    asked = dict.fromkeys(each.media.whole for each in items if each.media.is_remote)
    unknown = [media for media in asked if media.path not in known]
    answers = zip(unknown, stores.measure(unknown), strict=True)
    found = {media.path: answer for media, answer in answers if answer}
    found |= {media.path: known[media.path] for media in asked if media.path in known}
    missing = [
        item.media.path
        for item in items
        if not (item.media.path in found or fsio.is_there(item.media.path))
    ]
    if not found:
        return list(items), missing
    measured = (found.get(item.media.path, item.media) for item in items)
    return [
        dataclasses.replace(item, media=dataclasses.replace(media, span=item.media.span))
        for item, media in zip(items, measured, strict=True)
    ], missing


def first_of(shown: Sequence[str], num_lines: int) -> str:
    """Format the first lines of a message, and say how many of `num_lines` are left out."""
    more = f"\n  and {num_lines - len(shown)} more" if num_lines > len(shown) else ""
    return "".join(f"\n  {each[:500]}" for each in shown) + more


def _batches(values: Iterable[_T]) -> Iterator[list[_T]]:
    following = iter(values)
    while some := list(islice(following, _ROWS_IN_MEMORY)):
        yield some


def is_paired_list(name: str) -> bool:
    return name.lower() in _PAIRED_LISTS


def captions_of_list(path: Path) -> Path | None:
    """Return the file of captions that lies beside a list such as videos.txt, or None."""
    if not is_paired_list(path.name):
        return None
    beside = map(path.with_name, CAPTION_LISTS)
    return next((each for each in beside if each.is_file()), None)


def _read_list(path: Path, at: str) -> Iterator[Item]:
    beside = captions_of_list(path)
    # Blank lines between others are empty captions. Not `splitlines`, which would also split at
    # characters within a caption, such as U+2028.
    captions = None if beside is None else read_text(beside).rstrip().split("\n")
    try:
        with (
            fsio.open_regular(path) as binary,
            io.TextIOWrapper(binary, encoding=encoding_of(binary)) as file,
        ):
            folder, number = str(path.resolve().parent), 0
            for line in map(str.strip, file):
                if not line:
                    continue
                number += 1
                if captions is None:
                    yield Item(_media_in(folder, line, at))
                elif number <= len(captions):
                    yield Item(_media_in(folder, line, at), captions[number - 1].strip())
        if captions is not None and number != len(captions):
            raise DataError(
                f"{at or path} names {number} files, and {beside.name if at else beside} has "  # type: ignore[union-attr]
                f"{len(captions)} captions. Write "
                "one line in each for every clip, in the same order."
            )
    except UnicodeDecodeError as error:
        raise DataError(f"The list {path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from error


def _media_in(folder: str, name: str, at: str = "") -> Media:
    """Return the media file that a list or table names, relative to its folder or URL (`at`)."""
    if (url := stores.url_of(name)) is not None:
        return Media(url)
    if at:
        scheme, _, rest = posixpath.dirname(at).partition("://")
        return Media(f"{scheme}://{posixpath.normpath(posixpath.join(rest, name))}")
    # Text instead of a Path, which is much slower for millions of rows. Links are not resolved, but
    # two spellings of a path become one medium.
    return Media(os.path.normpath(f"{folder}/{name}" if name[:1] != "/" else name))


def _read_table(
    path: Path,
    conditioning: Sequence[str],
    extracted: Path | None,
    *,
    is_named: bool,
    at: str,
    notes: list[str] | None,
) -> Iterator[Item]:
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl, ".json": _read_jsonl}
    try:
        if path.suffix.lower() in readers:
            batches = readers[path.suffix.lower()](path, conditioning)
        else:
            batches = _read_parquet(path, conditioning, extracted)
        for table in batches:
            has_captions = any(name in table.names for name in CAPTION_COLUMNS)
            if notes is not None and not table.num_before and not has_captions:
                read = {*table.numbers, *table.conditioning, *table.spans, *PATH_COLUMNS, *MEASURED}
                if unread := [name for name in table.names if name not in read]:
                    notes.append(f"{at or path} has no column of captions; {name_unread(unread)}")
            # A table that was only found counts if it names clips and has captions for them.
            has_both = has_captions and any(name in table.names for name in PATH_COLUMNS)
            if not (is_named or _FILE_NAME in table.names or has_both):
                return
            yield from _items(path, table, at)
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"it is not UTF-8 text: {error}") from error
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or error) from error


def name_unread(names: Sequence[str]) -> str:
    """Return a sentence about unread columns of a table, and the names of a caption column."""
    return (
        f"not read: {', '.join(names)[:500]}. If one of them has captions, call it "
        f"{' or '.join(CAPTION_COLUMNS)}, and index again."
    )


def _items(path: Path, table: _Table, at: str) -> list[Item]:
    column = next((name for name in PATH_COLUMNS if name in table.names), None)
    if column is None:
        known = ", ".join(table.names) or "none with a value"
        raise DataError(
            f"{path} has no column of paths; its columns: {known[:500]}. "
            f"Name the one with the paths {' or '.join(PATH_COLUMNS)}."
        )
    paths = _texts(path, table, column)
    if None in paths:
        row = table.num_before + paths.index(None) + 1
        raise DataError(f"{at or path}: row {row} has no path. Add it or remove it.")
    caption = next((name for name in CAPTION_COLUMNS if name in table.names), None)
    captions = _texts(path, table, caption) if caption else [None] * len(paths)
    folder = str(path.resolve().parent)
    spans = _spans(at or path, table, len(paths))
    if len(table.numbers) > MAX_ATTRIBUTES:
        raise _unreadable(
            path,
            f"it has {len(table.numbers):,} numeric columns, at most {MAX_ATTRIBUTES:,} can be",
        )
    return [
        Item(
            _media_in(folder, name or "", at).cut(spans[row]),
            None if text is None else text.strip(),
            {
                score: value
                for score, values in table.numbers.items()
                if (value := values[row]) is not None
            },
            {
                column: given
                for column, values in table.conditioning.items()
                if (given := further_input(path, table.num_before + row, column, values[row], at))
                is not None
            },
        )
        for row, (name, text) in enumerate(zip(paths, captions, strict=True))
    ]


def _spans(
    path: Path | str, table: _Table, num_rows: int
) -> Sequence[tuple[float, float | None] | None]:
    """Return the spans of videos, in seconds, in a table's `start` and `end`; None: whole files."""
    # One of the two columns alone is a score like any other.
    if len(table.spans) < len(SPAN_COLUMNS):
        return [None] * num_rows
    starts, ends = (_seconds(path, table, name) for name in SPAN_COLUMNS)
    for name in SPAN_COLUMNS:  # numbers, but no scores
        table.numbers.pop(name, None)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True), table.num_before + 1):
        if not 0 <= (start or 0.0) < (math.inf if end is None else end):
            raise DataError(
                f"{path}: row {row} has start = {start} and end = {end}; expected seconds from the "
                "first frame on, the start before the end."
            )
    return [
        None if start is None and end is None else (start or 0.0, end)
        for start, end in zip(starts, ends, strict=True)
    ]


def _seconds(path: Path | str, table: _Table, name: str) -> list[float | None]:
    found: list[float | None] = []
    for row, value in enumerate(table.spans[name], table.num_before + 1):
        is_unknown = value is None or str(value).strip().lower() in _UNKNOWN
        try:
            number = None if is_unknown else float(value)
        except (TypeError, ValueError):
            raise DataError(
                f"{path}: row {row} has {name} = {str(value)!r:.80}; expected seconds from the "
                "first frame on, such as 62.5, or nothing. Correct it, or rename the column."
            ) from None
        found.append(_finite(number))
    return found


def further_input(path: Path, row: int, column: str, value: object, at: str = "") -> Given | None:
    """Return a clip's conditioning input in a table: a path made absolute, or a list of numbers."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and value.lstrip()[:1] != "[":
        return _media_in(str(path.resolve().parent), value, at).path
    where = f"row {row + 1}, column {column!r}"
    try:
        if isinstance(value, str):  # a list in a CSV cell
            value = fsio.parse_record(value.encode(), ANY_JSON, path)
        numbers = np.ravel(np.array(value, np.float64))  # refuses lists of different lengths
        if isinstance(value, bool) or not np.isfinite(numbers).all() or not numbers.size:
            raise ValueError("NaN, infinite or none")
    except (RecordError, TypeError, ValueError) as error:
        raise _unreadable(
            path, f"{where} is {value!r:.80}; expected a path, or a list of numbers"
        ) from error
    return tuple(numbers.tolist())


def _read_csv(path: Path, conditioning: Sequence[str]) -> Iterator[_Table]:
    # A column is a score only if all of its rows hold numbers, so a first pass reads all rows.
    other, known = set[str](), set[str]()  # names of columns with a text, and with a number
    for _, _, columns in _csv_columns(path):
        for name in filter(_may_be_score, columns.keys() - other):
            values = _parsed(columns[name])
            if values is None:
                other.add(name)
            elif any(value is not None for value in values):
                known.add(name)
    scores = sorted(known - other)
    for names, num_before, columns in _csv_columns(path):
        yield _Table(
            num_before,
            names,
            {
                name: [text or None for text in columns[name]]
                for name in (*PATH_COLUMNS, *CAPTION_COLUMNS)
                if name in names
            },
            {name: _parsed(columns[name]) or [] for name in scores},
            {},
            {name: columns[name] for name in conditioning if name in names},
            {name: columns[name] for name in SPAN_COLUMNS if name in names},
        )


def _csv_columns(path: Path) -> Iterator[tuple[list[str], int, dict[str, Sequence[str]]]]:
    """Read a CSV file in parts: (column names, number of earlier rows, columns of the part)."""
    rows = _csv_rows(path)
    header = next(rows, None)
    if header is None:
        raise _unreadable(path, "it is empty")
    # Two columns of one name would overwrite each other.
    names, num_before = _different(path, header), 0
    for some in _batches(rows):
        yield names, num_before, dict(zip(names, zip(*some, strict=True), strict=True))
        num_before += len(some)
    # A table without rows still has columns to check.
    if not num_before:
        yield names, 0, dict.fromkeys(names, ())


def _csv_rows(path: Path) -> Iterator[list[str]]:
    # newline="" as csv asks for; the reader of codecs.open takes minutes for a line of megabytes.
    with (
        fsio.open_regular(path) as binary,
        io.TextIOWrapper(binary, encoding=encoding_of(binary), newline="") as file,
    ):
        reader = csv.reader(file, strict=True)  # an unclosed quote must not swallow rows
        num_rows, num_columns = -1, 0
        try:
            for row in reader:
                if row and len(row) != (num_columns := num_columns or len(row)):
                    raise csv.Error(f"{len(row)} columns instead of the header's {num_columns}")
                if row:
                    num_rows += 1
                    yield row
        except csv.Error as error:
            start = f", in row {num_rows + 1}" if num_columns else ""
            raise _unreadable(path, f"line {reader.line_num}{start}: {error}") from error


def _parsed(texts: Iterable[str]) -> list[float | None] | None:
    """Return a table column's texts as numbers, or None if one of them is not a number."""
    values: list[float | None] = []
    for text in texts:
        word = text.strip().lower()
        try:
            value = _WORDS[word] if word in _WORDS else float(word)
        except ValueError:
            return None
        # 1e20 is a number, but digits of this length are an id.
        is_id = value is not None and abs(value) >= _MAX_EXACT and word.lstrip("+-").isdecimal()
        # Python's float accepts 1_000, which no other tool writes as a number.
        if "_" in word or is_id:
            return None
        values.append(_finite(value))
    return values


def _read_jsonl(path: Path, conditioning: Sequence[str]) -> Iterator[_Table]:
    # Dictionaries serve as sets that keep the order of the columns.
    texts, numbers, names = dict[str, None](), dict[str, None](), dict[str, None]()
    types: dict[str, str] = {}
    for row in _jsonl_rows(path):
        for name, value in row.items():
            names[name] = None
            if not _is_text(name):
                if _may_be_score(name) and score_of(value) is not None:
                    numbers[name] = None
            elif not isinstance(value := caption_of(name, value), str | None):
                types.setdefault(name, type(value).__name__)
            elif value:
                texts[name] = None
    # Rows may have different keys, so the columns are known only after the first pass.
    used = [name for name in names if name in texts and name not in types]
    others = [name for name in names if not _is_text(name)]
    num_before = 0
    for rows in _batches(_jsonl_rows(path)) if names else iter([list[dict[str, Any]]()]):
        yield _Table(
            num_before,
            [*used, *types, *others],
            {name: [caption_of(name, row.get(name)) or None for row in rows] for name in used},
            {name: [score_of(row.get(name)) for row in rows] for name in names if name in numbers},
            types,
            {name: [row.get(name) for row in rows] for name in conditioning if name in names},
            {name: [row.get(name) for row in rows] for name in SPAN_COLUMNS if name in names},
        )
        num_before += len(rows)


def caption_of(name: str, value: object) -> Any:
    """Return a value of a column; a list of captions becomes one text with all of them."""
    if name not in CAPTION_COLUMNS or not isinstance(value, list):
        return value
    return value if any(not isinstance(e, str | None) for e in value) else join_captions(value)


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix.lower() == ".json":
        try:
            yield from fsio.parse_record(fsio.read_regular(path), list[dict[str, Any]], path)
        except RecordError as error:
            reason = f"expected a list of objects, one for each clip: {error.reason}"
            raise _unreadable(path, reason) from error
        return
    for number, line in _lines(path):
        try:
            yield fsio.parse_record(line, dict[str, Any], path, fsio.MAX_LINE_DEPTH)
        except RecordError as error:
            raise _unreadable(path, f"line {number}: {error.reason}") from error


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
    """Return a JSON value as a clip's score, or None if it is not a number that can be one."""
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= _MAX_EXACT):
        return None
    return _finite(float(value))


def _read_parquet(
    path: Path, conditioning: Sequence[str], extracted: Path | None
) -> Iterator[_Table]:
    with (
        fsio.open_regular(path) as binary,
        pq.ParquetFile(binary, buffer_size=_BUFFER_BYTES) as file,
    ):
        num_rows, num_bytes = file.metadata.num_rows, path.stat().st_size
        # A tiny file can claim billions of rows (run-length encoding), which would fill the memory.
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
        spans = [name for name in SPAN_COLUMNS if name in names]
        inside = next((name for name in PATH_COLUMNS if _holds_media(fields.get(name))), None)
        columns = [name for name in [*wanted, *given, *spans] if name != inside]
        columns = list(dict.fromkeys(columns))
        paths: Iterator[str] | None = None
        if inside is not None and extracted is not None:
            # An iterator of its own: media are read in far smaller batches than the other columns.
            paths = _extract(path, file, inside, extracted)
        strings = pa.string(), pa.large_string()
        texts = [name for name in wanted if fields[name] in strings and name != inside]
        texts += [name for name in CAPTION_COLUMNS if _item_type(fields.get(name)) in strings]
        scores = [name for name in wanted if _is_numeric(name, fields[name])]
        # Found in a pass of their own: the cast to float64 below raises for integers that it
        # rounds.
        ids = _columns_of_ids(file, [name for name in scores if pa.types.is_integer(fields[name])])
        types = {
            name: str(fields[name])
            for name in names
            if name not in texts and (name != inside or paths is None)
        }
        nothing = pa.RecordBatch.from_pylist(
            [], pa.schema([(each, fields[each]) for each in columns])
        )
        num_before = 0
        for batch in file.iter_batches(_ROWS_IN_MEMORY, columns=columns) if num_rows else [nothing]:
            read = {name: [caption_of(name, e) for e in batch[name].to_pylist()] for name in texts}
            if inside is not None and paths is not None:
                read[inside] = list(islice(paths, len(batch)))
            yield _Table(
                num_before,
                names,
                {name: [text or None for text in column] for name, column in read.items()},
                {
                    name: list(map(_finite, batch[name].cast(pa.float64()).to_pylist()))
                    for name in scores
                    if name not in ids
                },
                types,
                {name: batch[name].to_pylist() for name in given if name != inside},
                {name: batch[name].to_pylist() for name in spans},
            )
            num_before += len(batch)


def _item_type(kind: Any) -> Any:
    """Return the type of the items of a column of lists, of the kinds that programs write."""
    tests = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return kind.value_type if kind is not None and any(test(kind) for test in tests) else None


def _holds_media(kind: Any) -> bool:
    """Return true if a table column holds media themselves (Hugging Face: bytes and path)."""
    return (
        kind is not None
        and pa.types.is_struct(kind)
        and {"bytes", "path"} <= {kind.field(index).name for index in range(kind.num_fields)}
    )


def _extract(path: Path, file: pq.ParquetFile, name: str, folder: Path) -> Iterator[str]:
    """Write the media inside a table's column to files of their own, and yield their paths.

    An existing file with the same content is not written, so that it is not indexed again.
    """
    # Tables of the same name in two folders must not share a folder of media.
    name_of_table = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    inside, row = folder / f"{path.stem}-{name_of_table}", 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[name]):
        for value in batch.column(0).to_pylist():
            row += 1
            data: bytes | None = value and value["bytes"]
            original: str = (value and value["path"]) or ""
            if data is None and original:
                yield _media_in(str(path.resolve().parent), original).path
                continue
            data = data or b""
            # Many tables have no name of the file, or a wrong one, so its first bytes count more.
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
    """Return a media file's ending by its first bytes, else by its original name, or None."""
    if not data:
        return None
    for start, offset, suffix in _MAGIC:
        if data[offset : offset + len(start)] == start:
            return suffix
    return PurePath(name).suffix.lower() if is_media(name) else None


_ROWS_AT_ONCE = 16  # number of rows whose media are in memory
_MAGIC = (
    (b"\x89PNG", 0, ".png"),
    (b"\xff\xd8\xff", 0, ".jpg"),
    (b"WEBP", 8, ".webp"),
    (b"GIF8", 0, ".gif"),
    (b"ftypavif", 4, ".avif"),
    (b"ftypqt", 4, ".mov"),  # before the general `ftyp`, as AVIF
    (b"ftyp", 4, ".mp4"),
    (b"\x1a\x45\xdf\xa3", 0, ".mkv"),
)


def _columns_of_ids(file: pq.ParquetFile, integers: Sequence[str]) -> set[str]:
    """Return the table's columns with an integer that is too large for a score."""
    ids = set[str]()
    for batch in file.iter_batches(_ROWS_IN_MEMORY, columns=list(integers)) if integers else ():
        for name in integers:
            bounds = pc.min_max(batch[name]).as_py()
            if any(abs(bound or 0) >= _MAX_EXACT for bound in bounds.values()):
                ids.add(name)
    return ids


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


def _texts(path: Path, table: _Table, name: str) -> list[str | None]:
    if name not in table.texts and name in CAPTION_COLUMNS:
        raise DataError(
            f"{path}: column {name!r} holds {table.types[name][:200]}; expected a text, or "
            "a list of texts, for each clip."
        )
    if name not in table.texts:
        raise DataError(
            f"{path}: column {name!r} holds {table.types[name][:200]}; expected text. Media inside "
            "a table cannot be read in place: write them to files or tars, and their paths here."
        )
    return table.texts[name]


def _unreadable(path: Path, why: object) -> DataError:
    return DataError(f"{path} cannot be read: {str(why).rstrip('.')}.")
