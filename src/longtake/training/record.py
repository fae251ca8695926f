"""What a run writes down about its steps, and shows to whoever is looking (rank 0)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from longtake.config import Bucket
from longtake.data.loader import Batch
from longtake.errors import ClipError
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.progress import StepProgress, step_progress
from longtake.run_dir import Metrics, RunDirectory
from longtake.tracking.tensorboard import TensorBoardMirror


class Record:
    """Metrics and events of a run's steps; does nothing on ranks other than 0."""

    def __init__(
        self,
        step_flops: Mapping[Bucket, int],
        run: RunDirectory,
        world: World,
        progress: StepProgress,
    ) -> None:
        self._step_flops = step_flops
        self._run = run
        self._world = world
        self._progress = progress
        self._mirror = TensorBoardMirror(run) if world.is_first else None
        self._step_began = time.perf_counter()
        self._data_seconds = 0.0
        self._num_failures = 0
        self._written: set[str] = set()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; notes how long each is waited for, and when an epoch begins."""
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self._data_seconds = time.perf_counter() - asked
            if batch is None:
                return
            if self._world.is_first and batch.begins_epoch:
                self._run.append_event("epoch", step=batch.step, epoch=batch.epoch)
            yield batch

    def step_done(self, batch: Batch, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Write the step's metrics; its time includes the wait for data and the last save."""
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        metrics = Metrics(
            step=batch.step + 1,
            epoch=batch.epoch,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            step_seconds=round(seconds, 6),
            data_seconds=round(self._data_seconds, 6),
            tflops_per_second=round(self._step_flops[batch.bucket] / seconds / 1e12, 6),
            time=round(time.time(), 3),
        )
        self._progress.update(metrics)
        if self._mirror is not None:
            self._run.append_metrics(metrics)
            self._mirror.catch_up()  # a tenth of a millisecond, and nothing to lose in a crash

    def clips_failed(
        self, batch: Batch, failures: Mapping[str, ClipError], num_over_ranks: int
    ) -> None:
        """Write one event for each clip that could not be decoded, whichever ranks met it."""
        if num_over_ranks == self._num_failures:  # the same on every rank
            return
        reasons = {identity: (str(e.path), e.reason) for identity, e in failures.items()}
        for rank, failed in enumerate(gather_objects(reasons, self._world)):
            for identity, (path, reason) in failed.items():
                if self._world.is_first and identity not in self._written:
                    self._written.add(identity)
                    clip = {"identity": identity, "path": path, "reason": reason}
                    self._run.append_event("sample_rejected", step=batch.step, rank=rank, **clip)
        self._num_failures = num_over_ranks

    def close(self) -> None:
        """End the mirror."""
        if self._mirror is not None:
            self._mirror.close()


@contextmanager
def keep_record(
    start: int,
    total: int,
    step_flops: Mapping[Bucket, int],
    run: RunDirectory,
    world: World,
    console: Console,
) -> Iterator[Record]:
    """A record of the steps start .. total, with a progress display on rank 0.

    `step_flops` are the operations of a whole step, over all ranks, on clips of each shape.
    """
    quiet = console if world.is_first else Console(quiet=True)
    with step_progress(quiet, start, total) as progress:
        record = Record(step_flops, run, world, progress)
        try:
            yield record
        finally:
            record.close()
