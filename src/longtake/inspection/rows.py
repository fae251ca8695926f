"""The lines of metrics.jsonl as columns, which are cached for long runs.

A line is kept if it is a record of the kind `Metrics`, as in `RunDirectory.metric_lines`; keys that
`Metrics` does not name are allowed and left out.
"""

import gc
import hashlib
import json
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

from longtake import errors, fsio
from longtake.inspection.columns import ABSENT, DTYPE, Column, ColumnStore
from longtake.metrics import METRIC_COLUMNS, METRIC_TYPES, METRICS, Metrics
from longtake.run_dir import RunDirectory

Progress = Callable[[float], object]
"""Function that is called with the share of a metrics.jsonl that has been read, from 0 to 1."""


def ignore_progress(share: float) -> None:
    """Ignore the progress of reading: the default where no progress is shown."""


_BLOCK_BYTES = 2**20
_CACHED_BYTES = 2**18  # fewer new bytes are not cached: reading them takes some milliseconds
_MAX_UNCACHED_BYTES = 2**24  # more new bytes are always cached: reading them takes 0.2 s
_CACHED_SHARE = 16  # a growing file's cache is written anew each time that 1/16 of it is new
_MAX_CACHES = 128  # more than the runs of most folders, whose list reads all of them
_HASHED_BYTES = 2**16
_HEADER_BYTES = 2**12
_CACHE_FORMAT = 3
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_validate = TypeAdapter(Metrics).validate_json
_VALIDATE: Final = {
    name: TypeAdapter(list[kind]).validate_python  # type: ignore[valid-type]
    for name, kind in METRIC_TYPES.items()
}
"""Functions by metric that each validate the values of that metric in many lines at once."""


class _Known(TypedDict):
    """Describes which part of a metrics.jsonl was read, to recognise the file later."""

    device: int
    inode: int
    size: fsio.Count
    mtime_ns: int
    end: fsio.Count
    """Byte offset behind the last line of metrics.jsonl that was read."""
    hash: str
    """SHA-256 of the first and the last 64 KiB of metrics.jsonl up to `end`."""
    num_skipped: fsio.Count


@dataclass
class _Source:
    """The lines of a metrics.jsonl that were read so far, with their numbers as columns."""

    known: _Known
    store: ColumnStore
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def empty(cls) -> "_Source":
        known = _Known(device=0, inode=0, size=0, mtime_ns=0, end=0, hash="", num_skipped=0)
        return cls(known, ColumnStore())


@dataclass(frozen=True)
class MetricRows:
    """Rows of a run's metrics.jsonl, in the order in which they were written."""

    path: Path
    source: _Source
    chosen: range | Column
    """Indices of the rows among all lines of `source`."""
    is_abandoned: NDArray[np.bool_]
    columns: dict[str, Column] = field(default_factory=dict, repr=False, compare=False)
    """Cache of whole columns (one metric of all rows), by name."""
    reduced: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Cache of columns that `series` has reduced for plots; later reads of the longer file add to
    it."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, wanted: Column | slice) -> "MetricRows":
        lines = self.chosen
        if isinstance(wanted, slice):
            chosen: range | Column = lines[wanted]
        else:
            if isinstance(lines, range):
                lines = np.arange(lines.start, lines.stop, lines.step)
            chosen = lines[wanted]
        return MetricRows(self.path, self.source, chosen, self.is_abandoned[wanted])

    def part(self, name: str, first: int, last: int) -> Column:
        """Return a metric of the rows `first` to before `last`; `columns.ABSENT` where missing.

        Raises:
            RecordError: the cache of the rows cannot be read.
        """
        if name in self.columns:
            return self.columns[name][first:last]
        lines = self.chosen[first:last]
        if not len(lines):
            return np.empty(0, DTYPE[name])
        # One read from the first to the last of the rows, of which the wanted ones are then taken.
        begin, end = int(lines[0]), int(lines[-1]) + 1
        if not isinstance(lines, range):
            begin, end = int(lines.min()), int(lines.max()) + 1
        try:
            column = self.source.store.read(name, begin, end)
        except OSError as error:
            why = f"its cache cannot be read ({error}); run the same command again"
            raise errors.RecordError(self.path, why) from error
        return column[:: lines.step] if isinstance(lines, range) else column[lines - begin]

    def raw_column(self, name: str) -> Column:
        """Return a metric of all rows, `columns.ABSENT` where missing; later calls use a cache."""
        if name not in self.columns:
            self.columns[name] = self.part(name, 0, len(self))
        return self.columns[name]

    def column(self, name: str) -> Column:
        """Return a metric of all rows, with NaN where it is missing or not finite."""
        values = self.raw_column(name)
        if values.dtype.kind != "f" or not (is_absent := values == ABSENT).any():
            return values
        return np.where(is_absent, np.array(np.nan, values.dtype), values)

    def is_recorded(self, name: str) -> NDArray[np.bool_]:
        return self.raw_column(name) != ABSENT

    @property
    def step(self) -> Column:
        return self.raw_column("step")

    @cached_property
    def kept(self) -> "MetricRows":
        return self[~self.is_abandoned] if self.is_abandoned.any() else self

    def step_of_batch(self, batch: int) -> int | None:
        """Return the step that was the last to train the batch, or None if no step did."""
        order, batches = self._by_batch
        place = int(np.searchsorted(batches, batch, side="right")) - 1
        if place < 0 or batches[place] != batch:
            return None
        return int(self.step[order[place]])

    def index_of(self, step: int) -> int | None:
        place = bisect_left(self.step, step)
        return place if place < len(self) and self.step[place] == step else None

    def metrics(self) -> list[Metrics]:
        """Return the rows as whole records, read from metrics.jsonl again: meant for few rows.

        Raises:
            RecordError: metrics.jsonl has changed since its rows were read.
        """
        found: list[Metrics] = []
        if not len(self):
            return found
        try:
            with fsio.open_regular(self.path) as file:
                for offset in self.raw_column("offset").tolist():
                    file.seek(offset)
                    found.append(_validate(file.readline(fsio.MAX_LINE_BYTES + 1), strict=True))
        except (OSError, ValidationError) as error:
            raise errors.RecordError(
                self.path, "it changed while it was read; run the same command again"
            ) from error
        return found

    @cached_property
    def _by_batch(self) -> tuple[Column, Column]:
        batches = self.raw_column("batch")
        order = np.argsort(batches, kind="stable")
        return order, batches[order]


def read_rows(
    run: RunDirectory, before: MetricRows | None = None, progress: Progress = ignore_progress
) -> MetricRows:
    """Return all rows of a run's metrics.jsonl, even of abandoned steps; invalid lines are skipped.

    `before` is the result of an earlier call: only lines that were appended since are read.

    Raises:
        RecordError: metrics.jsonl cannot be read.
    """
    path = run.metrics_path
    source = _Source.empty() if before is None else before.source
    try:
        with source.lock, fsio.open_regular(path) as file:
            source = _updated(path, file, source, progress)
            num_rows = source.store.num_rows
    except OSError as error:
        if not fsio.is_missing(error):
            raise errors.RecordError(path, error.strerror or str(error)) from error
        source, num_rows = _Source.empty(), 0
    all_rows = MetricRows(path, source, range(num_rows), np.zeros(num_rows, bool))
    rows = replace(all_rows, is_abandoned=_abandoned(all_rows, run))
    if before is not None and before.source is source:
        rows.reduced.update(before.reduced)
    return rows


def _abandoned(rows: MetricRows, run: RunDirectory) -> NDArray[np.bool_]:
    """Return [rows] whether the run later went back to before the row's step, abandoning it.

    Later rows with a smaller step show that, or a rollback after the last row. Steps decide, not
    times: clocks may be set back.
    """
    limit = np.full(len(rows), np.iinfo(np.int64).max)
    if len(rows):
        # limit[i] is the lowest step in the rows after i.
        limit[:-1] = np.minimum.accumulate(rows.step[:0:-1])[::-1]
        rollbacks = run.rollbacks()
        has_verdict = rows.raw_column("has_verdict")[-1]
        # A rollback that no row follows yet is known from its own file only.
        if rollbacks and has_verdict and rows.step[-1] == rollbacks[-1]["from_step"]:
            limit = np.minimum(limit, rollbacks[-1]["to_step"] + 1)
    return rows.step >= limit


# --- Reading ----------------------------------------------------------------------------------


def _updated(path: Path, file: BufferedReader, before: _Source, progress: Progress) -> _Source:
    """Return the lines of metrics.jsonl that were read or cached before, and the new whole ones."""
    status = os.fstat(file.fileno())
    is_usable = before.known["end"] and _is_prefix(before.known, file, status)
    source = before if is_usable else _read_cache(path, file, status) or _Source.empty()
    known = source.known
    first, end, num_skipped = known["end"], known["end"], known["num_skipped"]
    if (known["size"], known["mtime_ns"]) != (status.st_size, status.st_mtime_ns):
        known["hash"] = ""  # matches no file, should reading fail half-way
        with _without_collection():
            for lines, begins, end in _blocks(file, first, status.st_size):
                rows, num_bad = _parse(lines, begins)
                source.store.append(rows)
                num_skipped += num_bad
                progress(end / status.st_size)
        source.known = _Known(
            device=status.st_dev,
            inode=status.st_ino,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            end=end,
            hash=_hash_of_ends(file, end),
            num_skipped=num_skipped,
        )
    fsio.note_skipped_lines(path, num_skipped)
    if end - first >= min(_MAX_UNCACHED_BYTES, max(_CACHED_BYTES, end // _CACHED_SHARE)):
        with suppress(OSError, RuntimeError):  # without room, permission or home: read again
            _write_cache(path, source)
    return source


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's search for reference cycles, which is as slow as parsing and finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _blocks(
    file: BufferedReader, offset: int, size: int
) -> Iterator[tuple[list[bytes], NDArray[np.int64], int]]:
    """Yield complete lines in blocks, each line's byte offset, and the offset behind the block.

    A line that is too long is cut off.
    """
    file.seek(offset)
    rest, num_cut = b"", 0  # the unfinished line, and how many of its bytes were dropped
    while data := file.read(min(_BLOCK_BYTES, size - file.tell())):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            lengths = np.array([len(line) + 1 for line in lines])
            # The first line began in an earlier block, where some of its bytes may have been
            # dropped.
            lengths[0] += num_cut
            ends = offset + np.cumsum(lengths)
            yield lines, ends - lengths, int(ends[-1])
            offset, num_cut = int(ends[-1]), 0
        num_cut += max(0, len(rest) - fsio.MAX_LINE_BYTES - 1)
        rest = rest[: fsio.MAX_LINE_BYTES + 1]


def _parse(lines: Sequence[bytes], begins: NDArray[np.int64]) -> tuple[Column, int]:
    """Return the rows of lines that are valid metrics, and the number of other non-blank lines."""
    # Lines with the same keys are validated together, a column at a time: this is far faster than
    # line by line.
    alike: dict[tuple[str, ...], tuple[list[int], list[dict[str, Any]]]] = {}
    last: tuple[str, ...] | None = None
    for place, line in enumerate(lines):
        try:
            record = from_json(line, allow_inf_nan=False, cache_strings="keys")
        except ValueError:
            continue
        if type(record) is not dict or len(line) > fsio.MAX_LINE_BYTES:
            continue
        if (names := tuple(record)) != last:
            last, (places, records) = names, alike.setdefault(names, ([], []))
            # Fields that `Metrics` does not name could be nested deeply.
            is_known = METRIC_TYPES.keys() >= set(names)
        if is_known or not fsio.is_nested_deeper(line, fsio.MAX_LINE_DEPTH):
            places.append(place)
            records.append(record)
    rows, is_record = np.empty(len(lines), DTYPE), np.zeros(len(lines), bool)
    for names, (places, records) in alike.items():
        if not Metrics.__required_keys__ <= set(names) or not records:
            continue
        fields = dict(zip(names, zip(*map(dict.values, records), strict=True), strict=True))
        invalid = _find_invalid(fields)
        # Invalid records are rare: without them, the others are converted at once.
        if invalid:
            places = [each for number, each in enumerate(places) if number not in invalid]
            records = [each for number, each in enumerate(records) if number not in invalid]
            fields = dict(zip(names, zip(*map(dict.values, records), strict=True), strict=False))
        if places:
            rows[places], is_record[places] = _columns(fields, len(places)), True
    rows["offset"] = begins
    num_skipped = sum(bool(lines[place].strip()) for place in np.flatnonzero(~is_record).tolist())
    return rows[is_record], num_skipped


def _find_invalid(fields: Mapping[str, Sequence[Any]]) -> set[int]:
    """Return the indices of records with a metric of a type that `Metrics` does not allow."""
    found = set[int]()
    for name in fields.keys() & _VALIDATE.keys():
        try:
            _VALIDATE[name](list(fields[name]), strict=True)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)
            found.update(int(each["loc"][0]) for each in wrong)
    return found


def _columns(fields: Mapping[str, Sequence[Any]], count: int) -> Column:
    """Return the fields of `count` lines of metrics.jsonl as rows of numbers; null: NaN."""
    rows = np.zeros(count, DTYPE)
    for name in METRICS:
        rows[name] = ABSENT if DTYPE[name].kind == "f" else 0
    for name in fields.keys() & METRIC_COLUMNS.keys():
        columns = METRIC_COLUMNS[name]
        parts = [fields[name]] if name in columns else zip(*fields[name], strict=True)
        for column, values in zip(columns, parts, strict=True):
            dtype = DTYPE[column]
            numbers = np.array(values, np.int64 if dtype.kind == "i" else np.float64)
            if dtype == np.float32:  # larger numbers become the largest one, not infinity
                numbers = np.clip(numbers, -_MAX_FLOAT32, _MAX_FLOAT32)
            rows[column] = numbers
    if "batch" not in fields:
        rows["batch"] = rows["step"] - 1  # older runs did not write it, and skipped no batch
    rows["has_verdict"] = "verdict" in fields
    return rows


# --- Cache ------------------------------------------------------------------------------------


class _CacheHeader(TypedDict):
    """Header of a cache file of metrics, padded with spaces; a `ColumnStore`'s bytes follow."""

    format: fsio.Count
    fields: str
    """`DTYPE` of a row as text: a cache that was written with other columns is not used."""
    known: _Known
    num_rows: fsio.Count
    checksum: int


def _cache_path(path: Path) -> Path:
    """Return the path of a metrics.jsonl's cache, in the user's cache folder, never in a run."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return fsio.cache_folder() / "metrics" / f"{name}.rows"


def _read_cache(path: Path, file: BufferedReader, status: os.stat_result) -> _Source | None:
    """Return the rows of this metrics.jsonl that an earlier process cached; None if unusable."""
    with suppress(OSError, RuntimeError, errors.RecordError, ValueError):
        cache_path = _cache_path(path)
        with fsio.open_regular(cache_path) as cache:
            # A file that another user put there may say anything.
            if os.fstat(cache.fileno()).st_uid != os.getuid():
                return None
            header = fsio.parse_record(cache.read(_HEADER_BYTES), _CacheHeader, cache_path)
            if (header["format"], header["fields"]) != (_CACHE_FORMAT, str(DTYPE)):
                return None
            known = header["known"]
            # A line has at least one byte: more rows than bytes are a damaged header.
            if not _is_prefix(known, file, status) or header["num_rows"] > known["end"]:
                return None
            store = ColumnStore.load(cache, header["num_rows"], header["checksum"])
            return None if store is None else _Source(known, store)
    return None


def _is_prefix(known: _Known, file: BufferedReader, status: os.stat_result) -> bool:
    """Return whether the rows that `known` describes are still the beginning of this file."""
    is_same_file = (known["device"], known["inode"]) == (status.st_dev, status.st_ino)
    # A file that was rewritten may keep its inode and become longer: the hash of both ends tells.
    has_grown = status.st_size > known["size"]
    is_untouched = (known["size"], known["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    return (
        is_same_file
        and (has_grown or is_untouched)
        and known["end"] <= known["size"]
        and known["hash"] == _hash_of_ends(file, known["end"])
    )


def _hash_of_ends(file: BufferedReader, end: int) -> str:
    file.seek(0)
    found = hashlib.sha256(file.read(min(_HASHED_BYTES, end)))
    file.seek(max(0, end - _HASHED_BYTES))
    found.update(file.read(min(_HASHED_BYTES, end)))
    return found.hexdigest()


def _write_cache(path: Path, source: _Source) -> None:
    """Write the rows of metrics.jsonl to the cache file, and use that file in place of memory."""
    cache_path = _cache_path(path)
    cache_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        fsio.atomic_write(cache_path, by_many=True) as partial,
        partial.open("x+b") as cache,
    ):
        # The header is written last, as it has the checksum of what follows it.
        cache.seek(_HEADER_BYTES)
        checksum = source.store.write(cache)
        header = _CacheHeader(
            format=_CACHE_FORMAT,
            fields=str(DTYPE),
            known=source.known,
            num_rows=source.store.num_rows,
            checksum=checksum,
        )
        cache.seek(0)
        cache.write(json.dumps(header).encode().ljust(_HEADER_BYTES))
        cache.flush()
        source.store.read_from(cache, _HEADER_BYTES)
    fsio.remove_oldest(cache_path.parent, _MAX_CACHES)
