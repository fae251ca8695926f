"""The record of a stall: suspected processes, waiting ranks and findings of flight recorders."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from longtake import fsio

StallKind = Literal["stuck", "slow", "lost", "link", "unknown", "cleared"]
"""Kind of a stall, by its cause.

`stuck`: the suspect does not move; `slow`: it moves, but takes longer than ever; `lost`: its
process died, or its node does not answer; `link`: all ranks wait at the same place, so the network
is the cause; `unknown`: no process could be read; `cleared`: the process that raised the alarm
moved on in the meantime.
"""


@dataclass(frozen=True)
class Suspect:
    """A suspect of a stall: a process that others wait for or that hangs, or a silent node."""

    host: str
    pid: int  # 0 for a node
    role: Literal["rank", "decode", "node"]
    rank: int | None  # its rank, or the rank that started it
    thread: str = ""  # name of the thread that hangs; empty: the main thread
    function: str = ""  # innermost call outside of libraries, or innermost of all; empty: unknown
    file: str = ""  # file of that call, as in the process
    line: int = 0  # line of that call; 0: unknown
    within: str = ""  # the Python call it waits in, if another: `wait (threading.py:327)`
    doing: str = ""  # the heartbeat's phase
    step: int = 0  # global step of a rank; number of windows that a decode worker has begun
    seconds: float = 0.0  # time since the phase began, also for a process that died
    clip: str = ""  # identity of the clip that a decode worker reads
    clip_path: str = ""
    state: str = ""  # state in /proc in the last round; empty: it died
    cpu_share: float = 0.0  # cores that it kept busy between first and last round
    native: str | None = None  # innermost C call, if it was read
    has_gil: bool = False  # the thread holds the GIL
    moved: bool = False  # its stack or heartbeat changed between the rounds
    waits_in: str = "nothing"  # a `Wait` of `stall_snapshot`


@dataclass(frozen=True)
class WaitingRanks:
    """Ranks of a stalled run that wait for the same kind of thing."""

    doing: str  # what they wait for: `a collective`, `data`, `the device`, `a checkpoint`, `a lock`
    ranks: tuple[int, ...]
    host_count: int


@dataclass(frozen=True)
class MissingIn:
    """A collective that some ranks hold up, according to NCCL's flight recorders."""

    group: str  # the process group, by its description if it has one
    op: str  # such as `nccl:all_reduce`
    ranks: tuple[int, ...]  # the ranks that are the cause
    has_joined: bool = False  # True: they joined and did not finish it; False: never joined


@dataclass(frozen=True)
class StallDiagnosis:
    """The diagnosis of a stall, as saved in stalls/<token>.json."""

    token: Annotated[str, Field(pattern="^[0-9A-Za-z_-]{1,200}$")]  # of the request for dumps
    time: fsio.Time
    host: str  # the node that made the diagnosis
    kind: StallKind
    launch: str
    step: int  # step of the process that raised the alarm, else of the first suspect
    phase: str  # phase of that process at the alarm
    seconds: float | None  # time in that phase at the alarm; None: no alarm
    limit: float | None  # limit of the phase in seconds; None: no alarm
    suspects: tuple[Suspect, ...]  # the first is the cause
    waiting: tuple[WaitingRanks, ...]
    silent_nodes: tuple[str, ...]  # nodes without a dump
    missing_in: tuple[MissingIn, ...]  # findings of the flight recorder
    sentence: str
    node_events: tuple[str, ...] = ()  # recent events of clocks, links and GPUs, in words

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
