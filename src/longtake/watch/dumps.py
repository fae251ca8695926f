"""Dumps all processes of a run on this node, some times over.

No process is paused for it: py-spy reads them as they run. Only at the end, and only if it is asked
for, those that have not moved are read once more with the calls of C that they are in, for which
they are paused a moment; they hang anyway.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from longtake import stacks
from longtake.fsio import now
from longtake.heartbeat import Pulse, read_all
from longtake.node_dir import NodeDump, ProcessDump, Round
from longtake.stacks.frames import stack_of
from longtake.stacks.processes import facts
from longtake.stacks.trace import Trace, traces
from longtake.watch.members import Member, family, members

_NATIVE_SECONDS = {"stall": 1.8, "asked": 6.0}
"""For all processes of a node together."""


def dump_node(
    folder: Path,
    host: str,
    token: str,
    reason: Literal["stall", "asked"],
    *,
    rounds: int,
    round_seconds: float,
    native: bool,
) -> NodeDump:
    """Dump all processes of a run on this node.

    Args:
        folder: of the run's hearts on this node; see `heartbeat.folder_of`.
        host: this node's name.
        token: of the request.
        reason: of the request.
        rounds: how often.
        round_seconds: from one round's start to the next one's.
        native: read processes with their calls of C as well, as many as there is time for; of a
            stall, those that have not moved.

    Returns:
        What `nodes/<host>/stacks/<token>.json` holds.
    """
    seen = [_look(members(folder), at) for at in _beats(rounds, round_seconds)]
    if native:
        _read_natively(host, seen, reason)
    pulses = read_all(folder)
    launch = _launch(pulses)
    return {
        "token": token,
        "time": now(),
        "host": host,
        "reason": reason,
        "launch": launch,
        "rounds": seen,
        "missing": [each.as_dict() for each in pulses if _is_missing(each, pulses, launch)],
    }


def dump_family(
    pid: int, host: str, *, rounds: int, round_seconds: float, native: bool
) -> NodeDump:
    """Dump a process and all that it has started, as `dump_node` does a run's.

    Args:
        pid: the process.
        host: this node's name.
        rounds: see `dump_node`.
        round_seconds: see `dump_node`.
        native: see `dump_node`.
    """
    seen = [_look(family(pid), at) for at in _beats(rounds, round_seconds)]
    if native:
        _read_natively(host, seen, "asked")
    return {
        "token": "",
        "time": now(),
        "host": host,
        "reason": "asked",
        "launch": "",
        "rounds": seen,
        "missing": [],
    }


def _beats(rounds: int, round_seconds: float) -> Iterator[float]:
    """Wait for each round's time; gives the seconds since the first one began."""
    begun = time.monotonic()
    for number in range(rounds):
        time.sleep(max(0.0, begun + number * round_seconds - time.monotonic()))
        yield time.monotonic() - begun


def _look(there: Sequence[Member], at: float) -> Round:
    known = {each.pid: found for each in there if (found := facts(each.pid))}
    there = [each for each in there if each.pid in known]
    dumps = stacks.dump_all({each.pid: each.signal_file for each in there})
    processes: list[ProcessDump] = []
    for each in there:
        found, dump = known[each.pid], dumps[each.pid]
        processes.append(
            {
                "pid": each.pid,
                "ppid": found.ppid,
                "role": each.role,
                "rank": each.rank,
                "command": found.command,
                "state": dump.state,
                "cpu_seconds": found.cpu_seconds,
                "method": dump.method,
                "threads": list(map(_as_json, dump.threads)),
                "raw": dump.raw if not dump.threads else "",
                "heart": each.pulse.as_dict() if each.pulse else None,
            }
        )
    return {"seconds": round(at, 3), "processes": processes}


def _as_json(thread: stacks.Thread) -> dict[str, Any]:
    return {**asdict(thread), "frames": [asdict(frame) for frame in thread.frames]}


def _read_natively(host: str, rounds: Sequence[Round], reason: Literal["stall", "asked"]) -> None:
    """Read processes with their calls of C, the longest in its phase first, into the last round."""
    dump: Any = {"host": host, "rounds": rounds}
    there = [each for each in traces([dump]) if each.last["threads"]]
    if reason == "stall":
        there = [each for each in there if _hangs(each)]
    found = {each.pid: each for each in sorted(there, key=_seconds_in_phase, reverse=True)}
    for pid, threads in stacks.read_natively(list(found), _NATIVE_SECONDS[reason]).items():
        process, read = found[pid].last, list(map(_as_json, threads))
        if reason == "asked" or stack_of(read[0]) == found[pid].stack:
            process["threads"], process["method"] = read, "py-spy --native"


def _hangs(trace: Trace) -> bool:
    is_idle = trace.heart is not None and trace.heart["phase"] in ("idle", "ended")
    return trace.role != "agent" and not is_idle and not trace.has_moved


def _seconds_in_phase(trace: Trace) -> float:
    return float(trace.heart["seconds"]) if trace.heart else 0.0


def _launch(pulses: Sequence[Pulse]) -> str:
    """That of the youngest rank that lives, or else of the youngest one."""
    ranks = [pulse for pulse in pulses if pulse.role == "rank"]
    ranks = [pulse for pulse in ranks if pulse.is_alive] or ranks
    return max(ranks, key=lambda each: each.started).launch if ranks else ""


def _is_missing(pulse: Pulse, pulses: Sequence[Pulse], launch: str) -> bool:
    """Whether a process is gone that should be there; not one of a launch before this one."""
    if pulse.is_alive or pulse.phase in ("idle", "ended"):
        return False
    if pulse.launch:
        return pulse.launch == launch
    began = [each.started for each in pulses if each.role == "rank" and each.is_alive]
    return pulse.started >= min(began, default=0)
