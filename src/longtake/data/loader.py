"""Batches by global step, decoded ahead of the training.

    loader = Loader(DataSection(catalog="clips.parquet", buckets=[…]), batch_size=8)
    for batch in loader:
        …                            # train on batch.videos, samples weighted by batch.weights
        save(loader.state_dict())    # counts what was handed out, not what was prefetched

What a step trains on is the course's business (`longtake.data.course`) and does not depend on
ranks, workers or on where a run was resumed. Nothing is ever made up for a clip that cannot be
decoded: it is quarantined, and a real clip of the batch stands in for it with weight 0, so that
shapes stay, no gradient comes of it, and no clip is trained twice in an epoch.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.course import ORDER_VERSION, Course, keep_catalogs, resume, start
from longtake.data.plan import PlannedBatch
from longtake.data.pool import Incident, Pool
from longtake.data.sample import is_only_window, sample_seed, sample_window
from longtake.data.window import Window
from longtake.errors import ClipError, DataError

Pixels = NDArray[np.uint8]

_MOST_CLIPS_AT_HAND = 2**14
_REMEDY = "Are the files still where they were indexed? Run longtake data index again."


@dataclass
class _Memory:
    """Decoded windows that are the only one of their clip, kept while there is room."""

    room_bytes: float
    windows: dict[Window, Pixels] = field(default_factory=dict)

    def keep(self, window: Window, pixels: Pixels) -> None:
        """Keep a copy: the pixels are those of a batch, which is not ours for long."""
        if window not in self.windows and pixels.nbytes <= self.room_bytes:
            self.room_bytes -= pixels.nbytes
            self.windows[window] = pixels.copy()


@dataclass(frozen=True)
class _Sample:
    """One place of this rank's share, on its way."""

    clip: Clip
    epoch: int
    seed: int
    window: Window
    pixels: Future[Pixels]


@dataclass(frozen=True)
class _Begun:
    """A batch that is being decoded; None stands for a place that has no clip to decode."""

    planned: PlannedBatch
    samples: list[_Sample | None]
    videos: Pixels
    """[B, 3, F, H, W]: each sample's pixels are written to its place when they are there."""


class Loader:
    """Decodes the batches of a run, this rank's slice of each.

    On several ranks, whoever trains tells all of them after each step what some could not decode
    (`failures`, `quarantine`), so that all leave out the same clips and have the same state.

    Args:
        data: the recipe's section: catalogs, buckets, stages, workers and so on.
        batch_size: samples per step over all ranks.
        seed: of the run.
        rank: this process's data-parallel index.
        world_size: how many share each global batch; must divide it.
        kept: the folder in which catalogs that were trained on are kept, without which a run
            cannot go on after its data changed.

    Raises:
        DataError: a catalog cannot be read, or the batch size does not fit.
    """

    def __init__(
        self,
        data: DataSection,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        kept: Path | None = None,
    ) -> None:
        if batch_size < 1 or batch_size % world_size:
            raise DataError(
                f"A batch of {batch_size} clips cannot be shared by {world_size} ranks; it must be "
                f"a multiple of {world_size}."
            )
        self.data = data
        self.catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        self._course: Course | None = None
        self.quarantined: dict[str, str] = {}
        self._batch_size = batch_size
        self._seed = seed
        self._kept = kept
        local_size = batch_size // world_size
        self._mine = range(rank * local_size, (rank + 1) * local_size)
        self._step = 0
        self._memory = _Memory(data.memory_gib * 2**30)
        self._incidents: list[Incident] = []
        self._failures: dict[str, str] = {}
        self._clips: dict[tuple[int, int], Clip] = {}

    @property
    def course(self) -> Course:
        """Which clips each step trains on; of a new run, unless a state was loaded.

        Raises:
            DataError: a stage selects nothing, or the stages do not fit together.
        """
        if self._course is None:
            self._course = start(self.catalogs, self.data, self._batch_size, self._seed)
        return self._course

    @property
    def step(self) -> int:
        """Steps whose batches have been handed out: the global step of the next one."""
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """All that another loader needs to go on from here: small, JSON, the same on all ranks."""
        return {
            "order_version": ORDER_VERSION,
            "global_step": self._step,
            "seed": self._seed,
            "plan_version": self.course.plan.version,
            **self.course.position(self._step),
            "history": list(self.course.history),
            "quarantined": {**self.quarantined, **self._failures},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks and workers.

        Raises:
            DataChangedError: the data, the batch size or the stages have changed and
                `data.on_change` is `refuse`; says what changed and how one can go on.
            DataError: the state is not one of this loader's.
        """
        if state.get("order_version") != ORDER_VERSION or state["seed"] != self._seed:
            raise DataError(
                f"The state was taken with order version {state.get('order_version')} and seed "
                f"{state.get('seed')}; this loader has {ORDER_VERSION} and {self._seed}, and would "
                "repeat some clips and miss others. Use the same seed and the longtake that the "
                "run was started with."
            )
        step: int = state["global_step"]
        self._course = resume(
            state["history"],
            step,
            self.catalogs,
            self.data,
            self._batch_size,
            self._seed,
            self._kept,
        )
        self._step = step
        self.quarantined = {} if self.data.retry_quarantined else dict(state["quarantined"])
        self._failures.clear()
        self._clips.clear()

    def keep_catalogs(self) -> None:
        """Keep copies of the catalogs that are trained on; one rank calls it, before it trains.

        Raises:
            DataError: they cannot be written.
        """
        if self._kept is not None:
            keep_catalogs(self.course, self.catalogs, self._kept)

    @property
    def failures(self) -> dict[str, str]:
        """Clips that only this rank knows it cannot decode: why, by identity."""
        return dict(self._failures)

    def quarantine(self, clips: Mapping[str, str]) -> None:
        """Take note of clips that some ranks could not decode: the same clips on every rank."""
        self.quarantined = dict(sorted({**self.quarantined, **clips}.items()))
        self._failures.clear()

    @property
    def incidents(self) -> list[Incident]:
        """What befell this rank's decoding processes and was not cleared yet."""
        return list(self._incidents)

    def clear_incidents(self) -> None:
        """Forget incidents that were written down."""
        self._incidents.clear()

    def __iter__(self) -> Iterator[Batch]:
        """The batches from here on, to the end of the last stage."""
        return self.batches()

    def batches(self, end_step: int | None = None) -> Iterator[Batch]:
        """The batches from here to `end_step`, decoded ahead.

        Raises:
            DataError: more clips failed than `data.max_quarantined_clips` allows, or not one clip
                of a bucket can be decoded.
        """
        ends = [end for end in (end_step, self.course.end_step) if end is not None]
        waiting: deque[_Begun] = deque()
        following = self._step
        with self._pool(self.data.workers) as pool:
            while not ends or self._step < min(ends):
                while len(waiting) <= self._ahead() and (not ends or following < min(ends)):
                    waiting.append(self._begin(following, pool))
                    following += 1
                self._refuse_too_many()
                batch = self._assemble(waiting.popleft(), pool)
                self._incidents += pool.incidents()
                self._step += 1
                yield batch

    def load(self, step: int) -> Batch:
        """This rank's share of the batch of a global step, decoded here and now."""
        with self._pool(workers=0) as pool:
            return self._assemble(self._begin(step, pool), pool)

    def _pool(self, workers: int) -> Pool:
        return Pool(workers, self.data.sample_timeout_seconds, decoder=self.data.decoder)

    def _ahead(self) -> int:
        """Batches to keep under way: enough that no worker idles."""
        return max(self.data.prefetch_batches, -(-(self.data.workers + 1) // len(self._mine)))

    def _begin(self, step: int, pool: Pool) -> _Begun:
        """Start decoding this rank's share of a batch."""
        planned = self.course.batch(step)
        videos = np.empty((len(self._mine), *_shape(planned)), np.uint8)
        samples = [
            self._begin_place(planned, place, pixels, pool)
            for place, pixels in zip(self._mine, videos, strict=True)
        ]
        return _Begun(planned, samples, videos)

    def _begin_place(
        self, planned: PlannedBatch, place: int, out: Pixels, pool: Pool
    ) -> _Sample | None:
        if place >= len(planned.rows):
            return None
        clip = self._clip(planned.catalog, planned.rows[place])
        if self._is_quarantined(clip):
            return None
        return self._submit(clip, planned, planned.epochs[place], out, pool)

    def _submit(
        self, clip: Clip, planned: PlannedBatch, epoch: int, out: Pixels, pool: Pool
    ) -> _Sample:
        seed = sample_seed(self._seed, planned.stage, planned.source, epoch, clip)
        window = sample_window(clip, planned.bucket, self.data, seed)
        if (remembered := self._memory.windows.get(window)) is None:
            return _Sample(clip, epoch, seed, window, pool.submit(window, out))
        out[...] = remembered
        pixels: Future[Pixels] = Future()
        pixels.set_result(out)
        return _Sample(clip, epoch, seed, window, pixels)

    def _assemble(self, begun: _Begun, pool: Pool) -> Batch:
        """Wait for a batch's pixels, and let stand-ins fill the places that have none."""
        planned = begun.planned
        found = [sample and self._decoded(sample, planned.bucket) for sample in begun.samples]
        stand_in = next(filter(None, found), None) or self._stand_in(planned, pool)
        for sample, pixels in zip(found, begun.videos, strict=True):
            if sample is None:
                pixels[...] = stand_in.pixels.result()
        places = [sample or stand_in for sample in found]
        return Batch(
            step=planned.step,
            stage=planned.stage,
            source=planned.source,
            epoch=planned.epoch,
            begins_epoch=planned.begins_epoch,
            bucket=planned.bucket,
            videos=torch.from_numpy(begun.videos),
            captions=tuple(sample.clip.caption for sample in places),
            seeds=tuple(sample.seed for sample in places),
            identities=tuple(sample.clip.identity for sample in places),
            epochs=tuple(sample.epoch for sample in places),
            weights=torch.tensor([float(sample is not None) for sample in found]),
            rejected=tuple(self._rejected(planned, found)),
        )

    def _decoded(self, sample: _Sample, shape: Bucket) -> _Sample | None:
        """The sample, when its pixels are there; None if there is no way to get them."""
        # Since it was submitted, an earlier batch or another rank may have failed at it. It is
        # waited for all the same: until then it may be written to its place.
        is_out = self._is_quarantined(sample.clip)
        try:
            pixels = sample.pixels.result()
        except ClipError as error:
            if not is_out:
                self._failures[sample.clip.identity] = str(error)
            return None
        if is_out:
            return None
        if is_only_window(sample.clip, shape, self.data):
            self._memory.keep(sample.window, pixels)
        return sample

    def _rejected(
        self, planned: PlannedBatch, found: Sequence[_Sample | None]
    ) -> Iterator[tuple[str, int]]:
        for place, sample in zip(self._mine, found, strict=True):
            if sample is None and place < len(planned.rows):
                clip = self._clip(planned.catalog, planned.rows[place])
                yield clip.identity, planned.epochs[place]

    def _stand_in(self, planned: PlannedBatch, pool: Pool) -> _Sample:
        """Any clip of the batch, or else of its bucket, that can be decoded."""
        for row in self._candidates(planned):
            clip = self._clip(planned.catalog, row)
            if not self._is_quarantined(clip):
                out = np.empty(_shape(planned), np.uint8)
                sample = self._submit(clip, planned, planned.epoch, out, pool)
                if self._decoded(sample, planned.bucket):
                    return sample
                self._refuse_too_many()
        first = next(iter({**self.quarantined, **self._failures}.values()), "")
        raise DataError(
            f"No clip in the bucket of {planned.bucket} could be decoded. One: {first}. {_REMEDY}"
        )

    def _candidates(self, planned: PlannedBatch) -> Iterator[np.uint32]:
        yield from planned.rows
        for stream in self.course.plan_at(planned.step).streams():
            for part in stream.parts:
                if part.catalog is planned.catalog and planned.bucket in part.members.shapes:
                    yield from part.members.rows[part.members.shapes.index(planned.bucket)]

    def _clip(self, catalog: Catalog, row: np.uint32) -> Clip:
        """A clip's record; making it takes longer than all else that is done for a sample here."""
        key = (id(catalog), int(row))
        if key not in self._clips:
            if len(self._clips) >= _MOST_CLIPS_AT_HAND:
                self._clips.clear()
            self._clips[key] = catalog.clip(int(row))
        return self._clips[key]

    def _is_quarantined(self, clip: Clip) -> bool:
        return clip.identity in self.quarantined or clip.identity in self._failures

    def _refuse_too_many(self) -> None:
        failed, allowed = {**self.quarantined, **self._failures}, self.data.max_quarantined_clips
        if len(failed) > allowed:
            raise DataError(
                f"{len(failed)} clips could not be decoded while training, more than "
                f"data.max_quarantined_clips = {allowed} allows. One of them: "
                f"{list(failed.values())[-1]}. {_REMEDY}"
            )


def _shape(planned: PlannedBatch) -> tuple[int, int, int, int]:
    bucket = planned.bucket
    return 3, bucket.num_frames, bucket.height, bucket.width
