"""A server whose work is to read: what it publishes says which bytes it has seen.

As a program: python -P probe.py RUN --seconds S, a server that follows RUN.
"""

import argparse
import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from longtake import lease
from longtake.checkpoint import files
from longtake.evaluation.options import ServerOptions, ServerReport
from longtake.evaluation.server import EvaluationServer
from longtake.evaluation_dir import Scores, VideoScores
from longtake.fsio import now
from longtake.process import StopSignal
from longtake.sampling.claims import EvaluationTask, Progress, own_name

BeforeTask = Callable[[EvaluationTask, Path, Progress], object]


class Probe:
    """Reads the weights as a sampler does, then takes its time.

    Args:
        seconds: how long it takes on average.
        gate: a file that it waits for before it ends, if given.
        before: what it does before it reads the weights, if given.
    """

    def __init__(
        self, seconds: float = 0.0, gate: Path | None = None, before: BeforeTask | None = None
    ) -> None:
        self._seconds, self._gate, self._before = seconds, gate, before
        self._random = random.Random(os.getpid())  # noqa: S311 - no secret

    def __call__(self, task: EvaluationTask, folder: Path, progress: Progress) -> Scores:
        """See `Evaluate`."""
        if self._before is not None:
            self._before(task, folder, progress)
        progress("load", 0, 1)
        read = read_weights(task.checkpoint, task.preset.weights)
        (folder / "00_s0.mp4").write_text(read)
        end = time.monotonic() + self._seconds * 2 * self._random.random()
        while time.monotonic() < end or (self._gate is not None and not self._gate.exists()):
            progress("sample", 0, 1)
            time.sleep(0.01)
        video: VideoScores = {"file": "00_s0.mp4", "prompt": read, "seed": 0, "measures": {}}
        scores = scores_of(task.step, task.key, own_name(), task.preset.name)
        return {**scores, "weights": task.preset.weights, "videos": [video]}


def scores_of(step: int, key: str, server: str, preset: str = "probe") -> Scores:
    return {
        "preset": preset,
        "step": step,
        "key": key,
        "weights": "ema/main",
        "time": now(),
        "server": server,
        "settings": {"fps": 8.0},
        "videos": [],
        "measures": {"motion": 0.5},
        "alarms": [],
        "seconds": {"sample": 0.1},
    }


def read_weights(checkpoint: Path, weights: str) -> str:
    """The sha256 of all bytes below `weights`, refused as a sampler refuses them."""
    for part in ("trainer.json", f"{weights}/"):
        if damage := files.find_damage(checkpoint, checksums=True, within=part):
            raise files.DamagedCheckpointError(checkpoint, damage)
    paths = sorted((checkpoint / weights).rglob("*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument("--place", help="another machine, as far as leases can tell")
    given = parser.parse_args()
    if given.place:
        vars(lease)["pid_namespace"] = lambda: given.place
    options = ServerOptions(
        places=(given.run,),
        follows=True,
        look_seconds=0.05,
        pause_seconds=0.1,
        lease_seconds=1.0,
        max_attempts=given.attempts,
    )
    with StopSignal(second="default") as stop:
        report = ServerReport(Console(stderr=True, width=200))
        EvaluationServer(options, Probe(given.seconds, given.gate), report, stop).serve()


if __name__ == "__main__":
    main()
