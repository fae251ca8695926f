"""What a run writes down about its steps, and shows to whoever is looking (rank 0)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from longtake.config import Bucket, Recipe
from longtake.data.loader import Batch
from longtake.errors import ClipError
from longtake.models.assemble import forward_flops, latent_shape
from longtake.models.flops import training_flops
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.progress import StepProgress, step_progress
from longtake.run_dir import Metrics, RunDirectory
from longtake.tracking.tensorboard import TensorBoardMirror
from longtake.training.step import TrainingState

_SECONDS_BETWEEN_MIRRORINGS = 5.0


class Record:
    """Metrics and events of a run's steps; does nothing on ranks other than 0."""

    def __init__(
        self,
        state: TrainingState,
        recipe: Recipe,
        run: RunDirectory,
        world: World,
        progress: StepProgress,
    ) -> None:
        self._state = state
        self._recipe = recipe
        self._run = run
        self._world = world
        self._progress = progress
        self._mirror = TensorBoardMirror(run) if world.is_first else None
        self._mirrored = self._step_began = self._batch_arrived = time.perf_counter()
        self._epoch: int | None = None
        self._num_failures = 0
        self._written: set[tuple[int, str]] = set()
        self._flops: dict[Bucket, int] = {}

    def batch_arrived(self, batch: Batch) -> None:
        """Note how long the step has waited for its data, and when an epoch begins."""
        self._batch_arrived = time.perf_counter()
        if self._world.is_first and batch.epoch != self._epoch:
            self._epoch = batch.epoch
            self._run.append_event("epoch", step=batch.step, epoch=batch.epoch)

    def step_done(self, batch: Batch, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Write the step's metrics; its time includes the wait for data and the last save."""
        now = time.perf_counter()
        seconds, waited = now - self._step_began, self._batch_arrived - self._step_began
        self._step_began = now
        metrics = Metrics(
            step=self._state.global_step,
            epoch=batch.epoch,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            step_seconds=round(seconds, 6),
            data_seconds=round(waited, 6),
            tflops_per_second=round(self._step_flops(batch) / seconds / 1e12, 6),
            time=round(time.time(), 3),
        )
        self._progress.update(metrics)
        if self._mirror is not None:
            self._run.append_metrics(metrics)
            if now - self._mirrored > _SECONDS_BETWEEN_MIRRORINGS:
                self._mirror.catch_up()
                self._mirrored = now

    def clips_failed(self, failures: Mapping[str, ClipError], num_over_ranks: int) -> None:
        """Write an event for each clip that could not be decoded, whichever rank met it."""
        if num_over_ranks == self._num_failures:  # the same on every rank
            return
        reasons = {identity: (str(e.path), e.reason) for identity, e in failures.items()}
        for rank, failed in enumerate(gather_objects(reasons, self._world)):
            for identity, (path, reason) in failed.items():
                self._write_rejection(rank, identity, path, reason)
        self._num_failures = num_over_ranks

    def close(self) -> None:
        """Mirror what is left."""
        if self._mirror is not None:
            self._mirror.catch_up()
            self._mirror.close()

    def _write_rejection(self, rank: int, identity: str, path: str, reason: str) -> None:
        step = self._state.global_step
        facts = {"step": step, "rank": rank, "identity": identity, "path": path, "reason": reason}
        if self._world.is_first and (rank, identity) not in self._written:
            self._written.add((rank, identity))
            self._run.append_event("sample_rejected", **facts)

    def _step_flops(self, batch: Batch) -> int:
        """Operations of the step's global batch, counted once per shape of clip."""
        if batch.bucket not in self._flops:
            components = self._state.components
            latents = latent_shape(components.codec, batch.bucket)
            self._flops[batch.bucket] = training_flops(forward_flops(components, latents))
        return self._flops[batch.bucket] * self._recipe.training.batch_size


@contextmanager
def keep_record(
    state: TrainingState, recipe: Recipe, run: RunDirectory, world: World, console: Console
) -> Iterator[Record]:
    """A record of the steps to come, with a progress display on rank 0."""
    quiet = console if world.is_first else Console(quiet=True)
    with step_progress(quiet, state.global_step, recipe.training.steps) as progress:
        record = Record(state, recipe, run, world, progress)
        try:
            yield record
        finally:
            record.close()
