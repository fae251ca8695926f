"""Starts a run's follower, and another whenever it dies; for the training and for evaluators."""

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from longtake.config import TrackingSection
from longtake.evaluation_dir import writer_path
from longtake.fsio import no_follow
from longtake.lease import is_alive, newest
from longtake.process import RestartDelay, environment, program
from longtake.run_dir import RunDirectory
from longtake.tracking.turn import Role

_PROGRAM = "longtake.tracking"
_LOOK_SECONDS = 0.02
# W&B: nothing of a process above that uses it too, no words, no reports to its makers.
_QUIET = {"WANDB_SERVICE": "", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


class Follower:
    """A run's follower, as a process of its own.

    Args:
        run: the run.
        role: whose follower it is; a trainer's has precedence.
        section: what it tells; the run's recipe decides, if None.

    Raises:
        RunError: there is no such run.
        RecipeError: its recipe cannot be read.
    """

    def __init__(
        self, run: RunDirectory, role: Role, section: TrackingSection | None = None
    ) -> None:
        self._run, self._role = run, role
        self._section = run.recipe().tracking if section is None else section
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether none is started any more: `end` was called, or the run has been deleted."""
        return self._is_over.is_set()

    @property
    def pid(self) -> int | None:
        """The process that was started last."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, in milliseconds, if it was not and there is a tracker to be told."""
        is_wanted = self._section.tensorboard or self._section.wandb != "off"
        if is_wanted and self._process is None:
            with suppress(OSError):  # it is no reason not to train
                self._begin()
                threading.Thread(target=self._keep, name="follower", daemon=True).start()

    def end(self) -> None:
        """Say that nothing more will come; returns at once."""
        with self._lock:
            self._let_go()

    def close(self, wait_seconds: float = 10.0) -> None:
        """Say that nothing more will come, and wait until all is told, or cannot be.

        While another process's follower writes, there is nothing to wait for: that one tells all.

        Args:
            wait_seconds: at most; the follower continues by itself, for a minute at most.
        """
        self.end()
        process, end = self._process, time.monotonic() + wait_seconds
        while process is not None and process.poll() is None and time.monotonic() < end:
            writer = newest(writer_path(self._run))
            if writer is not None and self._has_told_all_it_can(writer, process.pid):
                return
            time.sleep(_LOOK_SECONDS)

    def _has_told_all_it_can(self, writer: Mapping[str, Any], pid: int) -> bool:
        """Whether the writer is this follower and has told all, or is another process's."""
        if writer["pid"] == pid:
            return bool(writer.get("caught_up"))
        return writer["ended"] is None and is_alive(writer) is not False

    def _let_go(self) -> None:
        if self._process is not None and not self._is_over.is_set():
            assert self._process.stdin is not None
            with suppress(OSError):  # it is gone
                self._process.stdin.close()
        self._is_over.set()

    def _keep(self) -> None:
        """Until the end, or the run's; one that dies again and again is left alone for a while."""
        starts = RestartDelay()
        while self._process is not None:
            starts.started()
            self._process.wait()
            if self._is_over.wait(starts.seconds):
                return
            with self._lock, suppress(OSError):
                if not self._run.exists():
                    self._let_go()
                if self._is_over.is_set():
                    return
                self._begin()

    def _begin(self) -> None:
        log = self._run.path / "tracking" / "follower.log"
        log.parent.mkdir(exist_ok=True)  # not that of the run, which may be deleted now
        options = ("--as", self._role, "--until-parent", str(os.getpid()))
        section = ("--section", self._section.model_dump_json())
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        with open(log, "ab", opener=no_follow) as file:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                program(_PROGRAM, str(self._run.path.resolve()), *options, *section),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment(**_QUIET),
                start_new_session=True,  # Ctrl-C and a scheduler's signals are not for it
            )
