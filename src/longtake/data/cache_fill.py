"""Fills a latent cache with the entries that a data plan needs: finds missing ones, computes them.

Encoders are passed in as functions. A clip that cannot be decoded is recorded; training then treats
it as if decoding had failed there.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake.config import AUDIO, Bucket, DataSection
from longtake.data import buckets, content, decode_worker, input_files, tasks
from longtake.data.cache import Cache, CacheFailure, SamplePart
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Indexed, Media
from longtake.data.conditioning import as_values, conditioning_error, conditioning_of
from longtake.data.packs import CACHE_KINDS, PACK_BYTES, CacheEntry, PackWriter
from longtake.data.plan import Plan
from longtake.data.quarantine import NOT_FINITE, describe_too_many
from longtake.data.training_captions import caption_variants
from longtake.data.window import Window
from longtake.data.workers import Task, WorkerIncident
from longtake.errors import ClipError, DataError
from longtake.formatting import format_duration
from longtake.heartbeat import HeartbeatDir

EncodePart = Callable[[SamplePart, Mapping[str, NDArray[Any]]], dict[str, Tensor]]
"""A function that encodes one part of a sample: it takes the inputs by name, each [3, F, H, W] or
sound, and returns the tensors of the part's cache entry."""
EncodeCaptions = Callable[[Sequence[str]], Sequence[dict[str, Tensor]]]
"""A function that encodes captions: it returns the tensors of each, without a batch dimension."""
Progress = Callable[[int, int], object]  # called with (done, total)

_THREADS = 16
_CHUNK = 4096
_FIRST_ITEMS = 32  # number of clips per first share, before the bytes of one are known
_MAX_ITEMS = 4096
_MAX_CHECKED = 20_000  # at most this many files of cached clips are checked for changes at launch
_NUM_SHARES = 64  # least number of shares, so that many workers get some
_CAPTIONS_AT_ONCE = 32  # captions for one call of the text encoder
_T = TypeVar("_T")
_SILENCE_SECONDS = 3600.0  # reading weights and encoding a long clip report no progress


class CacheItem(NamedTuple):
    """A clip and a shape in which it is trained, so that its cache entries can be listed."""

    clip: Clip
    shape: Bucket
    sources: tuple[str, ...] = ()  # names of the recipe's sources that contain the clip

    def item(self) -> "CacheItem":
        """Return itself; `_Row` has a method of this name that reads the clip first."""
        return self

    def parts(self, cache: Cache, window: Window) -> list[SamplePart]:
        """Return the cache entries of all samples that can use a window of this clip."""
        captions = [cache.no_caption]
        for source in self.sources:
            captions += caption_variants([self.clip.caption], source, cache.data)
        return cache.parts(self.clip, window, captions)


@dataclass(frozen=True, slots=True)
class _Row:
    """A `CacheItem` (clip and shape) as a row of a catalog, before the clip is read."""

    catalog: Catalog
    shape: Bucket
    row: int
    sources: tuple[str, ...]

    def item(self) -> CacheItem:
        return CacheItem(self.catalog.clip(self.row), self.shape, self.sources)


@dataclass(frozen=True)
class Missing:
    """Clips and captions of a data plan that a cache lacks, and counts of existing entries."""

    clips: list[_Row]  # clips of which a window or a further input is missing
    captions: list[str]
    present: Counter[str]  # number of entries that exist, by kind
    changed: dict[str, CacheFailure] = field(default_factory=dict)  # changed clips, by latents


@dataclass
class CacheReport:
    """Result of filling a cache, by one process or by all processes together."""

    present: Counter[str] = field(default_factory=Counter)  # existing entries, by kind
    computed: Counter[str] = field(default_factory=Counter)  # computed entries, by kind
    num_bytes: int = 0  # size of the computed entries
    failures: dict[str, CacheFailure] = field(default_factory=dict)  # by key of a window's latents
    incidents: list[WorkerIncident] = field(default_factory=list)
    refused: dict[Path, str] = field(default_factory=dict)  # damaged packs and the reasons
    seconds: float = 0.0

    def add(self, other: "CacheReport") -> None:
        self.present.update(other.present)
        self.computed.update(other.computed)
        self.num_bytes += other.num_bytes
        self.failures |= other.failures
        self.incidents += other.incidents
        self.refused |= other.refused

    def refuse_too_many(self, allowed: int) -> None:
        """Raise DataError if more clips than are allowed could not be encoded for the cache."""
        clips = {failure.identity: failure for failure in self.failures.values()}
        if len(clips) > allowed:
            reasons = [f"{each.path}: {each.reason}" for each in clips.values()]
            raise DataError(describe_too_many(reasons, "for the cache", allowed))

    def facts(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        failed = sorted({(each.path, each.reason) for each in self.failures.values()})
        return {
            **{
                kind: {"present": self.present[kind], "computed": self.computed[kind]}
                for kind in CACHE_KINDS
            },
            "bytes": self.num_bytes,
            "failed": [{"path": path, "reason": reason} for path, reason in failed],
            "damaged": [
                {"path": str(path), "reason": reason} for path, reason in self.refused.items()
            ],
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        present, computed = sum(self.present.values()), sum(self.computed.values())
        made = (
            f"{computed} computed in {format_duration(self.seconds)}"
            if computed
            else "none is missing"
        )
        return f"{present} entries were there, {made}"


def find_missing(
    cache: Cache,
    plan: Plan,
    *,
    share: slice = slice(None),
    without: Container[str] = (),
    known_inputs: Mapping[str, Indexed] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Missing:
    """Look up all cache entries that a data plan needs; return the clips and captions missing.

    Args:
        cache: the cache to look in.
        plan: the plan of what is trained.
        share: slice of all clips and captions to look for, so that processes can divide the work.
        without: identities of clips to leave out, because they are not trained on.
        known_inputs: further inputs as a run first read them: see `longtake.data.input_files`.
        progress: called with (clips done, total clips).
    """
    rows = list(islice(_rows(plan), share.start, share.stop, share.step))
    captions = [] if cache.with_text else distinct_captions(plan, cache.data, cache.no_caption)
    captions = captions[share]
    missing, held = Missing([], [], Counter()), list[_Row]()
    # Processes that divide the work check a part of the files each.
    limit = _MAX_CHECKED // (share.step or 1)
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            looks = pool.map(lambda row: _look(cache, row.item(), without), chunk)
            for row, (present, is_missing) in zip(chunk, looks, strict=True):
                missing.present.update(present)
                (missing.clips if is_missing else held).append(row)
            if progress:
                progress(start + len(chunk), len(rows))
        # An input that changed has another key, so its clip looks like a missing one: check those
        # too.
        rows = [*held, *(missing.clips if known_inputs else ())][:limit]
        changes = pool.map(lambda row: _changes(cache, row.item(), without, known_inputs), rows)
        failed = set[int]()
        for row, changed in zip(rows, changes, strict=True):
            missing.changed.update(changed)
            failed |= {id(row)} if changed else set()
        missing.clips[:] = [row for row in missing.clips if id(row) not in failed]
        entries = pool.map(lambda caption: cache.packs.holds(cache.prompt(caption)), captions)
        missing.captions.extend(
            caption for caption, there in zip(captions, entries, strict=True) if not there
        )
    missing.present["prompts"] += len(captions) - len(missing.captions)
    return missing


def fill_prompts(
    cache: Cache,
    captions: Sequence[str],
    encode: EncodeCaptions,
    report: CacheReport,
    progress: Progress | None = None,
) -> None:
    """Encode captions with the text encoder, and add the embeddings to a cache.

    Raises:
        DataError: the cache cannot be written, or an embedding is not finite.
    """
    waiting = iter(_shuffled(captions))
    done = 0
    with PackWriter(cache.packs) as writer:
        while some := list(islice(waiting, _CAPTIONS_AT_ONCE)):
            # Checked again just before encoding, as other processes may be filling the same cache.
            missing = [caption for caption in some if not writer.holds(cache.prompt(caption))]
            for caption, tensors in zip(missing, encode(missing), strict=True):
                if _not_finite(tensors):
                    raise DataError(
                        "The text encoder gives NaN or infinite numbers for the caption "
                        f"{caption!r:.200}; nothing of it was written to the cache. If other "
                        "captions fail too, its weights are damaged or their precision is too low "
                        "(text.dtype); else change this caption."
                    )
                stored = {name: cache.stored(tensor) for name, tensor in tensors.items()}
                writer.add(cache.prompt(caption), stored)
                report.computed["prompts"] += 1
            done += len(some)
            if progress:
                progress(done, len(captions))
    report.num_bytes += writer.num_bytes


def fill_latents(
    cache: Cache,
    clips: Sequence[_Row | CacheItem],
    encode: EncodePart,
    report: CacheReport,
    progress: Progress | None = None,
    heartbeats: HeartbeatDir | None = None,
) -> None:
    """Decode and encode the windows of clips and their further inputs, and add them to a cache.

    Raises:
        DataError: more clips fail than `data.max_quarantined_clips` allows, or the cache cannot be
            written.
    """
    data, under_way = cache.data, deque[tuple[Window, list[_Reading]]]()
    # Objects that should exist, which tell a missing clip from a store that is down.
    examples = [each.item().clip.media for each in clips[:3]]
    with (
        decode_worker.DecodePool.of_recipe(data, heartbeats, examples) as pool,
        PackWriter(cache.packs) as writer,
    ):
        for done, each in enumerate(_shuffled(clips)):
            item = each.item()
            for window in buckets.all_windows(item.clip, item.shape, data):
                parts = [
                    _Reading(part, {name: pool.submit(each) for name, each in part.reads.items()})
                    for part in item.parts(cache, window)
                    if not _held(cache, part)
                ]
                under_way.append((window, parts))
            # Two windows for each worker keep all of them busy and bound the pixels in memory.
            while len(under_way) > 2 * max(data.workers, 1):
                _finish(cache, *under_way.popleft(), encode, report, writer)
            if progress:
                progress(done, len(clips))
        for window, parts in under_way:
            _finish(cache, window, parts, encode, report, writer)
        report.incidents += pool.incidents()
    report.num_bytes += writer.num_bytes
    if progress:
        progress(len(clips), len(clips))


@dataclass(frozen=True)
class EncodeTask(Task[Sequence[CacheItem | str], CacheReport]):
    """Task of a worker process: adds entries of some clips, or of some captions, to a cache."""

    cache: Cache
    load: Callable[[], EncodePart] | Callable[[], EncodeCaptions]  # loads the encoder
    num_cpus: int = 1
    uses_gpu: bool = False
    doing = "encoding"
    silence_seconds: float = _SILENCE_SECONDS

    # Loaded at the first item: a worker process keeps the weights for all its items.
    @cached_property
    def _encode(self) -> Any:
        return self.load()

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.cache.folder / "aside",)

    def do(self, item: Sequence[CacheItem | str], progress: Callable[[], object]) -> CacheReport:
        report = CacheReport()
        fill: Callable[..., None] = fill_prompts if isinstance(item[0], str) else fill_latents
        fill(self.cache, item, self._encode, report, lambda done, total: progress())
        return report

    def lost(self, item: Sequence[CacheItem | str], reason: str) -> CacheReport:
        """Raise DataError, because a lost worker leaves the cache incomplete."""
        first = repr(item[0]) if isinstance(item[0], str) else item[0].clip.path
        raise DataError(
            f"{reason}. It was at {len(item)} of them, the first {first}. The same command again "
            "resumes where this one ended."
        )

    def reads(self, item: Sequence[CacheItem | str]) -> str:
        return "" if isinstance(item[0], str) else item[0].clip.media.path


def run_encode_task(
    task: EncodeTask,
    missing: Sequence[_Row] | Sequence[str],
    report: CacheReport,
    work: tasks.Work,
) -> None:
    """Fill a cache on a cluster's workers.

    Raises:
        DataError: no worker can be started, the cache cannot be written, or too many clips cannot
            be decoded.
    """
    sizes, done, known, before = list[int](), 0, 0, report.num_bytes

    def shares() -> Iterator[list[CacheItem | str]]:
        """Yield the missing clips or captions in shares for workers: one pack's worth, or less."""
        start = 0
        while start < len(missing):
            # The measured bytes of finished clips size the next shares.
            each = (report.num_bytes - before) / known if known else PACK_BYTES / _FIRST_ITEMS
            of_pack = min(_MAX_ITEMS, int(PACK_BYTES / max(each, 1.0)))
            sizes.append(max(1, min(of_pack, len(missing) // _NUM_SHARES)))
            some = missing[start : start + sizes[-1]]
            yield [one if isinstance(one, str) else one.item() for one in some]
            start += len(some)

    with closing(tasks.run_tasks(task, shares(), work)) as reports:
        for number, added in reports:
            report.add(added)
            known += sizes[number]
            report.refuse_too_many(task.cache.data.max_quarantined_clips)
            done = min(done + sizes[number], len(missing))
            work.progress(done, len(missing))


class _Reading(NamedTuple):
    """A sample's part (latents, prompt ...) that the cache lacks, while its inputs are decoded."""

    part: SamplePart
    contents: dict[str, Future[NDArray[np.uint8]]]  # by the names of its inputs


def _rows(plan: Plan) -> Iterator[_Row]:
    """Yield every clip of a data plan once for each shape in which it is trained."""
    for catalog, shape, rows, sources in _rows_by_shape(plan):
        for row in rows:
            yield _Row(catalog, shape, int(row), sources)


def count_clips(plan: Plan) -> dict[Bucket, int]:
    """Count the clips of a data plan by the shape in which a cache holds them."""
    counts = Counter[Bucket]()
    for _, shape, rows, _ in _rows_by_shape(plan):
        counts[shape] += len(rows)
    return dict(counts)


def _rows_by_shape(
    plan: Plan,
) -> Iterator[tuple[Catalog, Bucket, NDArray[np.uint32], tuple[str, ...]]]:
    """Yield the rows of each catalog that are trained in each shape, and the catalog's sources."""
    # Collected by catalog and shape: stages and streams often train the same clips.
    rows: dict[tuple[int, Bucket], list[NDArray[np.uint32]]] = {}
    catalogs, sources = {}, dict[int, dict[str, None]]()
    for stream in plan.streams():
        for part in stream.parts:
            catalogs[id(part.catalog)] = part.catalog
            sources.setdefault(id(part.catalog), {})[stream.source] = None
            for bucket, shape in enumerate(part.members.shapes):
                mine = part.members.candidates(bucket)
                rows.setdefault((id(part.catalog), shape), []).append(mine)
    for (catalog, shape), found in rows.items():
        # The order is the same in all processes, which divide the rows by their places.
        unique = np.unique(np.concatenate(found))
        yield catalogs[catalog], shape, unique, tuple(sources[catalog])


def distinct_captions(plan: Plan, data: DataSection, no_caption: str) -> list[str]:
    """Return each caption that a cache holds of a data plan, and the empty one; sorted."""
    captions = {no_caption}
    for stream in plan.streams():
        for part in stream.parts:
            texts = part.catalog.table["caption"].take(part.members.all_rows())
            distinct = pc.unique(texts).to_pylist()
            captions.update(caption_variants(distinct, stream.source, data))
    # Sorted, as processes that divide the work must cut shares from the same list.
    return sorted(captions)


def _look(cache: Cache, item: CacheItem, without: Container[str]) -> tuple[Counter[str], bool]:
    """Count a clip's existing cache entries by kind; return also whether any is missing."""
    present, is_missing = Counter[str](), False
    if item.clip.identity in without:
        return present, False
    for window in buckets.all_windows(item.clip, item.shape, cache.data):
        for part in item.parts(cache, window):
            entry = _held(cache, part)
            present.update([entry.kind] if entry else [])
            is_missing |= entry is None
    return present, is_missing


def _changes(
    cache: Cache, item: CacheItem, without: Container[str], known_inputs: Mapping[str, Indexed]
) -> dict[str, CacheFailure]:
    """Return a failure for each window of a clip whose file, or an input's file, has changed."""
    clip, data = item.clip, cache.data
    if clip.identity in without:
        return {}
    windows = list(buckets.all_windows(clip, item.shape, data))
    name = ""
    try:
        content.check_unchanged(clip.media, hash_of_file=cache.hashes.of)
        for name, wanted in conditioning_of(  # noqa: B007 - the handler names it
            clip, windows[0], data.conditioning
        ).items():
            media = input_files.with_known(wanted, known_inputs).media
            content.check_unchanged(media, hash_of_file=cache.hashes.of)
    except ClipError as error:
        why = conditioning_error(windows[0], name, error) if name else error
        failure = CacheFailure(clip.identity, str(why.path), why.reason)
        return {cache.latents(window).key: failure for window in windows}
    return {}


def _held(cache: Cache, part: SamplePart) -> CacheEntry | None:
    try:
        entry = cache.entry(part)
    except ClipError:  # decoding will report what is wrong with the file
        return None
    return entry if cache.packs.holds(entry) else None


def _finish(
    cache: Cache,
    window: Window,
    readings: list[_Reading],
    encode: EncodePart,
    report: CacheReport,
    writer: PackWriter,
) -> None:
    failures = dict[str, CacheFailure]()
    for part, contents in readings:
        read, name = dict[str, NDArray[Any]](), ""
        try:
            for name, content in contents.items():
                read[name] = as_values(part.reads[name], content.result())
            entry = cache.entry(part)
            if writer.holds(entry):  # another process has written it meanwhile
                continue
            if part.made == "values":
                values = torch.from_numpy(read[name])
                # Only one of equal frames is stored, such as a picture for the whole clip.
                is_same = values.ndim == 4 and bool((values == values[:, :1]).all())
                tensors = {"values": values[:, :1] if is_same else values}
            else:
                encoded = encode(part, read)
                tensors = {name: cache.stored(each) for name, each in encoded.items()}
            refuse_not_finite(window.media, tensors)
        except ClipError as error:
            why = conditioning_error(window, name, error) if name else error
            failures[name] = CacheFailure(window.identity, str(why.path), why.reason)
            continue
        writer.add(entry, tensors)
        report.computed[entry.kind] += 1
    if failures:
        # The clip's own failure ("") is recorded before one of its inputs.
        first = next(name for name in ("", AUDIO, *cache.data.conditioning) if name in failures)
        report.failures[cache.latents(window).key] = failures[first]
        report.refuse_too_many(cache.data.max_quarantined_clips)


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of encoded tensors that contain NaN or inf."""
    return [name for name, each in tensors.items() if not bool(each.isfinite().all())]


def refuse_not_finite(media: Media, tensors: Mapping[str, Tensor]) -> None:
    """Raise ClipError if an encoded tensor of a clip is not finite."""
    for name in _not_finite(tensors):
        kind = "NaN" if bool(tensors[name].isnan().any()) else "infinite"
        raise ClipError(str(media), f"{NOT_FINITE} {name} that are {kind}")


def _shuffled(items: Sequence[_T]) -> Iterable[_T]:
    # Each process has its own random order, so that several divide the work without coordination.
    return (items[int(number)] for number in np.random.default_rng().permutation(len(items)))
