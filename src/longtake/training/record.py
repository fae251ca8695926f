"""Writes metrics and events of a run's steps, and shows its progress (rank 0)."""

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from longtake import heartbeat
from longtake.config import Bucket
from longtake.data.loader import Batch, Loader
from longtake.data.workers import WorkerIncident
from longtake.errors import CheckpointError
from longtake.formatting import format_size
from longtake.fsio import file_time
from longtake.guard.detectors import GuardVerdict
from longtake.guard.history import StepStatistics
from longtake.guard.rollback import RollBack
from longtake.parallel.collectives import gather_objects
from longtake.progress import StepProgress, step_progress
from longtake.run_dir import EventKind, Metrics
from longtake.training.peak import PeakComparison
from longtake.training.session import Session
from longtake.training.startup import report_start


class Recorder:
    """Metrics and events of a run's steps; does nothing on ranks other than 0."""

    def __init__(
        self,
        session: Session,
        launch: str,
        step_flops: Mapping[Bucket, int],
        peak_flops: float | None,
        progress: StepProgress,
    ) -> None:
        self._run, self._world = session.run, session.world
        self._launch = launch
        self._step_flops, self._peak_flops = step_flops, peak_flops
        self._progress = progress
        self._step_began = time.perf_counter()
        self._data_seconds = 0.0
        self._stages: set[str] = set()
        self._has_started = False

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; measures how long each is waited for, and records new epochs."""
        while True:
            heartbeat.set_phase("data")
            asked = time.perf_counter()
            batch = next(batches, None)
            self._data_seconds = time.perf_counter() - asked
            if batch is None:
                return
            if self._world.is_first:
                self._record_epoch(batch)
            yield batch

    def _record_epoch(self, batch: Batch) -> None:
        where = {"step": batch.step, "stage": batch.stage, "source": batch.source}
        if batch.stage not in self._stages:
            self._stages.add(batch.stage)
            self._run.append_event("stage", **where)
        if batch.begins_epoch:
            self._run.append_event("epoch", **where, epoch=batch.epoch)

    def step_done(
        self,
        batch: Batch,
        statistics: StepStatistics,
        skipped_by: GuardVerdict | None,
        learning_rate: float,
    ) -> None:
        """Write the step's metrics; its time includes the wait for data and the last save.

        `skipped_by` is the verdict by which its update was not made.
        """
        if not self._has_started:
            report_start(statistics.step, self._run, self._world)
            self._has_started = True
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        metrics = _row(batch, statistics, learning_rate)
        metrics["launch"] = self._launch
        metrics["step_seconds"] = round(seconds, 6)
        metrics["data_seconds"] = round(self._data_seconds, 6)
        if skipped_by is not None and skipped_by.kind != "ok":
            metrics["verdict"] = skipped_by.kind
        if (flops := self._step_flops.get(batch.bucket)) is not None:
            metrics["tflops_per_second"] = round(flops / seconds / 1e12, 6)
            if self._peak_flops is not None:
                peak = self._peak_flops * self._world.size
                metrics["mfu"] = round(flops / seconds / peak, 6)
        self._progress.update(metrics)
        if self._world.is_first:
            self._run.append_metrics(metrics)

    def verdict(
        self, verdict: GuardVerdict, statistics: StepStatistics, report: str | None, *, acts: bool
    ) -> None:
        """Record and show what the guard found and whether it acts; `report` has more."""
        if not self._world.is_first:
            return
        kind: EventKind = (
            "update_skipped" if acts and verdict.kind == "skip" else "anomaly_detected"
        )
        self._run.append_event(
            kind,
            step=statistics.step,
            batch=statistics.batch,
            verdict=verdict.kind,
            reason=verdict.reason,
            began=verdict.began,
            message=verdict.message,
            report=report,
        )
        aside = "" if acts else " (guard.mode: only reported)"
        self._progress.say(f"step {statistics.step + 1}: {verdict.message}{aside}")

    def damaged(self, checkpoints: Sequence[tuple[Path, str]], step: int) -> None:
        for path, reason in checkpoints if self._world.is_first else ():
            self._run.append_event("checkpoint_damaged", step=step, path=path.name, reason=reason)
            self._progress.say(f"{path.name} is not whole ({reason}) and was passed over")

    def rolled_back(self, verdict: GuardVerdict, chosen: RollBack, from_step: int) -> None:
        if not self._world.is_first:
            return
        first, end = chosen.skipped
        self._run.append_event(
            "rolled_back",
            step=chosen.step,
            from_step=from_step,
            skipped=list(chosen.skipped),
            reason=verdict.reason,
            message=verdict.message,
        )
        self._progress.say(
            f"went back from step {from_step} to the checkpoint of step {chosen.step}; "
            f"{end - first} batches ({first} to {end - 1}) are skipped"
        )

    def saved(self, saved: Sequence[Path]) -> None:
        for path in saved:
            self._run.append_event("checkpoint", step=self._run.step_of(path), path=path.name)

    def save_failed(self, failure: CheckpointError | None) -> None:
        if failure is not None and self._world.is_first:
            self._run.append_event("checkpoint_failed", reason=str(failure))
            self._progress.say(f"{failure}")

    def data_troubles(self, batch: Batch, loader: Loader) -> None:
        """Tell all ranks which clips could not be decoded; record these and what hung.

        All ranks call it after the same steps.
        """
        mine = (socket.gethostname(), loader.failures, loader.incidents)
        for rank, (host, failures, incidents) in enumerate(gather_objects(mine, self._world)):
            # Context-parallel ranks may all have failed at the same clip.
            new = {each: why for each, why in failures.items() if each not in loader.quarantined}
            loader.quarantine(failures)
            if not self._world.is_first:
                continue
            for identity, reason in new.items():
                facts = {"step": batch.step, "rank": rank, "identity": identity}
                self._run.append_event("sample_rejected", **facts, reason=reason)
            for incident in incidents:
                self._write_incident(incident, batch.step, rank, host)
        loader.clear_incidents()

    def _write_incident(self, incident: WorkerIncident, step: int, rank: int, host: str) -> None:
        name = f"{file_time()}_{incident.pid}"
        path = self._run.stack_path(host, name)
        self._run.write_stacks(path, incident.stack.as_dict())
        kind: EventKind = "decoder_stalled" if incident.kind == "stalled" else "decoder_died"
        self._run.append_event(
            kind,
            step=step,
            rank=rank,
            host=host,
            pid=incident.pid,
            identity=incident.identity,
            path=incident.path,
            seconds=round(incident.seconds, 3),
            reason=incident.reason,
            where=incident.stack.where,
            stacks=str(path.relative_to(self._run.path)),
        )

    def memory(self, batch: Batch, comparison: PeakComparison | None) -> None:
        """Record the measured peak of a step's activations beside the predicted one."""
        if comparison is None:
            return
        predicted, measured = comparison.predicted_bytes, comparison.measured_bytes
        self._run.append_event(
            "memory_measured",
            step=batch.step + 1,
            predicted_gib=round(predicted / 2**30, 4),
            measured_gib=round(measured / 2**30, 4),
            error=round(comparison.error, 4),
        )
        self._progress.say(
            f"memory of forward and backward pass: {format_size(predicted)} predicted, "
            f"{format_size(measured)} measured ({comparison.error:+.1%})"
        )


@contextmanager
def keep_recorder(
    session: Session,
    launch: str,
    start: int,
    step_flops: Mapping[Bucket, int],
    peak_flops: float | None,
) -> Iterator[Recorder]:
    quiet = session.console if session.world.is_first else Console(quiet=True)
    with step_progress(quiet, start, session.recipe.training.steps) as progress:
        yield Recorder(session, launch, step_flops, peak_flops, progress)


def _row(batch: Batch, statistics: StepStatistics, learning_rate: float) -> Metrics:
    """A step's metrics without its times."""
    return Metrics(
        step=statistics.step + 1,
        epoch=batch.epoch,
        loss=statistics.loss if math.isfinite(statistics.loss) else None,
        grad_norm=statistics.grad_norm if math.isfinite(statistics.grad_norm) else None,
        learning_rate=learning_rate,
        step_seconds=0.0,
        data_seconds=0.0,
        time=round(time.time(), 3),
        batch=statistics.batch,
        loss_by_sigma=[_finite(loss) for loss in statistics.loss_by_sigma],
        weight_norm=_finite(statistics.weight_norm),
        update_ratio=_finite(statistics.update_ratio),
        nonfinite_share=statistics.nonfinite_share,
        group_grad_norms=_all_finite(statistics.group_grad_norms),
        group_weight_norms=_all_finite(statistics.group_weight_norms),
        group_update_ratios=_all_finite(statistics.group_update_ratios),
    )


def _all_finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(number) for name, number in numbers.items()}


def _finite(number: float) -> float | None:
    return float(f"{number:.7g}") if math.isfinite(number) else None
