"""Provides the batch of each global step, decoded ahead of training or read from a cache.

The batch of a step does not depend on ranks, workers or where the run was resumed. A clip that
cannot be decoded is quarantined, and a real clip of the batch takes its place with weight 0.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from longtake.config import AudioFormat, Bucket, DataSection
from longtake.data import input_files
from longtake.data.assembler import BatchAssembler, PendingBatch, SampleSource
from longtake.data.batch import Batch, num_places
from longtake.data.cache import Cache, CachedSource, CacheFailure
from longtake.data.catalog import Catalog
from longtake.data.checks import files_of_inputs, refuse_wrong_catalogs
from longtake.data.clip import Indexed
from longtake.data.decoding_source import DecodingSource, FrameCache
from longtake.data.plan_history import (
    ORDER_VERSION,
    PlanHistory,
    SkippedRanges,
    Span,
    keep_catalogs,
    resume,
    start,
)
from longtake.data.quarantine import Quarantine
from longtake.data.workers import WorkerIncident
from longtake.errors import DataError
from longtake.heartbeat import HeartbeatDir

PREFETCH_BATCHES = 3  # minimum number of batches decoded ahead of the training step


class UpcomingSamples(NamedTuple):
    """Clip shape and seeds of the next batch's samples, so that their noise can be drawn ahead."""

    bucket: Bucket
    seeds: tuple[int, ...]


@dataclass
class Prefetch:
    """Batches that are decoded or read ahead of the training step, in order."""

    source: SampleSource  # closed together with this object
    assembler: BatchAssembler
    world_size: int  # number of data-parallel ranks
    num_batches: int  # minimum number of batches fetched ahead
    num_workers: int  # decoding processes; enough batches are begun to keep all of them busy
    waiting: deque[PendingBatch] = field(default_factory=deque, init=False)
    _following: int = field(default=0, init=False)  # number of the batch to begin next

    def close(self) -> None:
        self.source.close()

    def fill(
        self, history: PlanHistory, skipped: SkippedRanges, step: int, end: int | None
    ) -> None:
        """Begin to fetch batches from `step` on, except skipped ones, until enough are waiting."""
        if not self.waiting or self.waiting[0].planned.step != step:  # it was skipped
            self.waiting.clear()
            self._following = step
        while end is None or self._following < end:
            size = 1
            if self.waiting:
                size = num_places(self.waiting[-1].planned.batch_size, self.world_size)
            # Enough samples for each worker and one more; small batches need a longer queue for
            # that.
            if len(self.waiting) > max(self.num_batches, -(-(self.num_workers + 1) // size)):
                return
            planned = history.batch(self._following)
            self.waiting.append(self.assembler.begin(planned, self.source))
            self._following = skipped.next_kept(self._following + 1)


class Loader:
    """Produces this rank's share of each batch of a run.

    With several ranks, the training loop exchanges the clips that could not be decoded after each
    step (`quarantine`), so that all ranks exclude the same clips and have the same state.

    Args:
        data: the recipe's section: catalogs, buckets, stages, workers and so on.
        batch_size: samples per step over all ranks.
        seed: the run's seed.
        rank: this process's data-parallel index.
        world_size: number of data-parallel ranks; they need not divide the batch size.
        kept: folder for copies of the catalogs, which a run needs to resume after its data changed.
        heartbeats: folder for the heartbeats of decoding processes; None writes none.
        prefetch_batches: minimum number of batches decoded ahead of the training step.
        audio: the sound that the model takes beside each window; None: none is read.

    Raises:
        DataError: a catalog cannot be read or lacks a column of `data.conditioning`, the batch size
            does not fit, or the recipe wants files beside clips that lie in tars.
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
        audio: AudioFormat | None = None,
    ) -> None:
        # The smallest batch of any stage and bucket decides.
        smallest = min(min(data.batch_sizes(each, batch_size)) for each in data.curriculum())
        if smallest < world_size:
            raise DataError(
                f"A batch of {smallest} clips cannot be shared by {world_size} ranks: each needs "
                "one. Take a larger batch or fewer ranks."
            )
        self.data = data
        self.catalogs = {name: Catalog.load(path) for name, path in data.sources().items()}
        self.step = 0  # number of the next batch
        self.skipped = SkippedRanges()
        self.quarantine = Quarantine(data.max_quarantined_clips)
        self.incidents: list[WorkerIncident] = []  # the training loop clears them
        self.heartbeats = None if heartbeats is None else HeartbeatDir(heartbeats, rank)
        # Content of the files of further inputs when the run first used them, by path.
        self.known_inputs: dict[str, Indexed] = {}
        self._plan_history: PlanHistory | None = None
        self._requested_skips: tuple[Span, ...] = ()
        self._batch_size, self._seed, self._kept = batch_size, seed, kept
        self._assembler = BatchAssembler(data, seed, rank, world_size, self.quarantine)
        self._ahead = world_size, prefetch_batches
        self._audio = audio
        self._frame_cache = FrameCache(data.frame_cache_gib * 2**30)
        self._cached: tuple[Cache, Mapping[str, CacheFailure]] | None = None
        self._begun: Prefetch | None = None  # prefetch for the next call of `batches`
        self._waiting: deque[PendingBatch] = deque()  # queue of the last call of `batches`
        if kept is not None and data.conditioning:
            self.known_inputs.update(input_files.read_known(kept))
        refuse_wrong_catalogs(self.catalogs, data)

    @property
    def plan_history(self) -> PlanHistory:
        """Data plans of the run: from a loaded state, or else a single one that starts a new run.

        Raises:
            DataError: a stage selects no clip, or the stages do not fit together.
        """
        if self._plan_history is None:
            self._plan_history = start(self.catalogs, self.data, self._batch_size, self._seed)
        return self._plan_history

    def skip(self, first: int, end: int) -> None:
        """Never train the batches `first` to `end - 1`, except those that are already trained.

        They count as consumed even if the data changes: their clips come again in the next epoch.
        They remain skipped when the state of an earlier step is loaded. If the data may have
        changed since they were planned, call this before a state is loaded.

        Raises:
            DataError: the range is not valid.
        """
        self._requested_skips = SkippedRanges.of([*self._requested_skips, (first, end)]).spans
        self.skipped = self.skipped.with_([(first, end)], since=self.step)
        self.step = self.skipped.next_kept(self.step)

    def end_after(self, count: int) -> int:
        """Return the number of the batch at which training ends after `count` more batches."""
        # The curriculum may end first, and its last batches may be skipped.
        end, last = self.skipped.after(self.step, count), self.plan_history.end_step
        return end if last is None else min(end, max(self.step, self.skipped.next_kept(last)))

    def state_dict(self) -> dict[str, Any]:
        """Return a small JSON state, equal on all ranks, from which another loader resumes."""
        return {
            "order_version": ORDER_VERSION,
            "global_step": self.step,
            "seed": self._seed,
            "plan_version": self.plan_history.plan.version,
            **self.plan_history.position(self.step),
            "history": list(self.plan_history.history),
            "quarantined": self.quarantine.all_clips(),
            "skipped": [list(span) for span in self.skipped.spans],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, on any number of ranks and workers, with its skipped batches.

        Raises:
            DataChangedError: the data, the batch size or the stages have changed and
                `data.on_change` is `refuse`; the message says what changed and how to resume.
            DataError: the state belongs to another seed or order of clips, or is invalid.
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
        facts = self.catalogs, self.data, self._batch_size, self._seed, self._kept
        self._plan_history = resume(state["history"], step, *facts)
        self.step, self.skipped = step, skipped
        self.quarantine.restore({} if self.data.retry_quarantined else state["quarantined"])
        self._assembler.clips.clear()  # the id of a freed catalog may be used again

    def read_from(
        self,
        cache: Cache,
        failures: Mapping[str, CacheFailure],
        incidents: Sequence[WorkerIncident] = (),
    ) -> None:
        """Read latents and embeddings from a complete cache from now on, instead of decoding.

        Order, seeds, epochs, weights and state do not change. A clip that could not be decoded when
        the cache was filled (`failures`, by the key of a window's latents) is quarantined when its
        step comes, as with decoding. `incidents` are those of filling the cache.
        """
        self._cached = cache, failures
        self.incidents += incidents

    def keep_catalogs(self, *, writes: bool = True) -> None:
        """Keep copies of the catalogs, and record the content of the files of further inputs.

        Call it before training: with `writes` on one rank, then without on the others.

        Raises:
            DataError: the copies cannot be written.
        """
        if self._kept is None:
            return
        if writes:
            keep_catalogs(self.plan_history, self.catalogs, self._kept)
            files = files_of_inputs(self.plan_history.plan, self.data)
            input_files.note(self._kept, files, self._cached and self._cached[0].hashes.of)
        if self.data.conditioning:
            self.known_inputs.update(input_files.read_known(self._kept))

    def fail(self, identity: str, reason: str) -> None:
        """Quarantine a clip of a recent batch, as if it could not be decoded."""
        self.quarantine.failures[identity] = f"{self._assembler.path_of(identity)}: {reason}"

    def begin(self, end_step: int | None = None) -> None:
        """Start to fetch the first batches, for example while the model is still being built.

        Call it after `load_state_dict` and `skip`; then call `batches` or `close`.
        """
        self.close()
        facts = self.data, self.catalogs, self._frame_cache, self.heartbeats, self.known_inputs
        source = (
            CachedSource(*self._cached) if self._cached else DecodingSource(*facts, self._audio)
        )
        self._begun = Prefetch(source, self._assembler, *self._ahead, self.data.workers)
        end = _earlier(end_step, self.plan_history.end_step)
        self._begun.fill(self.plan_history, self.skipped, self.step, end)

    def close(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()

    def batches(self, end_step: int | None = None) -> Generator[Batch]:
        """Yield the batches from `step` to `end_step - 1` that are not skipped, decoded ahead.

        Raises:
            DataError: more clips failed than `data.max_quarantined_clips` allows, or no clip at all
                can be decoded.
        """
        end = _earlier(end_step, self.plan_history.end_step)
        if self._begun is None:
            self.begin(end_step)
        prefetch, self._begun = self._begun, None
        assert prefetch is not None
        with closing(prefetch):
            self._waiting = prefetch.waiting
            while end is None or self.step < end:
                # Also drops the waiting batches if `skip` has left out the first of them meanwhile.
                prefetch.fill(self.plan_history, self.skipped, self.step, end)
                self.quarantine.refuse_too_many()
                pending = prefetch.waiting.popleft()
                batch = self._assembler.assemble(pending, self.plan_history, self.skipped)
                self.incidents += prefetch.source.incidents()
                batch = replace(batch, fetched=prefetch.source.take_fetched())
                # Before the yield, so that a state that is taken during the step continues after
                # it.
                self.step = self.skipped.next_kept(self.step + 1)
                yield batch

    def upcoming(self) -> UpcomingSamples | None:
        """Return shape and seeds of the next batch's samples, or None before it is planned.

        Clips may still fail to decode.
        """
        if not self._waiting:
            return None
        planned, samples, _ = self._waiting[0]
        return UpcomingSamples(planned.bucket, tuple(each.seed for each in samples if each))

    def decoded_next(self) -> Batch | None:
        """Return the next batch if all its clips are already decoded, else None.

        The loader's state does not change. Another batch may follow instead after `skip`, and other
        samples after clips were quarantined. With a cache, and for a batch in which a clip has
        failed, the result is None.
        """
        if not self._waiting:
            return None
        pending, history = self._waiting[0], self.plan_history
        return self._assembler.assemble_if_decoded(pending, history, self.skipped)


def _earlier(end_step: int | None, last_step: int | None) -> int | None:
    ends = [end for end in (end_step, last_step) if end is not None]
    return min(ends) if ends else None
