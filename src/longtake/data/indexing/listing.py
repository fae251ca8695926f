"""Reads lists and tables that name media.

    .txt                   one path per line
    .csv .jsonl .parquet   paths in a column `video`, `image`, `path` or `file`; captions, if any,
                           in `caption` or `text`; every other numeric column is an attribute

Paths are relative to the folder that the list lies in. What a clip's file says itself (its size,
its frames) is measured, never believed: columns with those names are passed over.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from longtake.data.clip import Clip, Media
from longtake.data.indexing.item import Item
from longtake.errors import DataError

PATH_COLUMNS = ("video", "image", "path", "file")
CAPTION_COLUMNS = ("caption", "text")

_TEXT = pa.schema([(name, pa.string()) for name in (*PATH_COLUMNS, *CAPTION_COLUMNS)])
MEASURED = {field.name for field in dataclasses.fields(Clip)} | {"offset", "num_bytes", "member"}


def read_listing(path: Path) -> list[Item]:
    """Return what a list or a table names, in its order.

    Raises:
        DataError: it cannot be read, has no column of paths, or names files that are not there.
    """
    items = _read_list(path) if path.suffix.lower() == ".txt" else _read_table(path)
    missing = [item.media.path for item in items if not Path(item.media.path).exists()]
    if missing:
        shown = "".join(f"\n  {each}" for each in missing[:5])
        more = f"\n  and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise DataError(
            f"{path} names {len(items)} files, and {len(missing)} of them do not exist:"
            f"{shown}{more}\nPaths are relative to {path.resolve().parent}. "
            "Correct them, or remove those lines."
        )
    return items


def _read_list(path: Path) -> list[Item]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"The list {path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from error
    return [Item(_media(path, line.strip())) for line in lines if line.strip()]


def _media(listing: Path, name: str) -> Media:
    return Media(os.path.normpath(listing.resolve().parent / name))


def _read_table(path: Path) -> list[Item]:
    reader = {".csv": _read_csv, ".jsonl": _read_jsonl}.get(path.suffix.lower(), _read_parquet)
    table = _read(path, reader)
    paths = _texts(path, table, _column(path, table, PATH_COLUMNS))
    if None in paths:
        raise DataError(f"{path}: row {paths.index(None) + 1} has no path. Add it or remove it.")
    caption = next((name for name in CAPTION_COLUMNS if name in table.column_names), None)
    captions = _texts(path, table, caption) if caption else [None] * len(paths)
    scores = {name: table[name].cast(pa.float64()).to_pylist() for name in _numeric(table)}
    return [
        Item(
            _media(path, name or ""),
            None if text is None else text.strip(),
            {score: values[row] for score, values in scores.items() if values[row] is not None},
        )
        for row, (name, text) in enumerate(zip(paths, captions, strict=True))
    ]


def _read(path: Path, reader: Callable[[Path], pa.Table]) -> pa.Table:
    try:
        return reader(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or error) from error


def _read_csv(path: Path) -> pa.Table:
    types = {field.name: field.type for field in _TEXT}  # a name such as 0017 is no number
    options = pa.csv.ConvertOptions(column_types=types)
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    return pa.csv.read_csv(path, convert_options=options, parse_options=parse)


def _read_jsonl(path: Path) -> pa.Table:
    parse = pa.json.ParseOptions(explicit_schema=_TEXT, unexpected_field_behavior="infer")
    table = pa.json.read_json(path, parse_options=parse)
    empty = [name for name in _TEXT.names if table[name].null_count == len(table)]
    return table.drop_columns(empty)


def _read_parquet(path: Path) -> pa.Table:
    return pa.parquet.ParquetFile(path).read()


def _column(path: Path, table: pa.Table, wanted: Sequence[str]) -> str:
    for name in wanted:
        if name in table.column_names:
            return name
    raise DataError(
        f"{path} has no column of paths; its columns are {', '.join(table.column_names)}. "
        f"Name the one with the paths {' or '.join(wanted)}."
    )


def _texts(path: Path, table: pa.Table, name: str) -> list[str | None]:
    column = table[name]
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise DataError(
            f"{path}: column {name!r} holds {column.type}; expected text. Media inside a table "
            "cannot be read in place: write them to files or tars, and their paths here."
        )
    texts: list[str | None] = [text or None for text in column.to_pylist()]
    return texts


def _numeric(table: pa.Table) -> list[str]:
    def is_numeric(column: Any) -> bool:
        kind = column.type
        return any(
            test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        )

    names = (name for name in table.column_names if name not in MEASURED)
    return [name for name in names if is_numeric(table[name])]


def _unreadable(path: Path, why: object) -> DataError:
    return DataError(f"{path} cannot be read: {why}.")
