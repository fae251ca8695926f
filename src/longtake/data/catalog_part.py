"""A part of a catalog of any size, for readers that only look at it.

Clips are sorted by the hash of their content, so the first ones are a fair sample of all.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from longtake.data import catalog as tables
from longtake.data.catalog import ASIDE_SCHEMA, ATTRIBUTE, Catalog, check_rows, with_whole_paths
from longtake.data.clip import Clip
from longtake.data.ledger import short_identity

_ROWS_AT_A_TIME: Final = 4096
_BUFFER_BYTES: Final = 2**16
_MOST_BYTES: Final = 64 * 2**20
_MOST_SET_ASIDE: Final = 50_000


@dataclass(frozen=True)
class CatalogPart:
    """The first clips of a catalog, with the numbers that are known without reading all of it."""

    catalog: Catalog
    """The clips, without timestamps of frames and with keyframes that are only counted."""
    num_clips: int
    """Number of all clips in the file."""
    num_set_aside: int
    """Number of all rejected files and further copies of clips in the file."""

    @property
    def is_whole(self) -> bool:
        return len(self.catalog) == self.num_clips

    @property
    def scale(self) -> float:
        """Factor that scales counts of this part to estimates for the whole file."""
        return self.num_clips / max(1, len(self.catalog))


def read_part(path: Path, most_clips: int, most_bytes: int = _MOST_BYTES) -> CatalogPart:
    """Read the first clips and the first files that were set aside.

    The fingerprint is not verified, because that needs all clips.

    Raises:
        DataError: the file is missing, not a catalog, damaged where it was read, or of another
            version.
    """
    tables.check_version(path)
    with (
        tables.damage_named(path),
        pq.ParquetFile(path, page_checksum_verification=True, buffer_size=_BUFFER_BYTES) as file,
    ):
        schema, counts = tables.disk_schema(file.schema_arrow), _clips_by_group(file)
        clips = list(_clips(file, schema, counts, path, most_clips, most_bytes))
        set_aside = _set_aside(file, counts, path)
        num_rows, num_clips = file.metadata.num_rows, sum(counts)
        table = pa.concat_tables(clips) if clips else schema.empty_table().drop_columns(["reason"])
        stored = (schema.metadata or {}).get(tables.FINGERPRINT_KEY, b"").decode(errors="replace")
        table = table.replace_schema_metadata(None)
    return CatalogPart(Catalog(table, set_aside, stored or "-"), num_clips, num_rows - num_clips)


def find_clips(path: Path, identities: Collection[bytes], most_groups: int) -> list[Clip]:
    """Return the clips with given identities, or first 7 bytes of them.

    At most `most_groups` groups of rows are read.

    Raises:
        DataError: as in `read_part`.
    """
    wanted = sorted(identities)
    tables.check_version(path)
    with (
        tables.damage_named(path),
        pq.ParquetFile(path, page_checksum_verification=True, buffer_size=_BUFFER_BYTES) as file,
    ):
        schema, counts = tables.disk_schema(file.schema_arrow), _clips_by_group(file)
        names = [each for each in schema.names if each.startswith(ATTRIBUTE)]
        attributes = [each.removeprefix(ATTRIBUTE) for each in names]
        groups = [n for n, count in enumerate(counts) if count and _may_hold(file, n, wanted)]
        found = list[Clip]()
        for group in groups[:most_groups]:
            rows = _places(file, group, counts[group], wanted)
            if len(rows):
                table = _rows_at(file, schema, group, rows, path)
                found += [tables.clip_of(row, attributes) for row in table.to_pylist()]
    return found


def _clips_by_group(file: pq.ParquetFile) -> list[int]:
    """Return the number of clips in each group of rows; further rows are files set aside."""
    metadata, found = file.metadata, []
    column = _column(file, "reason")
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group)
        statistics = rows.column(column).statistics
        # Statistics in the footer save reading the column.
        if statistics is not None and statistics.has_null_count:
            count = int(statistics.null_count)
        else:
            count = file.read_row_group(group, ["reason"])["reason"].null_count
        found.append(max(0, min(count, rows.num_rows)))
    return found


def _column(file: pq.ParquetFile, name: str) -> int:
    schema = file.metadata.schema
    return [schema.column(index).path for index in range(len(schema.names))].index(name)


def _clips(
    file: pq.ParquetFile,
    schema: pa.Schema,
    counts: Sequence[int],
    path: Path,
    most_clips: int,
    most_bytes: int,
) -> Iterator[pa.Table]:
    """Yield the first clips in batches, checked."""
    groups = [group for group, count in enumerate(counts) if count]
    left, folder = most_clips, f"{path.resolve().parent}/"
    last = b""
    for batch in file.iter_batches(_ROWS_AT_A_TIME, groups, schema.names):
        rows = with_whole_paths(pa.Table.from_batches([batch]), schema, folder)
        rows = rows.slice(0, min(left, rows["reason"].null_count)).drop_columns(["reason"])
        if not len(rows):
            return
        check_rows(rows, ASIDE_SCHEMA.empty_table())
        # Batches are checked one by one, so their borders are compared here.
        if rows["identity"][0].as_py() <= last:
            raise ValueError("its clips are not sorted by identity, each there once")
        last = rows["identity"][-1].as_py()
        rows = _without_frames(rows)
        left, most_bytes = left - len(rows), most_bytes - rows.nbytes
        yield rows
        if left <= 0 or most_bytes <= 0:
            return


def _without_frames(rows: pa.Table) -> pa.Table:
    """Replace lists of timestamps and keyframes by their lengths, as they grow with the videos."""
    keyframes = tables.one_array(rows["keyframes"])
    # Lists of nulls keep their lengths and take no memory.
    lengths = pc.list_value_length(keyframes).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    counted = pa.ListArray.from_arrays(offsets, pa.nulls(int(lengths.sum())))
    pts = tables.one_array(rows["pts"])
    empty = pa.array([[] if each else None for each in pts.is_valid().to_pylist()], pts.type)
    rows = rows.set_column(rows.column_names.index("keyframes"), "keyframes", counted)
    return rows.set_column(rows.column_names.index("pts"), "pts", empty)


def _set_aside(file: pq.ParquetFile, counts: Sequence[int], path: Path) -> pa.Table:
    """Return the first rejected files and copies of clips: the rows that are not clips."""
    names, left, found = ASIDE_SCHEMA.names, _MOST_SET_ASIDE, [ASIDE_SCHEMA.empty_table()]
    folder = f"{path.resolve().parent}/"
    sizes = (file.metadata.row_group(group).num_rows for group in range(len(counts)))
    groups = [n for n, (size, count) in enumerate(zip(sizes, counts, strict=True)) if size > count]
    if groups:
        for batch in file.iter_batches(_ROWS_AT_A_TIME, groups, names):
            rows = pa.Table.from_batches([batch])
            rows = rows.filter(pc.is_valid(rows["reason"])).slice(0, left)
            if rows["path"].null_count:
                raise ValueError("a file that was set aside has no path")
            found.append(with_whole_paths(rows, ASIDE_SCHEMA, folder))
            left -= len(rows)
            if left <= 0:
                break
    return pa.concat_tables(found).combine_chunks()


def _may_hold(file: pq.ParquetFile, group: int, wanted: Sequence[bytes]) -> bool:
    """Return whether a group of rows may hold an identity, by the file's minimum and maximum."""
    statistics = file.metadata.row_group(group).column(_column(file, "identity")).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    # Compared by beginnings, as only the first bytes of an identity may be known.
    low, high = statistics.min, statistics.max
    return any(low[: len(each)] <= each <= high[: len(each)] for each in wanted)


def _places(
    file: pq.ParquetFile, group: int, num_clips: int, wanted: Sequence[bytes]
) -> NDArray[np.int64]:
    """Return the rows in a group whose identities start with the same 7 bytes as a wanted one."""
    column = file.read_row_group(group, ["identity"])["identity"].slice(0, num_clips)
    if column.null_count:
        raise ValueError("a clip has no identity")
    octets = np.frombuffer(b"".join(column.to_pylist()), np.uint8).reshape(num_clips, -1)
    names = np.frombuffer(b"".join(each[:7] for each in wanted), np.uint8).reshape(-1, 7)
    return np.flatnonzero(np.isin(short_identity(octets), short_identity(names)))


def _rows_at(
    file: pq.ParquetFile, schema: pa.Schema, group: int, rows: NDArray[np.int64], path: Path
) -> pa.Table:
    folder, first, found = f"{path.resolve().parent}/", 0, []
    for batch in file.iter_batches(_ROWS_AT_A_TIME, [group], schema.names):
        # Batch by batch: a group with long lists of timestamps may not fit into memory.
        here = rows[(rows >= first) & (rows < first + len(batch))] - first
        if len(here):
            some = pa.Table.from_batches([batch]).take(pa.array(here))
            found.append(with_whole_paths(some, schema, folder).drop_columns(["reason"]))
        first += len(batch)
        if first > rows[-1]:
            break
    table = pa.concat_tables(found)
    check_rows(table, ASIDE_SCHEMA.empty_table())
    values: Any = table.replace_schema_metadata(None)
    return values
