"""Indexes media: decodes every file once, strictly, and writes the catalog of usable clips.

Known files are not read again: those of the older catalog at the output with the same path, size
and modification time, and those that an interrupted index recorded in a journal beside it.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, TypeAdapter
from typing_extensions import TypedDict

from longtake.data import catalog
from longtake.data.caption_files import (
    fields_beside,
    is_sidecar,
    read_captions,
    sidecar_of,
    unread_beside,
)
from longtake.data.catalog_writer import (
    MOST_LISTED,
    CatalogWriter,
    Written,
    caption_without_file,
)
from longtake.data.clip import Clip, Item, Media, join_captions
from longtake.data.content import copy_identity
from longtake.data.decode import Probe, ProbeTask
from longtake.data.media_list import as_bytes, open_scratch
from longtake.data.sources import FoundMedia, find
from longtake.data.tables import first_of
from longtake.data.tasks import ALL_CORES, Work, run_tasks
from longtake.data.workers import Task
from longtake.errors import ClipError, DataError
from longtake.fsio import Journal, make_writable

_PROBE_FIELDS = [field.name for field in fields(Probe) if field.name != "is_trusted"]
_SHOWN = 5  # number of rejected files shown in a message
_MAX_LINE_BYTES = 2**24  # enough for an hour of video with unevenly spaced frames


class _Entry(TypedDict):
    """One line of the index's journal: a file's properties, or the reason why it was rejected."""

    media: str
    stamp: tuple[int, int]
    reason: NotRequired[str]
    probe: NotRequired[Probe]


def _is_whole(entry: _Entry) -> _Entry:
    # Entries of a journal are copied into the catalog unchecked, so they must fit its columns: an
    # identity has 16 bytes, and sizes are int32.
    probe = entry.get("probe")
    if probe is None and "reason" not in entry:
        raise ValueError("expected `probe` or `reason`")
    sizes = () if probe is None else (probe.num_frames, probe.width, probe.height)
    is_named = probe is None or re.fullmatch("[0-9a-f]{32}", probe.identity)
    if not is_named or not all(0 < size < 2**31 for size in sizes):
        raise ValueError("expected an identity of 32 hex digits and sizes below 2^31")
    return entry


_PROBE = TypeAdapter(Probe)
_ENTRY: TypeAdapter[_Entry] = TypeAdapter(Annotated[_Entry, AfterValidator(_is_whole)])


class ProbeJournal(Journal[_Entry]):
    """Journal of an index, beside the catalog `out`, with the result of each file read so far."""

    def __init__(self, out: Path, *, trusts_metadata: bool = False) -> None:
        # Results of whole files and of first frames only must not be mixed.
        kind = ".trusted" if trusts_metadata else ""
        path = out.with_name(f".{out.name}.journal{kind}.jsonl")
        super().__init__(path, _ENTRY, max_line_bytes=_MAX_LINE_BYTES)

    def note(self, media: Media, stamp: catalog.Stamp, found: Probe | ClipError) -> None:
        """Record a file's properties, or the error that rejects it, in the journal."""
        stamped = {"media": str(media), "stamp": [stamp.num_bytes, stamp.mtime_ns]}
        if isinstance(found, ClipError):
            self.add(stamped | {"reason": found.reason})
        else:
            self.add(stamped | {"probe": _PROBE.dump_python(found, mode="json")})


class KnownFiles:
    """Files that an older catalog or an interrupted index has read; the newest result wins.

    They are in a database on disk. A result is used while size and modification time of its file
    are the same. Files whose frames were not decoded count as known only if metadata is trusted.
    """

    def __init__(
        self,
        older: catalog.StoredCatalog | None,
        journal: ProbeJournal,
        *,
        trusts_metadata: bool = False,
    ) -> None:
        self._database = open_scratch("known (name BLOB, stamp TEXT, identity, reason, probe TEXT)")
        if older is not None:
            self._add(_entries_of(older, trusts_metadata=trusts_metadata))
            # A catalog has the probe of the accepted clip only. Its copies, set aside with the same
            # identity, get it from there.
            self._database.execute("CREATE INDEX kept ON known (identity) WHERE probe IS NOT NULL")
            self._database.execute(
                "UPDATE known SET probe = (SELECT kept.probe FROM known AS kept WHERE "
                "kept.identity = known.identity AND kept.probe IS NOT NULL) WHERE probe IS NULL "
                "AND identity IS NOT NULL"
            )
            self._database.execute("DELETE FROM known WHERE probe IS NULL AND identity IS NOT NULL")
        self._add(
            (
                as_bytes(entry["media"]),
                stamp_text(catalog.Stamp(*entry["stamp"])),
                None,
                entry.get("reason"),
                _PROBE.dump_json(entry["probe"]) if "probe" in entry else None,
            )
            for entry in journal.entries()
        )

    def join(
        self, files: Iterable[list[Item]]
    ) -> Iterator[tuple[list[Item], catalog.Stamp | None, Probe | ClipError | None]]:
        """Yield for each file its items, its stamp, and the known result of reading it, or None.

        `files` must be sorted.
        """
        entries = self._database.execute(
            "SELECT name, stamp, reason, probe FROM known ORDER BY name, rowid"
        )
        stamp_of_file = lru_cache(stamp_of)  # one call for a tar, not one for each member
        entry = next(entries, None)
        for items in files:
            media, found = items[0].media.whole, None
            stamp = stamp_of_media(media, stamp_of_file)
            name = as_bytes(str(media))
            # A merge of two sorted sequences: neither has to fit into memory.
            # The last entry of a name counts: the journal was added after the catalog, and is
            # newer.
            while entry is not None and entry[0] <= name:
                found = entry if entry[0] == name else None
                entry = next(entries, None)
            if found is None or stamp is None or found[1] != stamp_text(stamp):
                yield items, stamp, None
            elif found[3] is None:
                yield items, stamp, ClipError(str(media), found[2])
            else:
                yield items, stamp, _PROBE.validate_json(found[3])

    def _add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self._database.executemany("INSERT INTO known VALUES (?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        self._database.close()

    __del__ = close


def _entries_of(
    older: catalog.StoredCatalog, *, trusts_metadata: bool
) -> Iterator[tuple[Any, ...]]:
    for some in older.clips():
        stamps = some.table.select(["file_bytes", "file_mtime_ns"]).to_pylist()
        for clip, stamp in zip(some.clips(), stamps, strict=True):
            is_trusted = bool(clip.attributes.get(catalog.TRUSTED))
            # Catalogs of older versions have no colour matrix, and one with trusted metadata no
            # exact frames: such files are read again.
            is_known = clip.color_matrix is not None and (trusts_metadata or not is_trusted)
            if is_known and clip.media.span is None:  # the rest of a span's file is unknown
                facts = {field: getattr(clip, field) for field in _PROBE_FIELDS}
                # A further copy was given another identity: restore that of its content.
                if number := int(clip.attributes.get(catalog.OTHER_CAPTION, 0)):
                    facts["identity"] = copy_identity(clip.identity, -number)
                probe = Probe(**facts, is_trusted=is_trusted)
                text = stamp_text(catalog.Stamp(*stamp.values()))
                identity = bytes.fromhex(clip.identity)
                yield as_bytes(clip.path), text, identity, None, _PROBE.dump_json(probe)
    for row in older.set_aside():
        text = stamp_text(catalog.Stamp(row["file_bytes"], row["file_mtime_ns"]))
        yield as_bytes(row["path"]), text, row["identity"], row["reason"], None


def stamp_text(stamp: catalog.Stamp) -> str:
    """Return a file's stamp (size and modification time) as text, for comparison."""
    return f"{stamp.num_bytes} {stamp.mtime_ns}"


def stamp_of(path: str) -> catalog.Stamp | None:
    """Return size and modification time of a file, or None if it cannot be accessed."""
    try:
        status = os.stat(path)  # noqa: PTH116 - called millions of times, as `fsio.is_there`
    except OSError:
        return None
    return catalog.Stamp(status.st_size, status.st_mtime_ns)


def stamp_of_media(
    media: Media, stamp_of_file: Callable[[str], catalog.Stamp | None] = stamp_of
) -> catalog.Stamp | None:
    """Return the stamp (size and modification time) of a file or an object in a store.

    None if it is not known.
    """
    # Stores gave size and stamp with their listing, so no object is asked for again.
    if media.is_remote:
        return catalog.Stamp(media.num_bytes or 0, media.stamp) if media.stamp else None
    return stamp_of_file(media.path)


@dataclass(kw_only=True)
class IndexReport(Written):
    """Result of `index`: numbers of clips, rejected files, and captions that match no file."""

    rejected: list[catalog.Rejection]  # the first rejected files, by path
    num_rejected: int  # number of rejected files; the catalog has each with its reason
    unmatched_captions: list[str]  # paths in the captions that match no found file
    unchanged: int  # number of files that were not read again
    passed_over: dict[str, int]  # number of files in searched folders by unknown ending
    unreadable: list[catalog.Rejection]  # folders that cannot be searched
    unread_captions: list[str]  # sentences about possible captions, if a clip has none


def index(
    sources: Sequence[Path],
    *,
    captions: Path | None,
    out: Path,
    work: Work = ALL_CORES,
    fresh: bool = False,
    conditioning: Sequence[str] = (),
    label: str = "",
    trusts_metadata: bool = False,
    keeps_other_captions: bool = False,
    by_line: bool = False,
    fields: Sequence[str] = (),
) -> IndexReport:
    """Decode every video and image once and write the catalog of those that can be trained on.

    Args:
        sources: folders, media files, lists, tables and tars: see `longtake.data.sources`.
        captions: JSONL file with one `{"video": path, "caption": text}` per line, the only source
            of captions then. By default (None), the sources' captions (a table's column, a tar's
            .txt), else `captions.jsonl` in each source folder, else `clip.txt` next to `clip.mp4`.
            `sidecar` is the default without `captions.jsonl`.
        out: the catalog to write. An older catalog there is replaced; its clips' scores are kept,
            and captions that `data caption` wrote are kept where the sources have none.
        work: where files are decoded, and within which limits. A file that needs more is rejected.
        fresh: also read unchanged files again.
        conditioning: columns of the sources' tables for `data.conditioning`; each clip must have a
            path of an existing file, or numbers, in each.
        label: the caption of clips that have none; `{stem}` in it is the file's name.
        trusts_metadata: decode only the first frame of each video. Such clips get the attribute
            `trusted_metadata` = 1; a call that does not trust metadata reads them again.
        keeps_other_captions: keep files of equal content once for each caption; else once.
        by_line: each line of a caption is one of its own, and a sample is trained with one of them.
        fields: fields of `captions` and of clip.json beside clip.mp4 that have captions; of several
            a sample is trained with one.

    Raises:
        DataError: a source or the captions cannot be read, a clip lacks a further input, no file is
            found or can be decoded, the catalog cannot be written (checked before decoding), or no
            worker can be started.
    """
    # Decoding may take days, so the output is checked first.
    check_out(out)
    writer = CatalogWriter()
    found = find(sources, conditioning, out.with_name(f"{out.stem}_media"))
    unmatched, faulty = _caption(found, captions, fields)
    before, journal = catalog_before(out), ProbeJournal(out, trusts_metadata=trusts_metadata)
    # A journal of an interrupted call would otherwise be resumed.
    if fresh:
        journal.remove()
    for error in found.refused:
        writer.reject(rejection_of(error))
    with closing(found.items), closing(writer):
        unchanged = probe_all(
            found.items.by_file(),
            found.items.num_files,
            partial(_accept, writer, faulty, label, trusts_metadata, by_line),
            known=KnownFiles(None if fresh else before, journal, trusts_metadata=trusts_metadata),
            journal=journal,
            task=ProbeTask(work.limits, trusts_metadata),
            work=work,
        )
        # The media's database may be large, and writing the catalog needs the disk.
        found.items.close()
        rejected = writer.rejected(MOST_LISTED)
        if not writer.num_clips:
            journal.remove()
            shown = [f"{each.path}: {each.reason}" for each in rejected[:_SHOWN]]
            raise DataError(
                f"None of {writer.num_rejected} files can be trained on; no catalog was written."
                f"{first_of(shown, writer.num_rejected)}"
            )
        # Before `write`, which sets aside what still has the same identity.
        if keeps_other_captions:
            writer.keep_other_captions()
        written = writer.write(out, before, label)
        journal.remove()  # last: until the catalog is written, only the journal has the results
        return IndexReport(
            **vars(written),
            rejected=rejected,
            num_rejected=writer.num_rejected,
            unmatched_captions=unmatched,
            unchanged=unchanged,
            passed_over=dict(found.passed_over),
            unreadable=[rejection_of(error) for error in found.unreadable],
            unread_captions=found.notes if written.without_caption else [],
        )


def _accept(
    writer: CatalogWriter,
    faulty: Mapping[str, ClipError],
    label: str,
    trusts_metadata: bool,
    by_line: bool,
    items: Sequence[Item],
    stamp: catalog.Stamp | None,
    whole: Probe | ClipError,
) -> None:
    """Add the clips of one file to a catalog, or the reasons why they are rejected."""
    names = {str(item.media) for item in items}
    for item in items:
        if (fault := faulty.get(str(item.media))) is not None:  # read again next time
            writer.reject(rejection_of(fault))
            continue
        result = whole
        if item.media.span is not None and isinstance(whole, Probe):
            try:
                result = whole.cut(item.media)
            except ClipError as error:
                result = error
        if isinstance(result, ClipError):
            rejection = rejection_of(result)
            writer.reject(rejection, stamp if rejection.path in names else None)
            continue
        mode = {catalog.TRUSTED: float(result.is_trusted)} if trusts_metadata else {}
        caption = item.caption
        if caption:
            caption = join_captions(caption.split("\n") if by_line else [caption])
        clip = Clip(
            media=item.media,
            caption=caption or caption_without_file(label, item.media.member or item.media.path),
            attributes={**item.attributes, **mode},
            conditioning=item.conditioning,
            **result.clip_fields,
        )
        writer.add(clip, stamp)


def probe_all(
    files: Iterable[list[Item]],
    num_files: int,
    accept: Callable[[list[Item], catalog.Stamp | None, Probe | ClipError], None],
    *,
    known: KnownFiles,
    journal: ProbeJournal,
    task: Task[Item, tuple[Probe | ClipError, bool]],
    work: Work,
) -> int:
    """Read every file that is not known already; return the number of known files.

    Args:
        files: the items of each file, sorted as in `MediaList`; taken when they are needed.
        num_files: total number of files.
        accept: called with the items of a file, its stamp and its result, in any order.
        known: files that need not be read.
        journal: records the results of the others.
        task: reads (probes) one file.
        work: where files are read; `progress` is called with (files done, total files).
    """
    probing: dict[int, tuple[list[Item], catalog.Stamp | None]] = {}
    num_known = num_done = 0

    def done(items: list[Item], stamp: catalog.Stamp | None, found: Probe | ClipError) -> None:
        nonlocal num_done
        accept(items, stamp, found)
        num_done += 1
        work.progress(num_done, num_files)

    # Known files are accepted while the workers are fed, so that nothing waits for them.
    def unknown() -> Iterator[Item]:
        nonlocal num_known
        number = 0
        for items, stamp, found in known.join(files):
            if found is not None:
                num_known += 1
                done(items, stamp, found)
                continue
            probing[number] = items, stamp
            number += 1
            yield Item(items[0].media.whole)

    with journal, closing(run_tasks(task, unknown(), work)) as outcomes:
        for number, (result, is_lasting) in outcomes:
            items, stamp = probing.pop(number)
            # A timeout or a lost worker may not happen again: without a stamp, the next call tries
            # again.
            if not is_lasting:
                stamp = None
            elif stamp is not None:
                journal.note(items[0].media.whole, stamp, result)
            done(items, stamp, result)
    return num_known


def _caption(
    found: FoundMedia, captions: Path | None, fields: Sequence[str]
) -> tuple[list[str], dict[str, ClipError]]:
    """Set the captions of all media from files of captions.

    Returns paths in a JSONL file that match no media, and errors of captions by the medium's name.
    """
    texts, unmatched = read_captions(
        captions,
        found.folders,
        lambda: (Path(str(item.media)) for item in found.items),
        found.notes,
        fields,
    )
    is_alone = captions is not None and not is_sidecar(captions)
    faulty, unread = dict[str, ClipError](), list[Path]()
    has_fields = bool(texts) or is_alone or not fields

    def text_of(media: Media) -> str:
        nonlocal has_fields
        path = Path(str(media))
        if path in texts or is_alone:
            return texts.get(path, "")
        try:
            text = fields_beside(path, fields)
            has_fields |= text is not None
            text = sidecar_of(path) if text is None else text
        except DataError as error:
            has_fields = True
            faulty[str(media)] = ClipError(str(media), f"its caption: {error}")
            return ""
        if text is None and not media.member and (beside := unread_beside(path)) is not None:
            unread.append(beside)
        return text or ""

    # A file of captions that was named is the only source: it replaces those of tables and tars.
    found.items.caption(text_of, every=is_alone)
    if not has_fields:
        raise DataError(
            f"--caption-field {' --caption-field '.join(fields)}: no clip.json beside a clip has "
            "such a field. Fields are read from there and from --captions alone; a tar or table "
            "has its texts in the column or key `caption`, which may be a list."
        )
    if unread:
        found.notes.append(
            f"{len(unread):,} clips have no caption, but a file beside them that is not read, such "
            f"as {unread[0]}. A caption is read from clip.txt or clip.caption beside clip.mp4."
        )
    return unmatched, faulty


def catalog_before(out: Path) -> catalog.StoredCatalog | None:
    """Return the older catalog at an output, or None if it is missing, damaged or outdated."""
    try:
        is_known = catalog.version_of(out) == str(catalog.SCHEMA_VERSION)
        return catalog.StoredCatalog(out) if is_known else None
    except DataError:  # a damaged one is replaced, and nothing of it is used
        return None


def rejection_of(error: ClipError) -> catalog.Rejection:
    path = str(error.path).encode("utf-8", "backslashreplace").decode()  # the path may not be UTF-8
    return catalog.Rejection(path, error.reason)


def check_out(out: Path) -> None:
    """Refuse an output that cannot be written, or that would overwrite something else.

    Raises:
        DataError: the name has another ending, holds no catalog, or its folder is not writable.
    """
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
