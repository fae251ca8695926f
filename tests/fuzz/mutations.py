"""Damages files as people, disks and other programs do; each from the numbers of one generator."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DEEP = 100_000

TEXTS: list[bytes] = [
    b"",
    b"\n",
    b"[]",
    b"{}",
    b"5",
    b"null",
    b'"text"',
    b"[[]]",
    b"[{}]",
    b"NaN",
    b"1e999",
    b"-" + b"9" * 5000,
    b"[" * DEEP,
    b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    b'{"time": ' + b"1" * 70_000 + b"}",
    b'{"step": "\\ud800"}',
    b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}",
    b"\0" * 512,
    b"<html>404</html>",
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\ud800",
    "a\0b",
    "x" * 20_000,
    "../../../etc/hostname",
    "/etc/hostname",
    "\x1b]0;title\x07",
    "line\nline",
    "$(touch canary)",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
    "2026-13-45T99:99:99",
]
Change = Callable[[random.Random, Path], object]


def damage_json(chance: random.Random, path: Path) -> None:
    """A JSON file: another text, another value, a value less, or other bytes."""
    chance.choice([_replace_text, _change_value, _change_value, _change_value, damage_bytes])(
        chance, path
    )


def damage_lines(chance: random.Random, path: Path) -> None:
    """A JSON lines file: one line more, or one line changed, or its bytes."""
    chance.choice([_add_line, _change_line, _change_line, damage_bytes])(chance, path)


def damage_bytes(chance: random.Random, path: Path) -> None:
    """Flip a bit, cut the end off, or put bytes between."""
    data = bytearray(path.read_bytes())
    where = chance.randrange(len(data) + 1)
    match chance.choice(["flip", "cut", "insert", "zeros"]):
        case "flip" if data:
            data[where % len(data)] ^= 1 << chance.randrange(8)
        case "cut":
            del data[where:]
        case "insert":
            data[where:where] = chance.randbytes(chance.choice([1, 8, 4000]))
        case _:
            end = where + chance.choice([1, 8, 512])
            data[where:end] = bytes(len(data[where:end]))
    path.write_bytes(data)


def replace_by_other_kind(chance: random.Random, path: Path) -> None:
    """A named pipe, a folder, a device, or a link to something, where a file or folder was."""
    replace_with(path, chance.choice(["pipe", "folder", "device", "loop", "dangling", "nothing"]))


def replace_with(path: Path, kind: str) -> None:
    """Put something of that kind where a file or folder was."""
    _remove(path)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("/no/such/file")


def unevaluate(place: Path, *, keep_claims: bool = False) -> None:
    """Forget that the newest checkpoint was evaluated, or only the result."""
    evaluations = place / "run" / "evaluations"
    shutil.rmtree(evaluations / "tiny" / "step_00000004")
    for claim in () if keep_claims else evaluations.glob("claims/tiny/step_00000004*"):
        shutil.rmtree(claim)


class _Hostile:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch canary",)


def hostile_pickle() -> bytes:
    """A pickle that makes a file `canary` in the folder where it is read."""
    return pickle.dumps(_Hostile())


def damage_catalog(chance: random.Random, path: Path) -> None:
    """Another value, type or set of columns under the same metadata; or other bytes."""
    if chance.random() < 0.3:
        damage_bytes(chance, path)
        return
    table = pq.read_table(path)
    name = chance.choice(table.column_names)
    index = table.column_names.index(name)
    match chance.choice(["value", "value", "value", "drop", "nulls", "type", "twice", "empty"]):
        case "value":
            rows = table.column(name).to_pylist()
            rows[chance.randrange(len(rows))] = chance.choice(
                [None, -1, 0, 2**31, 2**53 + 1, 1e308, float("nan"), "", "../x", "\x1b]0;t\x07"]
            )
            for kind in (table.schema.field(name).type, None, pa.string()):
                try:
                    column = pa.array(rows if kind != pa.string() else map(str, rows), kind)
                except (pa.ArrowException, TypeError, OverflowError):
                    continue
                table = table.set_column(index, name, column)
                break
        case "drop":
            table = table.remove_column(index)
        case "nulls":
            kind = table.schema.field(name).type
            table = table.set_column(index, name, pa.nulls(len(table), kind))
        case "type":
            table = table.set_column(index, name, pa.array([[1]] * len(table)))
        case "twice":
            table = table.append_column(name, table.column(name))
        case _:
            table = table.slice(0, 0)
    pq.write_table(table, path)


def damage_tree(chance: random.Random, folder: Path, change: Change = damage_bytes) -> Path:
    """Change one file of a folder; gives which."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    path = chance.choice(found)
    change(chance, path)
    return path


def damage_recipe(chance: random.Random, path: Path) -> None:
    """Change a value of a recipe, move a line, or write bytes that are no TOML."""
    lines = path.read_text().splitlines()
    number = chance.randrange(len(lines))
    match chance.choice(["value", "value", "value", "drop", "twice", "key", "bytes", "deep"]):
        case "value" if "=" in lines[number]:
            key = lines[number].partition("=")[0]
            lines[number] = f"{key}= {chance.choice(TOML_VALUES)}"
        case "drop":
            del lines[number]
        case "twice":
            lines.insert(number, lines[number])
        case "key":
            lines.insert(number, chance.choice(["kind", "x", "out.a", '""']) + " = 1")
        case "deep":
            lines.append("[a]\nb = " + "[" * 20_000)
        case _:
            data = bytearray("\n".join(lines).encode())
            data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data)
            return
    path.write_text("\n".join(lines))


TOML_VALUES = [
    "-1",
    "0",
    "1e308",
    "nan",
    "inf",
    "true",
    '""',
    '"text"',
    '"../.."',
    '"a\\u0000b"',
    '"~/x"',
    '"/dev/null"',
    '"x:y"',
    "[]",
    "[1]",
    "[{}]",
    "{}",
    "{ a = 1 }",
    "2026-01-01",
    "9" * 18,
    "9" * 5000,
    "2147483648",
    '"' + "x" * 300 + '"',
]


def _replace_text(chance: random.Random, path: Path) -> None:
    path.write_bytes(chance.choice(TEXTS))


def _change_value(chance: random.Random, path: Path) -> None:
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        _replace_text(chance, path)
        return
    path.write_text(json.dumps(_changed(chance, record)))


def _add_line(chance: random.Random, path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    at = chance.choice([0, len(lines), chance.randrange(len(lines) + 1)])
    line = chance.choice(TEXTS)
    lines.insert(at, line + chance.choice([b"\n", b"\n", b""]))
    path.write_bytes(b"".join(lines))


def _change_line(chance: random.Random, path: Path) -> None:
    lines = path.read_bytes().splitlines()
    at = chance.randrange(len(lines))
    lines[at] = json.dumps(_changed(chance, json.loads(lines[at]))).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


def _changed(chance: random.Random, record: Any) -> Any:
    """A record with one value, at any depth, changed, dropped or added."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    if not isinstance(record, dict | list) or not record:
        return chance.choice(VALUES)
    walk(record)
    inside, key = chance.choice(places)
    match chance.choice(["change", "change", "change", "drop", "add"]):
        case "drop":
            del inside[key]
        case "add" if isinstance(inside, dict):
            inside[chance.choice(["", "x", "\x1b[2J", "a/b"])] = chance.choice(VALUES)
        case _:
            inside[key] = chance.choice(VALUES)
    return record


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
