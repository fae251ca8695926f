"""Decodes every file once, strictly, and writes the catalog of those that can be trained on.

What is known already is not read again: an older catalog at the output tells of files whose path,
size and time of change are the same, and a journal beside it (`longtake.data.indexing.journal`) of
files that an index which was stopped had finished.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from longtake.data.catalog import Catalog, Duplicate, Rejection, Stamp, cannot_write
from longtake.data.clip import Clip
from longtake.data.indexing.captions import is_sidecar, read_captions
from longtake.data.indexing.item import Item
from longtake.data.indexing.journal import Memory, ProbeJournal, stamp_of
from longtake.data.indexing.probe import Probe
from longtake.data.indexing.probing import probe_all
from longtake.data.indexing.sources import Found, find
from longtake.data.limits import DEFAULT, Limits
from longtake.data.table import SCHEMA_VERSION, version_of
from longtake.errors import ClipError, DataError
from longtake.fsio import make_writable


@dataclass(frozen=True)
class IndexReport:
    """What `index` found.

    Attributes:
        accepted: clips in the catalog.
        rejected: files that cannot be trained on, by path.
        duplicates: further files with the content of an accepted one; left out.
        without_caption: accepted clips whose caption is empty.
        unmatched_captions: media that the captions name but that are not among the files.
        unchanged: files that were not read again, because they are as they were.
        scores_dropped: clips whose older scores were forgotten, because their caption changed.
        passed_over: how many files in the searched folders have another ending, by ending.
        unreadable: folders that cannot be searched, with the reason.
    """

    accepted: int
    rejected: list[Rejection]
    duplicates: int
    without_caption: int
    unmatched_captions: list[str]
    unchanged: int
    scores_dropped: int
    passed_over: dict[str, int]
    unreadable: list[Rejection]


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
) -> IndexReport:
    """Decode every video and image once and write the catalog of those that can be trained on.

    Args:
        sources: folders, media files, lists, tables and tars: see `longtake.data.indexing.sources`.
        captions: JSONL with one `{"video": path, "caption": text}` per line, and nothing else
            captions a clip. None: what the sources say (a table's column, a tar's .txt), else
            `captions.jsonl` in each source folder, else `clip.txt` next to `clip.mp4`. `sidecar`:
            as None, without `captions.jsonl`. How clips are found by name: see `read_captions`.
        out: the catalog to write. An older catalog there is replaced; its clips' scores are kept.
        on: where files are decoded; see `run_tasks`. The catalog is the same to the byte.
        workers: processes that decode; by default as many as there are cores. 0: this process,
            which a hostile file can then hang or crash.
        progress: called with (files done, files in all).
        fresh: read every file again, whatever is known of it.
        limits: what decoding one file may cost; a file that needs more is rejected.

    Raises:
        DataError: a source or the captions cannot be read, nothing is found or can be decoded,
            the catalog cannot be written (which is found out before decoding), or no worker can be
            started.
    """
    check_out(out)
    found = find(sources)
    items, unmatched = _captioned(found, captions)
    before = _catalog_before(out)
    seen = look_at(
        items, out, on=on, workers=workers, progress=progress, fresh=fresh, limits=limits
    )
    clips = _clips(items, seen)
    rejected = _rejected(items, seen, found.refused)
    if not clips:
        seen.journal.remove()
        raise DataError(_all_rejected(rejected))
    kept, duplicates = without_duplicates(clips)
    kept, scores_dropped = _with_scores(kept, before)
    Catalog.of(kept, rejected, duplicates, seen.stamps).save(out)
    seen.journal.remove()
    return IndexReport(
        accepted=len(kept),
        rejected=rejected,
        duplicates=len(duplicates),
        without_caption=sum(not clip.caption for clip in kept),
        unmatched_captions=unmatched,
        unchanged=seen.unchanged,
        scores_dropped=scores_dropped,
        passed_over=dict(found.passed_over),
        unreadable=[_rejection(error) for error in found.unreadable],
    )


@dataclass(frozen=True)
class Seen:
    """What is known of items.

    Attributes:
        results: what came of each, by `str(media)`.
        stamps: of their files, by `str(media)`.
        unchanged: how many of them were not read again.
        journal: remembers them; to be removed once a catalog does.
    """

    results: dict[str, Probe | ClipError]
    stamps: dict[str, Stamp]
    unchanged: int
    journal: ProbeJournal


def look_at(
    items: Sequence[Item],
    out: Path,
    *,
    on: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    fresh: bool = False,
    limits: Limits = DEFAULT,
) -> Seen:
    """Decode every item that neither the catalog at `out` nor its journal knows; see `index`."""
    journal = ProbeJournal(out)
    if fresh:
        journal.remove()
    memory = Memory(None if fresh else _catalog_before(out), journal.known())
    stamps = _stamps(items)
    results = memory.recall(stamps)
    seen = Seen(results, stamps, len(results), journal)
    with journal:
        if progress is not None and seen.results:
            progress(len(seen.results), len(items))
        new = [item for item in items if str(item.media) not in seen.results]
        with closing(probe_all(new, on=on, workers=workers, limits=limits)) as outcomes:
            for outcome in outcomes:
                name = str(outcome.item.media)
                seen.results[name] = outcome.found
                if not outcome.is_lasting:
                    del seen.stamps[name]
                elif name in seen.stamps:
                    seen.journal.note(outcome.item.media, seen.stamps[name], outcome.found)
                if progress is not None:
                    progress(len(seen.results), len(items))
    return seen


def _captioned(found: Found, captions: Path | None) -> tuple[list[Item], list[str]]:
    """Return the items with the captions that count, and the names that captions fit to none."""
    paths = {str(item.media): Path(str(item.media)) for item in found.items}
    texts, unmatched = read_captions(captions, found.folders, list(paths.values()))
    is_alone = captions is not None and not is_sidecar(captions)

    def caption(item: Item) -> str:
        text = texts.get(paths[str(item.media)], "")
        return text if is_alone or item.caption is None else item.caption

    return [replace(item, caption=caption(item)) for item in found.items], unmatched


def _catalog_before(out: Path) -> Catalog | None:
    try:
        return Catalog.load(out) if version_of(out) == str(SCHEMA_VERSION) else None
    except DataError:  # damaged: it is replaced, and nothing of it is believed
        return None


def _stamps(items: Iterable[Item]) -> dict[str, Stamp]:
    """The stamps of the items' files, by `str(media)`; without files that cannot be looked at."""
    stamp_of_file = cache(stamp_of)  # a tar is asked once, not once for each member
    found = {str(item.media): stamp_of_file(item.media.path) for item in items}
    return {name: stamp for name, stamp in found.items() if stamp is not None}


def _clips(items: Iterable[Item], seen: Seen) -> list[Clip]:
    return [
        Clip(
            media=item.media, caption=item.caption or "", attributes=item.attributes, **vars(found)
        )
        for item in items
        if isinstance(found := seen.results[str(item.media)], Probe)
    ]


def _rejected(items: Iterable[Item], seen: Seen, refused: Iterable[ClipError]) -> list[Rejection]:
    found = (seen.results[str(item.media)] for item in items)
    errors = [*refused, *(each for each in found if isinstance(each, ClipError))]
    return sorted(map(_rejection, errors), key=lambda each: each.path)


def _rejection(error: ClipError) -> Rejection:
    return Rejection(_printable(str(error.path)), error.reason)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def without_duplicates(clips: Iterable[Clip]) -> tuple[list[Clip], list[Duplicate]]:
    """Keep one clip of each identity, by path the first that has a caption, or else the first."""
    kept: dict[str, Clip] = {}
    duplicates = []
    for clip in sorted(clips, key=lambda clip: (not clip.caption, clip.path)):
        if clip.identity in kept:
            duplicates.append(Duplicate(clip.path, clip.identity))
        else:
            kept[clip.identity] = clip
    return list(kept.values()), duplicates


def _with_scores(clips: list[Clip], before: Catalog | None) -> tuple[list[Clip], int]:
    """Give clips that were there before their scores and origin; count those that lose scores.

    A score may be one of the caption, so a clip with another caption is to be scored again.
    """
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


def _all_rejected(rejected: Sequence[Rejection]) -> str:
    shown = "".join(f"\n  {each.path}: {each.reason}" for each in rejected[:5])
    more = f"\n  and {len(rejected) - 5} more" if len(rejected) > 5 else ""
    return f"None of {len(rejected)} files can be trained on; no catalog was written.{shown}{more}"


def check_out(out: Path) -> None:
    """Refuse an output that cannot be written, or that would overwrite something else."""
    if out.suffix not in ("", ".parquet"):
        raise DataError(
            f"A catalog is written as Parquet, and {out} ends in {out.suffix}. Name it "
            f"{out.with_suffix('.parquet')}."
        )
    if out.exists() and version_of(out) is None:
        raise DataError(
            f"{out} exists and is not a catalog; it was not overwritten. Name another file, such "
            f"as {out.parent / 'catalog.parquet'}."
        )
    try:
        make_writable(out.parent)
    except OSError as error:
        raise cannot_write(out, error) from error
