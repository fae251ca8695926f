"""preset.json: a preset as it was when the first of its videos was made; torch-free."""

import errno
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtake.errors import RecipeError, RecordError, RunError
from longtake.fsio import parse_record, read_regular, write_json, write_once


def keep_record(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write a preset's record, unless it is there.

    Args:
        path: preset.json, which is read first: where it is there, nothing is written.
        name: of the preset.
        record: all that decides what its videos show.

    Raises:
        RecipeError: another one is there.
        RunError: it cannot be read, or written.
    """
    try:
        kept = _read(path) or _written(path, record)
    except OSError as error:
        raise not_kept(path, error) from error
    changed = [key for key in record.keys() | kept.keys() if record.get(key) != kept.get(key)]
    if changed:
        raise RecipeError(
            f"Preset {name}: {path.parent} holds videos of another one; they differ in "
            f"{', '.join(sorted(changed))}. A row of videos shows the training only if nothing "
            f"else changes: give the new one another name, such as {name}-2, or move that "
            "folder away."
        )


def not_kept(path: Path, error: OSError) -> RunError:
    """What to raise where something of a preset cannot be read or written."""
    advice = " Make room." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return RunError(f"{path} cannot be kept: {error.strerror or error}.{advice}")


def _read(path: Path) -> dict[str, Any]:
    """What is there; empty where nothing is, or what a loss of power has left.

    Raises:
        OSError: it is there, and cannot be read.
    """
    with suppress(FileNotFoundError, RecordError):
        return parse_record(read_regular(path), dict[str, Any], path)
    return {}


def _written(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write it; returns what is there then, as somebody else may have been first."""
    if not write_once(path, record) and not _read(path):
        write_json(path, record, by_many=True)  # nothing can be read in what is there
    return _read(path)
