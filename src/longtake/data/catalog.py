"""The catalog: one Parquet table of all clips, and of the files that were rejected.

`longtake.data.index` writes it; training only reads it. Paths below its folder are stored relative
to it. Rows do not become Python objects, and a large table is mapped from disk and shared.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from longtake.data.clip import MIRRORED, Clip, Indexed, Media, Timing
from longtake.errors import DataError
from longtake.fsio import atomic_write, is_missing, open_regular

SCHEMA_VERSION = 2
_MAX_FLOAT = np.finfo(np.float64).max

VERSION_KEY = b"longtake.catalog"
FINGERPRINT_KEY = b"longtake.fingerprint"
ATTRIBUTE = "attributes."
CONDITIONING = "conditioning."  # prefix of columns with paths, or with lists of numbers
CAPTIONED = "captioned"
"""Name of an attribute of clips that is 1 if a model wrote the caption, else 0.

`index` keeps such captions if its sources have none."""
OTHER_CAPTION = "other_caption"  # attribute: number of a further clip with the same content
TRUSTED = "trusted_metadata"
"""Name of an attribute of clips that is 1 if `data index --trust-metadata` did not decode the
clip's frames, else 0."""
MATRIX = "color_matrix"
CLIP_SCHEMA = pa.schema(
    [
        ("identity", pa.binary(16)),
        ("path", pa.string()),  # path of the file, or of the tar
        ("member", pa.string()),
        ("offset", pa.int64()),
        ("num_bytes", pa.int64()),  # null for the whole file
        ("kind", pa.string()),
        ("caption", pa.string()),
        ("num_frames", pa.int32()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("fps", pa.float64()),
        ("duration_seconds", pa.float64()),
        ("stream_index", pa.int32()),
        ("rotation", pa.int32()),
        ("codec", pa.string()),
        ("pix_fmt", pa.string()),
        ("color_range", pa.string()),
        ("color_transfer", pa.string()),
        (MATRIX, pa.string()),  # null or missing in catalogs from before it was read
        ("first_pts", pa.int64()),  # null if the timestamps are not usable
        ("pts_step", pa.int64()),
        ("pts", pa.list_(pa.int64())),  # null if the spacing is even
        ("keyframes", pa.list_(pa.int32())),
        ("prepared_from", pa.string()),
        ("file_bytes", pa.int64()),  # the file is unchanged while this and the next are
        ("file_mtime_ns", pa.int64()),
    ]
)
# Only in catalogs with spans of files. null: the clip is a whole file, or the span has no end.
SPAN_SCHEMA = pa.schema(
    [("span_start", pa.float64()), ("span_end", pa.float64()), ("seek_pts", pa.int64())]
)
ASIDE_SCHEMA = pa.schema(
    [
        ("identity", pa.binary(16)),  # identity of the accepted clip, for a copy; null: rejected
        ("path", pa.string()),
        ("file_bytes", pa.int64()),
        ("file_mtime_ns", pa.int64()),
        ("reason", pa.string()),
    ]
)
_CONDITIONING_TYPES = pa.string(), pa.list_(pa.float64())
_MAY_BE_NULL = (MATRIX, "num_bytes", "first_pts", "pts_step", "pts", "file_bytes", "file_mtime_ns")
_MAX_PIXELS_A_SIDE, _MAX_FRAMES, _MAX_BYTES = 2**20 - 1, 2**30, 2**62
# Bounds of values that are computed with later: a damaged catalog must not overflow them.
_BOUNDS = {
    "offset": (0, _MAX_BYTES),
    "num_bytes": (1, _MAX_BYTES),
    "num_frames": (1, _MAX_FRAMES),
    "width": (1, _MAX_PIXELS_A_SIDE),
    "height": (1, _MAX_PIXELS_A_SIDE),
    "fps": (0, 1e9),
    "duration_seconds": (0, 1e9),
    "stream_index": (0, 2**16),
    "first_pts": (-(2**61), 2**61),
    "pts_step": (0, 2**61),
    "file_bytes": (0, _MAX_BYTES),
    "span_start": (0, 1e9),
    "span_end": (0, 1e9),
    "seek_pts": (-(2**62), 2**62),
}
_CHOICES = {"kind": ("image", "video"), "rotation": tuple(range(0, 2 * MIRRORED, 90))}
_DECIDES_TRAINING = ("num_frames", "width", "height", "stream_index", "rotation")
ROWS_PER_GROUP = 2**17  # some tens of MB, the memory that writing a catalog needs
_IN_DISORDER = "its clips are not sorted by identity, each there once"
_REMEDY = "Run `longtake data index` to write it."
_MAP_ABOVE_ROWS = 100_000  # larger tables are mapped from disk; some tens of MB


def version_of(path: Path) -> str | None:
    """Return the schema version of the catalog in a file, or None if there is no catalog."""
    try:
        if not path.is_file():  # opening a pipe would block forever
            return None
        metadata: Mapping[bytes, bytes] = pq.read_schema(path).metadata or {}
    except (OSError, ValueError, pa.ArrowException):
        return None
    version = metadata.get(VERSION_KEY)
    return None if version is None else version.decode(errors="replace")


def read(path: Path) -> pa.Table:
    """Return all rows of a catalog; a large table is mapped from a deleted temporary file."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        groups = range(file.metadata.num_row_groups)
        schema = disk_schema(file.schema_arrow)
        folder = f"{path.resolve().parent}/"
        if file.metadata.num_rows > _MAP_ABOVE_ROWS:
            return _mapped(file, schema, folder)
        tables = [with_whole_paths(file.read_row_group(index), schema, folder) for index in groups]
        return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def disk_schema(found: pa.Schema) -> pa.Schema:
    """Return the schema that a catalog has in memory, for the schema found in its file.

    Raises:
        LookupError: a column is missing.
        ValueError: a column of further inputs has the wrong type.
    """
    missing = [name for name in CLIP_SCHEMA.names if name not in (*found.names, MATRIX)]
    if missing:
        raise LookupError(f"it has no column {missing[0]}")
    # Columns that another tool added are ignored.
    schema = with_attributes(CLIP_SCHEMA, names_after(ATTRIBUTE, found.names))
    if SPAN_SCHEMA.names[0] in found.names:
        schema = pa.schema([*schema, *SPAN_SCHEMA])
    for name in (each for each in found.names if each.startswith(CONDITIONING)):
        if found.field(name).type not in _CONDITIONING_TYPES:
            raise ValueError(f"its column {name} holds {found.field(name).type}")
        schema = schema.append(pa.field(name, found.field(name).type))
    return schema.append(ASIDE_SCHEMA.field("reason")).with_metadata(found.metadata)


def with_whole_paths(rows: pa.Table, schema: pa.Schema, folder: str) -> pa.Table:
    """Convert rows of a catalog's file to their form in memory; make their paths absolute."""
    if MATRIX not in rows.column_names:
        rows = rows.append_column(MATRIX, pa.nulls(len(rows), pa.string()))
    table = rows.select(schema.names).cast(schema)
    for name in _path_columns(table):
        paths = table[name]
        absolute = pc.binary_join_element_wise(folder, paths, "")
        # Paths outside of the catalog's folder are stored absolute, and so are URLs.
        is_whole = pc.or_(pc.starts_with(paths, "/"), pc.match_substring(paths, "://"))
        paths = pc.if_else(is_whole, paths, absolute)
        table = table.set_column(table.column_names.index(name), name, paths)
    return table.combine_chunks()


def _path_columns(table: pa.Table) -> list[str]:
    """Return the names of the columns whose paths are stored relative to the catalog's folder."""
    inputs = (name for name in table.column_names if name.startswith(CONDITIONING))
    return ["path", *(name for name in inputs if table.schema.field(name).type == pa.string())]


def _mapped(file: pq.ParquetFile, schema: pa.Schema, folder: str) -> pa.Table:
    # Arrow's own format can be mapped without a copy, which Parquet cannot. The mapping outlives
    # the deleted file, and the kernel drops its pages when memory is short.
    with tempfile.NamedTemporaryFile(prefix="longtake-catalog-") as spill:
        with pa.ipc.new_file(spill.name, schema) as writer:
            for index in range(file.metadata.num_row_groups):
                writer.write_table(with_whole_paths(file.read_row_group(index), schema, folder))
        # Arrow keeps freed memory for later, which would count beside the mapped table.
        pa.default_memory_pool().release_unused()
        return pa.ipc.open_file(pa.memory_map(spill.name)).read_all()


def check_values(table: pa.Table) -> None:
    """Raise ValueError if a catalog has a value that `data index` never writes."""
    for name in CLIP_SCHEMA.names:
        if name not in _MAY_BE_NULL and table[name].null_count:
            raise ValueError(f"{table[name].null_count} clips have no {name}")
    for name in table.column_names:
        if name in _BOUNDS or name.startswith(ATTRIBUTE):
            low, high = _BOUNDS.get(name, (-_MAX_FLOAT, _MAX_FLOAT))
            is_in = pc.and_(pc.greater_equal(table[name], low), pc.less_equal(table[name], high))
            _refuse(table, name, pc.invert(is_in))
    for name, choices in _CHOICES.items():
        known = pc.is_in(table[name], value_set=pa.array(choices, table[name].type))
        _refuse(table, name, pc.invert(known))
    for name in _path_columns(table):
        _refuse(table, name, pc.match_substring(table[name], "\0"))
    for name in (each for each in table.column_names if each.startswith(CONDITIONING)):
        if table[name].null_count:
            raise ValueError(f"{table[name].null_count} clips have no {name}")
        if table.schema.field(name).type != pa.string():
            numbers = pc.list_flatten(table[name])
            if numbers.null_count or not pc.all(pc.is_finite(numbers), min_count=0).as_py():
                raise ValueError(f"{name} has numbers that are missing, NaN or infinite")
    frames = table["num_frames"].to_numpy().astype(np.int64)
    has_first, has_step = pc.is_valid(table["first_pts"]), pc.is_valid(table["pts_step"])
    _refuse(table, "pts_step", pc.xor(has_first, has_step))
    steps = table["pts_step"].fill_null(0).to_numpy().astype(np.float64)
    _refuse(table, "pts_step", pa.array(steps * frames > 2**62))
    _refuse(table, "keyframes", pa.array(_is_disordered(table, "keyframes", frames)))
    lengths = pc.fill_null(pc.list_value_length(table["pts"]), 0).to_numpy()
    is_wrong = (lengths > 0) & (lengths != frames)
    _refuse(table, "pts", pa.array(is_wrong | _is_disordered(table, "pts", None)))


def _refuse(table: pa.Table, name: str, is_wrong: Any) -> None:
    """Raise ValueError with a catalog column's first value that a mask marks as wrong, if any."""
    row = pc.index(is_wrong, True).as_py()
    if row >= 0:
        value = table[name][row].as_py()
        raise ValueError(f"a clip's {name.removeprefix(ATTRIBUTE)} is {value!r:.80}")


def _is_disordered(table: pa.Table, name: str, limits: NDArray[np.int64] | None) -> NDArray[Any]:
    """Return true [N] for catalog rows whose list of integers is out of order or over a limit."""
    column = one_array(table[name])
    rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(column)
    if flat.null_count:
        raise ValueError(f"a clip's {name} has gaps")
    values = flat.to_numpy(zero_copy_only=False).astype(np.int64)
    is_wrong = np.zeros(len(table), np.bool_)
    # Neighbours in the flat values are compared only where both belong to the same row.
    is_wrong[rows[1:][(rows[1:] == rows[:-1]) & (values[1:] <= values[:-1])]] = True
    if limits is not None:
        is_wrong[rows[(values < 0) | (values >= limits[rows])]] = True
    return is_wrong


def with_attributes(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """Return a catalog's schema with a float64 column added for each attribute."""
    for name in names:
        schema = schema.append(pa.field(ATTRIBUTE + name, pa.float64()))
    return schema


def names_after(prefix: str, columns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the columns that begin with a prefix, without it."""
    return tuple(each.removeprefix(prefix) for each in columns if each.startswith(prefix))


def conditioning_field(name: str, given: object) -> pa.Field:
    text, numbers = _CONDITIONING_TYPES
    return pa.field(CONDITIONING + name, text if isinstance(given, str) else numbers)


def clip_of(row: dict[str, Any], attribute_names: Iterable[str]) -> Clip:
    """Convert a row of a catalog, as a dictionary, to a clip; the row is emptied."""
    given = {name: row.pop(name) for name in list(row) if name.startswith(CONDITIONING)}
    media = Media(*(row.pop(name) for name in ("path", "member", "offset", "num_bytes")))
    first, step, listed = (row.pop(name) for name in ("first_pts", "pts_step", "pts"))
    attributes = {name: row.pop(ATTRIBUTE + name) for name in attribute_names}
    start, end = row.pop("span_start", None), row.pop("span_end", None)
    if start is not None:
        media = replace(media, span=(start, end))
    if media.is_remote and row["file_mtime_ns"] is not None:
        media = replace(media, stamp=row["file_mtime_ns"])
    row["identity"] = row["identity"].hex()
    indexed = Indexed(
        identity=row["identity"],
        num_frames=row["num_frames"],
        fps=row["fps"],
        file_bytes=row.pop("file_bytes"),
        mtime_ns=row.pop("file_mtime_ns"),
    )
    media = replace(media, indexed=indexed)
    row["keyframes"] = tuple(row["keyframes"])
    row["timing"] = None if first is None else Timing(first, step, tuple(listed or ()))
    row["attributes"] = {name: each for name, each in attributes.items() if each is not None}
    row["conditioning"] = {
        name.removeprefix(CONDITIONING): each if isinstance(each, str) else tuple(each)
        for name, each in given.items()
    }
    return Clip(media=media, **row)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_ascending(identities: pa.Array) -> bool:
    """Return true if the identities of clips ascend strictly, as big-endian halves of 64 bits."""
    if identities.null_count:
        return False
    halves = np.frombuffer(_identity_bytes(identities), ">u8").reshape(-1, 2)
    before, after = halves[:-1], halves[1:]
    same = before[:, 0] == after[:, 0]
    is_above = (before[:, 0] < after[:, 0]) | (same & (before[:, 1] < after[:, 1]))
    return bool(is_above.all())


def _identity_bytes(identities: pa.Array) -> memoryview:
    start = identities.offset * 16
    return memoryview(identities.buffers()[1] or b"")[start : start + 16 * len(identities)]


def fingerprint_of(table: pa.Table) -> str:
    return fingerprint_of_columns(len(table), table.schema, lambda name: table[name].chunks)


def fingerprint_of_columns(
    num_rows: int, schema: pa.Schema, chunks_of: Callable[[str], Iterable[pa.Array]]
) -> str:
    """Hash clips column by column, so that the result does not depend on how they are stored."""
    digest = hashlib.blake2b(f"catalog {SCHEMA_VERSION}\n".encode(), digest_size=16)
    digest.update(num_rows.to_bytes(8, "little"))
    for chunk in chunks_of("identity"):
        digest.update(_identity_bytes(chunk))
    for name in _DECIDES_TRAINING:
        for chunk in chunks_of(name):
            digest.update(_numbers(chunk, "<i8"))
    for chunk in chunks_of("caption"):
        # Lengths are hashed too: without them, other captions could be equal when joined.
        digest.update(_numbers(pc.binary_length(chunk), "<i8"))
    for chunk in filter(len, chunks_of("caption")):
        # Straight from Arrow's buffers: captions may have gigabytes, and no string is made.
        offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset :][: len(chunk) + 1]
        digest.update(memoryview(chunk.buffers()[2] or b"")[offsets[0] : offsets[-1]])
    for name in sorted(each for each in schema.names if each.startswith(CONDITIONING)):
        digest.update(name.encode())
        if schema.field(name).type != pa.string():  # paths do not count, numbers do
            for chunk in chunks_of(name):
                digest.update(_numbers(pc.list_value_length(chunk), "<i8"))
            for chunk in chunks_of(name):
                digest.update(_numbers(pc.list_flatten(chunk), "<f8"))
    return digest.hexdigest()


def _numbers(column: pa.Array, kind: str) -> bytes:
    return column.to_numpy(zero_copy_only=False).astype(kind).tobytes()


@dataclass(frozen=True)
class Rejection:
    """A file that cannot be trained on, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Duplicate:
    """A file that was left out of a catalog because it has the content of the clip `identity`."""

    path: str
    identity: str


@dataclass(frozen=True)
class Stamp:
    """Size and modification time of a file, by which `data index` tells whether it has changed."""

    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Catalog:
    """The clips of a data set, sorted by identity, and the files that were left out."""

    # One row for each clip: the fields of `Clip` as columns, with `media` and `timing` flattened,
    # and each attribute as a column `attributes.<name>`.
    table: pa.Table
    set_aside: pa.Table  # one row for each rejected file and each further copy of a clip
    stored_fingerprint: str | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        table = self.set_aside.filter(pc.is_null(self.set_aside["identity"]))
        return tuple(Rejection(**row) for row in table.select(["path", "reason"]).to_pylist())

    @cached_property
    def duplicates(self) -> tuple[Duplicate, ...]:
        table = self.set_aside.filter(pc.is_valid(self.set_aside["identity"]))
        rows = table.select(["path", "identity"]).to_pylist()
        return tuple(Duplicate(row["path"], row["identity"].hex()) for row in rows)

    def clip(self, row: int) -> Clip:
        """Return the clip in a row of the catalog."""
        return clip_of(self.table.slice(row, 1).to_pylist()[0], self.attribute_names)

    def clips(self) -> Iterator[Clip]:
        """Yield all clips in the order of rows."""
        for batch in self.table.to_batches(max_chunksize=4096):
            for row in batch.to_pylist():
                yield clip_of(row, self.attribute_names)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of all clips [N]: a field, or an attribute as float64, NaN where unknown.

        Raises:
            DataError: the catalog has no such column.
        """
        full = name if name in CLIP_SCHEMA.names else ATTRIBUTE + name
        if full not in self.table.column_names:
            known = ", ".join(self.attribute_names) or "none"
            raise DataError(
                f"The catalog has no attribute {name!r}; it has: {known}. "
                "Run `longtake data score` to add one."
            )
        return self.table[full].to_numpy()

    def captions(self) -> list[str]:
        return self.table["caption"].to_pylist()

    @cached_property
    def identities(self) -> pa.Array:
        return one_array(self.table["identity"])

    @cached_property
    def attribute_names(self) -> tuple[str, ...]:
        return names_after(ATTRIBUTE, self.table.column_names)

    @cached_property
    def conditioning_names(self) -> tuple[str, ...]:
        """Names of the columns of further inputs (paths or numbers), for `data.conditioning`."""
        return names_after(CONDITIONING, self.table.column_names)

    def with_attribute(self, name: str, values: NDArray[np.float64]) -> "Catalog":
        """Return this catalog with a score of each clip added or replaced; NaN where unknown."""
        assert values.shape == (len(self),)
        column = pa.array(values, pa.float64(), from_pandas=True)  # NaN becomes null
        full, others = ATTRIBUTE + name, self.table
        if full in others.column_names:
            others = others.drop_columns([full])
        table = others.append_column(full, column)
        attributes = sorted(each for each in table.column_names if each.startswith(ATTRIBUTE))
        first = [*CLIP_SCHEMA.names, *attributes]
        # Spans and further inputs come last.
        table = table.select([*first, *(each for each in table.column_names if each not in first)])
        return Catalog(table, self.set_aside, self.stored_fingerprint)

    def relocated(self, other: "Catalog") -> "Catalog":
        """Return this catalog with the paths at which another catalog has the same clips."""
        # Clips that the other catalog lacks keep their own paths.
        where = pc.index_in(self.identities, value_set=other.identities)
        # Row 0 stands in for clips that the other catalog lacks, and `if_else` does not use it.
        is_there, rows, table = pc.is_valid(where), pc.fill_null(where, 0), self.table
        if not len(other) or not pc.any(is_there).as_py():
            return self
        inputs = [each for each in _path_columns(table)[1:] if each in other.table.column_names]
        stamp = "file_bytes", "file_mtime_ns"
        for name in ("path", "member", "offset", "num_bytes", *stamp, *inputs):
            moved = pc.if_else(is_there, other.table[name].take(rows), table[name])
            table = table.set_column(table.column_names.index(name), name, moved)
        return Catalog(table, self.set_aside, self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Hash (32 hex digits) of clips' identities, captions, and what decides their windows.

        Paths and attributes are not part of it, so a moved folder keeps its fingerprint.
        """
        return self.stored_fingerprint or fingerprint_of(self.table)

    @classmethod
    def load(cls, path: Path) -> "Catalog":
        """Read a catalog; the paths of its clips are made absolute.

        Raises:
            DataError: the file is missing, not a catalog, damaged, or of another version.
        """
        check_version(path)
        with damage_named(path):
            table = read(path)
            marks = table.schema.metadata
            table = table.replace_schema_metadata(None)
            num_clips = table["reason"].null_count
            # Clips come first in the file, and their reason is null: this splits the two tables.
            catalog = cls(
                table.slice(0, num_clips).drop_columns(["reason"]),
                table.slice(num_clips).select(ASIDE_SCHEMA.names),
                marks.get(FINGERPRINT_KEY, b"").decode() or None,
            )
            check_rows(catalog.table, catalog.set_aside)
            fingerprint = fingerprint_of(catalog.table)
            _check_fingerprint(catalog.stored_fingerprint, fingerprint)
        return replace(catalog, stored_fingerprint=fingerprint)

    def save(self, path: Path) -> None:
        """Write the catalog as a Parquet file; raise DataError if it cannot be written."""
        table = pa.concat_tables([self.table, self.set_aside], promote_options="default")
        write(path, table.schema, [table], self.fingerprint)


def write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table], fingerprint: str) -> None:
    """Write a catalog's file: the rows of clips, then those of files that were left out.

    Raises:
        DataError: the file cannot be written.
    """
    folder = f"{path.parent.resolve()}/"
    schema = schema.with_metadata({VERSION_KEY: str(SCHEMA_VERSION), FINGERPRINT_KEY: fingerprint})
    try:
        with (
            atomic_write(path) as aside,
            pq.ParquetWriter(aside, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            waiting = list[pa.Table]()
            for table in tables:
                waiting.append(_relative(table, folder))
                # Small tables are gathered to full groups of rows, which readers read or skip as a
                # whole.
                if sum(map(len, waiting)) >= ROWS_PER_GROUP:
                    writer.write_table(_together(waiting, schema), ROWS_PER_GROUP)
                    waiting.clear()
            if waiting:
                writer.write_table(_together(waiting, schema), ROWS_PER_GROUP)
    except OSError as error:
        raise cannot_write(path, error) from error


def _together(tables: list[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *tables], promote_options="default")


def _relative(table: pa.Table, folder: str) -> pa.Table:
    for name in _path_columns(table):
        paths = table[name]
        inside = pc.utf8_slice_codeunits(paths, len(folder))
        paths = pc.if_else(pc.starts_with(paths, folder), inside, paths)
        table = table.set_column(table.column_names.index(name), name, paths)
    return table


def cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"The catalog {path} cannot be written: {error.strerror or error}. Name another file."
    )


class StoredCatalog:
    """A catalog whose clips are read in groups of rows, so that it need not fit into memory."""

    def __init__(self, path: Path) -> None:
        """Read the file of a catalog once and verify all of it.

        Raises:
            DataError: the file is missing, damaged, or of another version; see `Catalog.load`.
        """
        check_version(path)
        self._path, self.num_clips, num_rows, last = path, 0, 0, b""
        with damage_named(path):
            with pq.ParquetFile(path) as file:
                self.schema = disk_schema(file.schema_arrow)
            for table in self._groups():
                num_clips = table["reason"].null_count
                clips, aside = table.slice(0, num_clips), table.slice(num_clips)
                check_rows(clips, aside)
                identities = clips["identity"]
                # Groups are checked one by one, so their borders are compared here.
                if num_clips and (self.num_clips < num_rows or identities[0].as_py() <= last):
                    raise ValueError(_IN_DISORDER)
                last = identities[-1].as_py() if num_clips else last
                self.num_clips, num_rows = self.num_clips + num_clips, num_rows + len(table)
            stored = self.schema.metadata.get(FINGERPRINT_KEY, b"").decode() or None
            found = fingerprint_of_columns(self.num_clips, self.schema, self._chunks)
            _check_fingerprint(stored, found)

    def clips(self) -> Iterator[Catalog]:
        """Yield the clips group by group, each group of rows as a catalog."""
        nothing = ASIDE_SCHEMA.empty_table()
        for table in self._groups():
            if num_clips := table["reason"].null_count:
                yield Catalog(table.slice(0, num_clips).drop_columns(["reason"]), nothing)

    def set_aside(self) -> Iterator[dict[str, Any]]:
        """Yield the catalog's files that were left out: rejected ones, and further copies of clips.

        Each is a row with the columns of `ASIDE_SCHEMA`.
        """
        for table in self._groups():
            yield from (
                table.slice(table["reason"].null_count).select(ASIDE_SCHEMA.names).to_pylist()
            )

    @property
    def attribute_names(self) -> tuple[str, ...]:
        return names_after(ATTRIBUTE, self.schema.names)

    def _groups(self) -> Iterator[pa.Table]:
        folder = f"{self._path.resolve().parent}/"
        with pq.ParquetFile(self._path, page_checksum_verification=True) as file:
            for index in range(file.metadata.num_row_groups):
                rows = with_whole_paths(file.read_row_group(index), self.schema, folder)
                yield rows.replace_schema_metadata(None)

    def _chunks(self, name: str) -> Iterator[pa.Array]:
        left, kind = self.num_clips, self.schema.field(name).type
        with pq.ParquetFile(self._path, page_checksum_verification=True) as file:
            for index in range(file.metadata.num_row_groups):
                # Only the rows of clips count for the fingerprint, and those come first.
                column = file.read_row_group(index, [name])[name].slice(0, left).cast(kind)
                left -= len(column)
                yield from column.chunks


def check_rows(clips: pa.Table, set_aside: pa.Table) -> None:
    """Raise ValueError if the rows of a catalog are out of order or have invalid values."""
    if set_aside["reason"].null_count or not is_ascending(one_array(clips["identity"])):
        raise ValueError(_IN_DISORDER)
    check_values(clips)
    if set_aside["path"].null_count:
        raise ValueError("a file that was set aside has no path")


def _check_fingerprint(stored: str | None, found: str) -> None:
    if stored not in (None, found):
        raise ValueError(
            "its content was changed after it was written: its fingerprint is "
            f"{stored}, and that of its clips {found}"
        )


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn errors in the context, which reads a damaged catalog, into DataError."""
    try:
        yield
    except (OSError, LookupError, ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(f"The catalog {path} is damaged: {error}. {_REMEDY}") from error


def check_version(path: Path) -> None:
    """Raise DataError unless a file is a catalog in the format of this version of longtake."""
    try:
        open_regular(path).close()
    except OSError as error:
        if is_missing(error):
            raise DataError(f"The catalog {path} does not exist. {_REMEDY}") from None
        reason = error.strerror or str(error)
        raise DataError(f"The catalog {path} cannot be read: {reason}. {_REMEDY}") from error
    version = version_of(path)
    if version is None:
        raise DataError(f"{path} is not a catalog of longtake. {_REMEDY}")
    if version != str(SCHEMA_VERSION):
        raise DataError(
            f"The catalog {path} has format {version}, and this longtake reads format "
            f"{SCHEMA_VERSION}. {_REMEDY}"
        )
