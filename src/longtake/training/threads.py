"""Chooses the number of CPU threads that trains fastest, in a run's first steps and again later.

Two threads are faster than one if each has a core of its own. On shared cores each waits for
another that has no core, and steps take several times as long. The number is saved in each
checkpoint, because sums over another number of threads differ in their last bits.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from typing_extensions import TypedDict

from longtake import process
from longtake.config import Bucket
from longtake.data.batch import Batch
from longtake.fsio import Count, Finite
from longtake.parallel.mesh import World

_FLOPS_PER_THREAD = 2e7  # in a step; with fewer, threads mostly wait for each other
_WARM_UP = 2  # first steps, which allocate memory and are not measured
_TRIALS = 3  # measured steps with each number of threads
_HOPELESS = 2.0  # a number is dropped if a step takes this many times the fastest step of the trial
_WINDOW = 16  # steps whose median time is compared with that measured at the choice
_CHANGE = 1.5  # ratio of these two times beyond which numbers are tried again
_PAUSE = 64  # least number of steps between two trials
_GAIN = 0.9  # share of the present number's time that another must stay below to be chosen


class SavedThreads(TypedDict):
    """The chosen number of CPU threads, as a checkpoint's trainer.json holds it."""

    number: Count
    seconds: Finite  # per unit of work when the number was chosen; 0: not measured


@dataclass(frozen=True)
class ThreadChoice:
    """A number of CPU threads that was chosen by timing steps with several numbers."""

    before: int
    number: int
    seconds: dict[int, float]  # median time of a step by number of threads
    is_first: bool  # made in a run's first steps; later choices change last bits of results


@dataclass
class ThreadTuner:
    """Chooses a number of CPU threads by the times of training steps, without setting it.

    Args:
        numbers: candidates, the present one first.
        usual: seconds per unit of work with the present number, from an earlier launch; 0: unknown,
            so that a trial starts in the first steps.
    """

    numbers: Sequence[int]
    usual: float = 0.0
    number: int = field(init=False)  # threads of the next step, which may be part of a trial
    present: int = field(init=False)  # threads of steps outside of trials
    _trial: list[int] = field(init=False, default_factory=list)  # threads of the trial's next steps
    _tried: dict[int, list[float]] = field(init=False, default_factory=dict)
    _recent: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_WINDOW))
    _num_steps: int = field(init=False, default=0)  # since the last trial, or since the launch
    _is_first: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.number = self.present = self.numbers[0]
        self._is_first = not self.usual

    def step_done(self, seconds: float, work: float) -> ThreadChoice | None:
        """Add a step's time and amount of work; return the chosen number if it ended a trial.

        A trial computes some steps with each candidate number of CPU threads.
        """
        unit = seconds / work
        if self._trial:
            number = self._trial.pop(0)
            self._tried.setdefault(number, []).append(unit)
            if unit > _HOPELESS * min(map(min, self._tried.values())):
                # Numbers that are clearly slower are not tried further: each such step delays
                # training.
                self._trial = [each for each in self._trial if each != number]
            choice = None if self._trial else self._choose(work)
            self.number = self._trial[0] if self._trial else self.present
            return choice
        self._num_steps += 1
        self._recent.append(unit)
        if not self.usual:
            is_due = self._num_steps >= _WARM_UP
        else:
            ratio = median(self._recent) / self.usual
            is_due = self._num_steps >= _PAUSE and not 1 / _CHANGE < ratio < _CHANGE
        if is_due:
            # Alternating, so that other load on the machine affects all numbers alike.
            self._trial = list(self.numbers) * _TRIALS
            self.number = self._trial[0]
        return None

    def _choose(self, work: float) -> ThreadChoice:
        found = {number: median(each) for number, each in self._tried.items()}
        before, best = self.present, min(found, key=lambda number: found[number])
        # A small gain may be chance, and a change costs bitwise equality.
        self.present = best if found[best] < _GAIN * found[before] else before
        self.usual = found[self.present]
        seconds = {number: each * work for number, each in sorted(found.items())}
        choice = ThreadChoice(before, self.present, seconds, self._is_first)
        self._tried, self._num_steps, self._is_first = {}, 0, False
        self._recent.clear()
        return choice


class CpuThreads:
    """Sets the number of CPU threads for each training step; does nothing on a GPU.

    The number is fixed if OMP_NUM_THREADS is set, or if several ranks share the cores.

    Args:
        world: ranks of the launch.
        saved: number in the checkpoint that training resumes from; None in a new run.
    """

    def __init__(self, world: World, saved: SavedThreads | None = None) -> None:
        self.choice: ThreadChoice | None = None  # made in the last step; None in most
        self._tuner: ThreadTuner | None = None
        self._saved = saved
        self._is_cpu = world.device.type == "cpu"
        self._sample_flops: Mapping[Bucket, int] = {}
        if self._is_cpu and world.size == 1 and "OMP_NUM_THREADS" not in os.environ:
            most = process.num_cores()
            number = min(most, saved["number"]) if saved and saved["number"] else most
            usual = saved["seconds"] if saved and saved["number"] == number else 0.0
            halves = [most >> shift for shift in range(most.bit_length())]  # most, most/2, ..., 1
            others = [each for each in halves if each != number]
            self._tuner = ThreadTuner([number, *others], usual)
            torch.set_num_threads(number)  # the plan is made with it, too

    def set_work(self, sample_flops: Mapping[Bucket, int], batch_size: int) -> None:
        """Give up candidate numbers of CPU threads that are too large for the work of one step.

        Args:
            sample_flops: operations of a step on one clip of each shape; empty if unknown.
            batch_size: clips of a step.
        """
        self._sample_flops = sample_flops
        # A resumed run keeps its number: sums in another one differ in their last bits.
        if self._tuner is not None and not self._saved and sample_flops:
            flops = max(sample_flops.values()) * batch_size
            most = max(1, int(flops / _FLOPS_PER_THREAD))
            numbers = [number for number in self._tuner.numbers if number <= most]
            self._tuner = ThreadTuner(numbers)
            torch.set_num_threads(numbers[0])

    @contextmanager
    def measured(self, batch: Batch) -> Iterator[None]:
        """Set the number of CPU threads for a step, computed inside the context, and time it."""
        self.choice = None
        if self._tuner is None or len(self._tuner.numbers) == 1:
            yield
            return
        if self._tuner.number != torch.get_num_threads():
            torch.set_num_threads(self._tuner.number)
        bucket, begun = batch.bucket, time.perf_counter()
        yield
        # Where operations are unknown, pixels stand for them: only ratios of times are compared.
        pixels = bucket.num_pixels
        work = self._sample_flops.get(bucket, pixels) * len(batch.seeds)
        self.choice = self._tuner.step_done(time.perf_counter() - begun, work)

    def state(self) -> SavedThreads:
        """Return the number of CPU threads that a step uses, as a record for the checkpoint."""
        if self._tuner is None:
            return SavedThreads(number=torch.get_num_threads(), seconds=0.0)
        return SavedThreads(number=self._tuner.present, seconds=self._tuner.usual)

    def difference(self) -> str | None:
        """Return a warning if the CPU threads of a resumed run change its results' last bits."""
        now = torch.get_num_threads()
        if self._saved is None or self._saved["number"] == now or not self._is_cpu:
            return None
        before = self._saved["number"]
        return (
            f"steps are computed here by {now} CPU threads, and before by {before}: results are no "
            f"longer bitwise those of an undisturbed run. OMP_NUM_THREADS={before} keeps them so"
        )
