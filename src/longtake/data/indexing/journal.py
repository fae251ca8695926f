"""What is known of files from an older catalog and a journal: no file is decoded twice for one.

A command that was stopped leaves the journal, and the next one resumes from it.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, NotRequired, TypeVar

from pydantic import AfterValidator, TypeAdapter
from typing_extensions import TypedDict

from longtake.data.catalog import Catalog, Stamp
from longtake.data.clip import Media
from longtake.data.indexing.probe import Probe
from longtake.data.indexing.probing import to_json
from longtake.errors import ClipError
from longtake.fsio import Journal

_T = TypeVar("_T")
_ROWS_AT_ONCE = 2**16
_PROBE_FIELDS = [field.name for field in fields(Probe)]

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
    """Remembers beside the catalog `out` what was found in each file, as soon as it is known."""

    def __init__(self, out: Path) -> None:
        path = out.with_name(f".{out.name}.journal.jsonl")
        super().__init__(path, _ENTRY, max_line_bytes=_MAX_LINE_BYTES)

    def note(self, media: Media, stamp: Stamp, found: Probe | ClipError) -> None:
        """Add what was found in a file.

        Raises:
            DataError: it cannot be written.
        """
        stamped = {"media": str(media), "stamp": [stamp.num_bytes, stamp.mtime_ns]}
        self.add(stamped | to_json(found))

    def known(self) -> dict[str, tuple[Stamp, Probe | ClipError]]:
        """What an interrupted index has found, by `str(media)`."""
        known: dict[str, tuple[Stamp, Probe | ClipError]] = {}
        for entry in self.read():
            name = entry["media"]
            found = entry.get("probe") or ClipError(name, entry.get("reason", ""))
            known[name] = Stamp(*entry["stamp"]), found
        return known


class Memory:
    """What is known of files from an older catalog and from a journal."""

    def __init__(
        self, catalog: Catalog | None, journal: dict[str, tuple[Stamp, Probe | ClipError]]
    ) -> None:
        self._journal = journal
        self._catalog = catalog
        self._rows: dict[str, tuple[Stamp, int]] = {}
        self._reasons: dict[str, tuple[Stamp, str]] = {}
        if catalog is not None:
            self._remember(catalog)

    def _remember(self, catalog: Catalog) -> None:
        columns = ("path", "member", "identity", "file_bytes", "file_mtime_ns")
        lists = [catalog.table[name].to_pylist() for name in columns]
        rows = {identity: row for row, identity in enumerate(lists[2])}
        for path, member, identity, num_bytes, mtime_ns in zip(*lists, strict=True):
            if num_bytes is not None:
                known = Stamp(num_bytes, mtime_ns), rows[identity]
                self._rows[str(Media(path, member))] = known
        for entry in catalog.set_aside.to_pylist():
            if entry["file_bytes"] is None:
                continue
            stamp = Stamp(entry["file_bytes"], entry["file_mtime_ns"])
            if entry["identity"] in rows:
                self._rows[entry["path"]] = stamp, rows[entry["identity"]]
            else:
                self._reasons[entry["path"]] = stamp, entry["reason"]

    def recall(self, stamps: Mapping[str, Stamp]) -> dict[str, Probe | ClipError]:
        """What came of files that are still the same, by `str(media)`."""
        results: dict[str, Probe | ClipError] = {}
        rows = {}
        for name, stamp in stamps.items():
            if (written := _same(self._journal, name, stamp)) is not None:
                results[name] = written
            elif (row := _same(self._rows, name, stamp)) is not None:
                rows[name] = row
            elif (reason := _same(self._reasons, name, stamp)) is not None:
                results[name] = ClipError(name, reason)
        return results | self._probes(rows)

    def _probes(self, rows: Mapping[str, int]) -> dict[str, Probe | ClipError]:
        """Make the probes that the catalog's rows tell of; many at once is five times faster."""
        if self._catalog is None:
            return {}
        probes: dict[str, Probe | ClipError] = {}
        names = list(rows)
        for start in range(0, len(names), _ROWS_AT_ONCE):
            some = names[start : start + _ROWS_AT_ONCE]
            table = self._catalog.table.take([rows[name] for name in some])
            for name, clip in zip(
                some, Catalog(table, self._catalog.set_aside).clips(), strict=True
            ):
                probes[name] = Probe(**{field: getattr(clip, field) for field in _PROBE_FIELDS})
        return probes


def _same(known: Mapping[str, tuple[Stamp, _T]], name: str, stamp: Stamp) -> _T | None:
    before = known.get(name)
    return before[1] if before is not None and before[0] == stamp else None


def stamp_of(path: str) -> Stamp | None:
    """What a file looks like from outside; None where it cannot be looked at."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return Stamp(status.st_size, status.st_mtime_ns)
