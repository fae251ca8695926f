"""Finds clips in a catalog of any size by their identities, without reading all of it."""

from collections.abc import Collection, Iterable
from pathlib import Path

import pyarrow as pa
from pyarrow import dataset

from longtake.data import catalog as tables
from longtake.data.clip import Clip
from longtake.data.ledger import IDENTITY_BYTES

_ROWS_AT_A_TIME = 4096


def find_clips(path: Path, identities: Collection[bytes], most_groups: int | None) -> list[Clip]:
    """Return a catalog's clips with these identities, or with identities that begin so.

    At most `most_groups` groups of rows are read; None: any number. The fingerprint is not
    verified, because that needs all clips.

    Raises:
        DataError: the file is missing, not a catalog, damaged where it was read, or of another
            version.
    """
    tables.check_version(path)
    if not identities:
        return []
    kind = tables.CLIP_SCHEMA.field("identity").type
    identity, is_wanted = dataset.field("identity"), dataset.scalar(False)
    # A beginning stands for a range of identities. The file's statistics tell which groups of
    # rows, which are sorted by identity, can have it: the others are not read.
    for each in identities:
        first = pa.scalar(each.ljust(kind.byte_width, b"\0"), kind)
        last = pa.scalar(each.ljust(kind.byte_width, b"\xff"), kind)
        is_wanted |= (identity >= first) & (identity <= last)
    is_wanted &= dataset.field("reason").is_null()
    options = dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    file_format = dataset.ParquetFileFormat(default_fragment_scan_options=options)
    with tables.damage_named(path):
        (file,) = dataset.dataset(str(path.resolve()), format=file_format).get_fragments()
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
        tables.check_rows(rows, tables.ASIDE_SCHEMA.empty_table())
        attributes = tables.names_after(tables.ATTRIBUTE, schema.names)
        return [tables.clip_of(row, attributes) for row in rows.to_pylist()]


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
