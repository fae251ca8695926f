"""Writes metrics and events of a run's steps, and holds the right to write them (rank 0)."""

import math
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from longtake import errors, fsio, heartbeat
from longtake.config import Bucket
from longtake.data.loader import Batch, Loader
from longtake.data.workers import WorkerIncident
from longtake.evaluation_dir import Scores
from longtake.formatting import format_size, plural
from longtake.guard import detectors, history
from longtake.guard.rollback import RollBack
from longtake.lease import Lease, Leases, has_same_owner, is_alive, kept, newest
from longtake.parallel import collectives, mesh
from longtake.planner.memory import measured, take_peak
from longtake.progress import StepProgress, step_progress
from longtake.run_dir import LAUNCH_VARIABLE, EventKind, Metrics, RunDirectory, skipped_batches
from longtake.training.session import SampleLosses, Session
from longtake.training.startup import report_start
from longtake.training.threads import ThreadChoice

_LEASE_SECONDS = 60.0
_LOOK_SECONDS = 0.25
_MEMORY_EVERY = 10  # steps: asking torch's allocator takes 0.1 ms
_SECONDS_TO_EXIT = 10.0
"""In which a rank 0 of the same launch, which is being replaced on this host, has ended."""


class Recorder:
    """Metrics and events of a run's steps; does nothing on ranks other than 0.

    `sample_flops` are the operations of a step on one clip of each shape. `predicted` are the bytes
    that forward and backward pass take beside the weights on clips of one shape.
    """

    def __init__(
        self,
        session: Session,
        lease: Lease | None,
        progress: StepProgress,
        sample_flops: Mapping[Bucket, int],
        peak_flops: float | None,
        predicted: tuple[int, Bucket] | None,
    ) -> None:
        self._run, self._world, self._lease = session.run, session.world, lease
        self._sample_flops, self._peak_flops = sample_flops, peak_flops
        self._recipe = session.recipe
        self._predicted, self._progress = predicted, progress
        self._step_began = time.perf_counter()
        self._data_seconds = 0.0
        self._stages: set[str] = set()
        self._num_computed, self._has_started = 0, False

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
        before, now = batch.position_before.name, batch.position.name
        if before != now and (changes := self._recipe.stage_changes(before, now)):
            self._run.append_event("settings_changed", step=batch.step, stage=now, changes=changes)

    def step_done(
        self,
        batch: Batch,
        statistics: history.StepStatistics,
        skipped_by: detectors.GuardVerdict | None,
        learning_rate: float,
    ) -> None:
        """Write the step's metrics; its time includes the wait for data and the last save."""
        if not self._has_started:
            report_start(statistics.step, self._run, self._world)
            self._has_started = True
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        metrics = Metrics(
            step=statistics.step + 1,
            epoch=batch.epoch,
            loss=statistics.loss if math.isfinite(statistics.loss) else None,
            grad_norm=statistics.grad_norm if math.isfinite(statistics.grad_norm) else None,
            learning_rate=learning_rate,
            step_seconds=round(seconds, 6),
            data_seconds=round(self._data_seconds, 6),
            time=round(time.time(), 3),
            batch=statistics.batch,
            num_samples=statistics.num_samples,
            loss_by_sigma=[_finite(loss) for loss in statistics.loss_by_sigma],
            weight_norm=_finite(statistics.weight_norm),
            update_ratio=_finite(statistics.update_ratio),
            nonfinite_share=statistics.nonfinite_share,
            group_grad_norms=_all_finite(statistics.group_grad_norms),
            group_weight_norms=_all_finite(statistics.group_weight_norms),
            group_update_ratios=_all_finite(statistics.group_update_ratios),
            launch="" if self._lease is None else str(self._lease.record["token"]),
        )
        if statistics.step % _MEMORY_EVERY == 0 and (peak_bytes := take_peak(self._world.device)):
            metrics["peak_memory_bytes"] = peak_bytes
        if skipped_by is not None and skipped_by.kind != "ok":
            metrics["verdict"] = skipped_by.kind
        if (flops := self._sample_flops.get(batch.bucket)) is not None:
            flops *= batch.global_size
            metrics["tflops_per_second"] = round(flops / seconds / 1e12, 6)
            if self._peak_flops is not None:
                peak = self._peak_flops * self._world.size
                metrics["mfu"] = round(flops / seconds / peak, 6)
        if batch.fetched.num_bytes or batch.fetched.retries:
            metrics["store_bytes"] = batch.fetched.num_bytes
            metrics["store_seconds"] = round(batch.fetched.seconds, 6)
            metrics["store_retries"] = batch.fetched.retries
        self._progress.update(metrics)
        if self._world.is_first:
            self._run.append_metrics(metrics)

    def verdict(
        self,
        verdict: detectors.GuardVerdict,
        statistics: history.StepStatistics,
        report: str | None,
        *,
        acts: bool,
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

    def rolled_back(
        self, verdict: detectors.GuardVerdict, chosen: RollBack, from_step: int
    ) -> None:
        if not self._world.is_first:
            return
        facts = {"skipped": list(chosen.skipped)}
        self._run.append_event(
            "rolled_back",
            step=chosen.step,
            from_step=from_step,
            **facts,
            reason=verdict.reason,
            message=verdict.message,
        )
        self._progress.say(
            f"went back from step {from_step} to the checkpoint of step {chosen.step}; "
            f"{skipped_batches(facts)} are skipped"
        )

    def saved(self, saved: Sequence[Path]) -> None:
        for path in saved:
            self._run.append_event("checkpoint", step=self._run.step_of(path), path=path.name)

    def save_failed(self, failure: errors.CheckpointError | None) -> None:
        if failure is not None and self._world.is_first:
            self._run.append_event("checkpoint_failed", reason=str(failure))
            self._progress.say(f"{failure}")

    def sampled(self, scores: Scores, seconds: float) -> None:
        """Record a preset that rank 0 has sampled."""
        preset, step, count = scores["preset"], scores["step"], len(scores["videos"])
        facts = {"preset": preset, "videos": count, "seconds": round(seconds, 3)}
        self._run.append_event("sampled", step=step, **facts)
        self._progress.say(f"sampled {preset} at step {step}: {plural(count, 'video')}")

    def sampling_failed(self, preset: str, step: int, reason: str) -> None:
        self._run.append_event("sampling_failed", step=step, preset=preset, reason=reason)
        self._progress.say(f"{preset} of step {step} was not sampled: {reason}")

    def threads_chosen(self, step: int, choice: ThreadChoice | None) -> None:
        """Record and show which number of threads computes from here on, if it was chosen anew."""
        if choice is None:
            return
        self._run.append_event(
            "threads_chosen",
            step=step,
            threads=choice.number,
            before=choice.before,
            seconds={str(number): round(each, 6) for number, each in choice.seconds.items()},
            bitwise=choice.is_first,
        )
        if not choice.is_first:
            times = ", ".join(f"{each:.3g} s with {n}" for n, each in choice.seconds.items())
            self._progress.say(
                f"step {step + 1}: steps had become slower or faster, so that numbers of CPU "
                f"threads were tried ({times}): {choice.number} from here on. Results are no "
                "longer bitwise those of an undisturbed run; OMP_NUM_THREADS fixes the number."
            )

    def compare_with_zero(self, losses: SampleLosses, batch: Batch) -> None:
        """Warn where a release's weights predict worse than a model that always predicts 0."""
        if not self._world.is_first or losses.of_zero is None:
            return
        weights = np.array(batch.weights.tolist())
        loss = float(np.dot(weights, losses.losses))
        of_zero = float(np.dot(weights, losses.of_zero.tolist()))
        if not loss > of_zero:
            return
        mean, mean_of_zero = (each / weights.sum() for each in (loss, of_zero))
        message = (
            f"The first loss of {self._recipe.model.pretrained} is {mean:.3g}, and predicting a "
            f"velocity of 0 would have {mean_of_zero:.3g}. Trained weights are below it: look at "
            "the sign (velocity = noise - latents) and the scale of what the family's `call` "
            "returns, at the timestep that it passes on, and at the codec's normalisation."
        )
        self._run.append_event(
            "first_loss_high", step=0, loss=mean, of_zero=mean_of_zero, message=message
        )
        self._progress.say(message)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """What the block takes is not counted as time of a step."""
        begun = time.perf_counter()
        yield
        self._step_began += time.perf_counter() - begun

    def data_troubles(self, batch: Batch, loader: Loader) -> None:
        """Tell all ranks which clips could not be decoded; record these and what hung.

        All ranks call it after the same steps.
        """
        mine = (socket.gethostname(), loader.failures, loader.incidents)
        for rank, (host, failures, incidents) in enumerate(
            collectives.gather_objects(mine, self._world)
        ):
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
        name = f"{fsio.file_time()}_{incident.pid}"
        path = self._run.stack_path(host, name)
        self._run.write_record(path, incident.stack.as_dict())
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

    @contextmanager
    def measured(self, batch: Batch) -> Iterator[None]:
        """Runs a forward and backward pass; of one, its memory is compared with the prediction.

        Not of the launch's first one, in which libraries take what they keep.
        """
        self._num_computed += 1
        if self._predicted is None or self._num_computed == 1 or batch.bucket != self._predicted[1]:
            yield
            return
        with measured(self._world.device) as memory:
            yield
        (predicted, _), taken, self._predicted = self._predicted, max(1, memory.peak_bytes), None
        error = predicted / taken - 1
        self._run.append_event(
            "memory_measured",
            step=batch.step + 1,
            predicted_gib=round(predicted / 2**30, 4),
            measured_gib=round(taken / 2**30, 4),
            error=round(error, 4),
        )
        self._progress.say(
            f"memory of forward and backward pass: {format_size(predicted)} predicted, "
            f"{format_size(taken)} measured ({error:+.1%})"
        )

    def refuse_lost_lease(self) -> None:
        """Refuse to continue if another launch has taken the run over.

        That happens to a process that was stopped, or cut off from the disk, for a minute.
        """
        lease = self._lease
        if lease is None or lease.renewed_seconds() < _LEASE_SECONDS / 2:
            return
        if lease.is_held:
            with suppress(OSError):  # a full disk
                lease.renew()
            return
        raise errors.RunError(
            f"This launch was silent for more than {_LEASE_SECONDS:g} s, and "
            f"{_holder(newest(lease.folder))} has taken over the run {lease.folder.parent}. Only "
            "one launch may write a run, so this one ends; nothing that it saved is lost."
        )


@contextmanager
def keep_recorder(
    session: Session,
    lease: Lease | None,
    start: int,
    sample_flops: Mapping[Bucket, int],
    peak_flops: float | None = None,
    predicted: tuple[int, Bucket] | None = None,
) -> Iterator[Recorder]:
    shown = session.console if session.world.is_first else Console(quiet=True)
    with step_progress(shown, start, session.recipe.training.steps) as progress:
        yield Recorder(session, lease, progress, sample_flops, peak_flops, predicted)


def _all_finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(number) for name, number in numbers.items()}


def _finite(number: float) -> float | None:
    return float(f"{number:.7g}") if math.isfinite(number) else None


# --- The right to write a run -----------------------------------------------------------------
# One launch trains a run at a time: rank 0 holds the lease in the run's folder `lease`.


@contextmanager
def hold_run(run: RunDirectory, world: mesh.World, console: Console) -> Iterator[Lease | None]:
    """Hold a run until the block ends; all ranks call it. None on ranks other than 0.

    A rank 0 that a launcher or Slurm has started again inherits the lease of the one before it.
    Another launch waits as long as the holder may still be alive.
    """
    taken: list[Lease] = []
    collectives.first_does(lambda: taken.append(_take(run, console)), world)
    lease, how = taken[0] if taken else None, "failed"
    try:
        with nullcontext() if lease is None else kept(lease):
            yield lease
        how = "ended"
    finally:
        if lease is not None:
            with suppress(OSError):
                _give_up(lease, run, how)


def _give_up(lease: Lease, run: RunDirectory, how: str) -> None:
    """End the lease; leave nothing of a run that was refused before it began."""
    if run.exists():
        lease.end(how)
    else:
        (lease.folder / f"{lease.number}.json").unlink()
        lease.folder.rmdir()  # refuses if somebody else has begun to train here


def _take(run: RunDirectory, console: Console) -> Lease:
    owner = {**_this_launch(), "token": secrets.token_hex(4)}
    leases = Leases(_LEASE_SECONDS, owner, inherits=("launch", "job"))
    first, begun, is_said = newest(run.lease_path), time.monotonic(), False
    try:
        while (lease := leases.take(run.lease_path)) is None:
            holder = newest(run.lease_path)
            if holder is not None:
                _refuse_if_alive(run, holder, first, time.monotonic() - begun)
            if not is_said and time.monotonic() - begun > 1:
                is_said = True
                console.print(
                    f"{run.path} is held by {_holder(holder)}. It has not given a sign of life "
                    f"yet; if it gives none within {_LEASE_SECONDS:g} s, this launch takes over.",
                    markup=False,
                )
            time.sleep(_LOOK_SECONDS)
    except OSError as error:
        raise errors.RunError(
            f"The run directory {run.path} cannot be written: {error.strerror or error}. Make room "
            "or make it writable, or choose another one with --set out=FOLDER."
        ) from error
    return lease


def _refuse_if_alive(
    run: RunDirectory, holder: Mapping[str, Any], first: Mapping[str, Any] | None, seconds: float
) -> None:
    is_same = has_same_owner(holder, _this_launch())
    runs_here = is_alive(holder) and not (is_same and seconds < _SECONDS_TO_EXIT)
    has_moved = first is not None and any(
        first.get(name) != holder.get(name) for name in ("host", "pid", "time", "beat")
    )
    if runs_here or has_moved:
        raise errors.RunError(
            f"{run.path} is being trained by {_holder(holder)}. A run is trained by one launch at "
            f"a time. Stop that one first (kill {holder['pid']} on {holder['host']}: it saves and "
            "ends), or train beside it: --fresh, or --set out=FOLDER."
        )


def _this_launch() -> dict[str, str]:
    """What a rank 0 that is started again has in common with the one before it."""
    job = os.environ.get("SLURM_JOB_ID", "")
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return {"launch": os.environ.get(LAUNCH_VARIABLE, ""), "job": f"{cluster}/{job}" if job else ""}


def _holder(record: Mapping[str, Any] | None) -> str:
    """A holder in words: process, host, job and since when."""
    if record is None:
        return "another process"
    job = f" (Slurm job {str(record['job']).rpartition('/')[2]})" if record.get("job") else ""
    since = str(record["time"])[:19].replace("T", " ")
    return f"process {record['pid']} on {record['host']}{job} since {since} UTC"
