"""Batches by global step, decoded ahead of training, or read from a cache.

A step's batch does not depend on ranks, workers or where the run was resumed. A clip that cannot be
decoded is quarantined, and a real clip of the batch takes its place with weight 0.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake.config import Bucket, DataSection
from longtake.data import buckets, input_files
from longtake.data.cache import (
    Cache,
    CachedBuffer,
    CachedSource,
    CacheFailure,
    describe_too_many,
    verb_of,
    with_remedy,
)
from longtake.data.catalog import Catalog
from longtake.data.checks import files_of_inputs, refuse_wrong_catalogs
from longtake.data.clip import Clip, Indexed, Media
from longtake.data.conditioning import (
    Wanted,
    as_bytes,
    conditioning_error,
    conditioning_of,
    empty_conditioning,
)
from longtake.data.decode_worker import DecodePool
from longtake.data.ledger import StepSamples
from longtake.data.plan import Part, PlannedBatch, Stream
from longtake.data.plan_history import (
    ORDER_VERSION,
    PlanHistory,
    SkippedRanges,
    Span,
    begins_epoch,
    keep_catalogs,
    resume,
    start,
)
from longtake.data.stages import StagePosition
from longtake.data.stores import NOTHING, Fetched
from longtake.data.training_captions import with_sample_caption
from longtake.data.window import Window
from longtake.data.workers import WorkerIncident
from longtake.errors import ClipError, DataError
from longtake.heartbeat import HeartbeatDir


def num_places(batch_size: int, data_size: int) -> int:
    return -(-batch_size // data_size)


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch. Shapes: B local batch, F frames, H height, W width."""

    step: int
    stage: str
    source: str  # the name of its catalog in the recipe
    epoch: int
    begins_epoch: bool  # whether this is the first step that is counted in the epoch
    bucket: Bucket
    videos: Tensor  # [B, 3, F, H, W] uint8; F = 0 with `latents`
    captions: tuple[str, ...]  # [B]
    # [B] seeds of noise, sigma and caption dropout, from the run's seed, the sample's stage and
    # epoch and the clip's identity: the same on any world size
    seeds: tuple[int, ...]
    identities: tuple[str, ...]  # [B]
    epochs: tuple[int, ...]  # [B] each sample's own epoch
    weights: Tensor  # [B] float32: 1, or 0 for a filler (clip not decodable, smaller last batch)
    rejected: tuple[tuple[str, int], ...]  # (identity, epoch) of clips that were not decodable
    global_size: int  # samples of the batch over all ranks, unless it is a bucket's last
    position: StagePosition  # in the curriculum, for learning rate and EMA; `stage` has the clips
    position_before: StagePosition  # of the update before; of the first, its own
    # By names in `data.conditioning`, as `empty_conditioning`: pixels uint8, numbers float32.
    # With `latents` only what the codec does not encode
    inputs: dict[str, Tensor] = field(default_factory=dict)
    latents: Tensor | None = None  # [B, C, F', H', W'] from a cache
    # With `latents`: [B, ...] prompt embeddings, and `<name>_latents` of what the codec encodes
    conditioning: dict[str, Tensor] = field(default_factory=dict)
    # embeddings [1, ...], or of each sample, with its pictures, [B, ...]
    no_caption: dict[str, Tensor] = field(default_factory=dict)
    fetched: Fetched = NOTHING  # by this process from stores, since the batch before

    @property
    def consumed(self) -> StepSamples:
        """What the ledger records of the batch."""
        samples = zip(self.identities, self.epochs, self.weights.tolist(), strict=True)
        trained = [(identity, epoch) for identity, epoch, weight in samples if weight]
        return StepSamples(self.step, f"{self.stage}/{self.source}", trained, self.rejected)


Pixels = NDArray[np.uint8]


@dataclass
class FrameCache:
    """Decoded pixels and numbers that every epoch uses again, kept while there is room."""

    room_bytes: float
    contents: dict[Wanted, Pixels] = field(default_factory=dict)

    def keep(self, wanted: Wanted, pixels: Pixels) -> None:
        if wanted not in self.contents and pixels.nbytes <= self.room_bytes:
            self.room_bytes -= pixels.nbytes
            self.contents[wanted] = pixels.copy()


class DecodingSource:
    """Decodes clips and their further inputs; has the methods of a `CachedSource`."""

    def __init__(
        self,
        data: DataSection,
        workers: int,
        cache: FrameCache,
        heartbeats: HeartbeatDir | None = None,
        examples: tuple[Media, ...] = (),
        known_inputs: Mapping[str, Indexed] = MappingProxyType({}),
    ) -> None:
        self.data = data
        self.cache = cache
        self.known_inputs = known_inputs
        self.pool = DecodePool(
            workers,
            data.sample_timeout_seconds,
            memory_gib=data.sample_memory_gib,
            heartbeats=heartbeats,
            store=data.store,
            examples=examples,
        )
        self.incidents, self.close = self.pool.incidents, self.pool.close
        self.take_fetched = self.pool.take_fetched

    def buffer(self, shape: Bucket, num_places: int) -> "PixelBuffer":
        return PixelBuffer(self, shape, num_places)


class _PendingPixels(NamedTuple):
    """What is being decoded for one place."""

    window: Window
    is_kept: bool  # in the frame cache
    # by name; "" is the clip itself, the others are its further inputs
    requested: dict[str, tuple[Wanted, Future[Pixels]]]


class PixelBuffer:
    """The pixels of one batch; each sample is decoded into its place."""

    def __init__(self, source: DecodingSource, shape: Bucket, num_places: int) -> None:
        self._source = source
        self._shape = shape
        height, width, frames = shape.height, shape.width, shape.num_frames
        self._videos = np.empty((num_places, 3, frames, height, width), np.uint8)
        self._inputs = {
            name: empty_conditioning(section, shape, num_places)
            for name, section in source.data.conditioning.items()
        }
        self._pending: dict[int, _PendingPixels] = {}

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        data = self._source.data
        requested = {"": self._request(window, self._videos[place])}
        for name, wanted in conditioning_of(clip, window, data.conditioning).items():
            wanted = input_files.with_known(wanted, self._source.known_inputs)
            requested[name] = self._request(wanted, as_bytes(self._inputs[name][place]))
        is_kept = buckets.is_only_window(clip, self._shape, data)
        self._pending[place] = _PendingPixels(window, is_kept, requested)

    def _request(self, wanted: Wanted, out: Pixels) -> tuple[Wanted, Future[Pixels]]:
        if (cached := self._source.cache.contents.get(wanted)) is None:
            return wanted, self._source.pool.submit(wanted, out)
        out[...] = cached
        pixels: Future[Pixels] = Future()
        pixels.set_result(out)
        return wanted, pixels

    def is_decoded(self, place: int) -> bool:
        """Whether `wait` would return at once."""
        found = (future for _, future in self._pending[place].requested.values())
        return all(each.done() and each.exception() is None for each in found)

    def wait(self, place: int) -> None:
        window, is_kept, requested = self._pending[place]
        errors = []
        for name, (wanted, future) in requested.items():  # all: each may be written until then
            try:
                pixels = future.result()
            except ClipError as error:
                errors.append(conditioning_error(window, name, error) if name else error)
            else:
                if is_kept:
                    self._source.cache.keep(wanted, pixels)
        if errors:
            raise errors[0]

    def reshaped(self, shape: Bucket) -> "PixelBuffer":
        return PixelBuffer(self._source, shape, len(self._videos))

    def copy(self, source: int, place: int) -> None:
        for pixels in (self._videos, *self._inputs.values()):
            pixels[place] = pixels[source]

    def fields(self) -> dict[str, Any]:
        inputs = {name: torch.from_numpy(each) for name, each in self._inputs.items()}
        return {"videos": torch.from_numpy(self._videos), "inputs": inputs}


PREFETCH_BATCHES = 3  # decoded ahead of the training step
_MAX_CLIP_RECORDS = 2**14


SampleSource = DecodingSource | CachedSource
BatchBuffer = PixelBuffer | CachedBuffer


class UpcomingSamples(NamedTuple):
    """Of the next batch, as far as it is planned."""

    bucket: Bucket
    seeds: tuple[int, ...]


class _Sample(NamedTuple):
    clip: Clip
    epoch: int
    seed: int


class _PendingBatch(NamedTuple):
    planned: PlannedBatch
    samples: list[_Sample | None]  # None: a place without a clip
    buffer: BatchBuffer


@dataclass
class _Prefetch:
    """Batches that are being fetched, and what fetches them."""

    source: SampleSource
    following: int  # the batch to begin next
    waiting: deque[_PendingBatch] = field(default_factory=deque)


class Loader:
    """Decodes the batches of a run, this rank's slice of each.

    On several ranks the training loop exchanges the clips that could not be decoded after each step
    (`failures`, `quarantine`), so that all ranks exclude the same clips and have the same state.

    Args:
        data: the recipe's section: catalogs, buckets, stages, workers and so on.
        batch_size: samples per step over all ranks.
        seed: of the run.
        rank: this process's data-parallel index.
        world_size: data-parallel ranks; they need not divide the batch size.
        kept: the folder of the catalogs that were trained on, which a run needs to resume after
            its data changed.
        heartbeats: folder for the heartbeats of decoding processes; None: none are written.
        prefetch_batches: decoded ahead of the training step, at least.

    Raises:
        DataError: a catalog cannot be read or lacks a column of `data.conditioning`, the batch size
            does not fit, or files beside clips are wanted of clips in tars.
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
        heartbeats: Path | None = None,
        prefetch_batches: int = PREFETCH_BATCHES,
    ) -> None:
        smallest = min(min(data.batch_sizes(each, batch_size)) for each in data.curriculum())
        if smallest < world_size:
            raise DataError(
                f"A batch of {smallest} clips cannot be shared by {world_size} ranks: each needs "
                "one. Take a larger batch or fewer ranks."
            )
        self.data = data
        self.catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        self._plan_history: PlanHistory | None = None
        self.quarantined: dict[str, str] = {}
        self._batch_size = batch_size
        self._seed = seed
        self._kept = kept
        self._prefetch_batches = prefetch_batches
        self.heartbeats = None if heartbeats is None else HeartbeatDir(heartbeats, rank)
        self._rank, self._world_size = rank, world_size
        self._step = 0
        self._requested_skips: tuple[Span, ...] = ()
        self._skipped = SkippedRanges()
        self._frame_cache = FrameCache(data.frame_cache_gib * 2**30)
        self._incidents: list[WorkerIncident] = []
        self._failures: dict[str, str] = {}
        self._clips: dict[tuple[int, int], Clip] = {}
        self._cached: tuple[Cache, Mapping[str, CacheFailure]] | None = None
        self._prefetch: _Prefetch | None = None
        self._waiting: deque[_PendingBatch] = deque()
        self.known_inputs: dict[str, Indexed] = {}
        self.read_known_inputs()
        refuse_wrong_catalogs(self.catalogs, data)

    @property
    def plan_history(self) -> PlanHistory:
        """Which clips each step trains on; of a new run, unless a state was loaded.

        Raises:
            DataError: a stage selects nothing, or the stages do not fit together.
        """
        if self._plan_history is None:
            self._plan_history = start(self.catalogs, self.data, self._batch_size, self._seed)
        return self._plan_history

    @property
    def step(self) -> int:
        return self._step

    @property
    def skipped(self) -> tuple[Span, ...]:
        return self._skipped.spans

    def skip(self, first: int, end: int) -> None:
        """Skip the batches `first` .. `end - 1`, as far as they are still to come.

        They count as consumed also if the data changes: their clips come again in the next epoch.
        They remain skipped when the state of an earlier step is loaded. If the data may have
        changed since they were planned, call this before a state is loaded.

        Raises:
            DataError: there are no such batches.
        """
        self._requested_skips = SkippedRanges.of([*self._requested_skips, (first, end)]).spans
        self._skipped = self._skipped.with_([(first, end)], since=self._step)
        self._step = self._skipped.next_kept(self._step)

    def end_after(self, count: int) -> int:
        end, last = self._skipped.after(self._step, count), self.plan_history.end_step
        return end if last is None else min(end, max(self._step, self._skipped.next_kept(last)))

    def state_dict(self) -> dict[str, Any]:
        """The state from which another loader resumes: small, JSON, the same on all ranks."""
        return {
            "order_version": ORDER_VERSION,
            "global_step": self._step,
            "seed": self._seed,
            "plan_version": self.plan_history.plan.version,
            **self.plan_history.position(self._step),
            "history": list(self.plan_history.history),
            "quarantined": {**self.quarantined, **self._failures},
            "skipped": [list(span) for span in self.skipped],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, on any number of ranks and workers; skip what it skips.

        Raises:
            DataChangedError: the data, the batch size or the stages have changed and
                `data.on_change` is `refuse`; says what changed and how to resume.
            DataError: the state is not one of this loader's.
        """
        if state.get("order_version") != ORDER_VERSION or state["seed"] != self._seed:
            raise DataError(
                f"The state was taken with order version {state.get('order_version')} and seed "
                f"{state.get('seed')}; this loader has {ORDER_VERSION} and {self._seed}, "
                "and would repeat some clips and miss others. Use the same seed and the longtake "
                "that the run was started with."
            )
        step: int = state["global_step"]
        skipped = SkippedRanges.of(state.get("skipped", ())).with_(
            self._requested_skips, since=step
        )
        step = skipped.next_kept(step)
        self._plan_history = resume(
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
        """Take latents and embeddings from a complete cache from now on, instead of decoding.

        Order, seeds, epochs, weights and state do not change. A clip that could not be decoded when
        the cache was filled (`failures`, by the key of a window's latents) is quarantined when its
        step comes, as with decoding. `incidents` are those of filling the cache.
        """
        self._cached = cache, failures
        self._incidents += incidents

    def keep_catalogs(self) -> None:
        """Keep copies of the catalogs, and note what files of further inputs hold.

        One rank calls it, before training.

        Raises:
            DataError: they cannot be written.
        """
        if self._kept is None:
            return
        keep_catalogs(self.plan_history, self.catalogs, self._kept)
        files = files_of_inputs(self.plan_history.plan, self.data)
        input_files.note(self._kept, files, self._cached and self._cached[0].hash_of_file)

    def read_known_inputs(self) -> None:
        """Compare files of further inputs, from now on, with what `keep_catalogs` has noted."""
        if self._kept is not None and self.data.conditioning:
            self.known_inputs.update(input_files.read_known(self._kept))

    @property
    def failures(self) -> dict[str, str]:
        return dict(self._failures)

    def fail(self, identity: str, reason: str) -> None:
        """Set a clip of a batch aside, as one that cannot be decoded."""
        named = (clip.path for clip in self._clips.values() if clip.identity == identity)
        self._failures[identity] = f"{next(named, identity)}: {reason}"

    def quarantine(self, clips: Mapping[str, str]) -> None:
        self.quarantined = dict(sorted({**self.quarantined, **clips}.items()))
        self._failures.clear()

    @property
    def incidents(self) -> list[WorkerIncident]:
        return list(self._incidents)

    def clear_incidents(self) -> None:
        self._incidents.clear()

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, end_step: int | None = None) -> Iterator[Batch]:
        """The batches from here to number `end_step` that are not skipped, decoded ahead.

        Raises:
            DataError: more clips failed than `data.max_quarantined_clips` allows, or not one clip
                can be decoded.
        """
        end = self._end(end_step)
        prefetch, self._prefetch = self._prefetch, None
        prefetch = prefetch or _Prefetch(self._source(self.data.workers), self._step)
        self._waiting = prefetch.waiting
        with closing(prefetch.source) as source:
            while end is None or self._step < end:
                self._fill(prefetch, end)
                self._refuse_too_many()
                batch = self._assemble(prefetch.waiting.popleft())
                self._incidents += source.incidents()
                batch = replace(batch, fetched=source.take_fetched())
                self._step = self._skipped.next_kept(self._step + 1)
                yield batch

    def upcoming(self) -> UpcomingSamples | None:
        """Samples of the batch that follows the last one of `batches`; clips may still fail."""
        if not self._waiting:
            return None
        planned, samples, _ = self._waiting[0]
        return UpcomingSamples(planned.bucket, tuple(each.seed for each in samples if each))

    def decoded_next(self) -> Batch | None:
        """The batch that follows the last one of `batches`, if all its clips are decoded already.

        It is not taken: the state of the loader does not change. Another batch may come instead,
        after `skip`, and other samples, after `quarantine`. None with a cache, and for a batch with
        fillers.
        """
        if not self._waiting:
            return None
        planned, samples, buffer = self._waiting[0]
        found = [each for each in samples if each and not self._is_quarantined(each.clip)]
        if isinstance(buffer, CachedBuffer) or len(found) < len(samples):
            return None
        if not all(map(buffer.is_decoded, range(len(found)))):
            return None
        return self._batch(planned, found, found, buffer)

    def begin(self, end_step: int | None = None) -> None:
        """Start decoding the first batches while the model is still being built.

        Call it after `load_state_dict` and `skip`; then call `batches` or `close`.
        """
        self.close()
        if self._cached is None:  # to read from a cache takes no time
            self._prefetch = _Prefetch(self._source(self.data.workers), self._step)
            self._fill(self._prefetch, self._end(end_step))

    def close(self) -> None:
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.source.close()

    def load(self, step: int) -> Batch:
        with closing(self._source(workers=0)) as source:
            return self._assemble(self._begin(step, source))

    def _source(self, workers: int) -> SampleSource:
        if self._cached is not None:
            return CachedSource(*self._cached)
        ends = [
            catalog.clip(row).media
            for catalog in self.catalogs.values()
            for row in sorted({0, len(catalog) // 2, len(catalog) - 1})
            if len(catalog)
        ]
        examples = tuple(media for media in ends if media.is_remote)
        return DecodingSource(
            self.data, workers, self._frame_cache, self.heartbeats, examples, self.known_inputs
        )

    def _end(self, end_step: int | None) -> int | None:
        ends = [end for end in (end_step, self.plan_history.end_step) if end is not None]
        return min(ends) if ends else None

    def _fill(self, prefetch: _Prefetch, end: int | None) -> None:
        """Begin so many batches that no worker idles."""
        waiting = prefetch.waiting
        if not waiting or waiting[0].planned.step != self._step:  # it was skipped since
            waiting.clear()
            prefetch.following = self._step
        while end is None or prefetch.following < end:
            size = num_places(waiting[-1].planned.batch_size, self._world_size) if waiting else 1
            if len(waiting) > max(self._prefetch_batches, -(-(self.data.workers + 1) // size)):
                return
            waiting.append(self._begin(prefetch.following, prefetch.source))
            prefetch.following = self._skipped.next_kept(prefetch.following + 1)

    def _places(self, planned: PlannedBatch) -> range:
        """Which samples of a batch are this rank's."""
        local_size = num_places(planned.batch_size, self._world_size)
        return range(self._rank * local_size, (self._rank + 1) * local_size)

    def _position(self, step: int) -> StagePosition:
        name, first = self.plan_history.stage_at(step)
        return StagePosition(name, step - first - self._skipped.count(first, step))

    def _begin(self, step: int, source: SampleSource) -> _PendingBatch:
        planned = self.plan_history.batch(step)
        mine = self._places(planned)
        buffer = source.buffer(planned.bucket, len(mine))
        samples: list[_Sample | None] = [None] * len(mine)
        for place, number in enumerate(mine):
            if number < len(planned.rows):
                clip = self._clip(planned.catalog, planned.rows[number])
                if not self._is_quarantined(clip):
                    samples[place] = self._fetch(
                        clip, planned, planned.epochs[number], buffer, place
                    )
        return _PendingBatch(planned, samples, buffer)

    def _fetch(
        self, clip: Clip, planned: PlannedBatch, epoch: int, buffer: BatchBuffer, place: int
    ) -> _Sample:
        seed = buckets.sample_seed(self._seed, planned.stage, planned.source, epoch, clip)
        clip = with_sample_caption(clip, planned.source, self.data, seed)
        buffer.begin(place, clip, buckets.sample_window(clip, planned.bucket, self.data, seed))
        return _Sample(clip, epoch, seed)

    def _assemble(self, pending: _PendingBatch) -> Batch:
        """Wait for the samples of a batch; fillers take the places of those that failed."""
        planned, buffer = pending.planned, pending.buffer
        found = [
            sample and self._fetched(sample, buffer, place)
            for place, sample in enumerate(pending.samples)
        ]
        filled = next((place for place, sample in enumerate(found) if sample), 0)
        filler = found[filled]
        if filler is None:
            filler, planned, buffer = self._filler(planned, buffer, filled)
        for place, sample in enumerate(found):
            if sample is None and place != filled:
                buffer.copy(filled, place)
        return self._batch(planned, [sample or filler for sample in found], found, buffer)

    def _batch(
        self,
        planned: PlannedBatch,
        samples: Sequence[_Sample],
        found: Sequence[_Sample | None],
        buffer: BatchBuffer,
    ) -> Batch:
        """Of `samples`, those that are not in `found` are fillers."""
        before = self._skipped.last_kept(planned.step - 1)
        return Batch(
            step=planned.step,
            stage=planned.stage,
            source=planned.source,
            epoch=planned.epoch,
            begins_epoch=begins_epoch(planned, self.plan_history, self._skipped),
            bucket=planned.bucket,
            captions=tuple(sample.clip.caption for sample in samples),
            seeds=tuple(sample.seed for sample in samples),
            identities=tuple(sample.clip.identity for sample in samples),
            epochs=tuple(sample.epoch for sample in samples),
            weights=torch.tensor([float(sample is not None) for sample in found]),
            rejected=tuple(
                (self._clip(planned.catalog, planned.rows[number]).identity, planned.epochs[number])
                for number, sample in zip(self._places(planned), found, strict=True)
                if sample is None and number < len(planned.rows)
            ),
            global_size=planned.batch_size,
            position=self._position(planned.step),
            position_before=self._position(planned.step if before < 0 else before),
            **buffer.fields(),
        )

    def _fetched(self, sample: _Sample, buffer: BatchBuffer, place: int) -> _Sample | None:
        """The sample when it is fetched; None if it cannot be."""
        # An earlier batch or another rank may have failed at it since. Wait for it nevertheless:
        # until then it may be written to its place.
        is_out = self._is_quarantined(sample.clip)
        try:
            buffer.wait(place)
        except ClipError as error:
            if not is_out:
                self._failures[sample.clip.identity] = str(error)
            return None
        return None if is_out else sample

    def _filler(
        self, planned: PlannedBatch, buffer: BatchBuffer, place: int
    ) -> tuple[_Sample, PlannedBatch, BatchBuffer]:
        """Fetch any decodable clip of the batch, or else of its bucket, or else of another one.

        Where no clip of its bucket can be decoded, the batch is made in the shape of another: no
        rank has a sample then, and the update is skipped.
        """
        for stream, catalog, bucket, row in self._candidates(planned):
            clip = self._clip(catalog, row)
            if self._is_quarantined(clip):
                continue
            if bucket != planned.bucket:
                planned = replace(planned, bucket=bucket)
                buffer = buffer.reshaped(bucket)
            of_stream = planned if stream is None else replace(planned, source=stream.source)
            sample = self._fetch(clip, of_stream, planned.epoch, buffer, place)
            if self._fetched(sample, buffer, place):
                return sample, planned, buffer
            self._refuse_too_many()
        reasons = list({**self.quarantined, **self._failures}.values())
        first = with_remedy(reasons[0] if reasons else "")
        raise DataError(f"Not one clip could be {verb_of(reasons)}. One: {first}")

    def _candidates(
        self, planned: PlannedBatch
    ) -> Iterator[tuple[Stream | None, Catalog, Bucket, np.uint32]]:
        yield from ((None, planned.catalog, planned.bucket, row) for row in planned.rows)
        streams = self.plan_history.plan_at(planned.step).streams()
        found = [
            (stream, part, bucket)
            for stream in streams
            for part in stream.parts
            for bucket in range(len(part.members.shapes))
        ]

        def distance(each: tuple[Stream, Part, int]) -> tuple[bool, bool, bool]:
            stream, part, bucket = each
            is_other_shape = part.members.shapes[bucket] != planned.bucket
            is_other_catalog = part.catalog is not planned.catalog
            return is_other_shape, is_other_catalog, stream.stage != planned.stage

        for stream, part, bucket in sorted(found, key=distance):
            for row in part.members.candidates(bucket):
                yield stream, part.catalog, part.members.shapes[bucket], row

    def _clip(self, catalog: Catalog, row: np.uint32) -> Clip:
        # making a clip's record takes longer than all other work for a sample here
        key = (id(catalog), int(row))
        if key not in self._clips:
            if len(self._clips) >= _MAX_CLIP_RECORDS:
                self._clips.clear()
            self._clips[key] = catalog.clip(int(row))
        return self._clips[key]

    def _is_quarantined(self, clip: Clip) -> bool:
        return clip.identity in self.quarantined or clip.identity in self._failures

    def _refuse_too_many(self) -> None:
        failed, allowed = {**self.quarantined, **self._failures}, self.data.max_quarantined_clips
        if len(failed) > allowed:
            reasons = list(failed.values())
            raise DataError(describe_too_many(reasons, "while training", allowed))
