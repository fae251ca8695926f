"""Fills a cache with what a plan will ask for: finds what is missing, decodes it, has it encoded.

What encodes is passed in. Clips are decoded by the same supervised pool as in training; one that
cannot be is noted, and its place in training will be the same as if it had been found out there.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch import Tensor

from longtake.config import Bucket, DataSection
from longtake.data.cache import Cache, Entry
from longtake.data.cached import Failure
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.plan import Plan
from longtake.data.pool import Incident, Pool
from longtake.data.references import Reference, without_reference
from longtake.data.sample import all_windows
from longtake.data.window import Window
from longtake.errors import ClipError, DataError
from longtake.heartbeat import HeartbeatDir

EncodePixels = Callable[[NDArray[np.uint8]], Tensor]
"""From [3, F, H, W] uint8 to latents [C, F', H', W']."""
EncodeCaption = Callable[[str], dict[str, Tensor]]
"""From a caption to what the model is told of it, each without a batch dimension."""
Progress = Callable[[int, int], None]
"""Is told (done, in all)."""

_THREADS = 16
_CHUNK = 4096


class Place(NamedTuple):
    """One clip of a plan, and the shape that it is trained in."""

    catalog: Catalog
    shape: Bucket
    row: int

    @property
    def clip(self) -> Clip:
        """The clip's record, made when it is asked for."""
        return self.catalog.clip(self.row)

    def given(self) -> "Given":
        """The same without its catalog, for another process."""
        return Given(self.clip, self.shape)


class Given(NamedTuple):
    """One clip, and the shape that it is trained in."""

    clip: Clip
    shape: Bucket


@dataclass(frozen=True)
class Missing:
    """What a cache lacks of what a plan will ask for.

    Attributes:
        places: clips of which at least one window or picture is missing.
        captions: those without embeddings.
        present: how many entries are there, by kind.
    """

    places: list[Place]
    captions: list[str]
    present: Counter[str]


@dataclass
class Report:
    """What was done to fill a cache, by one process.

    Attributes:
        present: entries that were there, by kind.
        computed: entries that were made, by kind.
        num_bytes: that these take.
        failures: by the key of a window's latents, what cannot be decoded.
        incidents: what befell decoding processes.
    """

    present: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)

    def wrote(self, entry: Entry, num_bytes: int) -> None:
        """Count an entry."""
        self.computed[entry.kind] += 1
        self.num_bytes += num_bytes

    def add(self, other: "Report") -> None:
        """Count what another process has done."""
        self.present.update(other.present)
        self.computed.update(other.computed)
        self.num_bytes += other.num_bytes
        self.failures |= other.failures
        self.incidents += other.incidents


def find_missing(
    cache: Cache,
    plan: Plan,
    data: DataSection,
    *,
    share: slice = slice(None),
    without: Container[str] = (),
    progress: Progress | None = None,
) -> Missing:
    """Look for everything that a plan will ask a cache for.

    Args:
        cache: to look in.
        plan: what is to be trained.
        data: the recipe's section.
        share: which of all clips and captions to look for.
        without: identities of clips that are not trained on.
        progress: is told of clips.
    """
    places = list(islice(_places(plan), share.start, share.stop, share.step))
    captions = _captions(plan, cache.no_caption)[share]
    missing = Missing([], [], Counter())
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(places), _CHUNK):
            chunk = places[start : start + _CHUNK]
            looks = pool.map(lambda place: _look(cache, place, data, without), chunk)
            for place, (present, is_missing) in zip(chunk, looks, strict=True):
                missing.present.update(present)
                if is_missing:
                    missing.places.append(place)
            if progress:
                progress(start + len(chunk), len(places))
        entries = pool.map(lambda caption: cache.prompt(caption).is_whole(), captions)
        missing.captions.extend(
            caption for caption, there in zip(captions, entries, strict=True) if not there
        )
    missing.present["prompts"] += len(captions) - len(missing.captions)
    return missing


def fill_prompts(
    cache: Cache,
    captions: Sequence[str],
    encode: EncodeCaption,
    report: Report,
    progress: Progress | None = None,
) -> None:
    """Add captions to a cache.

    Raises:
        DataError: the cache cannot be written.
    """
    for done, number in enumerate(_some_order(len(captions)), start=1):
        entry = cache.prompt(captions[number])
        if not entry.is_whole():
            report.wrote(entry, entry.write(encode(captions[number])))
        if progress:
            progress(done, len(captions))


def fill_latents(
    cache: Cache,
    places: Sequence[Place] | Sequence[Given],
    data: DataSection,
    encode: EncodePixels,
    report: Report,
    progress: Progress | None = None,
    hearts: HeartbeatDir | None = None,
) -> None:
    """Add the windows of clips and their further pictures to a cache.

    Raises:
        DataError: more clips fail than `data.max_quarantined_clips` allows, or the cache cannot be
            written.
    """
    under_way: deque[_Job] = deque()
    limit = data.sample_timeout_seconds
    memory = data.sample_memory_gib
    with Pool(data.workers, limit, memory_gib=memory, hearts=hearts) as pool:
        for done, number in enumerate(_some_order(len(places))):
            place = places[number]
            for window in all_windows(place.clip, place.shape, data):
                under_way.append(_begin(cache, window, pool))
            while len(under_way) > 2 * max(data.workers, 1):
                _finish(cache, under_way.popleft(), encode, data, report)
            if progress:
                progress(done, len(places))
        for job in under_way:
            _finish(cache, job, encode, data, report)
        report.incidents += pool.incidents()
    if progress:
        progress(len(places), len(places))


def refuse_too_many(failures: Sequence[Failure], allowed: int) -> None:
    """Raise DataError if more clips cannot be decoded than are allowed to."""
    clips = {failure.identity: failure for failure in failures}
    if len(clips) > allowed:
        last = list(clips.values())[-1]
        raise DataError(
            f"{len(clips)} clips could not be decoded for the cache, more than "
            f"data.max_quarantined_clips = {allowed} allows. One of them: {last.path}: "
            f"{last.reason}. Are the files still where they were indexed? Run longtake data index "
            "again."
        )


class _Part(NamedTuple):
    """One thing that a sample is made of, and that the cache lacks."""

    name: str
    """Of a further picture; "" is the clip itself."""
    wanted: Window | Reference
    pixels: Future[NDArray[np.uint8]]


@dataclass(frozen=True)
class _Job:
    """One window, and what is missing of it and of the pictures that belong to it."""

    window: Window
    parts: list[_Part]


def _places(plan: Plan) -> Iterator[Place]:
    """Every clip of a plan in every shape that it is trained in, once."""
    rows: dict[tuple[int, Bucket], list[NDArray[np.uint32]]] = {}
    catalogs = {}
    for part in (part for stream in plan.streams() for part in stream.parts):
        catalogs[id(part.catalog)] = part.catalog
        for shape, mine in zip(part.members.shapes, part.members.rows, strict=True):
            rows.setdefault((id(part.catalog), shape), []).append(mine)
    for (catalog, shape), found in rows.items():
        for row in np.unique(np.concatenate(found)):
            yield Place(catalogs[catalog], shape, int(row))


def _captions(plan: Plan, no_caption: str) -> list[str]:
    captions = {no_caption}
    for part in (part for stream in plan.streams() for part in stream.parts):
        texts = part.catalog.table["caption"].take(part.members.all_rows())
        captions.update(pc.unique(texts).to_pylist())
    return sorted(captions)


def _look(
    cache: Cache, place: Place, data: DataSection, without: Container[str]
) -> tuple[Counter[str], bool]:
    """How many entries of a clip are there, by kind, and whether one is missing."""
    clip, present, is_missing = place.clip, Counter[str](), False
    if clip.identity in without:
        return present, False
    for window in all_windows(clip, place.shape, data):
        for name, wanted in _wanted(cache, window).items():
            entry = _whole(cache, name, wanted)
            present.update([entry.kind] if entry else [])
            is_missing |= entry is None
    return present, is_missing


def _wanted(cache: Cache, window: Window) -> dict[str, Window | Reference]:
    """What a sample is made of: its clip by the name "", further pictures by theirs."""
    return {"": window, **cache.references(window)}


def _entry(cache: Cache, name: str, wanted: Window | Reference) -> Entry:
    if isinstance(wanted, Reference):
        return cache.reference(name, wanted)
    return cache.latents(wanted)


def _whole(cache: Cache, name: str, wanted: Window | Reference) -> Entry | None:
    """The entry, if it is there."""
    try:
        entry = _entry(cache, name, wanted)
    except ClipError:  # decoding will say what is wrong with the picture
        return None
    return entry if entry.is_whole() else None


def _begin(cache: Cache, window: Window, pool: Pool) -> _Job:
    """Start to decode what is missing of a window and its pictures."""
    parts = [
        _Part(name, wanted, pool.submit(wanted))
        for name, wanted in _wanted(cache, window).items()
        if not _whole(cache, name, wanted)
    ]
    return _Job(window, parts)


def _finish(
    cache: Cache, job: _Job, encode: EncodePixels, data: DataSection, report: Report
) -> None:
    """Encode what was decoded, and note what could not be."""
    failures = []
    for name, wanted, pixels in job.parts:
        try:
            decoded, entry = pixels.result(), _entry(cache, name, wanted)
        except ClipError as error:
            why = without_reference(job.window, name, error) if name else error
            failures.append(Failure(job.window.identity, str(why.path), why.reason))
            continue
        if not entry.is_whole():  # another process may have been faster
            report.wrote(entry, entry.write({"latents": encode(decoded)}))
    if failures:
        report.failures[cache.latents(job.window).key] = failures[0]
        refuse_too_many(list(report.failures.values()), data.max_quarantined_clips)


def _some_order(count: int) -> list[int]:
    """Another one in each process, so that several share the work without knowing each other."""
    order: list[int] = np.random.default_rng().permutation(count).tolist()
    return order
