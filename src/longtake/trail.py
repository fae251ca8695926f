"""What a rank that fails leaves behind, so that all who waited for it can say why they end.

It is an event `rank_failed` of its node, written by the rank itself before its connections close,
or, where it was killed, by whoever launched it. Where neither could, its heart still beats no more.
"""

import os
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self

from longtake.errors import RecordError
from longtake.heartbeat import Pulse, folder_of, read_all
from longtake.node_dir import NodeDirectory, all_nodes, has_beaten, read_heartbeats, this_node
from longtake.run_dir import RunDirectory

LOG_VARIABLE: Final = "LONGTAKE_LOG"
"""In a rank's environment: the file into which a launcher writes what it says."""

Kind = Literal["error", "exception", "killed", "ended"]
_LOOK_SECONDS = 0.1
_SECONDS_FOR_A_WORD = 0.5
_MAX_LETTERS = 400


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed.

    Attributes:
        rank: which.
        world_size: of how many.
        launch: as of its heart; empty: it had not met the others yet.
        pid: its process.
        step: at which.
        phase: in which.
        kind: `error`: what a user can do something about; `exception`: any other; `killed`: by a
            signal; `ended`: with an exit code, and without a word.
        error: its last line.
        log: what it said is there; empty: wherever its launcher wrote it.
        host: where it ran.
    """

    rank: int
    world_size: int
    launch: str
    pid: int
    step: int
    phase: str
    kind: Kind
    error: str
    log: str = ""
    host: str = ""

    def leave(self, run: RunDirectory) -> None:
        """Write it down on this node; a full disk must not hide the failure itself."""
        facts = asdict(self)
        del facts["host"]  # which an event of a node has anyway
        with suppress(OSError):
            this_node(run).append_event("rank_failed", **facts)

    @classmethod
    def read(cls, event: dict[str, Any]) -> Self:
        """That of an event."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in event.items() if name in names})

    @property
    def in_words(self) -> str:
        """One line, for people."""
        who = f"Rank {self.rank} of {self.world_size}" + (f" on {self.host}" if self.host else "")
        error = self.error if self.error.endswith((".", "!", "?")) else f"{self.error}."
        look = f" What it said is in {self.log}." if self.log else ""
        return f"{who} failed at step {self.step} ({self.phase}): {error}{look}"


def failure_of(
    pulse: Pulse,
    kind: Kind,
    error: str,
    log: str | None = None,
) -> RankFailure:
    """The failure of the rank whose heart this is; `log`: this process's own by default."""
    return RankFailure(
        rank=pulse.rank,
        world_size=pulse.world_size,
        launch=pulse.launch,
        pid=pulse.pid,
        step=pulse.step,
        phase=pulse.phase,
        kind=kind,
        error=error,
        log=os.environ.get(LOG_VARIABLE, "") if log is None else log,
        host=socket.gethostname(),
    )


def last_line(error: BaseException) -> str:
    """What an exception says, on one line: the last that a traceback would end with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines)[:_MAX_LETTERS]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def signal_in_words(number: int) -> str:
    """What is said of a process that a signal has ended."""
    with suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"killed by signal {number}"


def failures(run: RunDirectory, launch: str) -> list[RankFailure]:
    """Those of a launch on all nodes, the first one first."""
    events = [event for event in _events(run) if event.get("launch") == launch]
    events.sort(key=lambda event: str(event["time"]))
    return [RankFailure.read(event) for event in events]


def failures_of_processes(
    run: RunDirectory, pids: Collection[int], since: str
) -> list[RankFailure]:
    """Those of this node's processes; `since`: a time as of `fsio.now`."""
    events = [*_events_of(this_node(run))]
    return [
        RankFailure.read(event)
        for event in events
        if event["pid"] in pids and str(event["time"]) >= since
    ]


def who_failed(run: RunDirectory, own: Pulse, seconds: float = 3.0) -> RankFailure | None:
    """The rank without which another cannot go on; None: nothing is known of it.

    Args:
        run: theirs.
        own: the heart of the one that asks.
        seconds: how long a word of another node is waited for, or a sign of its life.
    """
    begun, before = time.monotonic(), read_heartbeats(run)
    end = begun + seconds
    while True:
        found = failures(run, own.launch)
        gone = next(_gone(run, own), None)
        if found or time.monotonic() >= end:
            break
        if gone is not None:  # whoever launched it may still tell more
            end = min(end, time.monotonic() + _SECONDS_FOR_A_WORD)
        time.sleep(_LOOK_SECONDS)
    if found:
        return found[0]
    if gone is None:
        return _of_silent_node(run, own.launch, before, time.monotonic() - begun)
    return failure_of(gone, "killed", "its process is gone, without a word: killed?")


def _gone(run: RunDirectory, own: Pulse) -> Iterator[Pulse]:
    """Hearts of this node whose ranks were of the same launch and did not end as they should."""
    hearts = read_all(folder_of(run.path))
    theirs = (pulse for pulse in hearts if pulse.role == "rank" and pulse.launch == own.launch)
    return (pulse for pulse in theirs if pulse.phase != "ended" and not pulse.is_alive)


def _of_silent_node(
    run: RunDirectory, launch: str, before: Mapping[str, Mapping[str, Any]], seconds: float
) -> RankFailure | None:
    """A rank of a node whose watcher writes no more; None: all do, or none does (it is the disk).

    Args:
        run: theirs.
        launch: theirs.
        before: what the watchers had written so many seconds ago.
        seconds: at least twice what they take for it.
    """
    beats = {h: each for h, each in read_heartbeats(run).items() if each.get("launch") == launch}
    silent = [h for h, each in beats.items() if h in before and not has_beaten(before[h], each)]
    lost = [
        (h, rank) for h in silent if not beats[h].get("ended") for rank in beats[h].get("ranks", ())
    ]
    if not lost or len(silent) == len(beats):
        return None
    host, rank = lost[0]
    facts = {name: rank[name] for name in ("rank", "world_size", "launch", "pid", "step", "phase")}
    error = f"{host} has given no sign of life for {seconds:.0f} s: is it lost?"
    return RankFailure(**facts, kind="killed", error=error, host=host)


def _events(run: RunDirectory) -> Iterator[dict[str, Any]]:
    for node in all_nodes(run):
        yield from _events_of(node)


def _events_of(node: NodeDirectory) -> Iterator[dict[str, Any]]:
    with suppress(RecordError):  # then nothing is known of it
        yield from (event for event in node.events() if event["event"] == "rank_failed")
