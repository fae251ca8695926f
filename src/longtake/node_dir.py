"""The watchers' part of a run directory: paths, records and the state of a run; torch-free.

    nodes/<host>/heartbeat.json        phases of the node's processes, several times a second
    nodes/<host>/events.jsonl          what the watcher saw and did
    nodes/<host>/health.jsonl          clocks, power, links, disks, load: one line per some seconds
    nodes/<host>/watcher.log           output of the watcher
    nodes/<host>/logs/<time>/rank_0003.log   output of a rank that `longtake launch` started
    nodes/<host>/stacks/<token>.json   stack dumps of all the run's processes on the node
    nodes/<host>/stacks/<token>.fr/    the flight recorders' dumps for the same request, by rank
    requests/<token>.json              a request for dumps of all nodes (writer: the requester)
    stalls/<token>.json                the diagnosis over all nodes (writer: the first to finish)

The watcher of a node is the only writer below nodes/<host>, with three exceptions: rank 0 writes
dumps of decode workers to `stacks/`, the launcher writes `logs/`, and the rank or its launcher
appends the event `rank_failed`, in one write call.
"""

import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from longtake import errors, evaluation_dir, fsio, lease
from longtake.formatting import natural_key
from longtake.metrics import Metrics
from longtake.run_dir import EVENT, RunDirectory

NodeEventKind = Literal[
    "watcher_started",
    "stalled",
    "stall_cleared",
    "restarted_worker",
    "killed_rank",
    "rank_failed",
    "clock_stepped",
    "clock_slewed",
    "degraded",
    "recovered",
    "disk_full",
    "request_refused",
]

FLIGHT_PIPE_PREFIX = "fr_pipe_rank_"
"""Beginning of the name of the pipe that triggers a rank's flight recorder (NCCL's last
collectives); the rank and `.pipe` follow.

It lies in the heartbeat folder."""
FLIGHT_FILE_PREFIX = "fr_dump_rank_"
"""Beginning of the name of the file that a rank's flight recorder writes; the rank follows."""


@fsio.with_other_fields
class _RankEntry(TypedDict):
    rank: fsio.Count
    world_size: fsio.Count
    launch: str
    pid: fsio.Count
    step: fsio.Count
    phase: str


@fsio.with_other_fields
class _NodeHeartbeat(TypedDict):
    """Fields of nodes/<host>/heartbeat.json that longtake's readers use."""

    pid: NotRequired[fsio.Count]
    beat: NotRequired[fsio.Count]
    launch: NotRequired[str]
    ranks: NotRequired[list[_RankEntry]]
    addresses: NotRequired[list[str]]
    health: NotRequired[dict[str, Any]]
    monotonic: NotRequired[fsio.Finite]
    wall: NotRequired[fsio.Finite]


class _Frame(TypedDict):
    function: str
    file: str
    line: int


@fsio.with_other_fields
class _Thread(TypedDict):
    name: str
    frames: list[_Frame]


# Threads are checked, and returned as they are: pydantic would make a copy of every frame.
_THREADS = TypeAdapter(list[_Thread])


def _are_threads(threads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    _THREADS.validate_python(threads, strict=True)
    return threads


@fsio.with_other_fields
class ProcessDump(TypedDict):
    """Stack dump of one process at one moment, with its state."""

    pid: int
    ppid: int
    role: Literal["rank", "decode", "agent", "helper"]
    """Role of the process. `agent`: torchrun's agent; `helper`: any other process that a rank has
    started."""
    rank: int | None
    """The process's own rank, or the rank that started it."""
    command: str
    state: str
    """Process state letter of /proc/<pid>/stat: R S D T Z; empty: the process was gone."""
    cpu_seconds: float
    """User and system time of the process since its start, in seconds."""
    method: str
    """The way in which the stacks were read (py-spy, signal ...): see `stacks.StackDump`."""
    threads: Annotated[list[dict[str, Any]], AfterValidator(_are_threads)]
    """The process's `stacks.ThreadStack`s as JSON, the main thread first."""
    raw: str
    """Text about the process from which no stacks could be parsed."""
    heartbeat: dict[str, Any] | None
    """The process's heartbeat (`Heartbeat.as_dict`), read in the same round."""


class Round(TypedDict):
    """Stack dumps of all processes of a node at about the same moment."""

    seconds: float
    """Seconds from the first round of the dump to this round."""
    processes: list[ProcessDump]


class NodeDump(TypedDict):
    """Stack dumps of all processes of a run on one node, in several rounds.

    It is the content of nodes/<host>/stacks/<token>.json.
    """

    token: str
    time: str
    host: str
    reason: Literal["stall", "asked"]
    launch: str
    rounds: list[Round]
    missing: list[dict[str, Any]]
    """Heartbeats (`Heartbeat.as_dict`) of the run's processes that are gone and did not end
    normally."""


@fsio.with_other_fields
class StallAlarm(TypedDict):
    """Alarm of a stall: heartbeat of the process whose phase exceeded its limit (seconds)."""

    role: Literal["rank", "decode"]
    pid: fsio.Count
    rank: fsio.Count
    launch: Annotated[str, Field(max_length=64)]
    step: fsio.Count
    phase: Annotated[str, Field(max_length=64)]
    seconds: fsio.Finite
    detail: Annotated[str, Field(max_length=4096)]
    host: fsio.FileName
    limit: fsio.Finite


class DumpRequest(TypedDict):
    """A request for stack dumps of all nodes: the content of requests/<token>.json."""

    token: Annotated[str, Field(pattern="^[0-9A-Za-z_-]{1,200}$")]
    time: fsio.Time
    by: fsio.FileName
    """Host name of the node that requests the dumps."""
    reason: Literal["stall", "asked"]
    rounds: Annotated[int, Field(ge=1, le=100)]
    native: bool
    stall: NotRequired[StallAlarm]
    """The alarm of the stall for which dumps are requested, if that is the reason."""


@dataclass(frozen=True)
class NodeDirectory:
    """Paths and records of one node of a run, below nodes/<host> in the run directory."""

    run: RunDirectory
    host: str

    @property
    def path(self) -> Path:
        return nodes_path(self.run) / self.host

    @property
    def heartbeat_path(self) -> Path:
        return self.path / "heartbeat.json"

    @property
    def health_path(self) -> Path:
        return self.path / "health.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log_path(self) -> Path:
        return self.path / "watcher.log"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    def rank_log_path(self, time: str, rank: int) -> Path:
        return self.logs_path / time / f"rank_{rank:04d}.log"

    def dump_path(self, token: str) -> Path:
        return self.path / "stacks" / f"{token}.json"

    def flight_path(self, token: str) -> Path:
        return self.path / "stacks" / f"{token}.fr"

    def append_event(self, kind: NodeEventKind, /, **fields: Any) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # The event is one write call, as rank, launcher and watcher append to the same file.
        fsio.append_json(
            self.events_path, {"time": fsio.now(), "event": kind, "host": self.host, **fields}
        )

    def events(self) -> list[dict[str, Any]]:
        return fsio.read_records(self.events_path, EVENT)

    def write_heartbeat(self, record: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # Without fsync: the file is replaced every second, and one that is lost is written again.
        with (
            fsio.atomic_write(self.heartbeat_path) as aside,
            aside.open("x", encoding="utf-8") as file,
        ):
            json.dump(record, file)

    def read_heartbeat(self) -> dict[str, Any]:
        with suppress(errors.RecordError):
            return dict(fsio.read_record(self.heartbeat_path, _NodeHeartbeat) or {})
        return {}

    def write_dump(self, dump: NodeDump) -> Path:
        """Write this node's stack dump in answer to a request, and return its path."""
        path = self.dump_path(dump["token"])
        path.parent.mkdir(parents=True, exist_ok=True)
        fsio.write_text(path, json.dumps(dump, separators=(",", ":")) + "\n")
        return path


def read_dump(path: Path) -> NodeDump | None:
    with suppress(errors.RecordError):
        return fsio.read_record(path, NodeDump)
    return None


def nodes_path(run: RunDirectory) -> Path:
    return run.path / "nodes"


def this_node(run: RunDirectory) -> NodeDirectory:
    return NodeDirectory(run, socket.gethostname())


def all_nodes(run: RunDirectory) -> list[NodeDirectory]:
    folder = nodes_path(run)
    hosts = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [NodeDirectory(run, host) for host in sorted(hosts, key=natural_key)]


def node_heartbeats(run: RunDirectory) -> dict[str, dict[str, Any]]:
    found = {node.host: node.read_heartbeat() for node in all_nodes(run)}
    return {host: record for host, record in found.items() if record}


def beat_of(heartbeat: Mapping[str, Any]) -> tuple[object, object]:
    # The pid belongs to it: a watcher that was started again counts its beats from 1.
    return heartbeat.get("pid"), heartbeat.get("beat")


def has_beaten(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> bool:
    return bool(after) and (not before or beat_of(before) != beat_of(after or {}))


def requests_path(run: RunDirectory) -> Path:
    return run.path / "requests"


def request_path(run: RunDirectory, token: str) -> Path:
    return requests_path(run) / f"{token}.json"


def diagnosis_path(run: RunDirectory, token: str) -> Path:
    return run.path / "stalls" / f"{token}.json"


def read_events(run: RunDirectory) -> Iterator[dict[str, Any]]:
    found = [
        run.events(),
        *(node.events() for node in all_nodes(run)),
        *evaluation_dir.server_events(run),
    ]
    return (event for _, event in merge(*map(_in_order, found), key=lambda each: each[0]))


def _in_order(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one file of a node, each with a sort key that never decreases.

    The key is the latest time so far: a clock that is set back must not reorder the events of one
    node, and `heapq.merge` needs sorted input.
    """
    latest = ""
    for event in events:
        latest = max(latest, str(event["time"]))
        yield latest, event


StateKind = Literal["running", "stalled", "dead", "interrupted", "diverged", "finished"]
_FRESH_SECONDS = 60.0


class _Turn(TypedDict):
    """Event of a run that begins or ends a launch."""

    time: fsio.Time
    event: Literal["launched", "resumed", "finished", "interrupted", "diverged"]


@dataclass(frozen=True)
class RunState:
    """The current state of a run: running, stalled, or the way in which its last launch ended."""

    kind: StateKind
    """State of the run. `stalled`: it runs, but a watcher has reported a stall; `dead`: its last
    launch failed or ended without recording why; `interrupted`: a signal ended it, and the last
    step was saved."""
    holder: Mapping[str, Any] | None
    """The newest `LeaseRecord` of the run, which names the process that trains it; None: it was
    never trained."""
    silent_seconds: float | None
    """Seconds since the newest modification of the run's files; None: there are no files."""


def state(run: RunDirectory) -> RunState:
    """Determine the state of a run from its files, without waiting.

    If the lease's holder runs on this machine, /proc decides whether it is alive. Otherwise it is
    taken for alive while the run's files are younger than the lease's `seconds`, so clocks of the
    machines that differ by about a minute can give a wrong answer.
    """
    beats = (node.heartbeat_path for node in all_nodes(run))
    times = []
    for path in (run.metrics_path, run.events_path, *run.lease_path.glob("*.json"), *beats):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    silent = max(0.0, time.time() - max(times)) if times else None
    holder = lease.newest(run.lease_path)
    # The newest of all files, as each may be old in a run that lives, such as metrics at a save.
    is_fresh = silent is not None and silent <= (holder["seconds"] if holder else _FRESH_SECONDS)
    # Without a lease: a mirror, or a run that nobody has begun to train.
    if holder is None:
        ended = _how_it_ended(run)
        return RunState("running" if ended == "dead" and is_fresh else ended, None, silent)
    # A lease that was given back: the events say how the launch ended.
    if holder["ended"] is not None:
        return RunState(_how_it_ended(run), holder, silent)
    alive = lease.is_alive(holder)
    if not (is_fresh if alive is None else alive):
        return RunState("dead", holder, silent)
    return RunState("stalled" if _is_stalled(run, holder) else "running", holder, silent)


def _how_it_ended(run: RunDirectory) -> StateKind:
    found = fsio.read_last_record(run.events_path, _Turn)
    # An event of a launch that has not ended, and whose process is gone.
    if found is None or found["event"] == "launched" or found["event"] == "resumed":
        return "dead"
    return found["event"]


def _is_stalled(run: RunDirectory, holder: Mapping[str, Any]) -> bool:
    """Return True if the run's newest stall was not cleared and no later step was done."""
    stall: dict[str, Any] | None = None
    found = (node.events() for node in all_nodes(run))
    # Sorted by time over all nodes: another node than the reporting one may clear a stall.
    for event in merge(*found, key=lambda event: str(event["time"])):
        if event["event"] == "stalled" and str(event["time"]) > holder["time"]:
            stall = event
        elif (
            event["event"] == "stall_cleared" and stall and event.get("token") == stall.get("token")
        ):
            stall = None
    if stall is None:
        return False
    # A stall whose watcher died before it cleared it is over once later steps are done.
    last = fsio.read_last_record(run.metrics_path, Metrics)
    return last is None or bool(last["step"] <= (stall.get("step") or 0))
