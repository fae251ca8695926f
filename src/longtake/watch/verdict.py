"""What is found out about a stall: who is to blame, who merely waits, and the words for it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

Kind = Literal["stuck", "slow", "lost", "link", "unknown"]
"""`stuck`: it does not move; `slow`: it moves, for longer than it ever has; `lost`: its process is
gone, or its node does not answer; `link`: all ranks wait at the same place, so it is what connects
them; `unknown`: nobody could be asked."""


@dataclass(frozen=True)
class Suspect:
    """A process that others wait for, or that hangs by itself.

    Attributes:
        host: its node.
        pid: the process; 0 of a node that does not answer.
        role: what it is.
        rank: its rank, or that of the rank that it belongs to; None of a node.
        thread: the name of the thread in question; empty: the main one.
        function: the innermost call in a file that is no library's, such as longtake's or the
            user's, or else the innermost of all; empty: not known.
        file: of that call, as the process has it.
        line: of that call; 0: not known.
        within: what the call waits in, if that is another Python call: `wait (threading.py:327)`.
        doing: its phase, as its heart says.
        step: its step in the run, of a rank; how many windows a decoding process has begun.
        seconds: since the phase began; of a process that is gone too.
        clip: identity of the clip that a decoding process is at; empty: none.
        clip_path: the clip's file.
        state: as in /proc, in the last round; empty: it is gone.
        cpu_share: how many cores it kept busy between the first round and the last.
        native: the innermost call of C, where it was read.
        has_gil: whether that thread holds Python's lock.
        moved: whether its stack or its heart changed between the rounds.
        waits_in: what it waits for itself, as `waiting` has it; `nothing` if for nothing.
    """

    host: str
    pid: int
    role: Literal["rank", "decode", "node"]
    rank: int | None
    thread: str = ""
    function: str = ""
    file: str = ""
    line: int = 0
    within: str = ""
    doing: str = ""
    step: int = 0
    seconds: float = 0.0
    clip: str = ""
    clip_path: str = ""
    state: str = ""
    cpu_share: float = 0.0
    native: str | None = None
    has_gil: bool = False
    moved: bool = False
    waits_in: str = "nothing"


@dataclass(frozen=True)
class Waiting:
    """Ranks that wait for the same.

    Attributes:
        doing: what they wait for: `a collective`, `data`, `the device`, `a checkpoint`, `a lock`.
        ranks: which.
        host_count: on how many nodes.
    """

    doing: str
    ranks: tuple[int, ...]
    host_count: int


@dataclass(frozen=True)
class MissingIn:
    """A collective that ranks are to blame for, by the flight recorder.

    Attributes:
        group: the process group, by its description if it has one.
        op: such as `nccl:all_reduce`.
        ranks: who is to blame.
        has_joined: whether they joined it and did not finish it, or never joined.
    """

    group: str
    op: str
    ranks: tuple[int, ...]
    has_joined: bool = False


@dataclass(frozen=True)
class Verdict:
    """stalls/<token>.json.

    Attributes:
        token: of the request.
        time: when it was passed.
        host: who passed it.
        kind: what kind of stall it is.
        launch: of the run.
        step: of the heart that gave the alarm; without an alarm, of the first suspect.
        phase: likewise.
        seconds: for how long that heart had been in it when it gave the alarm.
        limit: what was the most, in seconds; None: nobody gave an alarm.
        suspects: the first is the culprit.
        waiting: ranks that merely wait.
        silent_nodes: those that gave no answer.
        missing_in: what the flight recorder adds.
        sentence: all of it in words.
    """

    token: str
    time: str
    host: str
    kind: Kind
    launch: str
    step: int
    phase: str
    seconds: float | None
    limit: float | None
    suspects: tuple[Suspect, ...]
    waiting: tuple[Waiting, ...]
    silent_nodes: tuple[str, ...]
    missing_in: tuple[MissingIn, ...]
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """As what JSON can hold; tuples become lists there."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Read what `as_dict` made, also after JSON; what this version does not know is left out.

        Raises:
            TypeError: something is missing.
        """
        told = _known(cls, found)
        told["suspects"] = tuple(Suspect(**_known(Suspect, each)) for each in told["suspects"])
        told["waiting"] = tuple(Waiting(**_known(Waiting, each)) for each in told["waiting"])
        missing = told["missing_in"]
        told["missing_in"] = tuple(MissingIn(**_known(MissingIn, each)) for each in missing)
        return cls(**told)


def _known(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: _frozen(value) for name, value in found.items() if name in names}


def _frozen(value: Any) -> Any:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(value) if is_list else value
