"""Damages of the named cases: each function gives what is done to a place before a command."""

import json
import tarfile
from collections.abc import Callable, Sequence
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import pyarrow as pa
import pyarrow.parquet as pq
from tests.fuzz.mutations import replace_with

from longtake.checkpoint.files import commit, describe_files, list_files
from longtake.data.catalog import FINGERPRINT_KEY

Damage = Callable[[Path], object]
_Options = ParamSpec("_Options")

STEP = "run/checkpoints/step_00000004"
_NO_RECORDS = [b"[]", b"5", b"{}", b'{"step": "x", "event": 5}', b'{"step": 1}', b'"text"', b"null"]


def damage(function: Callable[Concatenate[Path, _Options], object]) -> Callable[_Options, Damage]:
    """Take the arguments of a function now, and the place, its first, later."""

    @wraps(function)
    def choose(*options: _Options.args, **more: _Options.kwargs) -> Damage:
        return lambda place: function(place, *options, **more)

    return choose


@damage
def add_lines(place: Path, name: str, lines: Sequence[bytes] = _NO_RECORDS) -> None:
    """Add lines at both ends of a JSON lines file."""
    path = place / name
    more = b"".join(line + b"\n" for line in lines)
    path.write_bytes(more + path.read_bytes() + more)


@damage
def set_text(place: Path, name: str, text: bytes) -> None:
    """Make a file hold something else."""
    for path in named(place, name):
        path.write_bytes(text)


@damage
def set_values(place: Path, /, name: str, **values: Any) -> None:
    """Change fields of a JSON file."""
    for path in named(place, name):
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@damage
def recommit(place: Path, name: str, text: bytes) -> None:
    """Change a file of a checkpoint before its checksum is taken."""
    folder = place / STEP
    (folder / name).write_bytes(text)
    (folder / "COMMITTED").unlink()
    commit(folder, describe_files(folder, list_files(folder)))


@damage
def take_reading(place: Path, name: str) -> None:
    """Take the permission to read a file or a folder."""
    for path in named(place, name):
        path.chmod(0)


@damage
def put_kind(place: Path, name: str, kind: str) -> None:
    """Put a named pipe, a folder or a device where a file was."""
    for path in named(place, name):
        replace_with(path, kind)


@damage
def add_source(place: Path, name: str, data: bytes | str) -> None:
    """Add a file, and a clip, to a folder to index."""
    (place / "more").mkdir(exist_ok=True)
    encoded = data.encode() if isinstance(data, str) else data
    (place / "more" / name).write_bytes(encoded)
    (place / "more" / "a.mp4").write_bytes(next((place / "clips").glob("*.mp4")).read_bytes())


@damage
def add_table(place: Path, /, **columns: Any) -> None:
    """Add a Parquet table to a folder to index."""
    add_source("list.parquet", b"")(place)
    pq.write_table(pa.table(columns), place / "more" / "list.parquet")


@damage
def add_tar(place: Path, text: bytes) -> None:
    """Add a WebDataset tar to a folder to index: one clip, and a text about it."""
    add_source("none.txt", b"")(place)
    with tarfile.open(place / "more" / "a.tar", "w") as tar:
        tar.add(place / "more" / "a.mp4", "a.mp4")
        member = tarfile.TarInfo("a.json")
        member.size = len(text)
        tar.addfile(member, BytesIO(text))


@damage
def set_cell(place: Path, column: str, value: Any, *, fingerprint: bool) -> None:
    """Put another value in the catalog's first row; with the old fingerprint or without one."""
    path = place / "catalog.parquet"
    table = pq.read_table(path)
    if column not in table.column_names:
        table = table.append_column(column, pa.array([1.0] * len(table)))
    index = table.column_names.index(column)
    rows = [value, *table.column(column).to_pylist()[1:]]
    field = table.schema.field(column).with_nullable(True)
    table = table.set_column(index, field, pa.array(rows, field.type))
    if not fingerprint:
        marks = table.schema.metadata.items()
        kept = {key: mark for key, mark in marks if key != FINGERPRINT_KEY}
        table = table.replace_schema_metadata(kept)
    pq.write_table(table, path)


@damage
def change_kept_recipe(place: Path, old: str, new: str) -> None:
    """Change the recipe in the run."""
    path = place / "run" / "recipe.toml"
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new))


def named(place: Path, name: str) -> list[Path]:
    """List the files of a name, which may be a pattern."""
    return list(place.glob(name)) if "*" in name else [place / name]
