"""A run that is trained as a job of a private Slurm, and what Slurm may do to it."""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from longtake.drill.launch import FIXED
from longtake.drill.looking import Looking
from longtake.drill.private_slurm import PrivateSlurm
from longtake.errors import RunError
from longtake.process import environment, program
from longtake.stacks.processes import descendants, facts

_LASTING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")
_LOOK_SECONDS = 0.3
_RANK = "longtake train"


class SlurmJob(Looking):
    """A job that `longtake launch --slurm` has submitted; cancelled when the block is left.

    Args:
        folder: with recipe.toml, in which it works; all hosts see it.
        slurm: where it is submitted.
        options: of `longtake launch --slurm`.

    Attributes:
        number: of the job.
    """

    def __init__(self, folder: Path, slurm: PrivateSlurm, options: Sequence[str]) -> None:
        super().__init__(folder, slurm.cluster.names)
        self._slurm, self._state = slurm, "PENDING"
        command = program("longtake", "launch", "recipe.toml", "--slurm", *options)
        said = slurm.run(command, folder, **environment(**FIXED))
        found = re.search(r"^Job (\d+):", said.stderr, re.MULTILINE)
        if said.returncode or found is None:
            raise RunError(f"The job could not be submitted: {said.stderr.strip()}")
        self.number = found[1]
        self._log = self._run.path / "slurm" / f"job_{self.number}.log"
        self._log.touch()

    def is_running(self) -> bool:
        """Whether it runs, or is to run."""
        if self._state in _LASTING:
            time.sleep(_LOOK_SECONDS)  # the controller need not be asked more often
            self._state = self.facts()["JobState"]
        return self._state in _LASTING

    def wait(self) -> int:
        """Return its exit code, when it has ended."""
        for _ in self.looks():
            pass
        return int(self.facts()["ExitCode"].partition(":")[0]) if self._state != "COMPLETED" else 0

    def kill(self) -> bool:
        """Cancel it, if it has not ended."""
        was_running = self.is_running()
        if was_running:
            self._slurm.run(["scancel", "--full", "--signal=KILL", self.number])
        return was_running

    def facts(self) -> dict[str, str]:
        """What Slurm knows of it."""
        return self._slurm.job(self.number)

    def set_limit(self, minutes: str) -> None:
        """Change its time limit.

        Raises:
            RunError: Slurm does not do that.
        """
        done = self._slurm.run(
            ["scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}"]
        )
        if done.returncode:
            raise RunError(f"The limit could not be changed: {done.stderr.strip()}")

    def wait_for_restart(self) -> None:
        """Return when Slurm has put it into its queue again.

        Raises:
            RunError: it ends instead.
        """
        for _ in self.looks():
            if int(self.facts()["Restarts"]):
                return
        raise self.unexpected("ended, and did not come again")

    @contextmanager
    def held(self) -> Iterator[list[int]]:
        """Let its ranks stand still in the block; yields their processes."""
        ours = (facts(pid) for pid in descendants(os.getpid()))
        ranks = [each.pid for each in ours if each and _RANK in each.command]
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield ranks
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)

    def wait_for_signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        """Return when a signal waits for processes that stand still.

        Raises:
            RunError: the job ends without.
        """
        for _ in self.looks():
            if all(_is_pending(pid, number) for pid in pids):
                return
        raise self.unexpected(f"ended without {number.name}")


def _is_pending(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    pending = next(line for line in lines if line.startswith("ShdPnd:")).split()[1]
    return bool(int(pending, 16) >> (number - 1) & 1)
