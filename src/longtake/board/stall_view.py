"""Stalls of a run as a page shows them: diagnosis, actions taken, and a tree of process stacks."""

import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from longtake import fsio
from longtake.errors import RecordError
from longtake.formatting import for_seconds, one_line
from longtake.inspection.files import read_below
from longtake.inspection.node_reader import hosts_of
from longtake.inspection.reader import RunFacts
from longtake.monitor import sentences
from longtake.monitor.dumps import group_processes
from longtake.monitor.stall_record import StallDiagnosis, Suspect
from longtake.node_dir import NodeDirectory, NodeDump, diagnosis_path
from longtake.run_dir import RunDirectory

_MOST_STALLS, _MOST_GROUPS, _MOST_CALLS, _MOST_THREADS = 100, 60, 40, 30
_DIAGNOSIS_BYTES, _DUMP_BYTES = 2**22, 2**25
_READ_BYTES, _READ_NODES = 12 * 2**20, 64  # of dumps; reading more would take too long
_STATES: Final = {
    "stuck": "it does not move",
    "slow": "it moves, for longer than ever",
    "lost": "a process died, or its node does not answer",
    "link": "all ranks wait at the same place: the network",
    "unknown": "no process could be read",
    "cleared": "it moved on meanwhile",
}

_DIAGNOSIS: Final = TypeAdapter(StallDiagnosis)
_Name = Annotated[str, Field(max_length=4096)]


class _Pulse(TypedDict):
    """A heartbeat of a process in a stack dump (see `Heartbeat.as_dict`)."""

    role: _Name
    pid: fsio.Count
    rank: fsio.Count | None
    step: fsio.Count
    steps_done: fsio.Count
    phase: _Name
    seconds: fsio.Finite
    detail: _Name
    path_of_clip: _Name


@dataclass(frozen=True)
class Call:
    """One call of a process's stack in words."""

    text: str
    kind: str  # own, library or native


@dataclass(frozen=True)
class Group:
    """Processes of a stalled run whose main threads have the same stack."""

    who: str
    doing: str
    state: str
    is_halted: bool
    is_cause: bool
    count: int
    calls: Sequence[Call]  # innermost first
    num_more_calls: int
    unread: str  # why there are no calls; else empty
    threads: Sequence[tuple[str, Sequence[Call]]]  # names and calls of other threads
    num_more_threads: int


@dataclass(frozen=True)
class StackTree:
    """Groups of processes with equal stacks in the dumps of a stall, the cause first."""

    groups: Sequence[Group]
    num_left: int  # processes in groups that are not shown
    num_processes: int
    gone: Sequence[str]
    num_read: int  # nodes whose dump was read
    num_nodes: int  # nodes that have a dump
    problems: Sequence[str]


@dataclass(frozen=True)
class Stall:
    """One stall of a run (a process that did not move on), described in words."""

    token: str
    time: str
    kind: str
    meaning: str
    sentence: str
    cause: str  # the process, and where it is; empty if unknown
    clip: str
    facts: str
    ended: str
    is_open: bool
    done: Sequence[str]
    waiting: Sequence[str]
    tree: StackTree | None  # None if this stall is not the chosen one


def read_stalls(facts: RunFacts, chosen: str | None) -> tuple[list[Stall], list[str]]:
    """Return a run's stalls, the newest first; only the chosen or the newest one has stacks."""
    found, problems = list[StallDiagnosis](), list[str]()
    folder = diagnosis_path(facts.run, "any").parent
    written = list[tuple[float, str]]()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
                path = f"{folder.name}/{entry.name}"
                written.append((entry.stat(follow_symlinks=False).st_mtime, path))
    for _, name in sorted(written, reverse=True)[: 2 * _MOST_STALLS]:
        try:
            record = read_below(facts.run.path, name, _DIAGNOSIS, _DIAGNOSIS_BYTES)
        except RecordError as error:
            problems.append(one_line(error))
            continue
        if record is not None:
            found.append(record)
    found.sort(key=lambda each: datetime.fromisoformat(each.time).timestamp(), reverse=True)
    tokens = [each.token for each in found]
    shown = chosen if chosen in tokens else next(iter(tokens), None)
    stalls = [
        _stall(each, facts, tree_of(facts, each) if each.token == shown else None)
        for each in found[:_MOST_STALLS]
    ]
    return stalls, problems[:5]


def _stall(record: StallDiagnosis, facts: RunFacts, tree: StackTree | None) -> Stall:
    of_token = [each for each in facts.events if each.get("token") == record.token]
    cleared = next((each for each in of_token if each["event"] == "stall_cleared"), None)
    did = ("restarted_worker", "killed_rank")
    done = [str(each.get("reason", "")) for each in of_token if each["event"] in did]
    is_open = cleared is None and not done and record.kind != "cleared"
    # A launch may end without a record that its stall has cleared.
    is_open = is_open and facts.summary.state == "stalled"
    first = next(iter(record.suspects), None)
    waiting = []
    for each in record.waiting[:20]:
        ranks = [{"rank": rank, "host": "", "pid": 0} for rank in each.ranks]
        named = sentences.who("rank", ranks).partition(" (")[0] if ranks else "no rank"
        waiting.append(f"{named}: waiting for {each.doing}")
    text = f"step {record.step:,}, {record.phase}"
    seconds, limit = record.seconds, record.limit
    if seconds is not None and limit is not None:
        text += f"; alarm after {for_seconds(seconds)}, the limit being {for_seconds(limit)}"
    if record.silent_nodes:
        text += f"; no answer from {', '.join(record.silent_nodes[:8])}"
    return Stall(
        token=record.token,
        time=record.time,
        kind=record.kind,
        meaning=_STATES.get(record.kind, ""),
        sentence=record.sentence,
        cause=_cause(first) if first else "",
        clip=(first.clip_path or first.clip) if first else "",
        facts=text,
        ended=_ended(record, cleared, done, is_open),
        is_open=is_open,
        done=done,
        waiting=waiting,
        tree=tree,
    )


def _cause(suspect: Suspect) -> str:
    """Describe the process that caused a stall, and its innermost call outside of libraries."""
    if suspect.role == "node":
        return suspect.host
    rank = "" if suspect.rank is None else f"rank {suspect.rank}"
    who = f"decode worker of {rank}" if suspect.role == "decode" else rank
    who = f"{suspect.host}: {who} (process {suspect.pid})"
    return f"{who} in {sentences.spelled(asdict(suspect))}" if suspect.function else who


def _ended(
    record: StallDiagnosis, cleared: Mapping[str, Any] | None, done: Sequence[str], is_open: bool
) -> str:
    if cleared is not None:
        seconds = cleared.get("seconds")
        lasted = f" after {for_seconds(seconds)}" if isinstance(seconds, int | float) else ""
        return f"It cleared{lasted}."
    if record.kind == "cleared":
        return "It was no stall: the process moved on while it was looked at."
    if done:
        return "A process was ended for it."
    return "It lasts." if is_open else "No record says that it cleared: the launch ended with it."


# --- Stacks -----------------------------------------------------------------------------------


def tree_of(facts: RunFacts, record: StallDiagnosis) -> StackTree:
    """Read the nodes' stack dumps for a stall within limits of size, suspects' nodes first."""
    suspects = [each.host for each in record.suspects]
    # Suspects first, so that the limits never hide the cause.
    hosts = sorted(hosts_of(facts.run), key=lambda host: host not in suspects)
    paths, version, total, num_nodes = list[str](), list[Hashable](), 0, 0
    for host in hosts:
        path = NodeDirectory(facts.run, host).dump_path(record.token)
        with suppress(OSError):
            status = path.lstat()
            num_nodes += 1
            # One dump is always read, however large: without any there would be nothing to show.
            if len(paths) < _READ_NODES and (total + status.st_size <= _READ_BYTES or not paths):
                total += status.st_size
                paths.append(path.relative_to(facts.run.path).as_posix())
                version.append((host, fsio.version_of(status)))
    return facts.kept(
        f"stacks of {record.token}",
        (num_nodes, *version),
        lambda: _read_tree(facts.run, paths, num_nodes, record),
    )


def _read_tree(
    run: RunDirectory, paths: Sequence[str], num_nodes: int, record: StallDiagnosis
) -> StackTree:
    dumps, problems = list[NodeDump](), list[str]()
    for path in paths:
        try:
            found = read_below(run.path, path, NodeDump, _DUMP_BYTES)
        except RecordError as error:
            problems.append(one_line(error))
            continue
        if found is not None:
            dumps.append(found)
            # Heartbeats that are not valid are left out, and rounds without a process.
            for seen in found["rounds"]:
                for process in seen["processes"]:
                    if not _is_pulse(process["heartbeat"]):
                        process["heartbeat"] = None
            found["missing"] = [each for each in found["missing"] if _is_pulse(each)]
            found["rounds"] = [each for each in found["rounds"] if each["processes"]]
    grouped = group_processes(dumps)
    first = next(iter(record.suspects), None)
    blamed = (first.host, first.pid) if first else None
    groups = [
        (any((each["host"], each["pid"]) == blamed for each in group["members"]), group)
        for group in grouped["groups"]
    ]
    groups.sort(key=lambda each: (not each[0], -each[1]["count"]))
    left = groups[_MOST_GROUPS:]
    return StackTree(
        groups=[_group(group, is_cause) for is_cause, group in groups[:_MOST_GROUPS]],
        num_left=sum(group["count"] for _, group in left),
        num_processes=sum(group["count"] for _, group in groups),
        gone=[
            f"{sentences.who(each['role'], [each])}, {sentences.doing([each])}"
            for each in grouped["missing"][:_MOST_GROUPS]
        ],
        num_read=len(dumps),
        num_nodes=num_nodes,
        problems=problems[:5],
    )


def _is_pulse(record: object) -> bool:
    with suppress(RecordError):
        fsio.check_record(record, _Pulse, Path("heartbeat"))
        return True
    return False


def _group(group: Mapping[str, Any], is_cause: bool) -> Group:
    role, members = group["role"], group["members"]
    named = sentences.who(role, members)
    known = [each for each in members if each["phase"] is not None] or members
    stack = sentences.worth_showing(group["stack"]) if group["stack"] else []
    # Frames without a name, which begin with their address, say nothing.
    calls = [
        Call(sentences.spelled(each), "native")
        for each in group["native"]
        if not each["function"].startswith("0x")
    ][:8]
    calls += [_call(each) for each in stack[:_MOST_CALLS]]
    threads = list[tuple[str, Sequence[Call]]]()
    with_stack = [each for each in group["threads"] if each["stack"]]
    for each in with_stack[:_MOST_THREADS]:
        times = f" (in {each['count']})" if each["count"] > 1 else ""
        names = ", ".join(str(name) for name in each["names"][:3])
        shown = sentences.worth_showing(each["stack"])[:_MOST_CALLS]
        threads.append((f"{names}{times}", [_call(call) for call in shown]))
    return Group(
        who=named if role == "rank" else f"{sentences.ROLES[role][len(members) != 1]}: {named}",
        doing=sentences.doing(known),
        state=sentences.state_of(known),
        is_halted=sentences.is_halted(members),
        is_cause=is_cause,
        count=group["count"],
        calls=calls,
        num_more_calls=max(0, len(stack) - _MOST_CALLS),
        unread="" if group["stack"] else sentences.unread(members[0]),
        threads=threads,
        num_more_threads=max(0, len(with_stack) - _MOST_THREADS),
    )


def _call(call: Mapping[str, Any]) -> Call:
    kind = "library" if sentences.is_library(call) else "own"
    return Call(sentences.spelled(call), kind)
