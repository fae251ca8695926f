"""Batches by global step, decoded ahead of the training, or read from a cache.

    loader = Loader(DataSection(catalog="clips.parquet", buckets=[…]), batch_size=8)
    for batch in loader:
        …                            # train on batch.videos, samples weighted by batch.weights
        save(loader.state_dict())    # counts what was handed out, not what was prefetched

What a step trains on is the course's business (`longtake.data.course`) and does not depend on
ranks, workers or on where a run was resumed. Batches may be left out for good (`Loader.skip`): the
others stay what they are. Nothing is ever made up for a clip that cannot be decoded: it is
quarantined, and a real clip of the batch stands in for it with weight 0, so that shapes stay, no
gradient comes of it, and no clip is trained twice in an epoch.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection
from longtake.data.batch import Batch, num_places
from longtake.data.cache import Cache, CachedSource, CacheFailure
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.course import ORDER_VERSION, Course, keep_catalogs, resume, start
from longtake.data.decode_worker import DecodePool
from longtake.data.files import refuse_archives
from longtake.data.plan import PlannedBatch
from longtake.data.references import Reference, references_of, without_reference
from longtake.data.sample import is_only_window, sample_seed, sample_window
from longtake.data.skipped import Skipped, Span, begins_epoch
from longtake.data.window import Window
from longtake.data.workers import WorkerIncident
from longtake.errors import ClipError, DataError
from longtake.heartbeat import HeartbeatDir


class BatchBuffer(Protocol):
    """What fills the places of one batch."""

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        """Start to fetch what a sample is made of."""
        ...

    def wait(self, place: int) -> None:
        """Return when a place that was begun is filled, or will never be.

        Raises:
            ClipError: it cannot be.
        """
        ...

    def copy(self, source: int, place: int) -> None:
        """Fill a place like another one, which is filled."""
        ...

    def fields(self) -> dict[str, Any]:
        """The fields of a `Batch` that all places together make."""
        ...


class SampleSource(Protocol):
    """Fetches what batches are made of, several at a time; is closed like a file."""

    def places(self, shape: Bucket, num_places: int) -> BatchBuffer:
        """The empty places of one batch."""
        ...

    def incidents(self) -> list[WorkerIncident]:
        """What befell its processes since this was last asked."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


Pixels = NDArray[np.uint8]


@dataclass
class FrameCache:
    """Decoded pictures of which each epoch wants the same, kept while there is room."""

    room_bytes: float
    pictures: dict[Window | Reference, Pixels] = field(default_factory=dict)

    def keep(self, wanted: Window | Reference, pixels: Pixels) -> None:
        """Keep a copy: the pixels are those of a batch, which is not ours for long."""
        if wanted not in self.pictures and pixels.nbytes <= self.room_bytes:
            self.room_bytes -= pixels.nbytes
            self.pictures[wanted] = pixels.copy()


class DecodingSource:
    """Decodes clips and their further pictures.

    Args:
        data: the recipe's section.
        workers: processes that decode; 0: threads.
        memory: what is known already.
        hearts: where the workers say what they do; None: nowhere.
    """

    def __init__(
        self,
        data: DataSection,
        workers: int,
        memory: FrameCache,
        hearts: HeartbeatDir | None = None,
    ) -> None:
        self.data = data
        self.memory = memory
        limit = data.sample_timeout_seconds
        self.pool = DecodePool(workers, limit, memory_gib=data.sample_memory_gib, heartbeats=hearts)

    def places(self, shape: Bucket, num_places: int) -> "PixelBuffer":
        """The empty places of one batch."""
        return PixelBuffer(self, shape, num_places)

    def incidents(self) -> list[WorkerIncident]:
        """What befell the pool's workers since this was last asked."""
        return self.pool.incidents()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.pool.close()


@dataclass(frozen=True)
class _BegunPictures:
    """Pictures of one place that are on their way."""

    window: Window
    is_kept: bool
    """Whether they are to be remembered."""
    asked: dict[str, tuple[Window | Reference, Future[Pixels]]]
    """The clip itself by the name "", its further pictures by theirs."""


class PixelBuffer:
    """The pixels of one batch; each sample's are written to its place when they are there."""

    def __init__(self, feed: DecodingSource, shape: Bucket, num_places: int) -> None:
        self._feed = feed
        self._shape = shape
        height, width, frames = shape.height, shape.width, shape.num_frames
        self._videos = np.empty((num_places, 3, frames, height, width), np.uint8)
        self._references = {
            name: np.empty((num_places, 3, 1, height, width), np.uint8)
            for name in feed.data.references
        }
        self._begun: dict[int, _BegunPictures] = {}

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        """Start to decode a window and the further pictures of its clip."""
        data = self._feed.data
        asked = {"": self._ask(window, self._videos[place])}
        for name, reference in references_of(window, data.references).items():
            asked[name] = self._ask(reference, self._references[name][place])
        is_kept = is_only_window(clip, self._shape, data)
        self._begun[place] = _BegunPictures(window, is_kept, asked)

    def _ask(
        self, wanted: Window | Reference, out: Pixels
    ) -> tuple[Window | Reference, Future[Pixels]]:
        if (remembered := self._feed.memory.pictures.get(wanted)) is None:
            return wanted, self._feed.pool.submit(wanted, out)
        out[...] = remembered
        pixels: Future[Pixels] = Future()
        pixels.set_result(out)
        return wanted, pixels

    def wait(self, place: int) -> None:
        """Return when all pictures of a place are decoded, or will never be.

        Raises:
            ClipError: one of them cannot be; names it.
        """
        begun = self._begun[place]
        errors = []
        for name, (wanted, future) in begun.asked.items():  # all: each may be written until then
            try:
                pixels = future.result()
            except ClipError as error:
                errors.append(without_reference(begun.window, name, error) if name else error)
            else:
                if begun.is_kept:
                    self._feed.memory.keep(wanted, pixels)
        if errors:
            raise errors[0]

    def copy(self, source: int, place: int) -> None:
        """Fill a place like another one, which is filled."""
        for pixels in (self._videos, *self._references.values()):
            pixels[place] = pixels[source]

    def fields(self) -> dict[str, Any]:
        """`videos`, and `references` by name."""
        references = {name: torch.from_numpy(each) for name, each in self._references.items()}
        return {"videos": torch.from_numpy(self._videos), "references": references}


_MOST_CLIPS_AT_HAND = 2**14
_REMEDY = "Are the files still where they were indexed? Run longtake data index again."


@dataclass(frozen=True)
class _Sample:
    """One place of this rank's share, on its way."""

    clip: Clip
    epoch: int
    seed: int


@dataclass
class _UnderWay:
    """Batches that are being fetched, and what fetches them."""

    feed: SampleSource
    following: int
    """The batch to begin next."""
    waiting: "deque[_Begun]" = field(default_factory=deque)


@dataclass(frozen=True)
class _Begun:
    """A batch that is being filled; None stands for a place that has no clip to be filled with."""

    planned: PlannedBatch
    samples: list[_Sample | None]
    places: BatchBuffer


class Loader:
    """Decodes the batches of a run, this rank's slice of each.

    On several ranks, whoever trains tells all of them after each step what some could not decode
    (`failures`, `quarantine`), so that all leave out the same clips and have the same state.

    Args:
        data: the recipe's section: catalogs, buckets, stages, workers and so on.
        batch_size: samples per step over all ranks.
        seed: of the run.
        rank: this process's data-parallel index.
        world_size: how many share each global batch; where it does not divide that, the last of
            them have a place less to fill.
        kept: the folder in which catalogs that were trained on are kept, without which a run
            cannot go on after its data changed.
        hearts: where decoding processes say what they do; None: nowhere.

    Raises:
        DataError: a catalog cannot be read, the batch size does not fit, or further pictures are
            wanted of clips in tars.
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
        hearts: Path | None = None,
    ) -> None:
        if batch_size < world_size:
            raise DataError(
                f"A batch of {batch_size} clips cannot be shared by {world_size} ranks: each needs "
                "one. Take a larger batch or fewer ranks."
            )
        self.data = data
        self.catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        self._course: Course | None = None
        self.quarantined: dict[str, str] = {}
        self._batch_size = batch_size
        self._seed = seed
        self._kept = kept
        self.hearts = None if hearts is None else HeartbeatDir(hearts, rank)
        local_size = num_places(batch_size, world_size)
        self._mine = range(rank * local_size, (rank + 1) * local_size)
        self._step = 0
        self._told: tuple[Span, ...] = ()
        self._skipped = Skipped()
        self._memory = FrameCache(data.memory_gib * 2**30)
        self._incidents: list[WorkerIncident] = []
        self._failures: dict[str, str] = {}
        self._clips: dict[tuple[int, int], Clip] = {}
        self._cached: tuple[Cache, Mapping[str, CacheFailure]] | None = None
        self._ahead_of_time: _UnderWay | None = None
        for catalog in self.catalogs.values():
            refuse_archives(catalog, data.references)

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
        """The number of the next batch: all before it have been handed out, or are skipped."""
        return self._step

    @property
    def skipped(self) -> tuple[Span, ...]:
        """[first, end) of the batches that were not and will not be handed out, ascending."""
        return self._skipped.spans

    def skip(self, first: int, end: int) -> None:
        """Never hand out the batches `first` .. `end - 1`, as far as they are still to come.

        They count as consumed, whatever becomes of the data: their clips come again in the next
        epoch and not before. Where the state of an earlier step is loaded, they are skipped from
        there; say so before a state is loaded if the data may have changed since they were planned.

        Raises:
            DataError: there are no such batches.
        """
        self._told = Skipped.of([*self._told, (first, end)]).spans
        self._skipped = self._skipped.with_([(first, end)], since=self._step)
        self._step = self._skipped.past(self._step)

    def end_after(self, count: int) -> int:
        """What `step` will be when so many more batches, or all there are, have been handed out."""
        end, last = self._skipped.after(self._step, count), self.course.end_step
        return end if last is None else min(end, max(self._step, self._skipped.past(last)))

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
            "skipped": [list(span) for span in self.skipped],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks and workers; skip what it skips.

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
        skipped = Skipped.of(state.get("skipped", ())).with_(self._told, since=step)
        step = skipped.past(step)
        self._course = resume(
            state["history"],
            step,
            self.catalogs,
            self.data,
            self._batch_size,
            self._seed,
            self._kept,
        )
        self._step, self._skipped = step, skipped
        self.quarantined = {} if self.data.retry_quarantined else dict(state["quarantined"])
        self._failures.clear()
        self._clips.clear()

    def read_from(
        self,
        cache: Cache,
        failures: Mapping[str, CacheFailure],
        incidents: Sequence[WorkerIncident] = (),
    ) -> None:
        """Take latents and embeddings from a cache from now on, instead of decoding anything.

        Order, seeds, epochs, weights and state stay what they are. A clip that could not be decoded
        when the cache was filled is found out when its turn comes, as it would be by decoding.

        Args:
            cache: which holds all that this loader will ask for.
            failures: by the key of a window's latents, why it could not be decoded.
            incidents: what befell decoding processes while it was filled.
        """
        self._cached = cache, failures
        self._incidents += incidents

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
    def incidents(self) -> list[WorkerIncident]:
        """What befell this rank's decoding processes and was not cleared yet."""
        return list(self._incidents)

    def clear_incidents(self) -> None:
        """Forget incidents that were written down."""
        self._incidents.clear()

    def __iter__(self) -> Iterator[Batch]:
        """The batches from here on, to the end of the last stage."""
        return self.batches()

    def batches(self, end_step: int | None = None) -> Iterator[Batch]:
        """The batches from here to number `end_step` that are not skipped, decoded ahead.

        Raises:
            DataError: more clips failed than `data.max_quarantined_clips` allows, or not one clip
                of a bucket can be decoded.
        """
        end = self._end(end_step)
        begun, self._ahead_of_time = self._ahead_of_time, None
        begun = begun or _UnderWay(self._feed(self.data.workers), self._step)
        with begun.feed as feed:
            while end is None or self._step < end:
                self._begin_ahead(begun, end)
                self._refuse_too_many()
                batch = self._assemble(begun.waiting.popleft())
                self._incidents += feed.incidents()
                self._step = self._skipped.past(self._step + 1)
                yield batch

    def begin(self, end_step: int | None = None) -> None:
        """Start decoding processes, and with the first batches, while there is nobody to train yet.

        The next call of `batches` goes on with them. Nothing counts as handed out before. Call it
        when the loader is where it is to begin; and then `batches` or `close`.
        """
        self.close()
        if self._cached is None:  # to read from a cache takes no time
            self._ahead_of_time = _UnderWay(self._feed(self.data.workers), self._step)
            self._begin_ahead(self._ahead_of_time, self._end(end_step))

    def close(self) -> None:
        """End what `begin` has started, if nobody came for it."""
        begun, self._ahead_of_time = self._ahead_of_time, None
        if begun is not None:
            with begun.feed:
                pass

    def load(self, step: int) -> Batch:
        """This rank's share of the batch of a global step, decoded here and now."""
        with self._feed(workers=0) as feed:
            return self._assemble(self._begin(step, feed))

    def _feed(self, workers: int) -> SampleSource:
        if self._cached is not None:
            return CachedSource(*self._cached)
        return DecodingSource(self.data, workers, self._memory, self.hearts)

    def _end(self, end_step: int | None) -> int | None:
        """The number of the first batch that is not wanted; None: there is no end."""
        ends = [end for end in (end_step, self.course.end_step) if end is not None]
        return min(ends) if ends else None

    def _begin_ahead(self, begun: _UnderWay, end: int | None) -> None:
        """Begin as many batches from here on as should be under way."""
        waiting = begun.waiting
        if not waiting or waiting[0].planned.step != self._step:  # it was skipped since
            waiting.clear()
            begun.following = self._step
        while len(waiting) <= self._ahead() and (end is None or begun.following < end):
            waiting.append(self._begin(begun.following, begun.feed))
            begun.following = self._skipped.past(begun.following + 1)

    def _ahead(self) -> int:
        """Batches to keep under way: enough that no worker idles."""
        return max(self.data.prefetch_batches, -(-(self.data.workers + 1) // len(self._mine)))

    def _begin(self, step: int, feed: SampleSource) -> _Begun:
        """Start to fetch this rank's share of a batch."""
        planned = self.course.batch(step)
        places = feed.places(planned.bucket, len(self._mine))
        samples = [
            self._begin_place(planned, number, places, place)
            for place, number in enumerate(self._mine)
        ]
        return _Begun(planned, samples, places)

    def _begin_place(
        self, planned: PlannedBatch, number: int, places: BatchBuffer, place: int
    ) -> _Sample | None:
        """Start with the sample of a number in the global batch, if there is one."""
        if number >= len(planned.rows):
            return None
        clip = self._clip(planned.catalog, planned.rows[number])
        if self._is_quarantined(clip):
            return None
        return self._fetch(clip, planned, planned.epochs[number], places, place)

    def _fetch(
        self, clip: Clip, planned: PlannedBatch, epoch: int, places: BatchBuffer, place: int
    ) -> _Sample:
        seed = sample_seed(self._seed, planned.stage, planned.source, epoch, clip)
        places.begin(place, clip, sample_window(clip, planned.bucket, self.data, seed))
        return _Sample(clip, epoch, seed)

    def _assemble(self, begun: _Begun) -> Batch:
        """Wait for what fills a batch, and let stand-ins fill the places that have nothing."""
        planned, places = begun.planned, begun.places
        found = [
            sample and self._fetched(sample, places, place)
            for place, sample in enumerate(begun.samples)
        ]
        filled = next((place for place, sample in enumerate(found) if sample), 0)
        stand_in = found[filled] or self._stand_in(planned, places, filled)
        for place, sample in enumerate(found):
            if sample is None and place != filled:
                places.copy(filled, place)
        samples = [sample or stand_in for sample in found]
        return Batch(
            step=planned.step,
            stage=planned.stage,
            source=planned.source,
            epoch=planned.epoch,
            begins_epoch=begins_epoch(planned, self.course, self._skipped),
            bucket=planned.bucket,
            captions=tuple(sample.clip.caption for sample in samples),
            seeds=tuple(sample.seed for sample in samples),
            identities=tuple(sample.clip.identity for sample in samples),
            epochs=tuple(sample.epoch for sample in samples),
            weights=torch.tensor([float(sample is not None) for sample in found]),
            rejected=tuple(self._rejected(planned, found)),
            **places.fields(),
        )

    def _fetched(self, sample: _Sample, places: BatchBuffer, place: int) -> _Sample | None:
        """The sample, when its place is filled; None if there is no way to fill it."""
        # Since it was begun, an earlier batch or another rank may have failed at it. It is
        # waited for all the same: until then it may be written to its place.
        is_out = self._is_quarantined(sample.clip)
        try:
            places.wait(place)
        except ClipError as error:
            if not is_out:
                self._failures[sample.clip.identity] = str(error)
            return None
        return None if is_out else sample

    def _rejected(
        self, planned: PlannedBatch, found: Sequence[_Sample | None]
    ) -> Iterator[tuple[str, int]]:
        for place, sample in zip(self._mine, found, strict=True):
            if sample is None and place < len(planned.rows):
                clip = self._clip(planned.catalog, planned.rows[place])
                yield clip.identity, planned.epochs[place]

    def _stand_in(self, planned: PlannedBatch, places: BatchBuffer, place: int) -> _Sample:
        """Any clip of the batch, or else of its bucket, that can be fetched; fills a place."""
        for row in self._candidates(planned):
            clip = self._clip(planned.catalog, row)
            if not self._is_quarantined(clip):
                sample = self._fetch(clip, planned, planned.epoch, places, place)
                if self._fetched(sample, places, place):
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
