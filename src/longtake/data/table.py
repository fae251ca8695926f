"""How a catalog lies on disk and in memory: its columns, and clips as rows of them."""

import hashlib
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from longtake.data.clip import Clip, Media, Timing

SCHEMA_VERSION = 2
_MAX_FLOAT = np.finfo(np.float64).max

VERSION_KEY = b"longtake.catalog"
FINGERPRINT_KEY = b"longtake.fingerprint"
ATTRIBUTE = "attributes."
CLIP_SCHEMA = pa.schema(
    [
        ("identity", pa.binary(16)),
        ("path", pa.string()),  # of the file, or of the tar
        ("member", pa.string()),
        ("offset", pa.int64()),
        ("num_bytes", pa.int64()),  # null: all of the file
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
        ("first_pts", pa.int64()),  # null: the timestamps cannot be relied on
        ("pts_step", pa.int64()),
        ("pts", pa.list_(pa.int64())),  # only where the spacing is uneven
        ("keyframes", pa.list_(pa.int32())),
        ("prepared_from", pa.string()),
        ("file_bytes", pa.int64()),  # with the next: whether the file is still the same
        ("file_mtime_ns", pa.int64()),
    ]
)
ASIDE_SCHEMA = pa.schema(
    [
        ("identity", pa.binary(16)),  # of a further copy of a clip; rejected files have none
        ("path", pa.string()),
        ("file_bytes", pa.int64()),
        ("file_mtime_ns", pa.int64()),
        ("reason", pa.string()),
    ]
)
_MAY_BE_NULL = ("num_bytes", "first_pts", "pts_step", "pts", "file_bytes", "file_mtime_ns")
_MAX_PIXELS_A_SIDE, _MAX_FRAMES, _MAX_BYTES = 2**20 - 1, 2**30, 2**62
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
}
_CHOICES = {"kind": ("image", "video"), "rotation": (0, 90, 180, 270)}
_DECIDES_TRAINING = ("num_frames", "width", "height", "stream_index", "rotation")
ROWS_PER_GROUP = 2**20
_MAP_ABOVE_ROWS = 100_000  # some tens of MB


def version_of(path: Path) -> str | None:
    """Return the schema version of the catalog in a file, or None if there is no catalog."""
    try:
        if not path.is_file():  # opening a pipe would never end
            return None
        metadata: Mapping[bytes, bytes] = pq.read_schema(path).metadata or {}
    except (OSError, ValueError, pa.ArrowException):
        return None
    version = metadata.get(VERSION_KEY)
    return None if version is None else version.decode(errors="replace")


def read(path: Path) -> pa.Table:
    """Read all rows; a large table comes back mapped from a file that has no name any more."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        groups = range(file.metadata.num_row_groups)
        schema = _disk_schema(file.schema_arrow)
        folder = f"{path.resolve().parent}/"
        if file.metadata.num_rows > _MAP_ABOVE_ROWS:
            return _mapped(file, schema, folder)
        tables = [_read_group(file, index, schema, folder) for index in groups]
        return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def _disk_schema(found: pa.Schema) -> pa.Schema:
    missing = [name for name in CLIP_SCHEMA.names if name not in found.names]
    if missing:
        raise LookupError(f"it has no column {missing[0]}")
    names = [name for name in found.names if name.startswith(ATTRIBUTE)]
    schema = with_attributes(CLIP_SCHEMA, [name.removeprefix(ATTRIBUTE) for name in names])
    return schema.append(ASIDE_SCHEMA.field("reason")).with_metadata(found.metadata)


def _read_group(file: pq.ParquetFile, index: int, schema: pa.Schema, folder: str) -> pa.Table:
    table = file.read_row_group(index).select(schema.names).cast(schema)
    paths = table["path"]
    absolute = pc.binary_join_element_wise(folder, paths, "")
    paths = pc.if_else(pc.starts_with(paths, "/"), paths, absolute)
    return table.set_column(table.column_names.index("path"), "path", paths).combine_chunks()


def _mapped(file: pq.ParquetFile, schema: pa.Schema, folder: str) -> pa.Table:
    with tempfile.NamedTemporaryFile(prefix="longtake-catalog-") as spill:
        with pa.ipc.new_file(spill.name, schema) as writer:
            for index in range(file.metadata.num_row_groups):
                writer.write_table(_read_group(file, index, schema, folder))
        pa.default_memory_pool().release_unused()
        return pa.ipc.open_file(pa.memory_map(spill.name)).read_all()


def check_values(table: pa.Table) -> None:
    """Refuse values that no index writes, on which what reads a catalog would stumble.

    Raises:
        ValueError: says which column has which value.
    """
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
    _refuse(table, "path", pc.match_substring(table["path"], "\0"))
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
    """Raise for the first row of a mask that is set; null is not."""
    row = pc.index(is_wrong, True).as_py()
    if row >= 0:
        value = table[name][row].as_py()
        raise ValueError(f"a clip's {name.removeprefix(ATTRIBUTE)} is {value!r:.80}")


def _is_disordered(table: pa.Table, name: str, limits: NDArray[np.int64] | None) -> NDArray[Any]:
    """[N] whether a list of integers does not ascend or, with limits, is not below its row's."""
    column = one_array(table[name])
    rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(column)
    if flat.null_count:
        raise ValueError(f"a clip's {name} has gaps")
    values = flat.to_numpy(zero_copy_only=False).astype(np.int64)
    is_wrong = np.zeros(len(table), np.bool_)
    is_wrong[rows[1:][(rows[1:] == rows[:-1]) & (values[1:] <= values[:-1])]] = True
    if limits is not None:
        is_wrong[rows[(values < 0) | (values >= limits[rows])]] = True
    return is_wrong


def relative(paths: pa.ChunkedArray, folder: str) -> pa.ChunkedArray:
    """Shorten the paths that lie below a folder; the folder ends in a slash."""
    below = pc.starts_with(paths, folder)
    return pc.if_else(below, pc.utf8_slice_codeunits(paths, len(folder)), paths)


def with_attributes(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    for name in names:
        schema = schema.append(pa.field(ATTRIBUTE + name, pa.float64()))
    return schema


def row_of(clip: Clip, attribute_names: Iterable[str]) -> dict[str, Any]:
    """Lay one clip out flat; without the stamps of its file."""
    row = {name: getattr(clip, name, None) for name in CLIP_SCHEMA.names}
    media, timing = clip.media, clip.timing
    row |= {"path": media.path, "member": media.member, "offset": media.offset}
    row |= {"identity": bytes.fromhex(clip.identity), "num_bytes": media.num_bytes}
    if timing is not None:
        row |= {"first_pts": timing.first, "pts_step": timing.step, "pts": timing.listed or None}
    return row | {ATTRIBUTE + name: _known(clip.attributes.get(name)) for name in attribute_names}


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def clip_of(row: dict[str, Any], attribute_names: Iterable[str]) -> Clip:
    """Make a clip of one row, which is used up."""
    media = Media(*(row.pop(name) for name in ("path", "member", "offset", "num_bytes")))
    first, step, listed = (row.pop(name) for name in ("first_pts", "pts_step", "pts"))
    attributes = {name: row.pop(ATTRIBUTE + name) for name in attribute_names}
    del row["file_bytes"], row["file_mtime_ns"]
    row["identity"] = row["identity"].hex()
    row["keyframes"] = tuple(row["keyframes"])
    row["timing"] = None if first is None else Timing(first, step, tuple(listed or ()))
    row["attributes"] = {name: each for name, each in attributes.items() if each is not None}
    return Clip(media=media, **row)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """All chunks as one array; a copy only where there are several."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_ascending(identities: pa.Array) -> bool:
    """Whether each is above the one before, compared as big-endian halves of 64 bits."""
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
    """Hash column by column, so that it depends on the values only, not on how they lie."""
    digest = hashlib.blake2b(f"catalog {SCHEMA_VERSION}\n".encode(), digest_size=16)
    digest.update(len(table).to_bytes(8, "little"))
    for chunk in table["identity"].chunks:
        digest.update(_identity_bytes(chunk))
    for name in _DECIDES_TRAINING:
        digest.update(table[name].to_numpy().astype("<i8").tobytes())
    captions = table["caption"]
    digest.update(pc.binary_length(captions).to_numpy().astype("<i8").tobytes())
    for chunk in filter(len, captions.chunks):
        offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset :][: len(chunk) + 1]
        digest.update(memoryview(chunk.buffers()[2] or b"")[offsets[0] : offsets[-1]])
    return digest.hexdigest()
