"""Saves while training goes on, which waits only until its state is copied."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longtake import heartbeat
from longtake.checkpoint import store
from longtake.checkpoint.staging import Staging
from longtake.checkpoint.store import State
from longtake.checkpoint.writing import Company, write
from longtake.config import CheckpointSection
from longtake.errors import CheckpointError, LongtakeError
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

_PATIENCE = timedelta(hours=24)


class Saver:
    """Writes checkpoints, one after another, in a thread of its own; and thins out older ones.

    All ranks have one and make the same calls in the same order. What it has finished or failed
    is told when it is asked.

    Args:
        run: the run directory.
        world: all ranks.
        section: the recipe's. Where `background` is false each save is waited for, and the state
            is not copied.
        start: the step that training goes on from. Later checkpoints were passed over, and go
            when there is a whole one again.
        reach: how many steps a rollback must be able to go back; 0 for none.

    Attributes:
        failures_in_a_row: saves that have failed since one did not, the same on every rank.
    """

    def __init__(
        self,
        run: RunDirectory,
        world: World,
        section: CheckpointSection,
        *,
        start: int,
        reach: int = 0,
    ) -> None:
        self.world = world
        self._run, self._section, self._reach = run, section, reach
        group = None if world.mesh is None else dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._company = Company(world, group)
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, "checkpoint", _prepare_thread, (world.device,))
        self._under_way: Future[Path] | None = None
        self._since = start
        self._begun = time.monotonic()
        self._seconds = 0.0
        self._finished: list[Path] = []
        self._failure: BaseException | None = None
        self.failures_in_a_row = 0
        self._is_abandoned = False
        store.forget_hint_of_being_alone()

    def save(self, step: int, parts: Mapping[str, State], trainer: Mapping[str, Any]) -> None:
        """Begin to save; returns when the state may change again.

        An earlier save that is still under way is waited for. One that fails is told of by
        `failed`.

        Args:
            step: global step.
            parts: states by the folders in which they are saved.
            trainer: what else is needed to go on, as JSON.
        """
        self.wait()
        heartbeat.set_phase("checkpoint")
        self._begun = time.monotonic()
        given = self._staging.copy(parts) if self._section.background else parts
        self._under_way = self._thread.submit(self._save, step, given, trainer, self._since)
        self._since = step
        if not self._section.background:
            self.wait()

    @property
    def is_due(self) -> bool:
        """Whether `checkpoint.minutes` have passed since the last save; on rank 0, for all ranks.

        Other ranks never say so: their clocks differ.
        """
        minutes = self._section.minutes
        is_asked = minutes is not None and self.world.is_first
        return is_asked and time.monotonic() - self._begun >= 60 * (minutes or 0)

    @property
    def failed(self) -> bool:
        """Whether a save has failed, as far as this rank knows."""
        self._look()
        return self._failure is not None

    def finished(self) -> list[Path]:
        """Checkpoints that became whole since this was last asked; on rank 0, none elsewhere."""
        self._look()
        finished, self._finished = self._finished, []
        return finished if self.world.is_first else []

    def wait(self) -> None:
        """Return when no save is under way."""
        if self._under_way is not None:
            heartbeat.set_phase("save")
            wait([self._under_way])
        self._look()

    def take_failure(self) -> CheckpointError | None:
        """Why the last save failed, the same on every rank, and forgotten then; None if none has.

        All ranks call it; a save under way is waited for.
        """
        self.wait()
        failure, self._failure = self._failure, None
        said = gather_objects(None if failure is None else str(failure), self.world)
        message = next((each for each in said if each is not None), None)
        if failure is not None and not isinstance(failure, CheckpointError):
            raise failure  # a defect of ours, to be seen as one
        return None if message is None else CheckpointError(message)

    def abandon(self) -> None:
        """Wait for nothing any more, where there are other ranks; alone, a save ends by itself."""
        self._is_abandoned = self.world.mesh is not None

    def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        self._thread.shutdown(wait=not self._is_abandoned)
        self._look()

    def _save(
        self, step: int, parts: Mapping[str, State], trainer: Mapping[str, Any], since: int
    ) -> Path:
        begun = time.monotonic()
        path = write(self._run, step, parts, trainer, self._company)
        self._seconds = time.monotonic() - begun
        if self.world.is_first:
            store.thin_out(self._run, step, since, self._section, self._reach)
        return path

    def _look(self) -> None:
        """Take note of how a save has ended; only the thread that saves may run beside this."""
        if self._under_way is None or not self._under_way.done():
            return
        ended, self._under_way = self._under_way, None
        error = ended.exception()
        if error is None:
            self._finished.append(ended.result())
            heartbeat.record_duration("save", self._seconds)
            self.failures_in_a_row = 0
        else:
            self.failures_in_a_row += 1
            self._failure = error


@contextmanager
def keep_saver(
    run: RunDirectory, world: World, section: CheckpointSection, *, start: int, reach: int = 0
) -> Iterator[Saver]:
    """A saver that is waited for at the end, also after an error and after a Ctrl-C.

    But not after a defect, or the loss of another rank: what it writes would not become whole, and
    others wait for this process to be gone.

    Its arguments are those of `Saver`.

    Raises:
        CheckpointError: on every rank, at the end of a block that ends well: a save has failed.
    """
    saver = Saver(run, world, section, start=start, reach=reach)
    try:
        yield saver
        if error := saver.take_failure():
            raise error
    except Exception as error:
        if not isinstance(error, LongtakeError):
            saver.abandon()
        raise
    finally:
        saver.close()


def _prepare_thread(device: torch.device) -> None:
    """Make the thread know its card.

    Its priority stays that of the training: a thread that is made to wait for the processor holds
    Python's lock meanwhile, and the training waits with it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
