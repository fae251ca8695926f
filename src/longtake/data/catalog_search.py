"""Finds clips in a catalog of any size by their identities, without reading all of it."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq

from longtake.data import catalog as tables
from longtake.data.clip import Clip
from longtake.data.ledger import IDENTITY_BYTES

_ROWS_AT_A_TIME = 4096


def find_clips(path: Path, identities: Collection[bytes], most_groups: int | None) -> list[Clip]:
    """Return a catalog's clips with these identities, or with identities that begin so.

    At most `most_groups` groups of rows that have such clips are read; None: any number. The
    fingerprint is not verified, because that needs all clips.

    Raises:
        DataError: the file is missing, not a catalog, damaged where it was read, or of another
            version.
    """
    tables.check_version(path)
    if not identities:
        return []
    with tables.damage_named(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        schema = tables.disk_schema(file.schema_arrow)
        found: list[pa.Table] = []
        groups = 0
        for group in range(file.metadata.num_row_groups):
            if groups == most_groups:
                break
            # pyarrow could leave groups out by the smallest and largest identity that the file
            # notes for each, but one wrong bit in these notes ends the process.
            wanted = _is_wanted(file.read_row_group(group, ["identity", "reason"]), identities)
            groups += bool(pc.any(wanted).as_py())
            found += _rows_of(file, group, wanted)
        if not found:
            return []
        rows = tables.with_whole_paths(pa.concat_tables(found), schema, f"{path.resolve().parent}/")
        rows = rows.drop_columns(["reason"]).replace_schema_metadata(None)
        tables.check_rows(rows, tables.ASIDE_SCHEMA.empty_table())
        attributes = tables.names_after(tables.ATTRIBUTE, schema.names)
        return [tables.clip_of(row, attributes) for row in rows.to_pylist()]


def _is_wanted(rows: pa.Table, beginnings: Iterable[bytes]) -> pa.ChunkedArray:
    """Whether each row is a clip whose identity is one of these, or begins so."""
    identity = rows["identity"]
    is_wanted = pa.chunked_array([pa.repeat(False, rows.num_rows)])
    for each in beginnings:
        first, last = (
            pa.scalar(each.ljust(identity.type.byte_width, rest), identity.type)
            for rest in (b"\0", b"\xff")
        )
        is_between = pc.and_(pc.greater_equal(identity, first), pc.less_equal(identity, last))
        is_wanted = pc.or_(is_wanted, pc.fill_null(is_between, False))
    return pc.and_(is_wanted, pc.is_null(rows["reason"]))


def _rows_of(file: pq.ParquetFile, group: int, wanted: pa.ChunkedArray) -> Iterator[pa.Table]:
    """Read a group's wanted rows, a few at a time: lists of timestamps may not fit into memory."""
    start, left = 0, pc.sum(wanted).as_py() or 0
    for batch in file.iter_batches(_ROWS_AT_A_TIME, row_groups=[group], use_threads=False):
        if not left:
            return
        rows = pa.Table.from_batches([batch]).filter(wanted.slice(start, batch.num_rows))
        if rows.num_rows:
            yield rows
        start, left = start + batch.num_rows, left - rows.num_rows


def find_in_catalogs(
    paths: Iterable[Path], identities: Iterable[str], most_groups: int | None = None
) -> dict[str, Clip]:
    """Return clips by identities or their beginnings; earlier catalogs are searched first.

    Raises:
        DataError: a catalog that is searched is damaged.
    """
    # The ledger keeps the first bytes of an identity only, so that is what is compared.
    left, found = {bytes.fromhex(each)[:IDENTITY_BYTES]: each for each in identities}, {}
    for path in paths:
        if not left:
            break
        for clip in find_clips(path, left, most_groups):
            name = left.pop(bytes.fromhex(clip.identity)[:IDENTITY_BYTES], None)
            if name is not None:
                found[name] = clip
    return found
