"""`longtake train` as a process of its own, and what can be seen of it from outside."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longtake.drill.hangs import Hang, read_word
from longtake.drill.harms import Sabotage
from longtake.errors import RunError
from longtake.node_dir import NodeEventKind, this_node
from longtake.ourselves import environment, program
from longtake.records import read_json_lines
from longtake.run_dir import EventKind, RunDirectory
from longtake.stacks.processes import descendants, facts

_WATCHER = "longtake.watch"
_LIMIT_SECONDS = 300.0
_LOOK_SECONDS = 0.002
_LOOK_SECONDS_ON_NODE = 0.05  # a watcher takes seconds

# Sums are rounded otherwise by another number of threads; and small ones are faster with one.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# Ranks that torchrun starts again would find in its own store what the ones before them left.
_FIXED = {**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Sighting:
    """An event of a run, and when it was seen."""

    event: dict[str, Any]
    at: float
    """By this process's monotonic clock, in seconds."""


class Launch:
    """A training process, or several under torchrun; ended for good when the block is left.

    Args:
        folder: with recipe.toml, in which the process works.
        changes: of the recipe, `key=value`.
        processes: how many; more than one under torchrun.
        sabotage: what is wrong inside it, if anything is.
        restarts: how often torchrun starts all processes again after one has failed.

    Attributes:
        began: when it was started, by the monotonic clock, in seconds.
        pid: of the process that was started: the training process, or torchrun.
        looked_at: when it was last looked at, likewise.
    """

    def __init__(
        self,
        folder: Path,
        changes: Sequence[str],
        processes: int,
        sabotage: Sabotage | None = None,
        restarts: int = 0,
    ) -> None:
        self._folder = folder
        self._run = RunDirectory(folder / "run")
        self._log = folder / f"launch_{len(list(folder.glob('launch_*.log')))}.log"
        self._node = this_node(self._run)
        self._num_events = len(list(read_json_lines(self._run.events_path)))
        self._num_node_events = len(list(read_json_lines(self._node.events_path)))
        module, *ours = _program(processes, sabotage, restarts)
        options = [part for change in changes for part in ("--set", change)]
        self.began = self.looked_at = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                program(module, *ours, "train", "recipe.toml", *options),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(**_FIXED),
                start_new_session=True,  # so that Ctrl-C reaches the drill alone, which ends it
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """What has happened since it was started."""
        return list(read_json_lines(self._run.events_path))[self._num_events :]

    def node_events(self) -> list[dict[str, Any]]:
        """What this node's watcher has seen and done since then."""
        return list(read_json_lines(self._node.events_path))[self._num_node_events :]

    def looks(self, seconds: float = _LOOK_SECONDS) -> Iterator[None]:
        """Yield again and again while it runs, and once after its end.

        Raises:
            RunError: it does not end.
        """
        while self._process.poll() is None:
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
            path = self._run.metrics_path
            if path.exists() and path.read_bytes().count(b"\n") >= count:
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
        """Likewise, for an event of this node's watcher."""
        for _ in self.looks(_LOOK_SECONDS_ON_NODE):
            for event in self.node_events():
                if event["event"] == kind and fields.items() <= event.items():
                    return Sighting(event, time.monotonic())
        return None

    def wait_for_watcher(self) -> int:
        """The process that watches the run on this node.

        Raises:
            RunError: it ends without one.
        """
        for _ in self.looks(_LOOK_SECONDS_ON_NODE):
            if pid := self._node.read_heartbeat().get("pid"):
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

    def wait(self) -> int:
        """Return its exit code, when it has ended."""
        for _ in self.looks():
            pass
        return self._process.returncode

    def finish(self) -> None:
        """Return when it has ended well.

        Raises:
            RunError: it ended with an error.
        """
        if self.wait():
            raise self.unexpected(f"ended with exit code {self._process.returncode}")

    def kill(self) -> bool:
        """End it and all processes that it has started, as `kill -9` does, if it still runs.

        Its watcher is left to tell of it, and to end by itself.

        Returns:
            Whether that is what ended it.
        """
        if self._process.returncode is None:  # else its number may be another process's by now
            for pid in (self.pid, *self._descendants()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        return self._process.returncode == -signal.SIGKILL

    def _descendants(self) -> list[int]:
        """All that it has started but watchers; torchrun's ranks are in no group of its own."""
        found = [facts(pid) for pid in descendants(self.pid)]
        return [each.pid for each in found if each and _WATCHER not in each.command]

    def unexpected(self, what: str) -> RunError:
        """The error that says that it did what no drill wants."""
        return RunError(
            f"The training process {what}. It said: {self._last_words()} (all of it: {self._log})"
        )

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or "nothing"


def _program(processes: int, sabotage: Sabotage | None, restarts: int) -> list[str]:
    """What `python -m` starts, with its own arguments."""
    ours = ["longtake"]
    if sabotage is not None:
        ours = ["longtake.drill.sabotage", *sabotage.arguments]
    if processes == 1:
        return ours
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torchrun, "--max-restarts", str(restarts), "-m", *ours]
