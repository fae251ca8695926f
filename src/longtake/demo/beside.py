"""The evaluation server beside the demo's training: what a user starts with `longtake evaluate`."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from longtake.process import program, start

_HOW = ("--follow", "--until-finished")
_LIMIT_SECONDS = 300.0
_LOOK_SECONDS = 0.1
_SECONDS_TO_END = 10.0


@dataclass(frozen=True)
class Evaluator:
    """A server that samples each checkpoint of one run, in a process of its own.

    Attributes:
        log: where it writes what it says.
    """

    log: Path
    _process: "subprocess.Popen[bytes]"

    def finish(self, console: Console) -> None:
        """Wait until every checkpoint is sampled; nothing that happens there ends the demo."""
        begun = time.monotonic()
        if self._process.poll() is None:
            console.print("sampling the last checkpoints", highlight=False)
        while self._process.poll() is None and time.monotonic() - begun < _LIMIT_SECONDS:
            time.sleep(_LOOK_SECONDS)
        if self._process.returncode != 0:
            console.print(
                f"not every checkpoint was sampled; see {self.log}", markup=False, highlight=False
            )


@contextmanager
def evaluated(out: Path) -> Iterator[Evaluator]:
    """Sample each checkpoint of a run that is, or will be, in `out`, until the block ends."""
    log = out / "evaluate.log"
    with log.open("ab") as file:
        # In a session of its own: Ctrl-C is for the training, whose end ends this.
        process = start(program("longtake", "evaluate", str(out), *_HOW), file)
    try:
        yield Evaluator(log, process)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, which it does between two steps of its solver."""
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
