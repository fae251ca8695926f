"""What the ranks of this node need for a step, how many they do, and when they save; by hearts."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from longtake import heartbeat
from longtake.health.check import Numbers
from longtake.health.open_files import NUMBERS as OPEN_FILES
from longtake.health.open_files import open_files
from longtake.heartbeat import Phase, Pulse

CHECKPOINT = "checkpoint_is_near"
_SAVES: tuple[Phase, ...] = ("checkpoint", "save")
_NEAR_SAMPLES = 6
"""After a rank was last seen at it, what it has saved may still be on its way to the disk."""


class Steps:
    """Compares hearts with what they were at the last sample.

    Args:
        folder: that of `heartbeat.folder_of`.
    """

    name = "steps"
    numbers: Mapping[str, str] = {
        "step_work_seconds": "What the rank itself needed for a step, without waiting for others",
        "steps_per_second": "Steps that the rank has done",
        CHECKPOINT: "1: a rank of the node saves a checkpoint, or did within the last six samples",
        **OPEN_FILES,
    }

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[tuple[int, int], tuple[float, Pulse]] = {}
        self._near = 0

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
        found[CHECKPOINT] = float(self._is_near(pulse for _, pulse in ranks.values()))
        self._before = ranks
        return found | open_files([each.pid for each in pulses if each.phase != "ended"])

    def close(self) -> None:
        """Nothing is held."""

    def _is_near(self, ranks: Iterable[Pulse]) -> bool:
        """Whether a rank saves, or has saved since the last sample, or in one of those before."""
        before = {who: pulse for who, (_, pulse) in self._before.items()}
        seen = [
            each.phase in _SAVES or _saves(each) > _saves(before.get((each.pid, each.started)))
            for each in ranks
        ]
        self._near = _NEAR_SAMPLES if any(seen) else max(0, self._near - 1)
        return self._near > 0


def _since(then: float, before: Pulse, now: float, pulse: Pulse) -> Numbers:
    steps = pulse.steps_done - before.steps_done
    found = {f"steps_per_second:{pulse.rank}": round(steps / max(1e-9, now - then), 6)}
    count = pulse.work_count - before.work_count
    if count > 0:
        seconds = (pulse.work_seconds - before.work_seconds) / count
        found[f"step_work_seconds:{pulse.rank}"] = round(seconds, 6)
    return found


def _saves(pulse: Pulse | None) -> int:
    """How often a rank has saved, as far as its heart has counted."""
    return (
        sum(pulse.timings[each].count for each in _SAVES if each in pulse.timings) if pulse else 0
    )
