"""Finds clips in a catalog of any size by their identities, without reading all of it."""

from collections.abc import Collection
from functools import reduce
from operator import or_
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from longtake.data import catalog as tables
from longtake.data.catalog import ASIDE_SCHEMA, ATTRIBUTE
from longtake.data.clip import Clip

_ROWS_AT_A_TIME = 4096


def find_clips(path: Path, identities: Collection[bytes], most_groups: int) -> list[Clip]:
    """Return the clips with given identities, or with given beginnings of identities.

    At most `most_groups` groups of rows are read. The fingerprint is not verified, because that
    needs all clips.

    Raises:
        DataError: the file is missing, not a catalog, damaged where it was read, or of another
            version.
    """
    tables.check_version(path)
    if not identities:
        return []
    kind = tables.CLIP_SCHEMA.field("identity").type
    identity = pc.field("identity")
    # A beginning stands for a range of identities. The file's statistics tell which groups of
    # rows, which are sorted by identity, can have it: the others are not read.
    ranges = [
        (identity >= pa.scalar(each.ljust(kind.byte_width, b"\0"), kind))
        & (identity <= pa.scalar(each.ljust(kind.byte_width, b"\xff"), kind))
        for each in identities
    ]
    is_wanted = reduce(or_, ranges) & pc.field("reason").is_null()
    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    file_format = ds.ParquetFileFormat(default_fragment_scan_options=options)
    with tables.damage_named(path):
        file = file_format.make_fragment(str(path.resolve()), LocalFileSystem())
        schema = tables.disk_schema(file.physical_schema)
        groups = file.split_by_row_group(is_wanted)[:most_groups]
        # A few rows at a time: a group with long lists of timestamps may not fit into memory.
        found = [
            group.to_table(
                filter=is_wanted,
                batch_size=_ROWS_AT_A_TIME,
                batch_readahead=1,
                use_threads=False,
            )
            for group in groups
        ]
        if not found:
            return []
        rows = tables.with_whole_paths(pa.concat_tables(found), schema, f"{path.resolve().parent}/")
        rows = rows.drop_columns(["reason"]).replace_schema_metadata(None)
        tables.check_rows(rows, ASIDE_SCHEMA.empty_table())
        names = [each for each in schema.names if each.startswith(ATTRIBUTE)]
        attributes = [name.removeprefix(ATTRIBUTE) for name in names]
        return [tables.clip_of(row, attributes) for row in rows.to_pylist()]
