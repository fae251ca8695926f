"""The record of a stall: its suspects, who waits, and what else is known."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

StallKind = Literal["stuck", "slow", "lost", "link", "unknown", "cleared"]
"""`stuck`: it does not move; `slow`: it moves, for longer than ever; `lost`: its process died, or
its node does not answer; `link`: all ranks wait at the same place, so it is the network; `unknown`:
no process could be read; `cleared`: the process that raised the alarm moved on meanwhile."""


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
