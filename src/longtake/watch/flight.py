"""Who holds up a collective, by the flight recorders of the ranks.

Each rank has written down which collectives it has enqueued, in which group, and which of them are
not done. A rank waits at the first of its collectives that is not done: what it has enqueued later
comes after that. At that collective it waits

- for the members that have not enqueued it: they never joined; and
- for the members that have enqueued it, but wait at an earlier one of their own.

A rank that many wait for may thus itself only wait, in another group. So the waits are followed as
a graph, and its roots are to blame: ranks that somebody waits for and that wait for nobody. Such a
rank either has nothing under way, so it is its program that never came to the collective; or it
alone has not finished what all others have, so it is its device that stalls. Where all members
stand at the same collective and none has finished it, no rank is to blame: it is the link.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from longtake.watch.flight_files import FlightError, ask, collect, read, read_folders, stamps
from longtake.watch.recorder import MESSAGE, Op, Recorder, recorders_of

__all__ = [
    "Finding",
    "FlightError",
    "analyse",
    "ask",
    "collect",
    "read",
    "read_folders",
    "roots",
    "stamps",
]


@dataclass(frozen=True)
class Finding:
    """One collective at which ranks wait.

    Attributes:
        group: the process group's name.
        description: what the program calls it; may be empty.
        op: such as `nccl:all_reduce`.
        sizes: of its inputs, on the first rank that has joined.
        missing_ranks: those that never joined.
        stalled_ranks: those that joined, and have not finished it.
        to_blame: which of both are roots.
    """

    group: str
    description: str
    op: str
    sizes: tuple[tuple[int, ...], ...]
    missing_ranks: tuple[int, ...]
    stalled_ranks: tuple[int, ...]
    to_blame: tuple[int, ...]


def roots(dumps: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks that hold up others and wait for nobody; none: it is the link, or all is well.

    Args:
        dumps: what `read` has read, by rank.
    """
    recorders = recorders_of(dumps)
    return _roots(recorders, _waits(recorders))


def analyse(dumps: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """The collectives at which ranks wait: those with a rank that is to blame come first."""
    recorders = recorders_of(dumps)
    waits = _waits(recorders)
    culprits = set(_roots(recorders, waits))
    found = [_finding(op, recorders, culprits) for op in waits]
    return sorted(found, key=lambda each: (not each.to_blame, -len(each.stalled_ranks)))


def _finding(op: Op, recorders: Mapping[int, Recorder], culprits: set[int]) -> Finding:
    missing = set(_missing(op, recorders))
    stalled = [each for each in op.parties if each in recorders and op in recorders[each].pending]
    entry = recorders[stalled[0]].pending[op]
    blamed = {each for each in stalled if each in culprits and recorders[each].first == op}
    return Finding(
        group=op.group.name,
        description=str(entry["process_group"][1]),
        op=str(entry["profiling_name"]),
        sizes=tuple(tuple(each) for each in entry["input_sizes"]),
        missing_ranks=tuple(sorted(missing)),
        stalled_ranks=tuple(sorted(stalled)),
        to_blame=tuple(sorted(culprits & missing | blamed)),
    )


def _waits(recorders: Mapping[int, Recorder]) -> dict[Op, frozenset[int]]:
    """Whom the ranks wait for that wait at a collective, by the collective."""
    firsts = dict.fromkeys(each.first for each in recorders.values())
    return {op: _awaited(op, recorders) for op in firsts if op is not None}


def _awaited(op: Op, recorders: Mapping[int, Recorder]) -> frozenset[int]:
    missing = set(_missing(op, recorders))
    return frozenset(
        rank for rank in op.parties if rank in missing or _is_behind(rank, op, recorders)
    )


def _is_behind(rank: int, op: Op, recorders: Mapping[int, Recorder]) -> bool:
    """Whether a rank has still to come to what it has joined."""
    recorder = recorders[rank]
    return recorder.first != op and (op.number == MESSAGE or op in recorder.pending)


def _missing(op: Op, recorders: Mapping[int, Recorder]) -> list[int]:
    """Who has to take part and has not joined; who left no dump has not, as far as one knows."""
    return [
        rank
        for rank in op.parties
        if rank not in recorders or recorders[rank].enqueued.get(op.group, -1) < op.number
    ]


def _roots(
    recorders: Mapping[int, Recorder], waits: Mapping[Op, frozenset[int]]
) -> tuple[int, ...]:
    awaited = set(chain.from_iterable(waits.values()))
    first = {rank: each.first for rank, each in recorders.items()}
    found = {rank for rank in awaited if not _waits_at(first.get(rank), waits)}
    if found:
        return tuple(sorted(found))
    # In a ring of ranks that wait for each other, who never joined is to blame.
    ring = chain.from_iterable(_missing(op, recorders) for op in waits)
    if awaited:
        return tuple(sorted(set(ring)))
    alone = {op for op in waits if _others_are_done(op, recorders)}
    return tuple(sorted(rank for rank, op in first.items() if op in alone))


def _waits_at(op: Op | None, waits: Mapping[Op, frozenset[int]]) -> frozenset[int]:
    return frozenset() if op is None else waits[op]


def _others_are_done(op: Op, recorders: Mapping[int, Recorder]) -> bool:
    """Whether members have finished what others have not."""
    if op.number == MESSAGE:
        return False
    return any(op not in recorders[each].pending for each in op.parties if each in recorders)
