"""A watcher whose clock is set, or runs wrong, for the drills; a process of its own.

    python -m longtake.drill.false_clock --step -2.5 --after 1.5 RUN

Before it does what `longtake.watch` would do, it puts another function in the place of the one that
reads the clocks; longtake knows nothing of it, and the machine's clock stays what it is. When the
clock goes wrong it says so in a file, once.
"""

import argparse
import runpy
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from longtake.fsio import write_once
from longtake.health import clock
from longtake.health.clock import Clocks

WORD = "clock.json"
"""The file that it leaves beside the run directory: when it went wrong, by the monotonic clock."""


@dataclass
class FalseClock:
    """Clocks that are those of the machine, until they go wrong.

    Attributes:
        step_seconds: by which the date is then set.
        ppm: by how many microseconds a second it then runs fast.
        after_seconds: when that is, counted from the first reading.
        word: the file in which it says so.
    """

    step_seconds: float
    ppm: float
    after_seconds: float
    word: Path
    _begun: int | None = field(default=None, init=False)

    def read(self) -> Clocks:
        """Read the clocks."""
        real, monotonic, raw = _read_clocks()
        if self._begun is None:
            self._begun = raw + int(self.after_seconds * 1e9)
        if (since := raw - self._begun) < 0:
            return Clocks(real, monotonic, raw)
        write_once(self.word, {"at": time.monotonic()})
        drift = int(since * self.ppm / 1e6)  # which is one of all clocks but the oscillator's
        return Clocks(real + drift + int(self.step_seconds * 1e9), monotonic + drift, raw)


_read_clocks = clock.read_clocks


def main() -> None:
    """Watch a run by a clock that goes wrong."""
    parser = argparse.ArgumentParser(prog="python -m longtake.drill.false_clock")
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--ppm", type=float, default=0.0)
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("run", type=Path)
    given = parser.parse_args()
    false = FalseClock(given.step, given.ppm, given.after, given.run.parent / WORD)
    vars(clock).update(read_clocks=false.read)
    sys.argv = ["longtake.watch", str(given.run)]
    runpy.run_module("longtake.watch", run_name="__main__")


if __name__ == "__main__":
    main()
