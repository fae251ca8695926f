"""What the ranks of this node need for a step, and how many steps they do; by their hearts."""

import time
from collections.abc import Mapping
from pathlib import Path

from longtake import heartbeat
from longtake.health.check import Numbers
from longtake.health.open_files import NUMBERS as OPEN_FILES
from longtake.health.open_files import open_files
from longtake.heartbeat import Pulse


class Steps:
    """Compares hearts with what they were at the last sample.

    Args:
        folder: that of `heartbeat.folder_of`.
    """

    name = "steps"
    numbers: Mapping[str, str] = {
        "step_work_seconds": "What the rank itself needed for a step, without waiting for others",
        "steps_per_second": "Steps that the rank has done",
        **OPEN_FILES,
    }

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[tuple[int, int], tuple[float, Pulse]] = {}

    def sample(self) -> Numbers:
        """The numbers since the last sample, with the rank behind a colon.

        A rank that did no step in the meantime has no `step_work_seconds`.
        """
        now = time.monotonic()
        pulses = heartbeat.read_all(self._folder)
        ranks = {(each.pid, each.started): (now, each) for each in pulses if each.role == "rank"}
        found: Numbers = {}
        for who, (_, pulse) in ranks.items():
            if who in self._before and pulse.phase != "ended":
                found |= _since(*self._before[who], now, pulse)
        self._before = ranks
        return found | open_files([each.pid for each in pulses if each.phase != "ended"])

    def close(self) -> None:
        """Nothing is held."""


def _since(then: float, before: Pulse, now: float, pulse: Pulse) -> Numbers:
    steps = pulse.steps_done - before.steps_done
    found = {f"steps_per_second:{pulse.rank}": round(steps / max(1e-9, now - then), 6)}
    count = pulse.work_count - before.work_count
    if count > 0:
        seconds = (pulse.work_seconds - before.work_seconds) / count
        found[f"step_work_seconds:{pulse.rank}"] = round(seconds, 6)
    return found
