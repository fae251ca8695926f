"""From dumps of all nodes to one diagnosis: which process caused a stall and which only wait; pure.

A run hangs at one rank, and all others wait for it. Who waits is no suspect; who is waited for is,
and of several the one that has come least far. In this order:

1. a rank that died; a process that is stopped, or waits for a device that does not answer;
2. where ranks wait for data, the decode workers that have been at one clip longest; and the process
   that raised the alarm;
3. ranks that wait for no other while others do: they never joined. (Of a rank that waits for its
   checkpoint the saver's thread counts.)
4. a node that does not answer, if ranks are missing;
5. if all wait: whom the flight recorder names; or who waits elsewhere than most; or, without a
   majority, who is behind;
6. if all wait at the same place, no rank: it is the network.

A suspect that moves is slow, not stuck, and comes after those that do not.
"""

import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, get_args

import longtake
from longtake import fsio, node_dir, node_events, stacks
from longtake.formatting import for_seconds, plural
from longtake.heartbeat import PHASE_WORDS, STORE_WAIT, Phase
from longtake.monitor.dumps import ProcessTrace, traces
from longtake.monitor.flight_recorder import BlockedCollective, analyse

StallKind = Literal["stuck", "slow", "lost", "link", "unknown", "cleared"]
"""`stuck`: it does not move; `slow`: it moves, for longer than ever; `lost`: its process died, or
its node does not answer; `link`: all ranks wait at the same place, so it is the network; `unknown`:
no process could be read; `cleared`: the process that raised the alarm moved on meanwhile."""

Wait = Literal["collective", "data", "device", "checkpoint", "lock", "nothing"]
"""`lock`: another thread or process of the same node; `nothing`: it computes or hangs by itself."""

_WAIT_WORDS: dict[Wait, str] = {
    "collective": "a collective",
    "data": "data",
    "device": "the device",
    "checkpoint": "a checkpoint",
    "lock": "a lock",
    "nothing": "nothing",
}
_FOR_OTHER_RANKS = ("collective", "device")
_ON_DEVICE = ("forward", "backward", "collective", "optimizer")
_MAX_SUSPECTS = 8
_MAX_EXAMINED = 1000  # to tell whether a process has moved, all its stacks are read
_PHASE_ORDER: dict[str, int] = {phase: place for place, phase in enumerate(get_args(Phase))}


@dataclass(frozen=True)
class Suspect:
    """A process that others wait for, or that hangs by itself; or a node that does not answer."""

    host: str
    pid: int  # 0 of a node
    role: Literal["rank", "decode", "node"]
    rank: int | None  # its rank, or that of the rank that started it
    thread: str = ""  # empty: the main one
    function: str = ""  # innermost call outside of libraries, or innermost of all; empty: unknown
    file: str = ""  # of that call, as the process has it
    line: int = 0  # 0: unknown
    within: str = ""  # the Python call it waits in, if another: `wait (threading.py:327)`
    doing: str = ""  # the heartbeat's phase
    step: int = 0  # global step of a rank; windows that a decode worker has begun
    seconds: float = 0.0  # since the phase began; also of a process that died
    clip: str = ""  # identity of the clip that a decode worker reads
    clip_path: str = ""
    state: str = ""  # as in /proc, in the last round; empty: it died
    cpu_share: float = 0.0  # cores that it kept busy between first and last round
    native: str | None = None  # the innermost C call, where it was read
    has_gil: bool = False  # that thread holds it
    moved: bool = False  # its stack or heartbeat changed between the rounds
    waits_in: str = "nothing"  # a `Wait`


@dataclass(frozen=True)
class WaitingRanks:
    """Ranks that wait for the same."""

    doing: str  # what they wait for: `a collective`, `data`, `the device`, `a checkpoint`, `a lock`
    ranks: tuple[int, ...]
    host_count: int


@dataclass(frozen=True)
class MissingIn:
    """A collective that ranks hold up, by the flight recorder."""

    group: str  # the process group, by its description if it has one
    op: str  # such as `nccl:all_reduce`
    ranks: tuple[int, ...]  # the cause
    has_joined: bool = False  # they joined it and did not finish it; else they never joined


@dataclass(frozen=True)
class StallDiagnosis:
    """stalls/<token>.json."""

    token: str  # of the request
    time: str
    host: str  # who made it
    kind: StallKind
    launch: str
    step: int  # of the process that raised the alarm; without an alarm, of the first suspect
    phase: str  # when it was asked for
    seconds: float | None  # for which that process had been in it at the alarm
    limit: float | None  # of the phase, in seconds; None: no alarm
    suspects: tuple[Suspect, ...]  # the first is the cause
    waiting: tuple[WaitingRanks, ...]
    silent_nodes: tuple[str, ...]  # gave no dump
    missing_in: tuple[MissingIn, ...]  # what the flight recorder adds
    sentence: str
    node_events: tuple[str, ...] = ()  # recent events of clocks, links and GPUs, in words

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    request: node_dir.DumpRequest,
    dumps: Sequence[node_dir.NodeDump],
    silent: Sequence[str],
    recorders: Mapping[int, Mapping[str, Any]],
    host: str = "",
    events: Sequence[node_events.NodeEvent] = (),
) -> StallDiagnosis:
    """Find the cause of a stall, whatever the dumps are; `events`: see `node_events`."""
    blocked = analyse(recorders)
    stalled = frozenset(rank for each in blocked for rank in each.stalled_ranks)
    snapshot = StallSnapshot.of(dumps, stalled)
    alarm: Mapping[str, Any] = request.get("stall", {})
    kind, suspects = _find_cause(snapshot, alarm, silent, blocked)
    if alarm and has_moved_on(alarm, dumps):
        kind, suspects = "cleared", []
    first = suspects[0] if suspects else None
    found = StallDiagnosis(
        token=request["token"],
        time=fsio.now(),
        host=host,
        kind=kind,
        launch=str(alarm.get("launch", "")) or next((each["launch"] for each in dumps), ""),
        step=int(alarm.get("step", first.step if first else 0)),
        phase=str(alarm.get("phase", first.doing if first else "")),
        seconds=alarm.get("seconds"),
        limit=alarm.get("limit"),
        suspects=tuple(suspects),
        waiting=snapshot.waiting(suspects),
        silent_nodes=tuple(silent),
        missing_in=_missing_in(blocked),
        sentence="",
        node_events=tuple(map(str, events)),
    )
    sentence = node_events.add_to(describe(found, snapshot), events)
    return replace(found, suspects=found.suspects[:_MAX_SUSPECTS], sentence=sentence)


def has_moved_on(alarm: Mapping[str, Any], dumps: Sequence[node_dir.NodeDump]) -> bool:
    """Whether the process that raised an alarm has left that phase, by its node's last round.

    A rank that died has not. One that ended as it should has, and so has a decode worker that died:
    its pool has replaced it. Without a dump of its node nothing is known.
    """
    dump = next((each for each in dumps if each["host"] == alarm["host"]), None)
    if dump is None or not dump["rounds"]:
        return False
    who = alarm["role"], alarm["pid"]
    for each in dump["rounds"][-1]["processes"]:
        after = each["heartbeat"]
        if after and (after["role"], after["pid"]) == who and each["state"] not in ("", "Z", "X"):
            # A decode worker counts windows, and its alarm has the run's step.
            names = ("phase", "step", "detail") if alarm["role"] == "rank" else ("phase", "detail")
            is_same = all(alarm.get(name) in (None, after[name]) for name in names)
            return not is_same or after["seconds"] < alarm["seconds"]
    died = any((each["role"], each["pid"]) == who for each in dump["missing"])
    return alarm["role"] != "rank" or not died


# --- The cause.


_Cause = tuple[StallKind, list[Suspect]]


def _find_cause(
    snapshot: "StallSnapshot",
    alarm: Mapping[str, Any],
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


def _halted(snapshot: "StallSnapshot") -> list["ProcessState"]:
    """Processes that a signal stopped, that were not reaped, or ranks that a device blocks."""
    ranks = [each for each in snapshot.ranks if _is_stopped(each.trace) or _is_blocked(each)]
    traces = [each for every in snapshot.decoding.values() for each in every if _is_stopped(each)]
    workers = [ProcessState.of(each) for each in traces]
    return [*sorted(ranks, key=_longest_first), *sorted(workers, key=_longest_first)]


def _is_stopped(trace: ProcessTrace) -> bool:
    return trace.last["state"] in ("T", "t", "Z")


def _is_blocked(each: "ProcessState") -> bool:
    return _waits_for_device(each.trace) and not each.has_moved


def _waits_for_device(trace: ProcessTrace) -> bool:
    states = [seen["state"] for seen in trace.rounds]
    return len(states) > 1 and set(states) == {"D"}


def _is_held_up(trace: ProcessTrace) -> bool:
    """Whether a decode worker that says that it is idle cannot run, or was given a clip."""
    given = {(each["heartbeat"] or {}).get("given", "") for each in trace.rounds}
    has_not_begun = len(given) == 1 and given != {""} and not trace.has_moved
    return has_not_begun or _is_stopped(trace) or _waits_for_device(trace)


def _longest_first(each: "ProcessState") -> float:
    return -each.seconds


def _hanging_alone(snapshot: "StallSnapshot", alarm: Mapping[str, Any]) -> list["ProcessState"]:
    """Processes that wait for no other rank: first who raised the alarm, then who is behind.

    If any do not move, only those, without such as have only just arrived.
    """
    starved = {each.rank for each in snapshot.ranks if each.wait == "data"}
    workers = _hanging_workers(snapshot, starved, alarm)
    fed = {each.rank for each in workers}
    alone = [each for each in snapshot.ranks if each.wait not in _FOR_OTHER_RANKS]
    found = [*workers, *(each for each in alone if each.wait != "data" or each.rank not in fed)]
    still = [each for each in found if not each.has_moved]
    longest = max((each.seconds for each in still), default=0.0)
    found = [each for each in still if 2 * each.seconds >= longest] or found
    position = {each.rank: each.position for each in snapshot.ranks}
    alarmed = alarm.get("host"), alarm.get("pid")
    return sorted(
        found,
        key=lambda each: (
            (each.trace.host, each.trace.pid) != alarmed,
            position.get(each.rank, (0, 0)),
            -each.seconds,
        ),
    )


def _hanging_workers(
    snapshot: "StallSnapshot", starved: set[int], alarm: Mapping[str, Any]
) -> list["ProcessState"]:
    """Decode workers that ranks wait for, or that raised the alarm.

    Those that do not move and have been at one clip longest; without such, the first of the rest.
    """
    is_alarmed = alarm.get("role") == "decode"
    owners = starved | ({int(alarm["rank"])} if is_alarmed else set())
    of_owners = (each for rank in owners for each in snapshot.decoding.get(rank, ()))
    longest = sorted(of_owners, key=lambda each: -each.seconds_in_phase)[:_MAX_EXAMINED]
    found: list[ProcessState] = []
    for trace in longest:
        if trace.rank in starved or (is_alarmed and trace.pid == alarm["pid"]):
            found.append(ProcessState.of(trace))
        if sum(not each.has_moved for each in found[-2 * _MAX_SUSPECTS :]) > _MAX_SUSPECTS:
            break
    return [each for each in found if not each.has_moved] or found[:1]


def _out_of_place(snapshot: "StallSnapshot") -> list["ProcessState"]:
    """Of ranks that all wait for each other, those that do it where the others do not."""
    places: dict[Any, list[ProcessState]] = defaultdict(list)
    for each in snapshot.ranks:
        places[each.position, each.place].append(each)
    if len(places) < 2:
        return []
    most = max(places.values(), key=len)
    if 2 * len(most) > len(snapshot.ranks):
        rest = [each for group in places.values() if group is not most for each in group]
    else:
        behind = min(each.position for each in snapshot.ranks)
        rest = [each for each in snapshot.ranks if each.position == behind]
    return sorted(rest, key=lambda each: (each.position, -each.seconds))


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


# --- The processes of a stall.


@dataclass(frozen=True, eq=False)
class ProcessState:
    """A rank or decode worker: the thread that matters, and what it waits for."""

    trace: ProcessTrace
    thread: str  # empty: the main one
    calls: stacks.Stack  # of that thread, in the last round
    native: stacks.Stack  # the C calls below them, where they were read
    wait: Wait
    has_gil: bool  # that thread holds it

    @classmethod
    def of(cls, trace: ProcessTrace) -> "ProcessState":
        """Find the thread that tells what a process waits for.

        A rank that waits for its checkpoint is where the thread is that writes it; one that
        computes gradients on a device, where autograd's is; one that decodes in threads, there.
        """
        phase = str((trace.heartbeat or {}).get("phase", ""))
        threads = trace.threads
        if not threads:
            return cls(trace, "", (), (), classify_wait((), phase), has_gil=False)
        main = cls._of_thread(trace, threads[0], "", phase)
        if trace.role == "rank":
            for each in threads[1:]:
                if each["frames"] and main._is_represented_by(each):
                    return cls._of_thread(trace, each, str(each["name"]), phase)
        return main

    @classmethod
    def _of_thread(
        cls, trace: ProcessTrace, thread: Mapping[str, Any], name: str, phase: str
    ) -> "ProcessState":
        calls, native = stacks.python_stack(thread), stacks.native_stack(thread)
        wait = classify_wait(calls, phase, native)
        return cls(trace, name, calls, native, wait, thread["has_gil"])

    def _is_represented_by(self, thread: Mapping[str, Any]) -> bool:
        name = str(thread["name"])
        if self.wait == "checkpoint":
            return name.startswith("checkpoint")
        if self.wait == "data":  # "decode_0": of a pool without processes
            return (
                name.startswith("decode_")
                and stacks.user_frame(stacks.python_stack(thread)) is not None
            )
        in_autograd = bool(self.calls) and self.calls[0][0] == "_engine_run_backward"
        return in_autograd and name.startswith("pt_autograd")

    @property
    def rank(self) -> int:
        return -1 if self.trace.rank is None else self.trace.rank

    @property
    def phase(self) -> str:
        return str((self.trace.heartbeat or {}).get("phase", ""))

    @property
    def seconds(self) -> float:
        return self.trace.seconds_in_phase

    @cached_property
    def has_moved(self) -> bool:
        """Whether the thread's stack or the heartbeat changed between rounds."""
        if self.trace.has_moved:
            return True
        seen = self.trace.stacks_of(self.thread) if self.thread else []
        return any(stack != seen[0] for stack in seen[1:])

    @property
    def position(self) -> tuple[int, int]:
        steps_done = int((self.trace.heartbeat or {}).get("steps_done", 0))
        return steps_done, _PHASE_ORDER.get(self.phase, 0)

    @property
    def place(self) -> stacks.Call | None:
        return stacks.user_frame(self.calls) or (self.calls[0] if self.calls else None)

    def suspect(self) -> Suspect:
        trace, heartbeat = self.trace, self.trace.heartbeat or {}
        function, file, line = self.place or ("", "", 0)
        within = ""
        if self.calls and self.calls[0] != self.place:
            name, inner_file, inner_line = self.calls[0]
            within = f"{name} ({stacks.short_file(inner_file)}:{inner_line})"
        native = None
        if self.native:
            name, library, _ = self.native[0]
            native = f"{name} ({library.rpartition('/')[2]})" if library else name
        return replace(
            _by_heartbeat(trace.host, trace.pid, trace.role, trace.rank, heartbeat),
            thread=self.thread,
            function=function,
            file=file,
            line=line,
            within=within,
            state=trace.last["state"],
            cpu_share=round(max(0.0, trace.cpu_share), 3),
            native=native,
            has_gil=self.has_gil,
            moved=self.has_moved,
            waits_in=self.wait,
        )


@dataclass(frozen=True, eq=False)
class StallSnapshot:
    """All processes of a stall."""

    ranks: Sequence[ProcessState]  # living ones
    # By rank: busy decode workers, and idle ones that would have to work and do not.
    decoding: Mapping[int, Sequence[ProcessTrace]]
    lost: Sequence[Suspect]  # ranks whose process died
    rounds: int  # of dumps
    world_size: int  # 0: unknown

    @classmethod
    def of(cls, dumps: Sequence[node_dir.NodeDump], stalled: frozenset[int]) -> "StallSnapshot":
        """Arrange dumps; `stalled`: ranks in an unfinished collective by the flight recorder."""
        last = {each["host"]: [r["seconds"] for r in each["rounds"]][-1:] for each in dumps}
        ranks: list[ProcessState] = []
        decoding: dict[int, list[ProcessTrace]] = defaultdict(list)
        idle: list[ProcessTrace] = []
        lost = [
            _by_heartbeat(dump["host"], int(each["pid"]), each["role"], int(each["rank"]), each)
            for dump in dumps
            for each in dump["missing"]
        ]
        for trace in traces(dumps):
            is_last = trace.seconds[-1] >= last[trace.host][0]
            is_there = is_last and trace.last["state"] not in ("", "X")
            is_idle = (trace.heartbeat or {"phase": "idle"})["phase"] in ("idle", "ended")
            if trace.role == "rank" and is_there:
                ranks.append(ProcessState.of(trace))
            elif trace.role == "rank":
                lost.append(replace(ProcessState.of(trace).suspect(), state=""))
            elif trace.role == "decode" and is_there and is_idle:
                idle.append(trace)
            elif trace.role == "decode" and is_there:
                decoding[-1 if trace.rank is None else trace.rank].append(trace)
        starved = {each.rank for each in ranks if each.wait == "data"}
        for trace in idle:
            if trace.rank in starved and _is_held_up(trace):
                decoding[trace.rank].append(trace)
        # Each once: a process may have died while the rounds were read.
        once = {(each.host, each.pid): each for each in lost if each.role == "rank"}
        sizes = [int((each.trace.heartbeat or {}).get("world_size", 0)) for each in ranks]
        return cls(
            ranks=_with_device_waits(ranks, stalled),
            decoding=decoding,
            lost=sorted(once.values(), key=lambda each: -each.seconds),
            rounds=max((len(each["rounds"]) for each in dumps), default=0),
            world_size=max(sizes, default=0),
        )

    @property
    def absent(self) -> list[int]:
        seen = {each.rank for each in self.ranks} | {each.rank for each in self.lost}
        return [rank for rank in range(self.world_size) if rank not in seen]

    def waiting(self, suspects: Iterable[Suspect]) -> tuple[WaitingRanks, ...]:
        """Ranks that only wait, by what for; the largest group first."""
        blamed = {(each.host, each.pid) for each in suspects}
        groups: dict[str, list[ProcessState]] = defaultdict(list)
        for each in self.ranks:
            if each.wait != "nothing" and (each.trace.host, each.trace.pid) not in blamed:
                groups[_WAIT_WORDS[each.wait]].append(each)
        found = []
        for doing, group in groups.items():
            ranks, hosts = sorted(each.rank for each in group), {each.trace.host for each in group}
            found.append(WaitingRanks(doing, tuple(ranks), len(hosts)))
        return tuple(sorted(found, key=lambda each: -len(each.ranks)))


def _with_device_waits(
    ranks: Sequence[ProcessState], stalled: frozenset[int]
) -> list[ProcessState]:
    """Mark ranks that wait for their GPU, which their Python calls do not show.

    Those that do not move and, by the flight recorder, have an unfinished collective; or those at
    the same line as most ranks.
    """
    candidates = {
        each
        for each in ranks
        if each.wait == "nothing" and each.phase in _ON_DEVICE and not each.has_moved
    }
    places = Counter((each.position, each.place) for each in candidates)
    place, count = next(iter(places.most_common(1)), (None, 0))
    most = place if 2 * count > max(2, len(ranks)) else None
    return [
        replace(each, wait="device")
        if each in candidates and (each.rank in stalled or (each.position, each.place) == most)
        else each
        for each in ranks
    ]


def _by_heartbeat(
    host: str, pid: int, role: str, rank: int | None, heartbeat: Mapping[str, Any]
) -> Suspect:
    """What a process's heartbeat says, which may be all that is left of it."""
    is_decoding = role == "decode"
    return Suspect(
        *(host, pid, "decode" if is_decoding else "rank", rank),
        doing=str(heartbeat.get("phase", "")),
        step=int(heartbeat.get("step", 0)),
        seconds=float(heartbeat.get("seconds", 0.0)),
        clip=str(heartbeat.get("detail", "")) if is_decoding else "",
        clip_path=str(heartbeat.get("path_of_clip") or heartbeat.get("given", "")),
    )


# --- What a thread waits for. Its calls tell more than its phase: a rank in the phase `collective`
# may sleep in a hook, and one in `forward` may gather weights.

_COLLECTIVE = re.compile(
    r"/torch/distributed/(?:distributed_c10d|_functional_collectives|rendezvous|c10d_logger|"
    r"utils|nn/functional|device_mesh|fsdp/|tensor/|_composable/|algorithms/|_tools/|"
    r"checkpoint/utils|checkpoint/_nested_dict)"
)
_OWN_COLLECTIVE = "/longtake/parallel/collectives.py"
_SAVER = "/longtake/checkpoint/store.py"
_THREADS = re.compile(
    r"/(?:threading|queue|subprocess|selectors|concurrent/futures/\w+|multiprocessing/\w+)\.py$"
)
_WAITS = {
    *("wait", "_wait_for_tstate_lock", "acquire", "__enter__", "join", "get", "put", "select"),
    *("result", "exception", "poll", "_poll", "recv", "recv_bytes", "_recv", "_recv_bytes"),
    *("_try_wait", "_wait", "communicate", "_communicate"),
}
_DEVICE = re.compile(r"/torch/(?:cuda|accelerator)/\w+\.py$")
_READS_DEVICE = re.compile(r"\.(?:tolist|item|cpu|to)\(")
_PACKAGE = Path(longtake.__file__).parent
_DRIVER = re.compile(r"^(?:cuda|cu|hip)\w*Synchronize|^cu(?:da)?Memcpy|^cuEventQuery")
_BY_PHASE: dict[str, Wait] = {
    "collective": "collective",
    "rendezvous": "collective",
    "data": "data",
    "checkpoint": "checkpoint",
    "save": "checkpoint",
}


def classify_wait(calls: stacks.Stack, phase: str, native: stacks.Stack = ()) -> Wait:
    """What a thread waits for."""
    if not calls:
        return _BY_PHASE.get(phase, "nothing")
    below, own = (
        tuple(takewhile(lambda call: stacks.is_library_file(call[1]), calls)),
        stacks.user_frame(calls),
    )
    own_file = "" if own is None else own[1]
    if own_file.endswith(_OWN_COLLECTIVE) or any(_COLLECTIVE.search(file) for _, file, _ in below):
        return "collective"
    if any(_DRIVER.search(name) for name, _, _ in native):
        return "device"
    if any("synchronize" in name and _DEVICE.search(file) for name, file, _ in below):
        return "device"
    if not native and _reads_device(calls[0]):
        return "device"
    # py-spy says `Condition.wait` where Python knows qualified names, and `wait` elsewhere.
    names = (name.rpartition(".")[2] for name, file, _ in below if _THREADS.search(file))
    if not any(name in _WAITS for name in names):
        return "nothing"
    if own_file.endswith(_SAVER):
        return "checkpoint"
    return "data" if phase in ("data", "cache") else "lock"


def _reads_device(call: stacks.Call) -> bool:
    """Whether a line of training takes values from the device, which shows no call of torch's.

    The line is read in this process's own package: another process's file may be anything.
    """
    _, file, line = call
    _, ours, name = file.rpartition("/longtake/training/")
    if not ours or "/" in name:
        return False
    code = linecache.getline(str(_PACKAGE / "training" / name), line)
    return _READS_DEVICE.search(code) is not None


# --- In words, for people.

_MAX_NAMED = 3
_STATES = {
    "T": "is stopped (state T: by a signal)",
    "t": "is stopped by a debugger (state t)",
    "Z": "has ended and was not reaped (state Z)",
    "D": "waits for a device that does not answer (state D: a disk, a network disk or a driver)",
}


def describe(diagnosis: StallDiagnosis, snapshot: StallSnapshot) -> str:
    """Which process caused a stall, where it is and since when; who waits; what else is known."""
    suspects, silent = diagnosis.suspects, diagnosis.silent_nodes
    if diagnosis.kind == "cleared":
        return "The process that raised the alarm moved on while the processes were dumped."
    return " ".join(
        [
            *_causes(diagnosis, snapshot),
            *_waiting(diagnosis.waiting, any(each.role != "node" for each in suspects)),
            *_absent(snapshot.absent, silent, suspects),
            *map(_recorded, diagnosis.missing_in),
        ]
    )


def ranges(ranks: Sequence[int]) -> str:
    cuts = [0, *(at for at, (a, b) in enumerate(pairwise(ranks), 1) if b != a + 1), len(ranks)]
    runs = [(ranks[first], ranks[end - 1]) for first, end in pairwise(cuts) if end > first]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(sorted(ranks))}"


def place_of(suspect: Suspect) -> str:
    if not suspect.function:
        return ""
    return f"{suspect.function} ({stacks.short_file(suspect.file)}:{suspect.line})"


def _causes(diagnosis: StallDiagnosis, snapshot: StallSnapshot) -> Iterator[str]:
    suspects = diagnosis.suspects
    if suspects and (store := _store_of(suspects[0])):
        alike = [each for each in suspects if _store_of(each) == store]
        yield _waits_for_store(suspects[0], store, alike[1:])
        suspects = (suspects[0], *(each for each in suspects if each not in alike))
    elif suspects:
        yield _cause(suspects[0], snapshot.rounds)
    if more := suspects[1 : 1 + _MAX_NAMED]:
        rest = len(suspects) - 1 - len(more)
        named = [f"{_who(each)}{_at(each)}" for each in more]
        named += [f"{rest} more"] if rest else []
        yield f"Also: {'; '.join(named)}."
    if diagnosis.kind == "link":
        one = max(snapshot.ranks, key=lambda each: each.seconds).suspect()
        yield (
            f"All {len(snapshot.ranks)} ranks are in {place_of(one) or 'the same place'}, "
            f"{_doing(one)}, for {for_seconds(one.seconds)}: none of them is the cause. Check the "
            "network between them: links, switches and network cards."
        )
    if diagnosis.kind == "unknown":
        yield "No node has answered, so it is not known where the ranks are."


def _store_of(suspect: Suspect) -> str:
    """The store that a decode worker waits for; empty: none, or the worker itself does not run."""
    if _is_halted(suspect):
        return ""
    return suspect.clip_path.partition(STORE_WAIT)[2].partition(" ")[0]


def _waits_for_store(first: Suspect, store: str, others: Sequence[Suspect]) -> str:
    clip, _, said = first.clip_path.partition(STORE_WAIT)
    also = ""
    if others:
        hosts = sorted({each.host for each in others})
        named = ", ".join(hosts[:_MAX_NAMED])
        more = f" and {len(hosts) - _MAX_NAMED} more nodes" if len(hosts) > _MAX_NAMED else ""
        verb = "has" if len(others) == 1 else "have"
        also = f", and so {verb} {plural(len(others), 'other worker')} on {named}{more}"
    return (
        f"The store {said.removesuffix(')')}. {_who(first)} has been waiting for it for "
        f"{for_seconds(first.seconds)}, for clip {clip}{also}: training continues when the store "
        "answers."
    )


def _cause(suspect: Suspect, rounds: int) -> str:
    if suspect.role == "node":
        return f"{suspect.host} gives no answer."
    if not suspect.state:
        return (
            f"{_who(suspect)} is gone: {for_seconds(suspect.seconds)} ago it was "
            f"{_doing(suspect)}, and it did not end as it should."
        )
    stopped = f" {_STATES[suspect.state]}; it" if _is_halted(suspect) else ""
    return f"{_who(suspect)}{stopped} has been {_where(suspect)}{_motion(suspect, rounds)}."


def _is_halted(suspect: Suspect) -> bool:
    return suspect.state in _STATES and not suspect.moved


def _who(suspect: Suspect) -> str:
    if suspect.role == "node":
        return suspect.host
    if suspect.role == "decode":
        return f"{suspect.host}: decode worker {suspect.pid} of rank {suspect.rank}"
    who = f"rank {suspect.rank} (process {suspect.pid})"
    return f"{suspect.host}: " + (f"thread {suspect.thread} of {who}" if suspect.thread else who)


def _at(suspect: Suspect) -> str:
    place = place_of(suspect)
    since = f" for {for_seconds(suspect.seconds)}" if suspect.state else ""
    return f" in {place}{since}" if place else since


def _where(suspect: Suspect) -> str:
    since = f"for {for_seconds(suspect.seconds)}"
    if not suspect.function:
        return f"{_doing(suspect)} {since}"
    within = f", and there in {suspect.within}," if suspect.within else ""
    return f"in {place_of(suspect)}{within} {since}, {_doing(suspect)}"


def _doing(suspect: Suspect) -> str:
    if suspect.role == "decode":
        clip = suspect.clip_path or suspect.clip
        if clip and suspect.doing == "idle":
            return f"before clip {clip}, which it was given"
        return f"on clip {clip}" if clip else "without a clip"
    return PHASE_WORDS.get(suspect.doing, f"in {suspect.doing}").format(step=suspect.step)


def _motion(suspect: Suspect, rounds: int) -> str:
    times = f"{rounds} rounds" if rounds != 1 else "the only round"
    cores = suspect.cpu_share
    used = "no processor time" if cores < 0.02 else f"{cores:.2f} of a core"
    if cores >= 0.9:
        used = "a full core" if cores < 1.1 else f"{cores:.1f} cores"
    if suspect.moved:
        return f"; it is slow and not stuck: it has moved in {times}, and uses {used}"
    native = f" (in {suspect.native})" if suspect.native else ""
    gil = "; it holds the GIL, so no other thread of it runs" if suspect.has_gil else ""
    if suspect.waits_in == "collective" and not _is_halted(suspect):
        return "; none of the others has joined that collective"
    if cores >= 0.9 and not _is_halted(suspect):
        return f", and has not moved in {times}, but uses {used}: it is busy in C{native}{gil}"
    return f", and has not moved in {times}; it uses {used}{native}{gil}"


def _waiting(waiting: Sequence[WaitingRanks], has_suspect: bool) -> Iterator[str]:
    if waiting and has_suspect:
        first, *rest = waiting
        verb = "waits" if len(first.ranks) == 1 else "wait"
        named = [f"{_of_ranks(first.ranks).capitalize()} only {verb} for {first.doing}"]
        named += [f"{_of_ranks(each.ranks)} for {each.doing}" for each in rest]
        yield f"{', and '.join(named)}."


def _absent(
    absent: Sequence[int], silent: Sequence[str], suspects: Sequence[Suspect]
) -> Iterator[str]:
    if absent:
        yield f"There is no sign of {_of_ranks(absent)}; all others wait."
    elif silent and not any(each.role == "node" for each in suspects):
        yield f"No answer came from {', '.join(silent)}."


def _recorded(missing: MissingIn) -> str:
    did = "joined and has not finished" if missing.has_joined else "never joined"
    did = did.replace("has", "have") if len(missing.ranks) > 1 else did
    who = _of_ranks(missing.ranks)
    return f"By the flight recorder {who} {did} {missing.op} of {missing.group}."
