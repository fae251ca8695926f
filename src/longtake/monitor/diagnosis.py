"""Diagnosis of a stall from all nodes' stack dumps: its cause, and the processes that wait.

A run hangs at one rank, and all others wait for it. A process that only waits is no suspect; one
that others wait for is, and of several, the one that has progressed least. Suspects are looked for
in this order:

1. a rank that died; a process that is stopped, or waits for a device that does not answer;
2. if ranks wait for data, the decode workers that have been at one clip longest; and the process
   that raised the alarm;
3. ranks that do not wait for others while others wait: they never joined a collective. (For a rank
   that waits for its checkpoint, the saver's thread is examined.)
4. a node that does not answer, if ranks are missing;
5. if all wait: ranks that the flight recorder names; else ranks that wait at another place than
   most; or, without a majority, the ranks that are behind;
6. if all wait at the same place, no rank: the network is the cause.

A suspect that moves is slow, not stuck, and comes after those that do not. The functions have no
side effects.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longtake import fsio, node_dir, node_events
from longtake.monitor.flight_recorder import BlockedCollective, analyse
from longtake.monitor.stall_record import MissingIn, StallDiagnosis, StallKind, Suspect
from longtake.monitor.stall_sentence import describe
from longtake.monitor.stall_snapshot import ProcessState, StallSnapshot
from longtake.node_dir import StallAlarm

_FOR_OTHER_RANKS = ("collective", "device")
_MAX_SUSPECTS = 8
_MAX_EXAMINED = 1000  # deciding if a process has moved compares all its stacks, which is slow


def diagnose(
    request: node_dir.DumpRequest,
    dumps: Sequence[node_dir.NodeDump],
    silent: Sequence[str],
    recorders: Mapping[int, Mapping[str, Any]],
    host: str = "",
    events: Sequence[node_events.NodeEvent] = (),
) -> StallDiagnosis:
    """Find the cause of a stall; incomplete stack dumps never make it fail.

    Args:
        request: the request for stack dumps, with the alarm.
        dumps: stack dumps of all nodes that answered.
        silent: hosts without a stack dump.
        recorders: contents of the ranks' flight recorders (NCCL's last collectives), by rank.
        host: the node that makes the diagnosis.
        events: recent events of nodes, to add to the sentence.
    """
    blocked = analyse(recorders)
    stalled = frozenset(rank for each in blocked for rank in each.stalled_ranks)
    snapshot = StallSnapshot.of(dumps, stalled)
    alarm = request.get("stall")
    kind, suspects = _find_cause(snapshot, alarm, silent, blocked)
    if alarm is not None and has_moved_on(alarm, dumps):
        kind, suspects = "cleared", []
    first = suspects[0] if suspects else None
    found = StallDiagnosis(
        token=request["token"],
        time=fsio.now(),
        host=host,
        kind=kind,
        launch=(alarm["launch"] if alarm else "") or next((each["launch"] for each in dumps), ""),
        step=alarm["step"] if alarm else first.step if first else 0,
        phase=alarm["phase"] if alarm else first.doing if first else "",
        seconds=alarm["seconds"] if alarm else None,
        limit=alarm["limit"] if alarm else None,
        suspects=tuple(suspects),
        waiting=snapshot.waiting(suspects),
        silent_nodes=tuple(silent),
        missing_in=_missing_in(blocked),
        sentence="",
        node_events=tuple(map(str, events)),
    )
    sentence = node_events.add_to(describe(found, snapshot), events)
    # Shortened after the sentence, which counts all suspects.
    return replace(found, suspects=found.suspects[:_MAX_SUSPECTS], sentence=sentence)


def has_moved_on(alarm: StallAlarm, dumps: Sequence[node_dir.NodeDump]) -> bool:
    """Return True if the process that raised an alarm has left its phase by the last dump round.

    A rank that died has not moved on. A process that ended normally has, and so has a decode worker
    that died, as its pool has replaced it. Without a dump of its node the result is False.
    """
    dump = next((each for each in dumps if each["host"] == alarm["host"]), None)
    if dump is None or not dump["rounds"]:
        return False
    who = alarm["role"], alarm["pid"]
    for each in dump["rounds"][-1]["processes"]:
        after = each["heartbeat"]
        if after and (after["role"], after["pid"]) == who and each["state"] not in ("", "Z", "X"):
            # A decode worker counts windows, and its alarm has the run's step.
            is_same = (alarm["phase"], alarm["detail"]) == (after["phase"], after["detail"])
            if alarm["role"] == "rank":
                is_same = is_same and alarm["step"] == after["step"]
            return not is_same or after["seconds"] < alarm["seconds"]
    died = any((each["role"], each["pid"]) == who for each in dump["missing"])
    return alarm["role"] != "rank" or not died


# --- The cause.


_Cause = tuple[StallKind, list[Suspect]]


def _find_cause(
    snapshot: StallSnapshot,
    alarm: StallAlarm | None,
    silent: Sequence[str],
    blocked: Sequence[BlockedCollective],
) -> _Cause:
    if snapshot.lost:
        return "lost", list(snapshot.lost)
    if found := _halted(snapshot) or _hanging_alone(snapshot, alarm):
        kind: StallKind = "slow" if found[0].has_moved else "stuck"
        return kind, [each.suspect() for each in found]
    if snapshot.absent or (silent and not snapshot.ranks):
        return "lost", [Suspect(host, 0, "node", None) for host in silent]
    recorded = {rank for each in blocked for rank in each.causes}
    found = [each for each in snapshot.ranks if each.rank in recorded] or _out_of_place(snapshot)
    if found:
        return "stuck", [each.suspect() for each in found]
    return "link" if snapshot.ranks else "unknown", []


def _halted(snapshot: StallSnapshot) -> list[ProcessState]:
    """Return a stall's stopped and zombie processes, and its ranks that wait for a device."""
    ranks = [
        each
        for each in snapshot.ranks
        if each.is_stopped or (each.is_in_device_wait and not each.has_moved)
    ]
    decoding = (trace for traces in snapshot.decoding.values() for trace in traces)
    workers = [ProcessState.of(trace) for trace in decoding if trace.is_stopped]
    # Ranks first, each group by the time in the phase.
    return sorted(
        [*ranks, *workers], key=lambda each: (each.role, each.seconds_in_phase), reverse=True
    )


def _hanging_alone(snapshot: StallSnapshot, alarm: StallAlarm | None) -> list[ProcessState]:
    """Return the processes of a stall that wait for no other rank, the most suspicious first.

    The process that raised the alarm comes first, then those that have progressed least. If some do
    not move, only these are returned, and only if they have stood for at least half as long as the
    longest.
    """
    starved = {each.rank for each in snapshot.ranks if each.wait == "data"}
    workers = _hanging_workers(snapshot, starved, alarm)
    fed = {each.rank for each in workers}
    alone = [each for each in snapshot.ranks if each.wait not in _FOR_OTHER_RANKS]
    found = [*workers, *(each for each in alone if each.wait != "data" or each.rank not in fed)]
    still = [each for each in found if not each.has_moved]
    longest = max((each.seconds_in_phase for each in still), default=0.0)
    # A process that has just arrived may stand still by chance.
    found = [each for each in still if 2 * each.seconds_in_phase >= longest] or found
    position = {each.rank: each.position for each in snapshot.ranks}
    alarmed = alarm and (alarm["host"], alarm["pid"])
    return sorted(
        found,
        key=lambda each: (
            (each.host, each.pid) != alarmed,
            position.get(each.rank, (0, 0)),
            -each.seconds_in_phase,
        ),
    )


def _hanging_workers(
    snapshot: StallSnapshot, starved: set[int], alarm: StallAlarm | None
) -> list[ProcessState]:
    """Return decode workers whose clips ranks wait for, or that raised the alarm.

    These are the workers that do not move, the longest at their clip first; if all move, the one
    that has been at its clip longest.
    """
    alarmed = alarm if alarm and alarm["role"] == "decode" else None
    owners = starved | ({alarmed["rank"]} if alarmed else set())
    of_owners = (each for rank in owners for each in snapshot.decoding.get(rank, ()))
    longest = sorted(of_owners, key=lambda each: -each.seconds_in_phase)[:_MAX_EXAMINED]
    found: list[ProcessState] = []
    for trace in longest:
        if trace.rank in starved or (alarmed and trace.pid == alarmed["pid"]):
            found.append(ProcessState.of(trace))
        # More than are shown stand still, and the rest has been at its clips for a shorter time.
        if sum(not each.has_moved for each in found[-2 * _MAX_SUSPECTS :]) > _MAX_SUSPECTS:
            break
    return [each for each in found if not each.has_moved] or found[:1]


def _out_of_place(snapshot: StallSnapshot) -> list[ProcessState]:
    """Return ranks that wait at another place in the code than most, if all wait for each other.

    Without a majority, these are the ranks that have progressed least.
    """
    places: dict[Any, list[ProcessState]] = defaultdict(list)
    for each in snapshot.ranks:
        places[each.position, each.place].append(each)
    if len(places) < 2:
        return []
    most = max(places.values(), key=len)
    # The majority waits for the rest, as every rank has to join a collective.
    if 2 * len(most) > len(snapshot.ranks):
        rest = [each for group in places.values() if group is not most for each in group]
    else:
        behind = min(each.position for each in snapshot.ranks)
        rest = [each for each in snapshot.ranks if each.position == behind]
    return sorted(rest, key=lambda each: (each.position, -each.seconds_in_phase))


def _missing_in(blocked: Sequence[BlockedCollective]) -> tuple[MissingIn, ...]:
    found = []
    for each in blocked:
        group, missing = each.description or each.group, set(each.missing_ranks)
        never = tuple(rank for rank in each.causes if rank in missing)
        stalled = tuple(rank for rank in each.causes if rank not in missing)
        if never:
            found.append(MissingIn(group, each.op, never))
        if stalled:
            found.append(MissingIn(group, each.op, stalled, has_joined=True))
    return tuple(found)
