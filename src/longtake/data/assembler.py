"""Assembles one rank's share of each batch: fetches its samples, and replaces those that fail."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from longtake.config import Bucket, DataSection
from longtake.data import buckets
from longtake.data.batch import Batch, num_places
from longtake.data.cache import CachedBuffer, CachedSource
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.decoding_source import DecodingSource, PixelBuffer
from longtake.data.plan import Part, PlannedBatch, Stream
from longtake.data.plan_history import PlanHistory, SkippedRanges, begins_epoch
from longtake.data.quarantine import Quarantine, verb_of, with_remedy
from longtake.data.stages import StagePosition
from longtake.data.training_captions import with_sample_caption
from longtake.errors import ClipError, DataError

SampleSource = DecodingSource | CachedSource
BatchBuffer = PixelBuffer | CachedBuffer

_MAX_CLIP_RECORDS = 2**14


class Sample(NamedTuple):
    """A training sample: a clip in one epoch, and the seed of its random choices."""

    clip: Clip
    epoch: int
    seed: int


class PendingBatch(NamedTuple):
    """A rank's share of a batch whose clips are still being decoded or read from a cache."""

    planned: PlannedBatch
    samples: list[Sample | None]  # None for a place without a clip
    buffer: BatchBuffer


class BatchAssembler:
    """Builds one rank's share of each batch.

    Args:
        data: the recipe's `data` section.
        seed: the run's seed.
        rank: data-parallel index.
        world_size: number of data-parallel ranks.
        quarantine: clips to leave out; clips that fail here are added.
    """

    def __init__(
        self, data: DataSection, seed: int, rank: int, world_size: int, quarantine: Quarantine
    ) -> None:
        self._data, self._seed = data, seed
        self._rank, self._world_size = rank, world_size
        self._quarantine = quarantine
        self.clips: dict[tuple[int, int], Clip] = {}  # recent clips, by id of the catalog and row

    def places(self, planned: PlannedBatch) -> range:
        """Return the range of sample numbers within a batch that belong to this rank."""
        size = num_places(planned.batch_size, self._world_size)
        return range(self._rank * size, (self._rank + 1) * size)

    def begin(self, planned: PlannedBatch, source: SampleSource) -> PendingBatch:
        """Start to fetch this rank's samples of a batch."""
        places = self.places(planned)
        buffer = source.buffer(planned.bucket, len(places))
        samples: list[Sample | None] = [None] * len(places)
        for place, number in enumerate(places):
            if number < len(planned.rows):
                clip = self._clip(planned.catalog, planned.rows[number])
                if clip.identity not in self._quarantine:
                    epoch = planned.epochs[number]
                    samples[place] = self._fetch(clip, planned, epoch, buffer, place)
        return PendingBatch(planned, samples, buffer)

    def _fetch(
        self, clip: Clip, planned: PlannedBatch, epoch: int, buffer: BatchBuffer, place: int
    ) -> Sample:
        seed = buckets.sample_seed(self._seed, planned.stage, planned.source, epoch, clip)
        # The seed depends on the clip and not on its place, so every rank and resumption agrees.
        clip = with_sample_caption(clip, planned.source, self._data, seed)
        buffer.begin(place, clip, buckets.sample_window(clip, planned.bucket, self._data, seed))
        return Sample(clip, epoch, seed)

    def assemble(
        self, pending: PendingBatch, history: PlanHistory, skipped: SkippedRanges
    ) -> Batch:
        """Wait for a batch's samples; another clip takes the place of each that failed.

        Raises:
            DataError: too many clips have failed, or no clip at all can be read.
        """
        planned, buffer = pending.planned, pending.buffer
        samples = [
            sample and self._wait(sample, buffer, place)
            for place, sample in enumerate(pending.samples)
        ]
        # Every rank needs pixels in every place, so that all ranks run the same computation.
        first = next((place for place, sample in enumerate(samples) if sample), 0)
        stand_in = samples[first]
        if stand_in is None:
            stand_in, planned, buffer = self._fetch_stand_in(planned, buffer, first, history)
        for place, sample in enumerate(samples):
            if sample is None and place != first:
                buffer.copy(first, place)
        return self._batch(planned, samples, stand_in, buffer, history, skipped)

    def assemble_if_decoded(
        self, pending: PendingBatch, history: PlanHistory, skipped: SkippedRanges
    ) -> Batch | None:
        """Return the batch if all its samples are decoded and none has failed, else None."""
        planned, samples, buffer = pending
        usable = [each for each in samples if each and each.clip.identity not in self._quarantine]
        if isinstance(buffer, CachedBuffer) or len(usable) < len(samples):
            return None
        if not all(map(buffer.is_decoded, range(len(usable)))):
            return None
        # No place lacks a sample, so the stand-in is not used.
        return self._batch(planned, usable, usable[0], buffer, history, skipped)

    def _batch(
        self,
        planned: PlannedBatch,
        samples: Sequence[Sample | None],
        stand_in: Sample,
        buffer: BatchBuffer,
        history: PlanHistory,
        skipped: SkippedRanges,
    ) -> Batch:
        def position(step: int) -> StagePosition:
            name, first = history.stage_at(step)
            return StagePosition(name, step - first - skipped.count(first, step))

        # Skipped batches make no update, so positions count without them.
        before = skipped.last_kept(planned.step - 1)
        filled = [sample or stand_in for sample in samples]
        return Batch(
            step=planned.step,
            stage=planned.stage,
            source=planned.source,
            epoch=planned.epoch,
            begins_epoch=begins_epoch(planned, history, skipped),
            bucket=planned.bucket,
            captions=tuple(sample.clip.caption for sample in filled),
            seeds=tuple(sample.seed for sample in filled),
            identities=tuple(sample.clip.identity for sample in filled),
            epochs=tuple(sample.epoch for sample in filled),
            weights=torch.tensor([float(sample is not None) for sample in samples]),
            rejected=tuple(
                (self._clip(planned.catalog, planned.rows[number]).identity, planned.epochs[number])
                for number, sample in zip(self.places(planned), samples, strict=True)
                if sample is None and number < len(planned.rows)
            ),
            global_size=planned.batch_size,
            position=position(planned.step),
            position_before=position(planned.step if before < 0 else before),
            **buffer.fields(),
        )

    def _wait(self, sample: Sample, buffer: BatchBuffer, place: int) -> Sample | None:
        """Wait until a sample is fetched and return it, or None if its clip failed."""
        # An earlier batch or another rank may have quarantined the clip meanwhile. Wait even then:
        # the worker may still be writing to this place of the buffer.
        identity = sample.clip.identity
        is_out = identity in self._quarantine
        try:
            buffer.wait(place)
        except ClipError as error:
            if not is_out:
                self._quarantine.failures[identity] = str(error)
            return None
        return None if is_out else sample

    def _fetch_stand_in(
        self, planned: PlannedBatch, buffer: BatchBuffer, place: int, history: PlanHistory
    ) -> tuple[Sample, PlannedBatch, BatchBuffer]:
        """Fetch a clip in place of failed ones: of the batch, else of its shape, else of another.

        If no clip of the batch's bucket (clip shape) can be decoded, the batch takes another shape.
        Then no rank has a sample, and the update is skipped.
        """
        for stream, catalog, bucket, row in _candidates(planned, history):
            clip = self._clip(catalog, row)
            if clip.identity in self._quarantine:
                continue
            if bucket != planned.bucket:
                planned = replace(planned, bucket=bucket)
                buffer = buffer.source.buffer(bucket, len(self.places(planned)))
            # The prefix and trigger of a caption depend on its catalog, so the stand-in gets those
            # of its own.
            of_stream = planned if stream is None else replace(planned, source=stream.source)
            sample = self._fetch(clip, of_stream, planned.epoch, buffer, place)
            if self._wait(sample, buffer, place):
                return sample, planned, buffer
            self._quarantine.refuse_too_many()
        reasons = list(self._quarantine.all_clips().values())
        first = with_remedy(reasons[0] if reasons else "")
        raise DataError(f"Not one clip could be {verb_of(reasons)}. One: {first}")

    def _clip(self, catalog: Catalog, row: np.uint32) -> Clip:
        # Cached, as creating a clip's record takes longer than all other work for a sample here.
        key = (id(catalog), int(row))
        if key not in self.clips:
            if len(self.clips) >= _MAX_CLIP_RECORDS:
                self.clips.clear()
            self.clips[key] = catalog.clip(int(row))
        return self.clips[key]

    def path_of(self, identity: str) -> str:
        """Return the path of a clip of a recent batch, or its identity if it is not known."""
        paths = (clip.path for clip in self.clips.values() if clip.identity == identity)
        return next(paths, identity)


def _candidates(
    planned: PlannedBatch, history: PlanHistory
) -> Iterator[tuple[Stream | None, Catalog, Bucket, np.uint32]]:
    """Yield clips that may replace undecodable ones: the batch's own, then those most like them.

    Clips of the same shape come first, then of the same catalog, then of the same stage.
    """
    yield from ((None, planned.catalog, planned.bucket, row) for row in planned.rows)
    places = [
        (stream, part, bucket)
        for stream in history.plan_at(planned.step).streams()
        for part in stream.parts
        for bucket in range(len(part.members.shapes))
    ]

    # The same shape first: a batch of another shape has no gradient on any rank.
    def distance(each: tuple[Stream, Part, int]) -> tuple[bool, bool, bool]:
        stream, part, bucket = each
        is_other_shape = part.members.shapes[bucket] != planned.bucket
        is_other_catalog = part.catalog is not planned.catalog
        return is_other_shape, is_other_catalog, stream.stage != planned.stage

    for stream, part, bucket in sorted(places, key=distance):
        for row in part.members.candidates(bucket):
            yield stream, part.catalog, part.members.shapes[bucket], row
