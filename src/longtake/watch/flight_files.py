"""The flight recorder's files: ask ranks for them, gather them, read them without trusting them.

torch keeps the last collectives of each process that uses NCCL, and writes them down when a byte
comes through a named pipe. Where pipes and dumps lie is settled before the process group is made
(`longtake.parallel.flight.environment`); both are in the folder of the hearts, in memory.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtake.errors import LongtakeError
from longtake.fsio import atomic_write, open_regular
from longtake.node_dir import FLIGHT_FILE_PREFIX, FLIGHT_PIPE_PREFIX
from longtake.unpickle import RestrictedUnpickler

Stamp = tuple[int, int]
"""When a file was written last, in nanoseconds, and which file it is."""
_MOST_BYTES = 2**28
_OF_AN_ENTRY = frozenset(
    ("record_id", "pg_id", "process_group", "collective_seq_id", "profiling_name", "input_sizes")
) | {"state", "retired", "is_p2p"}


class FlightError(LongtakeError, ValueError):
    """A flight recorder's dump cannot be read, or holds what none has."""


def ask(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Ask ranks of this node to write their dumps; returns those whose pipe took it.

    A rank answers in a thread of its own, about a second later. A pipe that nobody reads, or none
    at all (no NCCL), is passed over at once.

    Args:
        folder: that of the hearts.
        ranks: in the run.
    """
    return [rank for rank in ranks if _tapped(folder / f"{FLIGHT_PIPE_PREFIX}{rank}.pipe")]


def stamps(folder: Path, ranks: Iterable[int]) -> dict[int, Stamp]:
    """By what each rank's dump is told from a later one, whatever clocks do; of those there are."""
    found = {}
    for rank in ranks:
        with suppress(OSError):
            found[rank] = _stamp(folder / f"{FLIGHT_FILE_PREFIX}{rank}")
    return found


def collect(
    folder: Path, ranks: Iterable[int], target: Path, before: Mapping[int, Stamp]
) -> list[int]:
    """Copy the dumps that were written since they were asked for; returns whose.

    Args:
        folder: that of the hearts.
        ranks: in the run.
        target: `NodeDirectory.flight_path`, where they are called rank_<rank>; made if there is
            something to copy.
        before: `stamps`, before they were asked for.
    """
    found = []
    for rank in ranks:
        path = folder / f"{FLIGHT_FILE_PREFIX}{rank}"
        with suppress(OSError):
            if _stamp(path) != before.get(rank):
                target.mkdir(parents=True, exist_ok=True)
                with atomic_write(target / f"rank_{rank}") as aside:
                    shutil.copyfile(path, aside, follow_symlinks=False)
                found.append(rank)
    return found


def tidy(folder: Path, ranks: Iterable[int]) -> None:
    """Take away what dead ranks have left, unless a rank of the same number has begun since.

    Args:
        folder: that of the hearts.
        ranks: in the run.
    """
    for rank in ranks:
        pipe = folder / f"{FLIGHT_PIPE_PREFIX}{rank}.pipe"
        if not _is_read(pipe):
            for path in (pipe, folder / f"{FLIGHT_FILE_PREFIX}{rank}"):
                path.unlink(missing_ok=True)


def tidy_all(folder: Path) -> None:
    """Take away what all dead ranks have left."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    parts = [name.removesuffix(".pipe").rpartition("_") for name in names]
    ours = (FLIGHT_FILE_PREFIX, FLIGHT_PIPE_PREFIX)
    tidy(folder, {int(rank) for *head, rank in parts if "".join(head) in ours and rank.isdecimal()})


def read(path: Path) -> dict[str, Any]:
    """Read one dump, in which only plain containers, numbers and texts are let through.

    Raises:
        FlightError: it is none; a pickle that wants anything imported is refused unread.
    """
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise FlightError(f"{path} is larger than a flight recorder's dump ever is.")
            found = RestrictedUnpickler(file).load()
    except FlightError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise FlightError(
            f"{path} is no flight recorder's dump that can be read: {error}"
        ) from error
    entries = found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise FlightError(f"{path} is no flight recorder's dump: it has no list of entries.")
    for each in entries:
        if lacking := _OF_AN_ENTRY - (each.keys() if isinstance(each, dict) else set()):
            raise FlightError(
                f"{path} has an entry without {', '.join(sorted(lacking))}, of which longtake can "
                "make nothing. Which torch has written it? 2.6 and later do so as expected."
            )
    return dict(found)


def read_folders(folders: Iterable[Path]) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The dumps rank_<rank> of several nodes' folders, by rank; and what could not be read, why."""
    dumps, troubles = {}, []
    for folder in folders:
        for path in sorted(folder.glob("rank_*")) if folder.is_dir() else ():
            try:
                dumps[int(path.name.removeprefix("rank_"))] = read(path)
            except (FlightError, ValueError) as error:
                troubles.append(str(error))
    return dumps, troubles


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino


def _is_read(pipe: Path) -> bool:
    """Whether a living process has a pipe open: torch's, that made it."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError:
        return False
    return True


def _tapped(pipe: Path) -> bool:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # there is none, or nobody reads it
        return False
    try:
        return os.write(descriptor, b"1") == 1
    except OSError:  # it is full: it was asked before, and has not answered
        return False
    finally:
        os.close(descriptor)
