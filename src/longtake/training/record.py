"""Writes the metrics and events of a run's steps (rank 0)."""

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from rich.console import Console

from longtake import errors, fsio, heartbeat
from longtake.config import Bucket
from longtake.data.batch import Batch
from longtake.data.loader import Loader
from longtake.evaluation_dir import Scores
from longtake.formatting import format_size, plural
from longtake.guard import detectors
from longtake.guard.rollback import RollBack
from longtake.lease import Lease
from longtake.metrics import Metrics
from longtake.parallel import collectives
from longtake.planner.profiler import measured, take_peak
from longtake.planner.record import MeasuredStep
from longtake.progress import step_progress
from longtake.run_dir import skipped_batches
from longtake.training import compiled
from longtake.training.guard_runner import Decision
from longtake.training.run_lease import refuse_lost
from longtake.training.session import SampleLosses, Session
from longtake.training.startup import report_start
from longtake.training.threads import CpuThreads, ThreadChoice

_MEMORY_EVERY = 10  # steps between two queries of torch's allocator, which take 0.1 ms each


class Recorder:
    """Writes a run's metrics.jsonl and events.jsonl; on ranks other than 0 it writes nothing.

    All ranks must call `timed`, which may raise on each of them, and `record_failures`, a
    collective that changes the quarantine of each. Metrics and the event
    `memory_measured` number steps from 1, other events from 0; events of clips, decoders, stages
    and epochs have the number of the batch, which a roll-back moves ahead.

    Args:
        session: this launch of the run.
        lease: lease on the run, checked before each step; None on ranks other than 0.
        start: number of steps done, from which the terminal shows progress within the context.
        sample_flops: operations of a step on one clip of each shape.
        peak_flops: operations per second of the device; None if unknown.
        predicted: bytes of one forward and backward pass, without weights, on clips of a shape.
        sample_tokens: tokens of one clip of each shape.
    """

    def __init__(
        self,
        session: Session,
        lease: Lease | None,
        start: int,
        sample_flops: Mapping[Bucket, int],
        peak_flops: float | None = None,
        predicted: tuple[int, Bucket] | None = None,
        sample_tokens: Mapping[Bucket, int] = MappingProxyType({}),
    ) -> None:
        self._run, self._world, self._lease = session.run, session.world, lease
        self._sample_flops, self._peak_flops = sample_flops, peak_flops
        self._sample_tokens = sample_tokens
        self._recipe, self._predicted = session.recipe, predicted
        console = session.console if session.world.is_first else Console(quiet=True)
        self._display = step_progress(console, start, session.recipe.training.steps)
        self._step_began = time.perf_counter()
        self._data_seconds = 0.0
        self._stages: set[str] = set()
        self._num_computed, self._has_started = 0, False

    def __enter__(self) -> Self:
        self._progress = self._display.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._display.__exit__(*error)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, measuring the wait for each; record new epochs and stages.

        Raises:
            RunError: another launch has taken the run over.
        """
        while True:
            heartbeat.set_phase("data")
            asked = time.perf_counter()
            batch = next(batches, None)
            self._data_seconds = time.perf_counter() - asked
            if batch is None:
                return
            if self._world.is_first:
                where = {"step": batch.step, "stage": batch.stage, "source": batch.source}
                if batch.stage not in self._stages:
                    self._stages.add(batch.stage)
                    self._run.append_event("stage", **where)
                if batch.begins_epoch:
                    self._run.append_event("epoch", **where, epoch=batch.epoch)
                old, new = batch.position_before.name, batch.position.name
                if old != new and (changes := self._recipe.stage_changes(old, new)):
                    facts = {"step": batch.step, "stage": new, "changes": changes}
                    self._run.append_event("settings_changed", **facts)
            # Before each step, so that a launch that has lost the run writes no further metrics.
            refuse_lost(self._lease)
            yield batch

    def step_done(
        self, batch: Batch, losses: SampleLosses, decision: Decision, learning_rate: float
    ) -> None:
        """Write the metrics of a training step, unless none of its samples could be trained.

        The step's time includes the wait for its batch and the save after the step before.
        """
        if not decision.has_samples:
            return
        statistics = decision.statistics
        # Before the metrics: the newest line there tells how long the run has been down.
        if not self._has_started:
            report_start(statistics.step, self._run, self._world)  # the event startup_timing
            self._has_started = True
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        metrics = Metrics(
            step=statistics.step + 1,
            epoch=batch.epoch,
            # JSON has neither NaN nor inf: they become null.
            loss=statistics.loss if math.isfinite(statistics.loss) else None,
            grad_norm=statistics.grad_norm if math.isfinite(statistics.grad_norm) else None,
            learning_rate=learning_rate,
            step_seconds=round(seconds, 6),
            data_seconds=round(self._data_seconds, 6),
            time=round(time.time(), 3),
            batch=statistics.batch,
            num_samples=statistics.num_samples,
            bucket=[batch.bucket.num_frames, batch.bucket.height, batch.bucket.width],
            loss_by_sigma=[_finite(loss) for loss in statistics.loss_by_sigma],
            weight_norm=_finite(statistics.weight_norm),
            update_ratio=_finite(statistics.update_ratio),
            nonfinite_share=statistics.nonfinite_share,
            group_grad_norms=_all_finite(statistics.group_grad_norms),
            group_weight_norms=_all_finite(statistics.group_weight_norms),
            group_update_ratios=_all_finite(statistics.group_update_ratios),
            # An audit finds by this whether two launches have written alternately.
            launch="" if self._lease is None else str(self._lease.record["token"]),
        )
        # Taking the peak also resets it, so that each value covers the steps since the last one.
        if statistics.step % _MEMORY_EVERY == 0 and (peak_bytes := take_peak(self._world.device)):
            metrics["peak_memory_bytes"] = peak_bytes
        if not decision.is_allowed and decision.verdict.kind != "ok":
            metrics["verdict"] = decision.verdict.kind
        if (flops := self._sample_flops.get(batch.bucket)) is not None:
            flops *= batch.global_size
            metrics["tflops_per_second"] = round(flops / seconds / 1e12, 6)
            if self._peak_flops is not None:
                peak = self._peak_flops * self._world.size
                metrics["mfu"] = round(flops / seconds / peak, 6)
        if (tokens := self._sample_tokens.get(batch.bucket)) is not None:
            # Stand-ins train nothing: their operations count above, but not their tokens.
            metrics["tokens_per_second"] = round(tokens * statistics.num_samples / seconds, 3)
        if batch.fetched.num_bytes or batch.fetched.retries:
            metrics["store_bytes"] = batch.fetched.num_bytes
            metrics["store_seconds"] = round(batch.fetched.seconds, 6)
            metrics["store_retries"] = batch.fetched.retries
        self._progress.update(metrics)
        if self._world.is_first:
            self._run.append_metrics(metrics)
            while compiled.FAULTS.new:
                message = compiled.FAULTS.new.pop(0)
                self._run.append_event("uncompiled", step=statistics.step, message=message)
        self.compare_with_zero(losses, batch)

    def report_verdict(self, decision: Decision, report: str | None) -> None:
        """Record and show a guard's verdict other than `ok`; `report` is a path in the run."""
        if not self._world.is_first:
            return
        statistics, verdict = decision.statistics, decision.verdict
        # With guard.mode = "report" the update was applied in spite of most verdicts.
        is_skipped = verdict.kind == "skip" and not decision.is_allowed
        self._run.append_event(
            "update_skipped" if is_skipped else "anomaly_detected",
            step=statistics.step,
            batch=statistics.batch,
            verdict=verdict.kind,
            reason=verdict.reason,
            began=verdict.began,
            message=verdict.message,
            report=report,
        )
        aside = " (only reported)" if decision.is_allowed else ""
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
        why = {"reason": verdict.reason, "message": verdict.message}
        self._run.append_event("rolled_back", step=chosen.step, from_step=from_step, **facts, **why)
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
        """Record that the videos of a preset were sampled; it is called on rank 0."""
        preset, step, count = scores["preset"], scores["step"], len(scores["videos"])
        facts = {"preset": preset, "videos": count, "seconds": round(seconds, 3)}
        self._run.append_event("sampled", step=step, **facts)
        self._progress.say(f"sampled {preset} at step {step}: {plural(count, 'video')}")

    def sampling_failed(self, preset: str, step: int, reason: str) -> None:
        self._run.append_event("sampling_failed", step=step, preset=preset, reason=reason)
        self._progress.say(f"{preset} of step {step} was not sampled: {reason}")

    def export_failed(self, step: int, reason: str) -> None:
        self._run.append_event("export_failed", step=step, reason=reason)
        self._progress.say(f"step {step} was not exported: {reason}")

    def _threads_chosen(self, step: int, choice: ThreadChoice | None) -> None:
        """Record and show the number of CPU threads if trials have just chosen one."""
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
        """Warn if a pretrained model's first loss is higher than that of always predicting 0.

        This happens in the first step only, and is mostly an error in how a family calls its model.
        """
        if not self._world.is_first or losses.of_zero is None:
            return
        # Weighted, so that stand-ins for missing clips do not count.
        weights = np.array(batch.weights.tolist())
        loss = float(np.dot(weights, losses.losses))
        of_zero = float(np.dot(weights, losses.of_zero.tolist()))
        # True for a loss of NaN as well, which the guard reports.
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
        """Leave the time spent inside the context, such as sampling, out of a step's time."""
        begun = time.perf_counter()
        yield
        self._step_began += time.perf_counter() - begun

    def record_failures(self, batch: Batch, loader: Loader) -> None:
        """Add clips that any rank could not use to every rank's quarantine, and record them.

        Decoders that hung or died are recorded as well. All ranks must call it.
        """
        quarantine = loader.quarantine
        mine = (socket.gethostname(), quarantine.failures, loader.incidents)
        for rank, (host, failures, incidents) in enumerate(
            collectives.gather_objects(mine, self._world)
        ):
            # Context-parallel ranks may all have failed at the same clip.
            new = {each: why for each, why in failures.items() if each not in quarantine.clips}
            # On every rank, as each of them may get the clip in a later epoch.
            quarantine.add(failures)
            if not self._world.is_first:
                continue
            for identity, reason in new.items():
                facts = {"step": batch.step, "rank": rank, "identity": identity}
                self._run.append_event("sample_rejected", **facts, reason=reason)
            for incident in incidents:
                path = self._run.stack_path(host, f"{fsio.file_time()}_{incident.pid}")
                self._run.write_record(path, incident.stack.as_dict())
                self._run.append_event(
                    "decoder_stalled" if incident.kind == "stalled" else "decoder_died",
                    step=batch.step,
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
        loader.incidents.clear()

    @contextmanager
    def measured(self, step: int, batch: Batch, threads: CpuThreads) -> Iterator[None]:
        """Measure time and memory of a step's passes and encoding, which run inside the context."""
        with self.measured_memory(batch), threads.measured(batch):
            yield
        self._threads_chosen(step, threads.choice)

    @contextmanager
    def measured_memory(self, batch: Batch) -> Iterator[None]:
        """Compare the memory of a forward and backward pass with the memory plan's prediction.

        The launch's first pass is left out, because libraries allocate memory in it that they keep.
        """
        self._num_computed += 1
        if self._predicted is None or self._num_computed == 1 or batch.bucket != self._predicted[1]:
            yield
            return
        with measured(self._world.device) as memory:
            yield
        # One comparison per launch is enough: on a CPU, measuring slows the step down.
        (predicted, _), taken, self._predicted = self._predicted, max(1, memory.peak_bytes), None
        error = predicted / taken - 1
        step = MeasuredStep(
            step=batch.step + 1,
            predicted_gib=round(predicted / 2**30, 4),
            measured_gib=round(taken / 2**30, 4),
            error=round(error, 4),
        )
        self._run.append_event("memory_measured", **asdict(step))
        self._progress.say(
            f"memory of forward and backward pass: {format_size(predicted)} predicted, "
            f"{format_size(taken)} measured ({error:+.1%})"
        )


def _all_finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(number) for name, number in numbers.items()}


def _finite(number: float) -> float | None:
    # fp32, in which losses and norms are computed, has about seven digits.
    return float(f"{number:.7g}") if math.isfinite(number) else None
