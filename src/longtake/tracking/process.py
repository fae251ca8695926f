"""Keeps a run's follower running, for training and for evaluation servers."""

import os
import time
from collections.abc import Mapping
from typing import Any

from longtake.config import TrackingSection
from longtake.evaluation_dir import writer_path
from longtake.lease import is_alive, newest
from longtake.process import KeptProcess, program
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
        self._run = run
        self._section = run.recipe().tracking if section is None else section
        options = ("--as", role, "--until-parent", str(os.getpid()))
        self._kept = KeptProcess(
            "follower",
            program(
                _PROGRAM,
                str(run.path.resolve()),
                *options,
                "--section",
                self._section.model_dump_json(),
            ),
            run.path / "tracking" / "follower.log",
            inside=run.path,
            changes=_QUIET,
            has_pipe=True,
        )

    @property
    def is_over(self) -> bool:
        """Whether none is started any more: `end` was called, or the run has been deleted."""
        return self._kept.is_over

    @property
    def pid(self) -> int | None:
        return self._kept.pid

    def start(self) -> None:
        """Start it, in milliseconds, if it was not and the recipe has a tracker."""
        if self._section.tensorboard or self._section.wandb != "off":
            self._kept.start()

    def end(self) -> None:
        """Say that nothing more will come; returns at once."""
        self._kept.end()

    def close(self, wait_seconds: float = 10.0) -> None:
        """Say that nothing more will come, and wait until the trackers have all, or cannot.

        While another process's follower writes, there is nothing to wait for: that one writes all.

        Args:
            wait_seconds: at most; the follower continues by itself, for a minute at most.
        """
        self.end()
        end = time.monotonic() + wait_seconds
        while self._kept.is_running and time.monotonic() < end:
            writer = newest(writer_path(self._run))
            if writer is not None and self._has_told_all_it_can(writer):
                return
            time.sleep(_LOOK_SECONDS)

    def _has_told_all_it_can(self, writer: Mapping[str, Any]) -> bool:
        """Whether the writer is this follower and has told all, or is another process's."""
        if writer["pid"] == self.pid:
            return bool(writer.get("caught_up"))
        return writer["ended"] is None and is_alive(writer) is not False
