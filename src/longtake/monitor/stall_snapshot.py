"""The processes of a stalled run, and the kind of thing each waits for, by calls and heartbeat."""

import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

import longtake
from longtake import node_dir, stacks
from longtake.heartbeat import Phase
from longtake.monitor.dumps import ProcessTrace, traces
from longtake.monitor.stall_record import Suspect, WaitingRanks

Wait = Literal["collective", "data", "device", "checkpoint", "lock", "nothing"]
"""The kind of thing that a thread of a stalled process waits for.

`lock`: another thread or process of the same node; `nothing`: it computes or hangs by itself."""

_WAIT_WORDS: dict[Wait, str] = {
    "collective": "a collective",
    "data": "data",
    "device": "the device",
    "checkpoint": "a checkpoint",
    "lock": "a lock",
    "nothing": "nothing",
}
_ON_DEVICE = ("forward", "backward", "collective", "optimizer")
_PHASE_ORDER: dict[str, int] = {phase: place for place, phase in enumerate(get_args(Phase))}


@dataclass(frozen=True, eq=False)
class ProcessState(ProcessTrace):
    """State of a rank or decode worker in a stall: its decisive thread, and what that waits for."""

    thread: str  # name of the thread; empty: the main thread
    calls: stacks.Stack  # calls of that thread in the last round
    native: stacks.Stack  # C calls below them, if they were read
    wait: Wait
    has_gil: bool  # the thread holds the GIL

    @classmethod
    def of(cls, trace: ProcessTrace) -> "ProcessState":
        """Build the state of a process from the thread that shows what it waits for.

        This is the main thread, except for a rank that waits for another of its threads: the one
        that writes the checkpoint, autograd's for a device, or one that decodes.
        """

        def of_thread(thread: Mapping[str, Any], name: str) -> "ProcessState":
            calls, native = stacks.python_stack(thread), stacks.native_stack(thread)
            wait = classify_wait(calls, trace.phase, native)
            process = trace.host, trace.rounds, trace.seconds
            return cls(*process, name, calls, native, wait, thread["has_gil"])

        main, *others = trace.threads or [{"frames": [], "has_gil": False}]
        state = of_thread(main, "")
        for each in others if trace.role == "rank" else ():
            if each["frames"] and state._is_represented_by(each):
                return of_thread(each, str(each["name"]))
        return state

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

    @cached_property
    def has_moved(self) -> bool:
        """True if the stack of the decisive thread or the heartbeat changed between rounds."""
        seen = self.stacks_of(self.thread) if self.thread else []
        return super().has_moved or any(stack != seen[0] for stack in seen[1:])

    @property
    def position(self) -> tuple[int, int]:
        steps_done = int((self.heartbeat or {}).get("steps_done", 0))
        return steps_done, _PHASE_ORDER.get(self.phase, 0)

    @property
    def place(self) -> stacks.Call | None:
        return stacks.user_frame(self.calls) or (self.calls[0] if self.calls else None)

    def suspect(self) -> Suspect:
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
            _by_heartbeat(self.host, self.pid, self.role, self.last["rank"], self.heartbeat or {}),
            thread=self.thread,
            function=function,
            file=file,
            line=line,
            within=within,
            state=self.last["state"],
            cpu_share=round(max(0.0, self.cpu_share), 3),
            native=native,
            has_gil=self.has_gil,
            moved=self.has_moved,
            waits_in=self.wait,
        )


@dataclass(frozen=True, eq=False)
class StallSnapshot:
    """All processes of a stalled run, from the stack dumps of its nodes."""

    ranks: Sequence[ProcessState]  # living ranks
    # Decode workers by rank: busy ones, and idle ones that should work and do not.
    decoding: Mapping[int, Sequence[ProcessTrace]]
    lost: Sequence[Suspect]  # ranks whose process died
    rounds: int  # number of rounds of dumps
    world_size: int  # 0: unknown

    @classmethod
    def of(cls, dumps: Sequence[node_dir.NodeDump], stalled: frozenset[int]) -> "StallSnapshot":
        """Build the snapshot of a stall from the nodes' stack dumps.

        Args:
            dumps: stack dumps of all nodes.
            stalled: ranks in an unfinished collective, according to the flight recorder.
        """
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
            # A process that is missing in its node's last round died during the dump.
            is_there = is_last and trace.last["state"] not in ("", "X")
            is_idle = trace.phase in ("", "idle", "ended")
            if trace.role == "rank" and is_there:
                ranks.append(ProcessState.of(trace))
            elif trace.role == "rank":
                lost.append(replace(ProcessState.of(trace).suspect(), state=""))
            elif trace.role == "decode" and is_there and is_idle:
                idle.append(trace)
            elif trace.role == "decode" and is_there:
                decoding[trace.rank].append(trace)
        starved = {each.rank for each in ranks if each.wait == "data"}
        for trace in idle:
            if trace.rank in starved and trace.is_held_up:
                decoding[trace.rank].append(trace)
        # Each once: a process may have died while the rounds were read.
        once = {(each.host, each.pid): each for each in lost if each.role == "rank"}
        sizes = [int((each.heartbeat or {}).get("world_size", 0)) for each in ranks]
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
        """Group the ranks that only wait by what they wait for; the largest group comes first."""
        blamed = {(each.host, each.pid) for each in suspects}
        groups: dict[str, list[ProcessState]] = defaultdict(list)
        for each in self.ranks:
            if each.wait != "nothing" and (each.host, each.pid) not in blamed:
                groups[_WAIT_WORDS[each.wait]].append(each)
        found = []
        for doing, group in groups.items():
            ranks, hosts = sorted(each.rank for each in group), {each.host for each in group}
            found.append(WaitingRanks(doing, tuple(ranks), len(hosts)))
        return tuple(sorted(found, key=lambda each: -len(each.ranks)))


def _with_device_waits(
    ranks: Sequence[ProcessState], stalled: frozenset[int]
) -> list[ProcessState]:
    """Mark ranks as waiting for their GPU, which their Python calls do not show.

    These are ranks that do not move and either have an unfinished collective, according to the
    flight recorder, or are at the same line as most ranks.
    """
    candidates = {
        each
        for each in ranks
        if each.wait == "nothing" and each.phase in _ON_DEVICE and not each.has_moved
    }
    places = Counter((each.position, each.place) for each in candidates)
    place, count = next(iter(places.most_common(1)), (None, 0))
    # More than half of the ranks, and two at least: one rank alone waits for nobody.
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
    """Build a suspect from the last heartbeat of a process, which may be all that is left of it."""
    is_decoding = role == "decode"
    return Suspect(
        *(host, pid, "decode" if is_decoding else "rank", rank),
        doing=str(heartbeat.get("phase", "")),
        step=int(heartbeat.get("step", 0)),
        seconds=float(heartbeat.get("seconds", 0.0)),
        clip=str(heartbeat.get("detail", "")) if is_decoding else "",
        clip_path=str(heartbeat.get("path_of_clip") or heartbeat.get("given", "")),
    )


# Calls tell more than a phase: a rank in the phase `collective` may sleep in a hook, and one in
# `forward` may gather weights.
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
    """Determine the kind of thing that a thread waits for, by its calls and its process's phase.

    Args:
        calls: the thread's Python calls, innermost first.
        phase: phase of the process's heartbeat.
        native: C calls below them, if they were read.
    """
    if not calls:
        return _BY_PHASE.get(phase, "nothing")
    below, own = (
        tuple(takewhile(lambda call: stacks.is_library_file(call[1]), calls)),
        stacks.user_frame(calls),
    )
    # Collectives come first: some of them also wait for the device.
    own_file = "" if own is None else own[1]
    if own_file.endswith(_OWN_COLLECTIVE) or any(_COLLECTIVE.search(file) for _, file, _ in below):
        return "collective"
    if any(_DRIVER.search(name) for name, _, _ in native):
        return "device"
    if any("synchronize" in name and _DEVICE.search(file) for name, file, _ in below):
        return "device"
    if not native and _reads_device(calls[0]):
        return "device"
    # py-spy reports `Condition.wait` if the process's Python has qualified names, else `wait`.
    names = (name.rpartition(".")[2] for name, file, _ in below if _THREADS.search(file))
    if not any(name in _WAITS for name in names):
        return "nothing"
    if own_file.endswith(_SAVER):
        return "checkpoint"
    return "data" if phase in ("data", "cache") else "lock"


def _reads_device(call: stacks.Call) -> bool:
    """Return True if a call is at a line of `longtake.training` that reads values from the device.

    Methods such as `item` are C calls, so the stack has no frame of torch for them. The line is
    read from this process's own package, as the path of another process may be any file.
    """
    _, file, line = call
    _, ours, name = file.rpartition("/longtake/training/")
    if not ours or "/" in name:
        return False
    code = linecache.getline(str(_PACKAGE / "training" / name), line)
    return _READS_DEVICE.search(code) is not None
