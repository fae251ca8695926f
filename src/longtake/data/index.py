"""Decodes every file once, strictly, and writes the catalog of those that can be trained on.

Known files are not read again: the older catalog at the output has those whose path, size and
modification time are the same, and a journal beside it those that an interrupted index finished.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, NotRequired, TypeVar

from pydantic import AfterValidator, TypeAdapter
from typing_extensions import TypedDict

from longtake.data import catalog, tasks
from longtake.data.clip import Clip, Item, Media
from longtake.data.decode import DEFAULT, Limits, Probe, ProbeTask
from longtake.data.sources import FoundMedia, find, is_sidecar, read_captions
from longtake.errors import ClipError, DataError
from longtake.fsio import Journal, make_writable

_T = TypeVar("_T")
_ROWS_AT_ONCE = 2**16  # that are made into probes: many at once is five times faster
_PROBE_FIELDS = [field.name for field in fields(Probe)]
_SHOWN = 5  # rejected files in a message
_MAX_LINE_BYTES = 2**24  # of an hour of video with unevenly spaced frames


class _Entry(TypedDict):
    media: str
    stamp: tuple[int, int]
    reason: NotRequired[str]
    probe: NotRequired[Probe]


def _is_whole(entry: _Entry) -> _Entry:
    probe = entry.get("probe")
    if probe is None and "reason" not in entry:
        raise ValueError("expected `probe` or `reason`")
    sizes = () if probe is None else (probe.num_frames, probe.width, probe.height)
    is_named = probe is None or re.fullmatch("[0-9a-f]{32}", probe.identity)
    if not is_named or not all(0 < size < 2**31 for size in sizes):
        raise ValueError("expected an identity of 32 hex digits and sizes below 2^31")
    return entry


_ENTRY: TypeAdapter[_Entry] = TypeAdapter(Annotated[_Entry, AfterValidator(_is_whole)])


class ProbeJournal(Journal[_Entry]):
    """A journal beside the catalog `out` of what was found in each file."""

    def __init__(self, out: Path) -> None:
        path = out.with_name(f".{out.name}.journal.jsonl")
        super().__init__(path, _ENTRY, max_line_bytes=_MAX_LINE_BYTES)

    def note(self, media: Media, stamp: catalog.Stamp, found: Probe | ClipError) -> None:
        stamped = {"media": str(media), "stamp": [stamp.num_bytes, stamp.mtime_ns]}
        if isinstance(found, ClipError):
            self.add(stamped | {"reason": found.reason})
        else:
            self.add(stamped | {"probe": asdict(found)})

    def known(self) -> dict[str, tuple[catalog.Stamp, Probe | ClipError]]:
        """The results of an interrupted index, by `str(media)`."""
        known: dict[str, tuple[catalog.Stamp, Probe | ClipError]] = {}
        for entry in self.read():
            name = entry["media"]
            found = entry.get("probe") or ClipError(name, entry.get("reason", ""))
            known[name] = catalog.Stamp(*entry["stamp"]), found
        return known


def known_probes(
    older: catalog.Catalog | None, journal: ProbeJournal, stamps: Mapping[str, catalog.Stamp]
) -> dict[str, Probe | ClipError]:
    """The results for unchanged files, by `str(media)`, from an older catalog and a journal."""
    known: dict[
        str, tuple[catalog.Stamp, Probe | ClipError | int]
    ] = {}  # an int is a row of the catalog
    if older is not None:
        columns = ("path", "member", "identity", "file_bytes", "file_mtime_ns")
        lists = [older.table[name].to_pylist() for name in columns]
        row_of = {identity: row for row, identity in enumerate(lists[2])}
        for path, member, identity, num_bytes, mtime_ns in zip(*lists, strict=True):
            known[str(Media(path, member))] = catalog.Stamp(num_bytes, mtime_ns), row_of[identity]
        for entry in older.set_aside.to_pylist():
            path, stamp = entry["path"], catalog.Stamp(entry["file_bytes"], entry["file_mtime_ns"])
            row = row_of.get(entry["identity"])
            known[path] = stamp, ClipError(path, entry["reason"]) if row is None else row
    known |= journal.known()
    same = {
        name: known[name][1]
        for name, stamp in stamps.items()
        if name in known and known[name][0] == stamp
    }
    results = {name: found for name, found in same.items() if not isinstance(found, int)}
    rows = {name: found for name, found in same.items() if isinstance(found, int)}
    if older is not None:
        names = list(rows)
        for start in range(0, len(names), _ROWS_AT_ONCE):
            some = names[start : start + _ROWS_AT_ONCE]
            table = older.table.take([rows[name] for name in some])
            for name, clip in zip(
                some, catalog.Catalog(table, older.set_aside).clips(), strict=True
            ):
                results[name] = Probe(**{field: getattr(clip, field) for field in _PROBE_FIELDS})
    return results


def stamp_of(path: str) -> catalog.Stamp | None:
    """Size and modification time of a file; None if it cannot be accessed."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return catalog.Stamp(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class IndexReport:
    """What `index` found."""

    accepted: int  # clips in the catalog
    rejected: list[catalog.Rejection]  # files that cannot be trained on, by path
    duplicates: int  # further files with the content of an accepted one; left out
    without_caption: int  # accepted clips whose caption is empty
    unmatched_captions: list[str]  # media that the captions name but that were not found
    unchanged: int  # files that were not read again
    scores_dropped: int  # clips that lost their older scores, because their caption changed
    passed_over: dict[str, int]  # files in the searched folders with another ending, by ending
    unreadable: list[catalog.Rejection]  # folders that cannot be searched


def index(
    sources: Sequence[Path],
    *,
    captions: Path | None,
    out: Path,
    on: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    fresh: bool = False,
    limits: Limits = DEFAULT,
    conditioning: Sequence[str] = (),
    label: str = "",
) -> IndexReport:
    """Decode every video and image once and write the catalog of those that can be trained on.

    Args:
        sources: folders, media files, lists, tables and tars: see `longtake.data.sources`.
        captions: JSONL with one `{"video": path, "caption": text}` per line, and nothing else
            captions a clip. None: the sources' captions (a table's column, a tar's .txt), else
            `captions.jsonl` in each source folder, else `clip.txt` next to `clip.mp4`. `sidecar`:
            as None, without `captions.jsonl`.
        out: the catalog to write. An older catalog there is replaced; its clips' scores are kept.
        on: where files are decoded; see `run_tasks`. The catalog is the same to the byte.
        workers: processes that decode; by default one for each core. 0: this process, which a
            hostile file can then hang or crash.
        progress: called with (files done, files in all).
        fresh: read unchanged files again, too.
        limits: for decoding one file; a file that needs more is rejected.
        conditioning: columns of the sources' tables that `data.conditioning` will name; each clip
            must have a path of an existing file, or numbers, in each.
        label: the caption of clips that have none.

    Raises:
        DataError: a source or the captions cannot be read, a clip lacks a further input, nothing
            is found or can be decoded, the catalog cannot be written (checked before decoding), or
            no worker can be started.
    """
    check_out(out)
    found = find(sources, conditioning, out.with_name(f"{out.stem}_media"))
    items, unmatched = _captioned(found, captions)
    before = _catalog_before(out)
    probed = probe_all(
        items, out, on=on, workers=workers, progress=progress, fresh=fresh, limits=limits
    )
    results = [(item, probed.results[str(item.media)]) for item in items]
    clips = [
        Clip(
            media=item.media,
            caption=item.caption or label,
            attributes=item.attributes,
            conditioning=item.conditioning,
            **vars(result),
        )
        for item, result in results
        if isinstance(result, Probe)
    ]
    errors = [*found.refused, *(each for _, each in results if isinstance(each, ClipError))]
    rejected = sorted(map(_rejection, errors), key=lambda each: each.path)
    if not clips:
        probed.journal.remove()
        shown = "".join(f"\n  {each.path}: {each.reason}" for each in rejected[:_SHOWN])
        more = f"\n  and {len(rejected) - _SHOWN} more" if len(rejected) > _SHOWN else ""
        raise DataError(
            f"None of {len(rejected)} files can be trained on; no catalog was written.{shown}{more}"
        )
    kept, duplicates = without_duplicates(clips)
    kept, scores_dropped = _with_scores(kept, before)
    catalog.Catalog.of(kept, rejected, duplicates, probed.stamps).save(out)
    probed.journal.remove()
    return IndexReport(
        accepted=len(kept),
        rejected=rejected,
        duplicates=len(duplicates),
        without_caption=sum(not clip.caption for clip in kept),
        unmatched_captions=unmatched,
        unchanged=probed.unchanged,
        scores_dropped=scores_dropped,
        passed_over=dict(found.passed_over),
        unreadable=[_rejection(error) for error in found.unreadable],
    )


@dataclass(frozen=True)
class ProbeResults:
    """The results for items, by `str(media)`."""

    results: dict[str, Probe | ClipError]
    stamps: dict[str, catalog.Stamp]  # of their files
    unchanged: int  # number of items that were not read again
    journal: ProbeJournal  # to be removed when the catalog is written


def probe_all(
    items: Sequence[Item],
    out: Path,
    *,
    on: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    fresh: bool = False,
    limits: Limits = DEFAULT,
) -> ProbeResults:
    """Decode every item that neither the catalog at `out` nor its journal knows; see `index`."""
    journal = ProbeJournal(out)
    if fresh:
        journal.remove()
    stamp_of_file = cache(stamp_of)  # once for a tar, not once for each member
    found = {str(item.media): stamp_of_file(item.media.path) for item in items}
    stamps = {name: stamp for name, stamp in found.items() if stamp is not None}
    results = known_probes(None if fresh else _catalog_before(out), journal, stamps)
    probed = ProbeResults(results, stamps, len(results), journal)
    with journal:
        if progress is not None and probed.results:
            progress(len(probed.results), len(items))
        new = [item for item in items if str(item.media) not in probed.results]
        task = ProbeTask(limits)
        with closing(tasks.run_tasks(task, new, on=on, workers=workers)) as outcomes:
            for number, (result, is_lasting) in outcomes:
                media = new[number].media
                name = str(media)
                probed.results[name] = result
                if not is_lasting:
                    del probed.stamps[name]
                elif name in probed.stamps:
                    journal.note(media, probed.stamps[name], result)
                if progress is not None:
                    progress(len(probed.results), len(items))
    return probed


def _captioned(found: FoundMedia, captions: Path | None) -> tuple[list[Item], list[str]]:
    paths = {str(item.media): Path(str(item.media)) for item in found.items}
    texts, unmatched = read_captions(captions, found.folders, list(paths.values()))
    is_alone = captions is not None and not is_sidecar(captions)

    def caption(item: Item) -> str:
        text = texts.get(paths[str(item.media)], "")
        return text if is_alone or item.caption is None else item.caption

    return [replace(item, caption=caption(item)) for item in found.items], unmatched


def _catalog_before(out: Path) -> catalog.Catalog | None:
    try:
        return (
            catalog.Catalog.load(out)
            if catalog.version_of(out) == str(catalog.SCHEMA_VERSION)
            else None
        )
    except DataError:  # damaged: it is replaced, and nothing of it is used
        return None


def _rejection(error: ClipError) -> catalog.Rejection:
    path = str(error.path).encode("utf-8", "backslashreplace").decode()  # it may not be UTF-8
    return catalog.Rejection(path, error.reason)


def without_duplicates(clips: Iterable[Clip]) -> tuple[list[Clip], list[catalog.Duplicate]]:
    """Keep one clip of each identity, by path the first that has a caption, or else the first."""
    kept: dict[str, Clip] = {}
    duplicates = []
    for clip in sorted(clips, key=lambda clip: (not clip.caption, clip.path)):
        if clip.identity in kept:
            duplicates.append(catalog.Duplicate(clip.path, clip.identity))
        else:
            kept[clip.identity] = clip
    return list(kept.values()), duplicates


def _with_scores(clips: list[Clip], before: catalog.Catalog | None) -> tuple[list[Clip], int]:
    """Give known clips their scores and origin; count those whose scores go with their caption."""
    if before is None or not (before.attribute_names or any(before.column("prepared_from"))):
        return clips, 0
    rows = {identity.hex(): row for row, identity in enumerate(before.identities.to_pylist())}
    dropped = 0
    for index, clip in enumerate(clips):
        if clip.identity not in rows:
            continue
        old = before.clip(rows[clip.identity])
        clip = replace(clip, prepared_from=old.prepared_from)
        if old.caption == clip.caption:
            clip = replace(clip, attributes={**old.attributes, **clip.attributes})
        else:
            dropped += bool(old.attributes)
        clips[index] = clip
    return clips, dropped


def check_out(out: Path) -> None:
    """Refuse an output that cannot be written, or that would overwrite something else."""
    if out.suffix not in ("", ".parquet"):
        raise DataError(
            f"A catalog is written as Parquet, and {out} ends in {out.suffix}. Name it "
            f"{out.with_suffix('.parquet')}."
        )
    if out.exists() and catalog.version_of(out) is None:
        raise DataError(
            f"{out} exists and is not a catalog; it was not overwritten. Name another file, such "
            f"as {out.parent / 'catalog.parquet'}."
        )
    try:
        make_writable(out.parent)
    except OSError as error:
        raise catalog.cannot_write(out, error) from error
