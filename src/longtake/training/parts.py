"""Objects that a launch trains with: those built before the first step, and those it opens."""

from dataclasses import dataclass
from pathlib import Path

from longtake import process
from longtake.checkpoint.store import Saver
from longtake.config import Bucket
from longtake.data.loader import Loader
from longtake.parallel.replicas import ReplicaCheck
from longtake.planner.record import MemoryPlan
from longtake.training.guard_runner import GuardRunner
from longtake.training.record import Recorder
from longtake.training.samples import TrainingSampler
from longtake.training.session import Session, TrainingState
from longtake.training.statistics import NormStats
from longtake.training.threads import CpuThreads


@dataclass(frozen=True)
class BuiltRun:
    """Model, data, guard and all other objects that a launch builds before its first step."""

    session: Session
    state: TrainingState
    loader: Loader
    guard: GuardRunner
    norms: NormStats
    replicas: ReplicaCheck
    threads: CpuThreads
    plan: MemoryPlan
    sample_flops: dict[Bucket, int]
    ledger: Path  # folder of this launch's ledger
    sampler: TrainingSampler | None = None  # None unless the recipe samples in training


@dataclass(frozen=True, kw_only=True)
class Training(BuiltRun):
    """A built run together with the saver, recorder and stop signal of its steps, on one rank."""

    saver: Saver
    recorder: Recorder
    stop: process.StopSignal

    def local_facts(self) -> dict[str, float]:
        """Return this rank's numbers of failures, stop signals and save states.

        They are summed over ranks with the step's statistics.
        """
        failures = len(self.loader.quarantine.failures) + len(self.loader.incidents)
        signals = {f"stop.{name}": float(name == self.stop.reason) for name in process.EXIT_CODES}
        saver = {"save_failed": float(self.saver.failed), "save_due": float(self.saver.is_due)}
        return {"failures": float(failures), **signals, **saver}
