"""Analysis of torch's flight recorder: the rank that holds up a collective.

Each process that uses NCCL keeps its last collectives and writes them to a file when a byte comes
through a named pipe, both in the heartbeat folder (`parallel.mesh.recorder_environment`). A rank
waits at its first unfinished collective, for the members that did not enqueue it (they never
joined) and for those that enqueued it but wait at an earlier one of their own. The roots of this
graph of waits are the cause: ranks that others wait for and that wait for nobody. A root has
nothing pending (its program never reached the collective), or is the only one that has not finished
it (its device stalls). If all members are at the same collective and none has finished it, no rank
is the cause but the network.
"""

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from longtake import errors, fsio, node_dir, trust

MESSAGE = -1
"""Number that stands for the sequence number of every point-to-point message.

Sender and receiver count messages differently, so only the oldest pending one can be matched."""
_MAX_BYTES = 2**28
_ENTRY_KEYS = frozenset(
    ("record_id", "pg_id", "process_group", "collective_seq_id", "profiling_name", "input_sizes")
) | {"state", "retired", "is_p2p"}
_NAME = re.compile(
    rf"(?:{node_dir.FLIGHT_FILE_PREFIX}|{node_dir.FLIGHT_PIPE_PREFIX})(\d+)(?:\.pipe)?"
)
_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class FlightRecorderError(errors.LongtakeError, ValueError):
    """Error: a file cannot be read as a dump of torch's flight recorder."""


# --- Files, in the heartbeat folder: a pipe and a dump for each rank.


def request_files(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Ask this node's ranks to write their flight recorders' files; return the reached ranks.

    A rank writes its file in a thread of its own, about a second later. A rank without a pipe (no
    NCCL), or without a reader of it, is skipped at once.
    """
    return [rank for rank in ranks if _write_byte(_pipe(folder, rank))]


def file_versions(folder: Path, ranks: Iterable[int]) -> dict[int, object]:
    """Return the version of each rank's flight recorder file, which changes with each new file."""
    return {rank: fsio.file_version(_file(folder, rank)) for rank in ranks}


def copy_files(
    folder: Path, ranks: Iterable[int], target: Path, before: Mapping[int, object]
) -> list[int]:
    """Copy flight recorder files newer than `before` to `target`, and return their ranks.

    The copies are `target`/rank_<rank>. The folder is only created if there is something to copy.
    """
    found = []
    for rank, version in file_versions(folder, ranks).items():
        if version is not None and version != before.get(rank):
            with suppress(OSError):
                target.mkdir(parents=True, exist_ok=True)
                with fsio.atomic_write(target / f"rank_{rank}") as aside:
                    shutil.copyfile(_file(folder, rank), aside, follow_symlinks=False)
                found.append(rank)
    return found


def remove_files(folder: Path, ranks: Iterable[int]) -> None:
    """Remove flight recorder files and pipes of dead ranks; keep pipes that a new process reads."""
    for rank in ranks:
        pipe = _pipe(folder, rank)
        try:
            # fifo(7): opening a pipe to write without blocking fails if it has no reader.
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
        except OSError:  # no living process reads it
            for path in (pipe, _file(folder, rank)):
                path.unlink(missing_ok=True)


def remove_all_files(folder: Path) -> None:
    """Remove the flight recorder files and pipes of all dead ranks in a heartbeat folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    names = [_NAME.fullmatch(path.name) for path in paths]
    remove_files(folder, {int(name[1]) for name in names if name})


def read_file(path: Path) -> dict[str, Any]:
    """Read the pickle of a flight recorder; it may have plain containers, numbers and strings only.

    Raises:
        FlightRecorderError: the file cannot be read, or has another format.
    """
    try:
        with fsio.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise FlightRecorderError(f"{path} is larger than any flight recorder's file.")
            # Other users' processes may have written it, and a plain unpickler runs any code.
            found = trust.RestrictedUnpickler(file).load()
    except FlightRecorderError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise FlightRecorderError(
            f"{path} cannot be read as a flight recorder's file: {error}"
        ) from error
    entries = found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise FlightRecorderError(f"{path} has no list of entries; a flight recorder's file has.")
    for each in entries:
        if missing := _ENTRY_KEYS - (each.keys() if isinstance(each, dict) else set()):
            raise FlightRecorderError(
                f"{path} has an entry without {', '.join(sorted(missing))}. Expected the format of "
                "torch 2.6 and later."
            )
    return dict(found)


def read_folders(folders: Iterable[Path]) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Read flight recorder files rank_<rank> in the folders of several nodes.

    Returns:
        The dumps by rank, and an error message for each file that cannot be read.
    """
    dumps, problems = {}, []
    for folder in folders:
        for path in sorted(folder.glob("rank_*")) if folder.is_dir() else ():
            try:
                dumps[int(path.name.removeprefix("rank_"))] = read_file(path)
            except (FlightRecorderError, ValueError) as error:
                problems.append(str(error))
    return dumps, problems


def _pipe(folder: Path, rank: int) -> Path:
    return folder / f"{node_dir.FLIGHT_PIPE_PREFIX}{rank}.pipe"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{node_dir.FLIGHT_FILE_PREFIX}{rank}"


def _write_byte(pipe: Path) -> bool:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # there is none, or it has no reader
        return False
    try:
        return os.write(descriptor, b"1") == 1
    except OSError:  # full: an earlier request was not answered
        return False
    finally:
        os.close(descriptor)


# --- What the ranks recorded, in terms that are equal on all ranks.


@dataclass(frozen=True, eq=False)
class GroupMembers:
    """A torch process group and its ranks, according to flight recorders.

    Groups are compared by identity, as disjoint groups may have the same name.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveOp:
    """One collective operation, equal on all its ranks, or one message between two ranks."""

    group: GroupMembers
    number: int
    ends: tuple[int, int] | None = None  # sender and receiver of a message, if known

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.ends or self.group.ranks


@dataclass(frozen=True)
class RecordedOps:
    """Collectives in one rank's flight recorder: the pending ones, and each group's last."""

    pending: Mapping[CollectiveOp, Mapping[str, Any]]  # in the order of enqueueing
    enqueued: Mapping[GroupMembers, int]  # the last collective of each group

    @cached_property
    def first(self) -> CollectiveOp | None:
        return next(iter(self.pending), None)


@dataclass(frozen=True)
class BlockedCollective:
    """A collective at which ranks wait, and the ranks that hold it up."""

    group: str  # the process group's name
    description: str  # the program's name for it; may be empty
    op: str  # such as `nccl:all_reduce`
    missing_ranks: tuple[int, ...]  # ranks that never joined
    stalled_ranks: tuple[int, ...]  # ranks that joined and did not finish
    causes: tuple[int, ...]  # missing or stalled ranks that are roots of the graph of waits


def analyse(dumps: Mapping[int, Mapping[str, Any]]) -> list[BlockedCollective]:
    """Find collectives at which ranks wait; those that a rank holds up come first.

    Args:
        dumps: contents of flight recorders' files, by rank.
    """
    groups = _groups(dumps)
    entries = [entry for dump in dumps.values() for entry in dump["entries"]]
    messages = {str(entry["process_group"][0]) for entry in entries if entry["is_p2p"]}
    recorded = {rank: _recorded_by(rank, dump, groups, messages) for rank, dump in dumps.items()}
    firsts = dict.fromkeys(each.first for each in recorded.values())
    waits = {op: _awaited(op, recorded) for op in firsts if op is not None}
    roots = _roots(recorded, waits)
    found = []
    for op in waits:
        missing = set(_missing(op, recorded))
        stalled = [each for each in op.ranks if each in recorded and op in recorded[each].pending]
        entry = recorded[stalled[0]].pending[op]
        blamed = {each for each in stalled if each in roots and recorded[each].first == op}
        blocked = BlockedCollective(
            group=op.group.name,
            description=str(entry["process_group"][1]),
            op=str(entry["profiling_name"]),
            missing_ranks=tuple(sorted(missing)),
            stalled_ranks=tuple(sorted(stalled)),
            causes=tuple(sorted(roots & missing | blamed)),
        )
        found.append(blocked)
    return sorted(found, key=lambda each: (not each.causes, -len(each.stalled_ranks)))


def _awaited(op: CollectiveOp, recorded: Mapping[int, RecordedOps]) -> frozenset[int]:
    """Return ranks that a collective waits for: not joined, or still at an earlier collective."""

    def is_behind(own: RecordedOps) -> bool:
        return own.first != op and (op.number == MESSAGE or op in own.pending)

    missing = set(_missing(op, recorded))
    return frozenset(each for each in op.ranks if each in missing or is_behind(recorded[each]))


def _missing(op: CollectiveOp, recorded: Mapping[int, RecordedOps]) -> list[int]:
    """Return the ranks that did not join a collective, also those without a recorder's file."""
    return [
        rank
        for rank in op.ranks
        if rank not in recorded or recorded[rank].enqueued.get(op.group, -1) < op.number
    ]


def _roots(
    recorded: Mapping[int, RecordedOps], waits: Mapping[CollectiveOp, frozenset[int]]
) -> set[int]:
    awaited = set(chain.from_iterable(waits.values()))
    first = {rank: each.first for rank, each in recorded.items()}
    found = {
        rank
        for rank in awaited
        if (op := first.get(rank)) is None or not waits.get(op, frozenset())
    }
    if found:
        return found
    if awaited:  # a cycle of waits has no root; then the cause are ranks that never joined
        return set(chain.from_iterable(_missing(op, recorded) for op in waits))
    # All ranks have joined all collectives. A rank whose peers have finished its collective stalls
    # on its own device.
    alone = {
        op
        for op in waits
        if op.number != MESSAGE
        and any(op not in recorded[each].pending for each in op.ranks if each in recorded)
    }
    return {rank for rank, op in first.items() if op in alone}


def _recorded_by(
    rank: int,
    dump: Mapping[str, Any],
    groups: Mapping[tuple[int, str], GroupMembers],
    messages: set[str],
) -> RecordedOps:
    pending: dict[CollectiveOp, Mapping[str, Any]] = {}
    enqueued: dict[GroupMembers, int] = {}
    for place, name in _group_names(dump).items():
        status = dump.get("pg_status", {}).get(place)
        if status and name not in messages:  # with point-to-point messages it counts these too
            enqueued[groups[rank, name]] = int(status["last_enqueued_collective"])
    for entry in sorted(dump["entries"], key=lambda each: int(each["record_id"])):
        group = groups[rank, str(entry["process_group"][0])]
        number = int(entry["collective_seq_id"])
        if entry["is_p2p"]:
            number = MESSAGE
        else:
            enqueued[group] = max(enqueued.get(group, -1), number)
        if entry["state"] != "completed" and not entry["retired"]:
            pending.setdefault(CollectiveOp(group, number, _ends(entry, group)), entry)
    return RecordedOps(pending, enqueued)


def _ends(entry: Mapping[str, Any], group: GroupMembers) -> tuple[int, int] | None:
    """Return sender and receiver of a recorded message as ranks of the run; None: unknown."""
    found = _PEERS.search(str(entry["profiling_name"])) if entry["is_p2p"] else None
    if found is None:
        return None
    places = [int(each) for each in found.groups()[1:]]
    if max(places) >= len(group.ranks):
        return None
    own, other = (group.ranks[place] for place in places)
    return (own, other) if found[1] == "send" else (other, own)


def _group_names(dump: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of a rank's process groups by their numbers in the recorder's `pg_status`.

    Entries contain both. Groups without entries are matched by order: numbers and names both ascend
    in the order of creation.
    """
    stated = {str(each["pg_id"]): str(each["process_group"][0]) for each in dump["entries"]}
    numbers, names = dump.get("pg_status", {}), dump.get("pg_config", {})
    if len(numbers) != len(names) or not all(map(str.isdecimal, chain(numbers, names))):
        return stated
    return dict(zip(sorted(numbers, key=int), sorted(names, key=int), strict=True)) | stated


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> dict[tuple[int, str], GroupMembers]:
    """Return the process groups in all ranks' flight recorders, by rank and name.

    If a recorder does not state the ranks of a group (gloo), its members are the ranks that used
    it; the default group has all ranks.
    """
    users: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for name, description in {tuple(each["process_group"]) for each in dump["entries"]}:
            users[str(name)].update({rank}, dumps if description == "default_pg" else ())
        for name in _group_names(dump).values():
            users[name].add(rank)
    guessed = {name: GroupMembers(name, tuple(sorted(ranks))) for name, ranks in users.items()}
    found = {(rank, name): group for name, group in guessed.items() for rank in group.ranks}
    stated: dict[tuple[str, str], GroupMembers] = {}  # by name and the text of the ranks
    for rank, dump in dumps.items():
        for name, config in dump.get("pg_config", {}).items():
            key = str(name), str(config["ranks"])
            # Ranks of one group need the same object, as groups are compared by identity.
            if key not in stated:
                ranks = tuple(int(each) for each in re.findall(r"\d+", key[1]))
                stated[key] = GroupMembers(key[0], ranks)
            if stated[key].ranks and (rank, key[0]) in found:
                found[rank, key[0]] = stated[key]
    return found
