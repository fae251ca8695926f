"""Watches over a run's steps: judges each before its update, and keeps what there was to see."""

import math
import socket
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

from longtake.config import GuardSection
from longtake.data.batch import Batch
from longtake.fsio import now
from longtake.guard.detectors import OK, GuardVerdict, judge
from longtake.guard.history import History, JudgedStep, StepStatistics
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.step import SampleLosses

_STEPS_OF_SAMPLES = 16
_STEPS_OF_HISTORY = 128


@dataclass(frozen=True)
class _Seen:
    """This rank's share of one step."""

    batch: int
    step: int
    rank: int
    samples: tuple[tuple[str, str, int, float, float], ...]
    """(identity, caption, epoch, sigma, loss) of each that was trained."""


class Guard:
    """The guard of one run, the same on every rank.

    Attributes:
        history: the steps that new ones are compared with.
    """

    def __init__(self, section: GuardSection, run: RunDirectory, world: World) -> None:
        self.history = History(section.window)
        self._section = section
        self._run = run
        self._world = world
        self._seen: deque[_Seen] = deque(maxlen=_STEPS_OF_SAMPLES)

    def judge(
        self, statistics: StepStatistics, samples: SampleLosses, batch: Batch
    ) -> GuardVerdict:
        """What is to be done with a step's update; takes note of the step."""
        self._seen.append(_share(statistics, samples, batch, self._world))
        verdict = self._as_wanted(judge(self.history, statistics, self._section))
        done = "ok" if self.allows(verdict) else verdict.kind
        self.history = self.history.append(JudgedStep(statistics, done))
        return verdict

    def allows(self, verdict: GuardVerdict) -> bool:
        """Whether a step's update is to be made; always, where the guard only reports."""
        return verdict.kind == "ok" or (self._section.mode != "act" and verdict.kind != "stop")

    def _as_wanted(self, verdict: GuardVerdict) -> GuardVerdict:
        mode = self._section.mode
        if mode != "act" and verdict.reason == "non_finite":  # with which nobody may go on
            return replace(verdict, kind="stop")
        return OK if mode == "off" else verdict

    def load(self, data: Any) -> None:
        """Remember what a checkpoint holds of the steps before it."""
        self.history = History.from_json(data, self._section.window)
        self._seen.clear()

    def report(self, verdict: GuardVerdict, statistics: StepStatistics) -> str | None:
        """Write down all that was seen around a verdict of the newest step; all ranks call it.

        Returns:
            The report's path from the run directory, on rank 0.
        """
        seen = gather_objects((socket.gethostname(), list(self._seen)), self._world)
        if not self._world.is_first:
            return None
        number = len(list(self._run.guard_path.glob(f"step_{statistics.step:08d}_*.json")))
        path = self._run.guard_report_path(statistics.step, number)
        report = {
            "step": statistics.step,
            "batch": statistics.batch,
            "time": now(),
            "verdict": asdict(verdict),
            "history": [_row(judged) for judged in list(self.history)[-_STEPS_OF_HISTORY:]],
            "samples": [row for host, each in seen for share in each for row in _rows(share, host)],
            "state": {"checkpoint": newest_before(self._run, statistics.step)},
        }
        self._run.write_guard_report(path, report)
        return str(path.relative_to(self._run.path))


def newest_before(run: RunDirectory, step: int) -> int | None:
    """The step of the newest checkpoint from which a step could be run once more."""
    return max((each for each in run.checkpoint_steps() if each <= step), default=None)


def _share(statistics: StepStatistics, samples: SampleLosses, batch: Batch, world: World) -> _Seen:
    rows = zip(
        batch.identities,
        batch.captions,
        batch.epochs,
        samples.sigmas,
        samples.losses,
        batch.weights.tolist(),
        strict=True,
    )
    trained = tuple(row[:-1] for row in rows if row[-1] and world.speaks_for_data)
    return _Seen(statistics.batch, statistics.step, world.rank, trained)


def _row(judged: JudgedStep) -> dict[str, Any]:
    return {**judged.statistics.as_dict(), "verdict": judged.verdict_kind}


def _rows(seen: _Seen, host: str) -> list[dict[str, Any]]:
    keys = ("identity", "caption", "epoch", "sigma", "loss")
    where = {"step": seen.step, "batch": seen.batch, "rank": seen.rank, "host": host}
    samples = ((*sample[:-1], _for_json(sample[-1])) for sample in seen.samples)
    return [{**where, **dict(zip(keys, sample, strict=True))} for sample in samples]


def _for_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
