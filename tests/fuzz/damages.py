"""What the named cases damage: each function gives what is done to a place before a command."""

import json
import tarfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.fuzz.generators import take_permission
from tests.fuzz.mutations import replace_with, unevaluate

from longtake.checkpoint.files import commit, describe_files, list_files
from longtake.data.catalog import FINGERPRINT_KEY

Damage = Callable[[Path], object]

STEP = "run/checkpoints/step_00000004"
_NO_RECORDS = [b"[]", b"5", b"{}", b'{"step": "x", "event": 5}', b'{"step": 1}', b'"text"', b"null"]


def add_lines(name: str, lines: Sequence[bytes] = _NO_RECORDS) -> Damage:
    """Add lines at both ends of a JSON lines file."""

    def damage(place: Path) -> None:
        path = place / name
        more = b"".join(line + b"\n" for line in lines)
        path.write_bytes(more + path.read_bytes() + more)

    return damage


def set_text(name: str, text: bytes) -> Damage:
    """Make a file hold something else."""

    def damage(place: Path) -> None:
        for path in place.glob(name) if "*" in name else [place / name]:
            path.write_bytes(text)

    return damage


def set_values(name: str, **values: Any) -> Damage:
    """Change fields of a JSON file."""

    def damage(place: Path) -> None:
        for path in place.glob(name):
            path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def recommit(name: str, text: bytes) -> Damage:
    """Change a file of a checkpoint before its checksum is taken."""

    def damage(place: Path) -> None:
        folder = place / STEP
        (folder / name).write_bytes(text)
        (folder / "COMMITTED").unlink()
        commit(folder, describe_files(folder, list_files(folder)))

    return damage


def put_kind(name: str, kind: str) -> Damage:
    """Put a named pipe, a folder or a device where a file was."""

    def damage(place: Path) -> None:
        for path in _found(place, name):
            replace_with(path, kind)

    return damage


def _found(place: Path, name: str) -> list[Path]:
    return list(place.glob(name)) if "*" in name else [place / name]


def make_unreadable(name: str) -> Damage:
    """A file that its reader has no permission for."""

    def damage(place: Path) -> None:
        for path in _found(place, name):
            path.chmod(0)

    return damage


def make_read_only(name: str) -> Damage:
    """Nothing below a folder can be written, and one checkpoint is not evaluated yet."""

    def damage(place: Path) -> None:
        unevaluate(place)
        take_permission(place / name)

    return damage


def add_source(name: str, data: bytes | str) -> Damage:
    """A file in a folder to index."""

    def damage(place: Path) -> None:
        (place / "more").mkdir(exist_ok=True)
        encoded = data.encode() if isinstance(data, str) else data
        (place / "more" / name).write_bytes(encoded)
        (place / "more" / "a.mp4").write_bytes(next((place / "clips").glob("*.mp4")).read_bytes())

    return damage


def add_table(**columns: Any) -> Damage:
    """A Parquet table in a folder to index."""

    def damage(place: Path) -> None:
        add_source("list.parquet", b"")(place)
        pq.write_table(pa.table(columns), place / "more" / "list.parquet")

    return damage


def add_tar(text: bytes, name: str = "a.json") -> Damage:
    """A WebDataset tar in a folder to index: one clip, and a text about it."""

    def damage(place: Path) -> None:
        add_source("none.txt", b"")(place)
        with tarfile.open(place / "more" / "a.tar", "w") as tar:
            tar.add(place / "more" / "a.mp4", "a.mp4")
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, BytesIO(text))

    return damage


def set_cell(column: str, value: Any, *, fingerprint: bool) -> Damage:
    """Another value in the catalog's first row, with the old fingerprint or without one."""

    def damage(place: Path) -> None:
        path = place / "catalog.parquet"
        table = pq.read_table(path)
        if column not in table.column_names:
            table = table.append_column(column, pa.array([1.0] * len(table)))
        index = table.column_names.index(column)
        rows = [value, *table.column(column).to_pylist()[1:]]
        field = table.schema.field(column).with_nullable(True)
        table = table.set_column(index, field, pa.array(rows, field.type))
        if not fingerprint:
            marks = {
                key: mark for key, mark in table.schema.metadata.items() if key != FINGERPRINT_KEY
            }
            table = table.replace_schema_metadata(marks)
        pq.write_table(table, path)

    return damage


def add_to_recipe(line: str) -> Damage:
    """A line more at the end of the recipe, or in place of the line of that key."""

    def damage(place: Path) -> None:
        path = place / "recipe.toml"
        path.write_text(f"{path.read_text()}\n{line}\n")

    return damage


def change_kept_recipe(old: str, new: str) -> Damage:
    """The recipe in the run, changed."""

    def damage(place: Path) -> None:
        path = place / "run" / "recipe.toml"
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new))

    return damage
