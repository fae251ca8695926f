"""Stack dumps of a run's processes on one node in several rounds, and groups of equal stacks.

No process is paused: py-spy reads them while they run. At the end, on request, processes that have
not moved are read once more with their C calls, which pauses each for a moment.
"""

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from longtake import fsio, node_dir, stacks
from longtake.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from longtake.node_dir import DumpRequest, NodeDirectory, NodeDump, ProcessDump, Round
from longtake.process import read_stat
from longtake.run_dir import RunDirectory
from longtake.stacks import Stack, descendants, native_stack, parents, python_stack

ProcessRole = Literal["rank", "decode", "agent", "helper"]
DumpReason = Literal["stall", "asked"]
_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_OBSERVERS = ("longtake.monitor", "longtake watch", "longtake stacks", "py-spy")
# For all processes of a node together. The node that diagnoses a stall waits 3 s for the others'
# dumps; a user waits longer.
_NATIVE_SECONDS = {"stall": 1.8, "asked": 6.0}
_HALTED = ("T", "t", "D")  # states in which processes are not grouped with those that run
_MAX_DUMPS = 50
_REQUEST_SECONDS = 86400.0
_TOKENS = ("stall_", "asked_")


# --- Which processes belong to a run.


@dataclass(frozen=True)
class RunProcess:
    """A process of a run to dump: a rank, a decode worker, torchrun's agent or a descendant."""

    pid: int
    role: ProcessRole
    rank: int | None  # its rank, or the rank that started it
    heartbeat: Heartbeat | None = None
    signal_file: Path | None = None  # the file to which it writes its stacks at SIGUSR2


def processes_of_run(folder: Path) -> list[RunProcess]:
    """Find all processes of a run on this node, except observers, by its heartbeat folder."""
    heartbeats = [each for each in read_heartbeats(folder) if each.is_alive]
    # /proc is read once for all processes, not once for each.
    known = parents()
    ranks = [each.pid for each in heartbeats if each.role == "rank"]
    agents = _agents({known.get(pid, 0) for pid in ranks})
    return [
        *map(_with_heartbeat, heartbeats),
        *(RunProcess(pid, "agent", None) for pid in agents),
        *_helpers([*agents, *ranks], heartbeats, known),
    ]


def process_tree(pid: int) -> list[RunProcess]:
    """Find a process and all its descendants, of any run or none."""
    known = parents()
    pids = {pid, *descendants(pid, known)}
    folders = heartbeat_dir(Path()).parent.glob("*")
    # The run of a process is not known here, so the pages of all of this user's runs are read.
    pages = (each for folder in folders for each in read_heartbeats(folder))
    heartbeats = [each for each in pages if each.pid in pids and each.is_alive]
    found = [
        *map(_with_heartbeat, heartbeats),
        *(RunProcess(agent, "agent", None) for agent in _agents({pid})),
        *_helpers([pid], heartbeats, known),
    ]
    # Without a heartbeat the process itself is in no list above.
    is_known = any(each.pid == pid for each in found)
    return found if is_known else [RunProcess(pid, "helper", None), *found]


def _agents(pids: Collection[int]) -> list[int]:
    found = [each for each in map(read_stat, sorted(pids)) if each]
    return [each.pid for each in found if any(name in each.command for name in _AGENTS)]


def _with_heartbeat(heartbeat: Heartbeat) -> RunProcess:
    pid, role = heartbeat.pid, heartbeat.role
    file: Path | None = stacks.stack_file(heartbeat.path.parent, pid)
    if file and not file.exists():  # a decode worker writes to memory, which its pool reads
        file, stderr = None, Path(f"/proc/{pid}/fd/2")
        with suppress(OSError):
            file = stderr if str(stderr.readlink()).startswith("/memfd:") else None
    return RunProcess(pid, role, heartbeat.rank, heartbeat, file)


def _helpers(
    roots: Sequence[int], heartbeats: Sequence[Heartbeat], known: Mapping[int, int]
) -> list[RunProcess]:
    def is_observer(pid: int) -> bool:
        found = read_stat(pid)
        return found is None or found.is_gone or any(name in found.command for name in _OBSERVERS)

    of_pid = {each.pid: each for each in heartbeats}
    # The watcher and py-spy are descendants of a rank too, with everything that they start.
    below = {pid for root in roots for pid in descendants(root, known)}
    observers = set(filter(is_observer, below)) | {os.getpid()}
    below = {pid for root in roots for pid in descendants(root, known, without=observers)}
    helpers = sorted(below - set(of_pid) - set(roots))
    return [RunProcess(pid, "helper", _rank_above(pid, of_pid, known)) for pid in helpers]


def _rank_above(pid: int, of_pid: Mapping[int, Heartbeat], known: Mapping[int, int]) -> int | None:
    while pid := known.get(pid, 0):
        if pid in of_pid:
            return of_pid[pid].rank
    return None


# --- Dumping them.


def dump_node(
    folder: Path,
    host: str,
    request: DumpRequest,
    round_seconds: float,
    early: Sequence[tuple[float, Round]] = (),
) -> NodeDump:
    """Dump the stacks of a run's processes on this node in rounds; see `dump_processes`.

    Args:
        folder: the run's heartbeat folder.
        host: name of this node.
        request: the request for the dump.
        round_seconds: interval between two rounds.
        early: first rounds, collected by `EarlyRounds` before the request.
    """
    dump = dump_processes(lambda: processes_of_run(folder), host, request, round_seconds, early)
    heartbeats = read_heartbeats(folder)
    ranks = [each for each in heartbeats if each.role == "rank"]
    # If all ranks are dead, their pages still tell the launch.
    ranks = [each for each in ranks if each.is_alive] or ranks
    dump["launch"] = launch = max(ranks, key=lambda each: each.started).launch if ranks else ""
    missing = [each for each in heartbeats if _is_missing(each, ranks, launch)]
    return {**dump, "missing": [each.as_dict() for each in missing]}


def dump_processes(
    find: Callable[[], Sequence[RunProcess]],
    host: str,
    request: DumpRequest,
    round_seconds: float,
    early: Sequence[tuple[float, Round]] = (),
) -> NodeDump:
    """Dump the stacks of the processes that `find` returns, in several rounds.

    If the request wants it, C calls are read after the last round, which pauses processes.
    """
    begun = early[0][0] if early else time.monotonic()
    seen: list[Round] = [{**found, "seconds": round(at - begun, 3)} for at, found in early]
    for number in range(len(seen), request["rounds"]):
        # Rounds are due by the time of the first, so that slow ones do not delay all later ones.
        time.sleep(max(0.0, begun + number * round_seconds - time.monotonic()))
        at = time.monotonic() - begun
        seen.append(_dump_round(find(), at))
    if request["native"]:
        _add_native_calls(host, seen, request["reason"])
    return {
        "token": request["token"],
        "time": fsio.now(),
        "host": host,
        "reason": request["reason"],
        "launch": "",
        "rounds": seen,
        "missing": [],
    }


class EarlyRounds:
    """Rounds of stack dumps collected before an alarm, so that a stall is diagnosed sooner.

    Only one thread may use an object.

    Args:
        folder: the run's heartbeat folder on this node.
        rounds: number of rounds of a dump, all of which may be early.
        round_seconds: interval between two rounds.
    """

    def __init__(self, folder: Path, rounds: int, round_seconds: float) -> None:
        self._folder, self._round_seconds = folder, round_seconds
        self._found: deque[tuple[float, Round]] = deque(maxlen=rounds)

    def collect(self) -> None:
        """Dump this node's stacks as another early round, if `round_seconds` have passed."""
        at = time.monotonic()
        if not self._found or at - self._found[-1][0] >= self._round_seconds:
            self._found.append((at, _dump_round(processes_of_run(self._folder), 0.0)))

    def forget(self) -> None:
        self._found.clear()

    def take(self, pid: int | None) -> list[tuple[float, Round]]:
        """Return and forget the early rounds of dumps that show processes in their current phases.

        These are the rounds since the last beginning of a phase of a rank of this node or of
        process `pid`.
        """
        now = time.monotonic()
        begun = [
            now - each.seconds
            for each in read_heartbeats(self._folder)
            if each.is_alive and (each.role == "rank" or each.pid == pid)
        ]
        found = [each for each in self._found if each[0] > max(begun, default=0.0)]
        self.forget()
        return found


def _dump_round(there: Sequence[RunProcess], at: float) -> Round:
    known = {each.pid: found for each in there if (found := read_stat(each.pid))}
    # A process may have ended since it was found.
    there = [each for each in there if each.pid in known]
    dumps = stacks.dump_all({each.pid: each.signal_file for each in there})
    processes: list[ProcessDump] = []
    for each in there:
        found, dump = known[each.pid], dumps[each.pid]
        processes.append(
            {
                "pid": each.pid,
                "ppid": found.parent,
                "role": each.role,
                "rank": each.rank,
                "command": found.command,
                "state": dump.state,
                "cpu_seconds": found.cpu_seconds,
                "method": dump.method,
                "threads": list(map(_as_json, dump.threads)),
                "raw": dump.raw if not dump.threads else "",
                "heartbeat": each.heartbeat.as_dict() if each.heartbeat else None,
            }
        )
    return {"seconds": round(at, 3), "processes": processes}


def _as_json(thread: stacks.ThreadStack) -> dict[str, Any]:
    return {**asdict(thread), "frames": [asdict(frame) for frame in thread.frames]}


def _add_native_calls(host: str, rounds: Sequence[Round], reason: DumpReason) -> None:
    """Add C calls to the last round of a stack dump, first of processes longest in their phase."""
    dump: Any = {"host": host, "rounds": rounds}
    there = [
        each
        for each in traces([dump])
        if each.last["threads"] and (reason == "asked" or each.hangs)
    ]
    found = {each.pid: each for each in sorted(there, key=lambda each: -each.seconds_in_phase)}
    for pid, threads in stacks.read_native_stacks(list(found), _NATIVE_SECONDS[reason]).items():
        # A process that has moved on since the last round keeps its consistent Python stacks.
        process, read = found[pid].last, list(map(_as_json, threads))
        if reason == "asked" or python_stack(read[0]) == found[pid].stack:
            process["threads"], process["method"] = read, "py-spy --native"


def _is_missing(heartbeat: Heartbeat, ranks: Sequence[Heartbeat], launch: str) -> bool:
    """Return True if a process of the current launch is dead that has not ended normally."""
    if heartbeat.is_alive or heartbeat.read_again().phase in ("idle", "ended"):
        return False
    if heartbeat.launch:
        return heartbeat.launch == launch
    # It died before the ranks met: of this launch, if it is not older than the living ranks.
    return heartbeat.started >= min((each.started for each in ranks if each.is_alive), default=0)


# --- A process through all rounds.


@dataclass(frozen=True, eq=False)
class ProcessTrace:
    """One process in all rounds of its node's stack dump in which it existed."""

    host: str
    rounds: tuple[ProcessDump, ...]
    seconds: tuple[float, ...]  # time of each round since the node's first

    @property
    def last(self) -> ProcessDump:
        return self.rounds[-1]

    @property
    def pid(self) -> int:
        return self.last["pid"]

    @property
    def role(self) -> ProcessRole:
        return self.last["role"]

    @property
    def rank(self) -> int:  # -1: a helper or agent of no rank
        rank = self.last["rank"]
        return -1 if rank is None else rank

    @property
    def heartbeat(self) -> dict[str, Any] | None:
        return self.last["heartbeat"]

    @property
    def phase(self) -> str:
        return str((self.heartbeat or {}).get("phase", ""))

    @property
    def seconds_in_phase(self) -> float:
        return float((self.heartbeat or {}).get("seconds", 0.0))

    @property
    def threads(self) -> list[dict[str, Any]]:
        # A process that runs while it is read is not readable in every round.
        return next((each["threads"] for each in reversed(self.rounds) if each["threads"]), [])

    @cached_property
    def stacks(self) -> list[Stack]:
        return [python_stack(each["threads"][0]) for each in self.rounds if each["threads"]]

    @property
    def stack(self) -> Stack:
        return python_stack(self.threads[0]) if self.threads else ()

    @property
    def has_moved(self) -> bool:
        """True if the stack of the main thread or the heartbeat changed between rounds."""
        main = [each["threads"][0] for each in self.rounds if each["threads"]]
        for one, other in pairwise(main):  # comparing raw frames first is quick: most are equal
            if one["frames"] != other["frames"] and python_stack(one) != python_stack(other):
                return True
        seen = zip(self.rounds, self.seconds, strict=True)
        beats = [(each["heartbeat"], at) for each, at in seen if each["heartbeat"]]
        return any(_has_progressed(*one, *other) for one, other in pairwise(beats))

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped by a signal or a debugger, or is a zombie."""
        return self.last["state"] in ("T", "t", "Z")

    @property
    def is_in_device_wait(self) -> bool:
        """True if the process was in state D in all of several rounds: it waits in the kernel."""
        return len(self.rounds) > 1 and {each["state"] for each in self.rounds} == {"D"}

    @property
    def is_held_up(self) -> bool:
        """True if an idle decode worker does not begin the clip it was given, or cannot run."""
        given = {(each["heartbeat"] or {}).get("given", "") for each in self.rounds}
        has_not_begun = len(given) == 1 and given != {""} and not self.has_moved
        return has_not_begun or self.is_stopped or self.is_in_device_wait

    @property
    def hangs(self) -> bool:
        """True if the process has work to do and does not move between rounds of the dump."""
        is_idle = self.phase in ("idle", "ended")
        return self.role != "agent" and not is_idle and not self.has_moved

    @property
    def cpu_share(self) -> float:
        seconds = self.seconds[-1] - self.seconds[0]
        used = self.last["cpu_seconds"] - self.rounds[0]["cpu_seconds"]
        return used / seconds if seconds > 0 else 0.0

    def stacks_of(self, name: str) -> list[Stack]:
        named = ([each for each in seen["threads"] if each["name"] == name] for seen in self.rounds)
        return [python_stack(each[0]) for each in named if each]


def traces(dumps: Iterable[NodeDump]) -> list[ProcessTrace]:
    """Collect each process of the nodes' stack dumps over the rounds, in order of appearance."""
    found: list[ProcessTrace] = []
    for dump in dumps:
        seen: dict[int, list[tuple[ProcessDump, float]]] = defaultdict(list)
        for each in dump["rounds"]:
            for process in each["processes"]:
                seen[process["pid"]].append((process, each["seconds"]))
        for rounds in seen.values():
            processes, seconds = zip(*rounds, strict=True)
            found.append(ProcessTrace(dump["host"], processes, seconds))
    return found


def _has_progressed(
    before: Mapping[str, Any], at: float, after: Mapping[str, Any], then: float
) -> bool:
    # A phase that ended and began again within the interval has a shorter duration than expected.
    same = all(before[name] == after[name] for name in ("phase", "step", "steps_done", "detail"))
    return not same or bool(after["seconds"] < before["seconds"] + (then - at) / 2)


# --- Many nodes' dumps.


class StackInterner:
    """Shares equal stacks in memory between dumps: most processes of a large run have the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[Any, ...], ...], list[dict[str, Any]]] = {}

    def intern(self, dump: NodeDump) -> NodeDump:
        """Replace stacks of a dump by equal ones of earlier dumps in place, and return the dump."""
        for each in dump["rounds"]:
            for process in each["processes"]:
                for thread in process["threads"]:
                    frames = thread["frames"]
                    key = tuple([tuple(frame.values()) for frame in frames])
                    thread["frames"] = self._known.setdefault(key, frames)
        return dump


def group_processes(dumps: Iterable[NodeDump]) -> dict[str, Any]:
    """Group processes of stack dumps with the same role, main thread's stack and stopped state.

    Args:
        dumps: stack dumps of nodes; an iterator, as those of a thousand nodes would fill the
            memory.

    Returns:
        JSON values: `launch`; `hosts` that were dumped; `groups`, for each role the largest first;
        and `missing` (see `NodeDump`) with `host`.
    """
    alike: dict[_GroupKey, _ProcessGroup] = {}
    missing, hosts, launch = [], [], ""
    for dump in dumps:
        hosts.append(dump["host"])
        launch = launch or dump["launch"]
        missing += [{"host": dump["host"], **each} for each in dump["missing"]]
        for trace in traces([dump]):
            command = trace.last["command"] if trace.role == "helper" else ""
            halted = trace.last["state"] if trace.last["state"] in _HALTED else ""
            key = trace.role, command, halted, trace.stack
            alike.setdefault(key, _ProcessGroup()).add(trace)
    groups = [each.as_dict(key) for key, each in alike.items()]
    groups.sort(key=lambda each: (get_args(ProcessRole).index(each["role"]), -each["count"]))
    return {"launch": launch, "hosts": hosts, "groups": groups, "missing": missing}


_GroupKey = tuple[str, str, str, Stack]  # role, a helper's command, state if stopped, stack


@dataclass
class _ProcessGroup:
    """Processes with the same stack: facts of each, and the C calls of one process."""

    members: list[dict[str, Any]] = field(default_factory=list)
    native: Stack = ()
    threads: Counter[tuple[str, Stack]] = field(default_factory=Counter)

    def add(self, trace: ProcessTrace) -> None:
        heartbeat, last = trace.heartbeat or {}, trace.last
        names = ("phase", "seconds", "step", "detail", "path_of_clip")
        of_process = ("pid", "role", "rank", "command", "state", "method", "raw")
        member = {
            "host": trace.host,
            **{name: last.get(name) for name in of_process},
            **{name: heartbeat.get(name) for name in names},
            "has_moved": trace.has_moved if len(trace.rounds) > 1 else None,
            "watched_seconds": round(trace.seconds[-1] - trace.seconds[0], 3),
            "cpu_share": round(trace.cpu_share, 3),
        }
        self.members.append(member)
        self.threads.update((each["name"], python_stack(each)) for each in trace.threads[1:])
        if trace.threads and not self.native:
            self.native = native_stack(trace.threads[0])

    def as_dict(self, key: _GroupKey) -> dict[str, Any]:
        by_stack: dict[Stack, list[tuple[str, int]]] = defaultdict(list)
        for (name, stack), count in self.threads.most_common():
            by_stack[stack].append((name, count))
        threads = [
            {
                "names": sorted(name for name, _ in named),
                "count": sum(count for _, count in named),
                "stack": _calls(stack),
            }
            for stack, named in by_stack.items()
        ]
        stacks = {"stack": _calls(key[-1]), "native": _calls(self.native), "threads": threads}
        return {"role": key[0], "count": len(self.members), "members": self.members, **stacks}


def _calls(stack: Stack) -> list[dict[str, Any]]:
    return [{"function": call[0], "file": call[1], "line": call[2]} for call in stack]


# --- Old files. Diagnoses and events stay; dumps and requests are what led to them.


def prune_dumps(node: NodeDirectory, most: int = _MAX_DUMPS) -> None:
    """Remove this node's stack dumps and flight recorders' files except the `most` newest.

    Only files with names that a watcher gives are removed.
    """
    folder = node.dump_path("any").parent
    if fsio.is_linked(folder, node.run.path):
        return
    paths = [path for path in folder.glob("*") if path.name.startswith(_TOKENS)]
    times: dict[str, float] = defaultdict(float)
    # A dump and its flight recorders' folder have the same stem, and go together.
    for path in paths:
        times[path.stem] = max(times[path.stem], _modified(path))
    for token in sorted(times, key=lambda each: times[each], reverse=True)[most:]:
        node.dump_path(token).unlink(missing_ok=True)
        fsio.remove_tree(node.flight_path(token))


def prune_requests(run: RunDirectory, launch: str) -> None:
    """Remove requests for stack dumps that are over a day older than the newest, by file times.

    Stalls of the current launch stay, so that the next stall at the same step gets another token.
    """
    folder = node_dir.requests_path(run)
    if fsio.is_linked(folder, run.path):
        return
    times = {path: _modified(path) for path in folder.glob("[!.]*.json")}
    newest = max(times.values(), default=0.0)
    for path in (path for path, at in times.items() if newest - at > _REQUEST_SECONDS):
        stall = fsio.read_json(path).get("stall") or {}
        if not launch or stall.get("launch") != launch:
            path.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0
