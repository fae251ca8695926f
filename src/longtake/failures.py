"""Failure records: why a rank failed, so that the ranks that lost it can name it as the cause.

A failure is an event `rank_failed` of its node. Its `source` is the writer: the rank, before its
connections close; the launcher, if the rank was killed; or the watcher, which sees only that the
process is gone. If nothing was recorded, a heartbeat that has stopped names the lost rank.
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
from longtake.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from longtake.node_dir import NodeDirectory, all_nodes, has_beaten, node_heartbeats, this_node
from longtake.run_dir import RunDirectory

LOG_VARIABLE: Final = "LONGTAKE_LOG"
"""Environment variable of a rank: the file to which its launcher redirects its output."""

FailureKind = Literal["error", "exception", "killed", "ended"]
"""The way in which a rank failed.

`error`: a LongtakeError; `exception`: any other exception; `killed`: by a signal; `ended`: with
an exit code and without a record."""
FailureSource = Literal["rank", "launcher", "watcher"]
_POLL_SECONDS = 0.1
_LAUNCHER_SECONDS = 0.5  # until the launcher of a rank that is gone has recorded why
_MAX_CHARS = 400


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank, as in the event `rank_failed`."""

    rank: int
    world_size: int
    launch: str  # identifier of the launch; empty: the rank had not met the other ranks
    pid: int
    step: int
    phase: str
    kind: FailureKind
    error: str  # one line
    log: str = ""  # file with the rank's output; empty: unknown
    host: str = ""
    source: FailureSource = "rank"  # program that recorded it; a watcher knows the least

    def record(self, run: RunDirectory) -> None:
        """Append the failure of a rank to this node's events, ignoring OSError.

        A full disk must not hide the failure itself.
        """
        with suppress(OSError):
            this_node(run).append_event("rank_failed", **self.as_event())

    def as_event(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["host"]  # each event of a node has it
        return facts

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> Self:
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in event.items() if name in names})

    def __str__(self) -> str:
        who = f"Rank {self.rank} of {self.world_size}" + (f" on {self.host}" if self.host else "")
        error = self.error if self.error.endswith((".", "!", "?")) else f"{self.error}."
        log = f" Its output is in {self.log}." if self.log else ""
        return f"{who} failed at step {self.step} ({self.phase}): {error}{log}"


def failure_of(
    heartbeat: Heartbeat,
    kind: FailureKind,
    error: str,
    log: str | None = None,
    source: FailureSource = "rank",
) -> RankFailure:
    """Build the record of the failure of the rank that has this heartbeat, on this host.

    Args:
        heartbeat: the rank's heartbeat.
        kind: the way it failed.
        error: the error in one line.
        log: file with the rank's output; None: that of this process, from `LOG_VARIABLE`.
        source: the program that records the failure.
    """
    return RankFailure(
        rank=heartbeat.rank,
        world_size=heartbeat.world_size,
        launch=heartbeat.launch,
        pid=heartbeat.pid,
        step=heartbeat.step,
        phase=heartbeat.phase,
        kind=kind,
        error=error,
        log=os.environ.get(LOG_VARIABLE, "") if log is None else log,
        host=socket.gethostname(),
        source=source,
    )


def error_line(error: BaseException) -> str:
    # One line, and short: it has to fit into a heartbeat page and into one write of events.jsonl.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines)[:_MAX_CHARS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def describe_signal(number: int) -> str:
    with suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"killed by signal {number}"


def failures_of_launch(run: RunDirectory, launch: str) -> list[RankFailure]:
    """Read the ranks' failures of a launch, by time; those recorded by watchers come last."""
    events = [event for node in all_nodes(run) for event in _events(node)]
    events = [event for event in events if event.get("launch") == launch]
    # A watcher knows the least, and may write before the launcher does.
    events.sort(key=lambda event: (event.get("source") == "watcher", str(event["time"])))
    return list(map(RankFailure.from_event, events))


def failures_of_processes(
    run: RunDirectory, pids: Collection[int], since: str
) -> list[RankFailure]:
    """Read the failures since a time of this node's ranks with `pids`; not those by watchers.

    Args:
        run: the run directory.
        pids: the processes.
        since: a time in the format of `fsio.now`.
    """
    return [
        RankFailure.from_event(event)
        for event in _events(this_node(run))
        if event["pid"] in pids and str(event["time"]) >= since and event.get("source") != "watcher"
    ]


def find_failed_rank(run: RunDirectory, own: Heartbeat, seconds: float = 3.0) -> RankFailure | None:
    """Find the failure of another rank that made this rank lose its connection; None: unknown.

    Args:
        run: the run directory.
        own: heartbeat of the rank that lost a peer.
        seconds: limit of the wait for another node's record or sign of life.
    """
    # A recorded reason is best, so wait for it: a lost connection is noticed before the record of
    # the other node becomes visible on a shared file system. A rank of this node that is gone
    # shortens the wait: its launcher records the reason at once, or never.
    begun, before = time.monotonic(), node_heartbeats(run)
    end = begun + seconds
    while True:
        found = failures_of_launch(run, own.launch)
        # Ranks of this node and launch whose process is gone without having ended.
        ranks = (each for each in read_heartbeats(heartbeat_dir(run.path)) if each.role == "rank")
        running = (each for each in ranks if each.launch == own.launch and each.phase != "ended")
        gone = next((each for each in running if not each.is_alive), None)
        is_known = bool(found) and found[0].source != "watcher"
        if is_known or time.monotonic() >= end:
            break
        if gone is not None:
            end = min(end, time.monotonic() + _LAUNCHER_SECONDS)
        time.sleep(_POLL_SECONDS)
    if found:
        return found[0]
    if gone is None:
        return _on_silent_node(run, own.launch, before, time.monotonic() - begun)
    return failure_of(gone, "killed", "its process is gone without a record: killed?")


def _on_silent_node(
    run: RunDirectory, launch: str, before: Mapping[str, Mapping[str, Any]], seconds: float
) -> RankFailure | None:
    """Return a rank of a node whose watcher has stopped writing heartbeats; None: no such node.

    If the watchers of all nodes are silent, the shared disk is the likely cause: also None.

    Args:
        run: the run directory.
        launch: the launch.
        before: the watchers' heartbeats `seconds` ago.
        seconds: at least twice the interval of the watchers' heartbeats.
    """
    beats = {h: each for h, each in node_heartbeats(run).items() if each.get("launch") == launch}
    silent = [h for h, each in beats.items() if h in before and not has_beaten(before[h], each)]
    # A watcher that has ended with its ranks is silent, too, and nothing is lost.
    lost = [h for h in silent if not beats[h].get("ended") and beats[h].get("ranks")]
    if not lost or len(silent) == len(beats):
        return None
    host, rank = lost[0], beats[lost[0]]["ranks"][0]
    facts = {name: rank[name] for name in ("rank", "world_size", "launch", "pid", "step", "phase")}
    error = f"{host} has given no sign of life for {seconds:.0f} s: is it lost?"
    return RankFailure(**facts, kind="killed", error=error, host=host)


def _events(node: NodeDirectory) -> Iterator[dict[str, Any]]:
    with suppress(RecordError):  # then nothing is known of it
        yield from (event for event in node.events() if event["event"] == "rank_failed")
