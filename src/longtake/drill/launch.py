"""`longtake train` as a process of its own, or several of them."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname

from longtake.drill.harms import Sabotage
from longtake.drill.looking import Looking
from longtake.process import program, start
from longtake.stacks.processes import descendants, facts

_WATCHER = "longtake.watch"

# Sums are rounded otherwise by another number of threads; and small ones are faster with one.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# Ranks that torchrun starts again would find in its own store what the ones before them left.
FIXED = {**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Of the environment of every drill's ranks."""


class Launch(Looking):
    """A training process, or several under torchrun; ended for good when the block is left.

    Args:
        folder: with recipe.toml, in which the process works.
        changes: of the recipe, `key=value`.
        processes: how many; more than one under torchrun.
        sabotage: what is wrong inside it, if anything is.
        restarts: how often all processes are started again after one has failed, by `longtake
            launch`, or where there is sabotage by torchrun.

    Attributes:
        pid: of the process that was started: the training process, or torchrun.
    """

    def __init__(
        self,
        folder: Path,
        changes: Sequence[str],
        processes: int,
        sabotage: Sabotage | None = None,
        restarts: int = 0,
    ) -> None:
        super().__init__(folder, [gethostname()])
        module, *ours = _program(processes, sabotage, restarts)
        options = ["recipe.toml", *(part for change in changes for part in ("--set", change))]
        with self._log.open("wb") as log:
            command = program(module, *ours, *options)
            self._process = start(command, log, folder, **FIXED)
        self.pid = self._process.pid

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Return its exit code, when it has ended."""
        for _ in self.looks():
            pass
        assert self._process.returncode is not None
        return self._process.returncode

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


def _program(processes: int, sabotage: Sabotage | None, restarts: int) -> list[str]:
    """What `python -m` starts, with its own arguments, up to the recipe."""
    ours = ["longtake", "train"]
    if sabotage is not None:
        ours = ["longtake.drill.sabotage", *sabotage.arguments, "train"]
    elif restarts:
        count = ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
        return ["longtake", "launch", *count]
    if processes == 1:
        return ours
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torchrun, "--max-restarts", str(restarts), "-m", *ours]
