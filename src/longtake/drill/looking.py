"""What can be seen from outside of a run that is being trained."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longtake.drill.hangs import Hang, read_word
from longtake.errors import RunError
from longtake.fsio import read_json_lines
from longtake.node_dir import NodeDirectory, NodeEventKind
from longtake.run_dir import EventKind, RunDirectory

_LIMIT_SECONDS = 600.0
_LOOK_SECONDS = 0.002
_LOOK_SECONDS_ON_NODE = 0.05  # a watcher takes seconds


@dataclass(frozen=True)
class Sighting:
    """An event of a run, and when it was seen."""

    event: dict[str, Any]
    at: float
    """By this process's monotonic clock, in seconds."""


class Looking(ABC):
    """Looks at a run while processes train it, which are ended when the block is left.

    Args:
        folder: in which they work, with the run in `run`.
        hosts: those that they run on.

    Attributes:
        began: when they were started, by the monotonic clock, in seconds.
        looked_at: when they were last looked at, likewise.
    """

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self._folder = folder
        self._run = RunDirectory(folder / "run")
        self._log = folder / f"launch_{len(list(folder.glob('launch_*.log')))}.log"
        self._nodes = [NodeDirectory(self._run, host) for host in hosts]
        self._num_events = _count(self._run.events_path)
        self._num_node_events = {node: _count(node.events_path) for node in self._nodes}
        self.began = self.looked_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @abstractmethod
    def is_running(self) -> bool:
        """Whether they still run."""

    @abstractmethod
    def wait(self) -> int:
        """Return their exit code, when they have ended."""

    @abstractmethod
    def kill(self) -> bool:
        """End them, as `kill -9` does, if they still run; returns whether that ended them."""

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """What has happened since it was started."""
        return list(read_json_lines(self._run.events_path))[self._num_events :]

    def node_events(self) -> list[dict[str, Any]]:
        """What the nodes' watchers have seen and done since then, node by node."""
        found: list[dict[str, Any]] = []
        for node, num_before in self._num_node_events.items():
            found += list(read_json_lines(node.events_path))[num_before:]
        return found

    def num_rows(self) -> int:
        """How many rows of metrics the run has, with those of before."""
        path = self._run.metrics_path
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def looks(self, seconds: float = _LOOK_SECONDS) -> Iterator[None]:
        """Yield again and again while it runs, and once after its end.

        Raises:
            RunError: it does not end.
        """
        while self.is_running():
            self.looked_at = time.monotonic()
            yield
            if self.looked_at > self.began + _LIMIT_SECONDS:
                raise RunError(
                    f"The training process of the drill has not ended in {_LIMIT_SECONDS:g} s. "
                    f"What it said last is in {self._log}: {self._last_words()}"
                )
            time.sleep(seconds)
        yield

    def wait_for_rows(self, count: int) -> None:
        """Return when the run has this many rows of metrics.

        Raises:
            RunError: it ends without them.
        """
        for _ in self.looks():
            if self.num_rows() >= count:
                return
        raise self.unexpected(f"ended before step {count}")

    def wait_for_checkpoints(self, count: int) -> None:
        """Return when the run has this many whole checkpoints.

        Raises:
            RunError: it ends without them.
        """
        for _ in self.looks():
            if len(self._run.checkpoint_steps()) >= count:
                return
        raise self.unexpected(f"ended before it had {count} whole checkpoints")

    def find(self, kind: EventKind, **fields: Any) -> Sighting | None:
        """Wait for an event with such fields; None if the run ends without it."""
        for _ in self.looks():
            for event in self.events():
                if event["event"] == kind and fields.items() <= event.items():
                    return Sighting(event, time.monotonic())
        return None

    def find_on_node(self, kind: NodeEventKind, **fields: Any) -> Sighting | None:
        """Likewise, for an event of a node's watcher."""
        for _ in self.looks(_LOOK_SECONDS_ON_NODE):
            for event in self.node_events():
                if event["event"] == kind and fields.items() <= event.items():
                    return Sighting(event, time.monotonic())
        return None

    def wait_for_watcher(self) -> int:
        """The process that watches the run on the first node, as it is called there.

        Raises:
            RunError: it ends without one.
        """
        for _ in self.looks(_LOOK_SECONDS_ON_NODE):
            if pid := self._nodes[0].read_heartbeat().get("pid"):
                return int(pid)
        raise self.unexpected("ended before it was watched")

    def wait_for_hang(self) -> Hang:
        """What the process that hangs has said of it.

        Raises:
            RunError: none hangs, and the run has ended.
        """
        for _ in self.looks():
            if hang := read_word(self._folder):
                return hang
        raise self.unexpected("ended before one of its processes could hang")

    def finish(self) -> None:
        """Return when it has ended well.

        Raises:
            RunError: it ended with an error.
        """
        if code := self.wait():
            raise self.unexpected(f"ended with exit code {code}")

    def unexpected(self, what: str) -> RunError:
        """The error that says that it did what no drill wants."""
        return RunError(
            f"The training process {what}. It said: {self._last_words()} (all of it: {self._log})"
        )

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or "nothing"


def _count(path: Path) -> int:
    return len(list(read_json_lines(path)))
