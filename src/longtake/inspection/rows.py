"""The lines of metrics.jsonl as columns: read in blocks, and cached for long runs.

Arrow reads a block in which every line has the types of `Metrics`; pydantic reads all others line
by line. Both keep and skip the same lines.
"""

import hashlib
import json
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import json as arrow_json
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from longtake import errors, fsio
from longtake.inspection.columns import ABSENT, DTYPE, SIGMA_NAMES, Column, ColumnStore
from longtake.run_dir import Metrics, RunDirectory

_FIELDS: Final = frozenset(DTYPE.names or ())
_OPTIONAL: Final = (
    *("weight_norm", "update_ratio", "tflops_per_second", "mfu", "peak_memory_bytes"),
    "num_samples",
    *SIGMA_NAMES,
)
_COUNTS = (
    *("step", "epoch", "batch", "num_samples"),
    *("store_bytes", "store_retries", "peak_memory_bytes"),
)
_SPARSE: Final = ("verdict", "store_bytes", "store_seconds", "store_retries", "peak_memory_bytes")
"""Fields that some lines have and others have not."""
_VERDICTS: Final = {None, "skip", "roll_back", "stop"}
_BLOCK_BYTES = 2**21
_NUM_THREADS = 2  # that parse; numpy and Arrow work beside each other
_CACHED_BYTES = 2**24  # fewer new bytes are read again each time: that takes 0.1 s
_MAX_CACHES = 32
_LOOKED_AT_BYTES = 2**16
_HASHED_BYTES = 2**16
_HEADER_BYTES = 2**12
_CACHE_FORMAT = 2
_MAX_COUNT, _MAX_TIME = 2**53, 1e11  # of `Count` and `Timestamp`
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_validate = TypeAdapter(Metrics).validate_json


class _Known(TypedDict):
    """What was read of a metrics.jsonl."""

    device: int
    inode: int
    size: fsio.Count
    mtime_ns: int
    end: fsio.Count
    """Of the last line that was read."""
    hash: str
    """Of the file's first and last bytes up to `end`."""
    num_skipped: fsio.Count


@dataclass
class _Source:
    """The lines of a metrics.jsonl that were read, and the numbers in them."""

    known: _Known
    store: ColumnStore
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def empty(cls) -> "_Source":
        known = _Known(device=0, inode=0, size=0, mtime_ns=0, end=0, hash="", num_skipped=0)
        return cls(known, ColumnStore())


@dataclass(frozen=True)
class MetricRows:
    """The lines of metrics.jsonl, in the order in which they were written."""

    path: Path
    source: _Source
    chosen: range | Column
    """Which lines; an array: their numbers."""
    is_abandoned: NDArray[np.bool_]
    columns: dict[str, Column] = field(default_factory=dict, repr=False, compare=False)
    """Numbers of all these rows that were read, or computed from others."""
    reduced: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `series` has reduced of columns; rows that follow begin with it."""

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
        """Numbers of some rows, with `columns.ABSENT` where the line does not have it.

        Raises:
            RecordError: the cache of them cannot be read.
        """
        if name in self.columns:
            return self.columns[name][first:last]
        lines = self.chosen[first:last]
        if not len(lines):
            return np.empty(0, DTYPE[name])
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
        """`part` of all rows, which is kept."""
        if name not in self.columns:
            self.columns[name] = self.part(name, 0, len(self))
        return self.columns[name]

    def column(self, name: str) -> Column:
        """Numbers by line; NaN: not finite, or not in the line."""
        values = self.raw_column(name)
        if values.dtype.kind != "f" or not (is_absent := values == ABSENT).any():
            return values
        return np.where(is_absent, np.array(np.nan, values.dtype), values)

    def is_recorded(self, name: str) -> NDArray[np.bool_]:
        recorded: NDArray[np.bool_] = self.raw_column(name) != ABSENT
        return recorded

    @property
    def step(self) -> Column:
        return self.raw_column("step")

    @cached_property
    def kept(self) -> "MetricRows":
        return self[~self.is_abandoned] if self.is_abandoned.any() else self

    def step_of_batch(self, batch: int) -> int | None:
        """The step that was last trained on a batch; None: there is none."""
        order, batches = self._by_batch
        place = int(np.searchsorted(batches, batch, side="right")) - 1
        if place < 0 or batches[place] != batch:
            return None
        return int(self.step[order[place]])

    def index_of(self, step: int) -> int | None:
        place = bisect_left(self.step, step)
        return place if place < len(self) and self.step[place] == step else None

    def metrics(self) -> list[Metrics]:
        """The records, read again: for few rows."""
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


def read_rows(run: RunDirectory, before: MetricRows | None = None) -> MetricRows:
    """All rows, those of abandoned steps too; lines that are no records are counted and skipped.

    `before`: what an earlier call returned; only lines that were appended since are read.
    """
    path = run.metrics_path
    source = _Source.empty() if before is None else before.source
    try:
        with source.lock, fsio.open_regular(path) as file:
            source = _updated(path, file, source)
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
    """Whether a later row, or a rollback after the last one, returns to before each step.

    It is decided by steps, not by times: clocks may be set back.
    """
    limit = np.full(len(rows), _MAX_COUNT + 1, np.int64)
    if len(rows):
        limit[:-1] = np.minimum.accumulate(rows.step[:0:-1])[::-1]
        rollbacks = run.rollbacks()
        has_verdict = rows.raw_column("has_verdict")[-1]
        if rollbacks and has_verdict and rows.step[-1] == rollbacks[-1]["from_step"]:
            limit = np.minimum(limit, rollbacks[-1]["to_step"] + 1)
    return rows.step >= limit


# --- Reading ----------------------------------------------------------------------------------


def _updated(path: Path, file: BufferedReader, before: _Source) -> _Source:
    """What was read before, or is in the cache, and all complete lines after it."""
    status = os.fstat(file.fileno())
    is_usable = before.known["end"] and _is_prefix(before.known, file, status)
    source = before if is_usable else _read_cache(path, file, status) or _Source.empty()
    known = source.known
    first, end, num_skipped = known["end"], known["end"], known["num_skipped"]
    if (known["size"], known["mtime_ns"]) != (status.st_size, status.st_mtime_ns):
        known["hash"] = ""  # unusable, until all is read
        if status.st_size - first >= _CACHED_BYTES:
            with suppress(OSError, RuntimeError), TemporaryFile(dir=_cache_folder(path)) as spilled:
                source.store.spill_to(spilled)
        for found, num_bad, after in _parsed(file, first, status.st_size):
            source.store.append(found)
            num_skipped, end = num_skipped + num_bad, after
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
    if end - first >= _CACHED_BYTES:
        with suppress(OSError, RuntimeError):  # no room, no permission, no home: read again
            _write_cache(path, source)
    return source


def _parsed(file: BufferedReader, offset: int, size: int) -> Iterator[tuple[Column, int, int]]:
    """The rows of each block, how many of its lines are no records, and the offset after it."""
    blocks = _blocks(file, offset, size)
    if size - offset <= _BLOCK_BYTES:
        yield from ((*_parse(begin, block), after) for begin, block, after in blocks)
        return
    with ThreadPoolExecutor(_NUM_THREADS, "longtake-rows") as pool:
        pending = deque[tuple[Future[tuple[Column, int]], int]]()
        for begin, block, after in blocks:
            pending.append((pool.submit(_parse, begin, block), after))
            if len(pending) > _NUM_THREADS:
                done, end = pending.popleft()
                yield *done.result(), end
        for done, end in pending:
            yield *done.result(), end


def _blocks(file: BufferedReader, offset: int, size: int) -> Iterator[tuple[int, bytes, int]]:
    """Blocks of complete lines: the offset, the bytes, and the offset after them.

    Of a line that is longer than a block, only the beginning is in its block.
    """
    while offset < size:
        file.seek(offset)
        block = file.read(min(_BLOCK_BYTES, size - offset))
        length = block.rfind(b"\n") + 1
        if length:
            yield offset, block[:length], offset + length
            offset += length
        elif len(block) < _BLOCK_BYTES:
            return
        else:
            after = offset + len(block) + _length_of_rest(file, size - offset - len(block))
            if after > size:
                return
            yield offset, block[: fsio.MAX_LINE_BYTES + 1] + b"\n", after
            offset = after


def _length_of_rest(file: BufferedReader, limit: int) -> int:
    """Bytes up to the next newline and with it; more than `limit` if there is none before it."""
    length = 0
    while length < limit:
        data = file.readline(min(_BLOCK_BYTES, limit - length))
        length += len(data)
        if data.endswith(b"\n") or not data:
            return length if data else limit + 1
    return limit + 1


def _parse(offset: int, block: bytes) -> tuple[Column, int]:
    """The rows in a block of lines, and how many lines are no records."""
    octets = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(octets == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    rows, invalid = None, np.zeros(len(ends), bool)
    if _is_safe_for_arrow(block, octets, starts, ends):
        with suppress(pa.ArrowException, pa.ArrowInvalid):
            rows, doubtful = _parse_by_arrow(block, len(ends))
    if rows is None:
        rows, doubtful = np.zeros(len(ends), DTYPE), np.arange(len(ends))
    num_blank = 0
    for index in doubtful.tolist():
        line = block[starts[index] : ends[index]]
        try:
            if len(line) > fsio.MAX_LINE_BYTES or fsio.is_nested_deeper(line, fsio.MAX_LINE_DEPTH):
                raise ValueError
            _fill(rows[index : index + 1], _validate(line, strict=True))
        except ValueError:  # pydantic's is one
            invalid[index] = True
            num_blank += not line.strip()
    rows["offset"] = starts + offset
    num_invalid = int(invalid.sum())
    return (rows[~invalid] if num_invalid else rows), num_invalid - num_blank


def _fill(row: Column, metrics: Metrics) -> None:
    row["batch"] = metrics["step"] - 1  # longtake before 0.1 wrote none, and skipped none
    for name in _OPTIONAL:
        row[name] = ABSENT
    for name, value in metrics.items():
        if name in _FIELDS:
            row[name] = _within_float32(np.nan if value is None else value, row.dtype[name])
    for name, value in zip(SIGMA_NAMES, metrics.get("loss_by_sigma", ()), strict=False):
        row[name] = _within_float32(np.nan if value is None else value, row.dtype[name])
    row["has_verdict"] = "verdict" in metrics


def _within_float32(values: Any, dtype: np.dtype[Any]) -> Any:
    """Larger numbers become the largest one, not infinity."""
    if dtype != np.float32:
        return values
    return np.where(values == ABSENT, ABSENT, np.clip(values, -_MAX_FLOAT32, _MAX_FLOAT32))


def _is_safe_for_arrow(block: bytes, octets: Column, starts: Column, ends: Column) -> bool:
    """Whether each line is one object, short and not nested deeply; texts are plain ASCII.

    What Arrow reads otherwise than pydantic, or with its stack, is left to pydantic.
    """
    if int((ends - starts).max()) > fsio.MAX_LINE_BYTES or not block.isascii() or b"\\" in block:
        return False
    if not ((octets[starts] == ord("{")).all() and (octets[ends - 1] == ord("}")).all()):
        return False
    opening = np.flatnonzero((octets == ord("{")) | (octets == ord("[")))
    per_line = np.diff(np.searchsorted(opening, ends), prepend=0)
    return int(per_line.max()) <= fsio.MAX_LINE_DEPTH


def _parse_by_arrow(block: bytes, num_lines: int) -> tuple[Column, Column] | tuple[None, Column]:
    """The rows, and the indices of those that pydantic has to read; None: it has to read all."""
    nothing = None, np.empty(0, np.int64)
    try:
        first = _validate(block[: block.index(b"\n")], strict=True)
    except ValidationError:
        return nothing
    schema = _schema(first, block[:_LOOKED_AT_BYTES])
    if schema is None:
        return nothing
    try:
        table = _read_json(block, schema)
    except pa.ArrowInvalid:  # perhaps further on are fields that the beginning does not have
        schema = _schema(first, block)
        table = _read_json(block, schema)
    if table.num_rows != num_lines:
        return nothing
    doubtful = np.zeros(num_lines, bool)  # a field is null or missing: Arrow does not say which
    rows = np.zeros(num_lines, DTYPE)
    for name in _OPTIONAL:
        rows[name] = ABSENT
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not _are_in_range(name, column):
            return nothing
        if column.null_count and not _is_only_absent(name, column, block):
            doubtful |= column.is_null().to_numpy()
        if name == "loss_by_sigma":
            _put_quarters(rows, column)
        elif name in _FIELDS:
            if column.null_count:
                is_optional = name in _OPTIONAL
                column = column.cast(pa.float64()) if is_optional else column
                column = column.fill_null(ABSENT if is_optional else 0)
            rows[name] = _within_float32(column.to_numpy(), rows.dtype[name])
        elif name == "verdict":
            if not {each.as_py() for each in column.unique()} <= _VERDICTS:
                return nothing
            rows["has_verdict"] = column.is_valid().to_numpy()
    if "batch" not in table.column_names:
        rows["batch"] = rows["step"] - 1
    return rows, np.flatnonzero(doubtful)


def _read_json(block: bytes, schema: pa.Schema) -> pa.Table:
    return arrow_json.read_json(
        pa.BufferReader(block),
        arrow_json.ReadOptions(use_threads=False, block_size=len(block)),
        arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    )


def _is_only_absent(name: str, column: pa.ChunkedArray, block: bytes) -> bool:
    """Whether each line that has no number in a field does not have the field."""
    if name in Metrics.__required_keys__ or name == "batch":
        return False
    num_there = len(column) - column.null_count
    return bool(block.count(b'"%s"' % name.encode()) == num_there)


def _put_quarters(rows: Column, lists: pa.ChunkedArray) -> None:
    values = pc.list_flatten(lists).to_numpy().reshape(-1, len(SIGMA_NAMES))  # null: NaN
    is_there = lists.is_valid().to_numpy() if lists.null_count else slice(None)
    for quarter, name in enumerate(SIGMA_NAMES):
        rows[name][is_there] = _within_float32(values[:, quarter], rows.dtype[name])


def _schema(metrics: Mapping[str, Any], text: bytes) -> pa.Schema | None:
    """Arrow's types of the fields of a record, and of the sparse ones that are in the text.

    None: the record has fields that `Metrics` has not.
    """
    if not metrics.keys() <= Metrics.__annotations__.keys():
        return None
    types = {name: _type(name, value) for name, value in metrics.items()}
    for name in _SPARSE:
        if name not in types and b'"%s"' % name.encode() in text:
            types[name] = _type(name, "" if name == "verdict" else 0.0)
    return pa.schema(types)


def _type(name: str, value: object) -> pa.DataType:
    match value:
        case str():
            return pa.string()
        case dict():
            return pa.struct([(key, pa.float64()) for key in value])
        case list():
            return pa.list_(pa.float64())
        case _:
            return pa.int64() if name in _COUNTS else pa.float64()


def _are_in_range(name: str, column: pa.ChunkedArray) -> bool:
    """Whether numbers are finite, counts and times within their limits, and lists have 4 items."""
    if pa.types.is_string(column.type):
        return True
    if pa.types.is_struct(column.type):
        return all(_are_in_range(name, each) for each in column.flatten())
    if pa.types.is_list(column.type):
        lengths = pc.min_max(pc.list_value_length(column)).as_py()
        return set(lengths.values()) <= {4, None} and _are_in_range(name, pc.list_flatten(column))
    values = column.drop_null().to_numpy()
    if not len(values):
        return True
    low, high = values.min(), values.max()  # NaN if one is NaN
    if pa.types.is_integer(column.type):
        return bool(low >= 0 and high <= _MAX_COUNT)
    if name == "time":
        return bool(low >= 0 and high <= _MAX_TIME)
    return bool(np.isfinite(low) and np.isfinite(high))


# --- Cache ------------------------------------------------------------------------------------


class _CacheHeader(TypedDict):
    """The beginning of a cache, filled up with spaces; the bytes of a `ColumnStore` follow."""

    format: fsio.Count
    fields: str
    """Those of `DTYPE`."""
    known: _Known
    num_rows: fsio.Count
    checksum: int


def _cache_path(path: Path) -> Path:
    """In the user's cache folder: inspection writes nothing in a run directory."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return fsio.cache_folder() / "metrics" / f"{name}.rows"


def _cache_folder(path: Path) -> Path:
    folder = _cache_path(path).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _read_cache(path: Path, file: BufferedReader, status: os.stat_result) -> _Source | None:
    """What an earlier process read of this file; None: there is no usable cache."""
    with suppress(OSError, RuntimeError, errors.RecordError, ValueError):
        cache_path = _cache_path(path)
        with fsio.open_regular(cache_path) as cache:
            if os.fstat(cache.fileno()).st_uid != os.getuid():
                return None
            header = fsio.parse_record(cache.read(_HEADER_BYTES), _CacheHeader, cache_path)
            if (header["format"], header["fields"]) != (_CACHE_FORMAT, str(DTYPE)):
                return None
            known = header["known"]
            if not _is_prefix(known, file, status) or header["num_rows"] > known["end"]:
                return None
            store = ColumnStore.load(cache, header["num_rows"], header["checksum"])
            return None if store is None else _Source(known, store)
    return None


def _is_prefix(known: _Known, file: BufferedReader, status: os.stat_result) -> bool:
    """Whether it is of this file as it is now, or as it was before lines were appended."""
    is_same_file = (known["device"], known["inode"]) == (status.st_dev, status.st_ino)
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
    """Write the cache, and from then on read full blocks from it."""
    cache_path, folder = _cache_path(path), _cache_folder(path)
    with (
        fsio.atomic_write(cache_path, by_many=True) as partial,
        partial.open("x+b") as cache,
    ):
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
        source.store.keep_in(cache, _HEADER_BYTES)
    fsio.remove_oldest(folder, _MAX_CACHES)
