"""The lines of metrics.jsonl as columns: read in blocks, and cached for long runs.

Arrow reads a block in which every line has the types of `Metrics`; pydantic reads all others line
by line. Both keep and skip the same lines.
"""

import hashlib
import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import json as arrow_json
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from longtake import errors, fsio
from longtake.run_dir import Metrics, RunDirectory

_DTYPE: Final = np.dtype(
    [
        ("offset", "<i8"),  # of the line in the file
        ("step", "<i8"),
        ("batch", "<i8"),
        ("time", "<f8"),
        ("step_seconds", "<f8"),
        ("loss", "<f8"),  # NaN, here and below: it was not finite
        ("grad_norm", "<f8"),
        ("weight_norm", "<f8"),
        ("has_weight_norm", "?"),
        ("has_verdict", "?"),
    ]
)
_FIELDS: Final = frozenset(_DTYPE.names or ())
_BLOCK_BYTES = 2**22
_ARROW_BLOCK_BYTES = 2**20
_CACHED_BYTES = 2**24  # fewer new bytes are read again each time: that takes 0.1 s
_MAX_CACHES = 32
_HASHED_BYTES = 2**16
_CACHE_FORMAT = 1
_MAX_COUNT, _MAX_TIME = 2**53, 1e11  # of `Count` and `Timestamp`

Column = NDArray[Any]
_validate = TypeAdapter(Metrics).validate_json


@dataclass(frozen=True)
class MetricRows:
    """The lines of metrics.jsonl, in the order in which they were written."""

    path: Path
    table: Column
    is_abandoned: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, chosen: Column | slice) -> "MetricRows":
        return MetricRows(self.path, self.table[chosen], self.is_abandoned[chosen])

    @property
    def step(self) -> Column:
        return self.table["step"]

    @cached_property
    def kept(self) -> "MetricRows":
        return self[~self.is_abandoned] if self.is_abandoned.any() else self

    def passes(self) -> "list[MetricRows]":
        starts = np.flatnonzero(np.diff(self.step) <= 0) + 1
        edges = [0, *starts.tolist(), len(self)]
        return [self[start:end] for start, end in pairwise(edges) if end > start]

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
                for offset in self.table["offset"].tolist():
                    file.seek(offset)
                    found.append(_validate(file.readline(fsio.MAX_LINE_BYTES + 1), strict=True))
        except (OSError, ValidationError) as error:
            raise errors.RecordError(
                self.path, "it changed while it was read; run the same command again"
            ) from error
        return found

    @cached_property
    def _by_batch(self) -> tuple[Column, Column]:
        order = np.argsort(self.table["batch"], kind="stable")
        return order, self.table["batch"][order]


def read_rows(run: RunDirectory) -> MetricRows:
    """All rows, those of abandoned steps too; lines that are no records are counted and skipped."""
    path = run.metrics_path
    try:
        with fsio.open_regular(path) as file:
            table = _read_table(path, file)
    except OSError as error:
        if not fsio.is_missing(error):
            raise errors.RecordError(path, error.strerror or str(error)) from error
        table = np.empty(0, _DTYPE)
    rows = MetricRows(path, table, np.zeros(len(table), bool))
    return MetricRows(path, table, _abandoned(rows, run))


def _abandoned(rows: MetricRows, run: RunDirectory) -> NDArray[np.bool_]:
    """Whether a later row, or a rollback after the last one, returns to before each step.

    It is decided by steps, not by times: clocks may be set back.
    """
    limit = np.full(len(rows), _MAX_COUNT + 1, np.int64)
    if len(rows):
        limit[:-1] = np.minimum.accumulate(rows.step[:0:-1])[::-1]
        rollbacks, last = run.rollbacks(), rows.table[-1]
        if rollbacks and last["has_verdict"] and last["step"] == rollbacks[-1]["from_step"]:
            limit = np.minimum(limit, rollbacks[-1]["to_step"] + 1)
    return rows.step >= limit


# --- Reading ----------------------------------------------------------------------------------


def _read_table(path: Path, file: BufferedReader) -> Column:
    status = os.fstat(file.fileno())
    table, first, num_skipped = _read_cache(path, file, status) or (np.empty(0, _DTYPE), 0, 0)
    num_rows, end = len(table), first
    for offset, block, after in _blocks(file, first, status.st_size):
        found, num_bad = _parse(offset, block)
        num_skipped, end, needed = num_skipped + num_bad, after, num_rows + len(found)
        if needed > len(table):  # grows in place: a copy takes the memory of all rows once more
            left = (status.st_size - end) * len(found) / len(block)
            table.resize(needed + int(1.02 * left), refcheck=False)
        table[num_rows:needed] = found
        num_rows = needed
    table.resize(num_rows, refcheck=False)
    fsio.note_skipped_lines(path, num_skipped)
    if end - first >= _CACHED_BYTES:
        with suppress(OSError, RuntimeError):  # no room, no permission, no home: read again
            _write_cache(path, file, status, table, end, num_skipped)
    return table


def _blocks(file: BufferedReader, offset: int, size: int) -> Iterator[tuple[int, bytes, int]]:
    """Blocks of complete lines: the offset, the bytes, and the offset after them.

    Of a line that is longer than a block, only the beginning is in its block.
    """
    file.seek(offset)
    rest = b""
    while data := file.read(min(_BLOCK_BYTES, size - offset - len(rest))):
        block = rest + data if rest else data
        length = block.rfind(b"\n") + 1
        if length:
            yield offset, block[:length], offset + length
            offset, rest = offset + length, block[length:]
        elif len(block) < _BLOCK_BYTES:
            rest = block
        else:
            after = offset + len(block) + _length_of_rest(file, size - offset - len(block))
            if after > size:
                return
            yield offset, block[: fsio.MAX_LINE_BYTES + 1] + b"\n", after
            offset, rest = after, b""


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
        rows, doubtful = np.zeros(len(ends), _DTYPE), np.arange(len(ends))
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
    for name in ("step", "batch", "time", "step_seconds", "loss", "grad_norm", "weight_norm"):
        if name in metrics:
            value = metrics[name]
            row[name] = np.nan if value is None else value
    if "weight_norm" not in metrics:
        row["weight_norm"] = np.nan
    row["has_weight_norm"], row["has_verdict"] = "weight_norm" in metrics, "verdict" in metrics


def _is_safe_for_arrow(block: bytes, octets: Column, starts: Column, ends: Column) -> bool:
    """Whether each line is one object, short and not nested deeply; texts are plain ASCII.

    What Arrow reads otherwise than pydantic, or with its stack, is left to pydantic.
    """
    if int((ends - starts).max()) > fsio.MAX_LINE_BYTES or not block.isascii() or b"\\" in block:
        return False
    if not ((octets[starts] == ord("{")).all() and (octets[ends - 1] == ord("}")).all()):
        return False
    opening = np.flatnonzero((octets | 0x20) == ord("{"))  # and "[", which differs in that bit
    per_line = np.diff(np.searchsorted(opening, ends), prepend=0)
    return int(per_line.max()) <= fsio.MAX_LINE_DEPTH


def _parse_by_arrow(block: bytes, num_lines: int) -> tuple[Column, Column] | tuple[None, Column]:
    """The rows, and the indices of those that pydantic has to read; None: it has to read all."""
    nothing = None, np.empty(0, np.int64)
    try:
        first = _validate(block[: block.index(b"\n")], strict=True)
    except ValidationError:
        return nothing
    schema = _schema(first)
    if schema is None:
        return nothing
    table = arrow_json.read_json(
        pa.BufferReader(block),
        arrow_json.ReadOptions(block_size=_ARROW_BLOCK_BYTES),
        arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    )
    verdicts = table.column("verdict")
    num_verdicts = num_lines - verdicts.null_count
    if table.num_rows != num_lines or block.count(b'"verdict"') != num_verdicts:
        return nothing
    if not {each.as_py() for each in verdicts.unique()} <= {None, "skip", "roll_back", "stop"}:
        return nothing
    has_verdict = verdicts.is_valid().to_numpy()
    doubtful = np.zeros(num_lines, bool)  # a field is null or missing: Arrow does not say which
    rows = np.zeros(num_lines, _DTYPE)
    for name in schema.names:
        column = table.column(name)
        if name != "verdict" and column.null_count:
            doubtful |= column.is_null().to_numpy()
        if not _are_in_range(name, column):
            return nothing
        if name in _FIELDS:
            values = column.fill_null(0) if column.null_count else column
            rows[name] = values.to_numpy()
    rows["has_verdict"] = has_verdict
    rows["has_weight_norm"] = "weight_norm" in schema.names
    if "weight_norm" not in schema.names:
        rows["weight_norm"] = np.nan
    if "batch" not in schema.names:
        rows["batch"] = rows["step"] - 1
    return rows, np.flatnonzero(doubtful)


def _schema(metrics: Mapping[str, Any]) -> pa.Schema | None:
    """Arrow's types of the fields of a record; None if it has fields that `Metrics` has not."""
    if not metrics.keys() <= Metrics.__annotations__.keys():
        return None
    types = {}
    for name, value in metrics.items():
        if name in ("step", "epoch", "batch"):
            types[name] = pa.int64()
        elif isinstance(value, dict):
            types[name] = pa.struct([(key, pa.float64()) for key in value])
        elif isinstance(value, list):
            types[name] = pa.list_(pa.float64())
        else:
            types[name] = pa.string() if isinstance(value, str) else pa.float64()
    return pa.schema({**types, "verdict": pa.string()})


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
    """The first line of a cache; the bytes of the table follow."""

    format: fsio.Count
    fields: str
    """Those of `_DTYPE`."""
    device: int
    inode: int
    size: fsio.Count
    mtime_ns: int
    end: fsio.Count
    """Of the last line that was read."""
    hash: str
    """Of the file's first and last bytes up to `end`."""
    num_rows: fsio.Count
    num_skipped: fsio.Count
    checksum: fsio.Count
    """CRC-32 of the table."""


def _cache_path(path: Path) -> Path:
    """Readers write nothing into a run: the cache is in the user's folder of caches."""
    top = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(top) if top.startswith("/") else Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return folder / "longtake" / "metrics" / f"{name}.rows"


def _read_cache(
    path: Path, file: BufferedReader, status: os.stat_result
) -> tuple[Column, int, int] | None:
    """The table, its last line's end, and the number of skipped lines; None: no usable cache."""
    with suppress(OSError, RuntimeError, errors.RecordError, ValueError):
        cache_path = _cache_path(path)
        with fsio.open_regular(cache_path) as cache:
            if os.fstat(cache.fileno()).st_uid != os.getuid():
                return None
            header = fsio.parse_record(cache.readline(_HASHED_BYTES), _CacheHeader, cache_path)
            if not _is_prefix(header, file, status):
                return None
            table = np.zeros(header["num_rows"], _DTYPE)
            octets = table.view(np.uint8).data
            if cache.readinto(octets) == len(octets) and zlib.crc32(octets) == header["checksum"]:
                return table, header["end"], header["num_skipped"]
    return None


def _is_prefix(header: _CacheHeader, file: BufferedReader, status: os.stat_result) -> bool:
    """Whether a cache is of this file as it is now, or as it was before lines were appended."""
    is_same_file = (header["device"], header["inode"]) == (status.st_dev, status.st_ino)
    has_grown = status.st_size > header["size"]
    is_untouched = (header["size"], header["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    return (
        (header["format"], header["fields"]) == (_CACHE_FORMAT, str(_DTYPE))
        and is_same_file
        and (has_grown or is_untouched)
        and header["num_rows"] <= header["end"] <= header["size"]
        and header["hash"] == _hash_of_ends(file, header["end"])
    )


def _hash_of_ends(file: BufferedReader, end: int) -> str:
    file.seek(0)
    found = hashlib.sha256(file.read(min(_HASHED_BYTES, end)))
    file.seek(max(0, end - _HASHED_BYTES))
    found.update(file.read(min(_HASHED_BYTES, end)))
    return found.hexdigest()


def _write_cache(
    path: Path,
    file: BufferedReader,
    status: os.stat_result,
    table: Column,
    end: int,
    num_skipped: int,
) -> None:
    octets = table.view(np.uint8).data
    header = _CacheHeader(
        format=_CACHE_FORMAT,
        fields=str(_DTYPE),
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        end=end,
        hash=_hash_of_ends(file, end),
        num_rows=len(table),
        num_skipped=num_skipped,
        checksum=zlib.crc32(octets),
    )
    cache_path = _cache_path(path)
    folder = cache_path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with fsio.atomic_write(cache_path, by_many=True) as partial, partial.open("xb") as cache:
        cache.write(json.dumps(header).encode() + b"\n")
        cache.write(octets)
    by_age = sorted(folder.glob("*.rows"), key=lambda each: each.stat().st_mtime)
    for old in by_age[:-_MAX_CACHES]:
        old.unlink(missing_ok=True)
