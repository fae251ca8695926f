"""Sorts any number of clips on disk and writes them as a catalog.

See `media_list` for the temporary database, and `catalog` for the format.
"""

import json
import math
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.config.data import STEM
from longtake.data import catalog
from longtake.data.clip import HDR, Clip, captions_of
from longtake.data.content import MAX_COPIES, copy_identity
from longtake.data.media_list import open_scratch

MOST_LISTED = 1000  # number of files listed in a report
_ROWS_IN_MEMORY = 2**13
_SCHEMA = pa.schema([*catalog.CLIP_SCHEMA, *catalog.SPAN_SCHEMA])
_LISTS = {"pts": "q", "keyframes": "i"}  # columns of integers, with the type codes of `array`
_KEYS = ("identity", "has_no_caption", "name")  # the first clip of an identity is kept
_ORDER = ", ".join(_KEYS)
_COLUMNS = (*_KEYS, *_SCHEMA.names[1:], "attribute_values", "given")
_TRANSFER = _COLUMNS.index("color_transfer")
_PATH, _MEMBER, _CAPTION, _PREPARED_FROM, _SPAN_START, _ATTRIBUTES, _GIVEN = map(
    _COLUMNS.index,
    ("path", "member", "caption", "prepared_from", "span_start", "attribute_values", "given"),
)
_CLIPS = f"clips ({', '.join(_COLUMNS)})"
_ASIDE = "aside (identity, has_no_caption, path, file_bytes, file_mtime_ns, reason)"
_Row = tuple[Any, ...]


@dataclass
class Written:
    """Numbers of accepted, duplicate and other clips in a catalog that was just written."""

    accepted: int = 0
    without_caption: int = 0  # number of accepted clips whose caption is empty
    in_hdr: int = 0  # number of accepted clips in HDR
    with_several: int = 0  # number of accepted clips with several captions
    duplicates: int = 0  # number of files left out because an accepted one has the same content
    # Path and caption of the first duplicates whose caption is not that of the accepted clip.
    other_captions: list[tuple[str, str]] = field(default_factory=list)
    trusted: int = 0  # number of clips whose frames were not decoded
    scores_dropped: int = 0  # clips that lost their older scores, because their caption changed


def caption_without_file(label: str, name: str) -> str:
    """Return the caption of a clip that has none: `label`, with the file's name as `{stem}`.

    Underscores in the name become spaces.
    """
    return label.replace(STEM, PurePath(name).stem.replace("_", " "))


class CatalogWriter:
    """Writes a catalog of clips and rejected files, added in any order, without equal clips.

    Of clips with the same content, the first by path that has a caption is kept, or the first by
    path if none has.
    """

    def __init__(self) -> None:
        self._database = open_scratch(_CLIPS, _ASIDE)
        self._names = set[str]()  # names of attributes
        self.num_clips = self.num_rejected = 0

    def add(self, clip: Clip, stamp: catalog.Stamp | None) -> None:
        """Add a clip to the catalog, with size and modification time of its file."""
        # A copy with another caption gets an identity of its own: a probe has that of the content.
        if number := int(clip.attributes.get(catalog.OTHER_CAPTION, 0)):
            clip = replace(clip, identity=copy_identity(clip.identity, number))
        self._names.update(clip.attributes)
        self.num_clips += 1
        self._insert("clips", _row_of(clip, stamp))

    def reject(self, each: catalog.Rejection, stamp: catalog.Stamp | None = None) -> None:
        """Add a rejected file; with its stamp, it is not indexed again until it changes."""
        self.num_rejected += 1
        self._insert("aside", (None, 0, each.path, *_stamp(stamp), each.reason))

    def keep_other_captions(self) -> None:
        """Keep clips of equal content as separate clips, one for each different caption."""
        rows = self._database.execute(
            f"SELECT rowid, identity, caption, attribute_values FROM clips ORDER BY {_ORDER}"  # noqa: S608
        )
        changed, last, captions = list[tuple[bytes, str, int]](), b"", set[str]()
        for row, identity, caption, values in rows:
            captions, last = (captions if identity == last else set()), identity
            # The first clip keeps the identity of its content; copies get numbered ones.
            if captions and caption and caption not in captions and len(captions) < MAX_COPIES:
                number = len(captions)
                attributes = {**json.loads(values or "{}"), catalog.OTHER_CAPTION: float(number)}
                name = bytes.fromhex(copy_identity(identity.hex(), number))
                changed.append((name, json.dumps(attributes), row))
                self._names.add(catalog.OTHER_CAPTION)
            captions.add(caption)
        # After the loop: a cursor that is open while its table changes would be undefined.
        self._database.executemany(
            "UPDATE clips SET identity = ?, attribute_values = ? WHERE rowid = ?", changed
        )

    def rejected(self, most: int) -> list[catalog.Rejection]:
        """Return the first `most` rejected files, by path, with their reasons."""
        rows = self._database.execute(
            "SELECT path, reason FROM aside WHERE identity IS NULL ORDER BY path, rowid LIMIT ?",
            (most,),
        )
        return [catalog.Rejection(*row) for row in rows]

    def write(
        self, out: Path, before: catalog.StoredCatalog | None = None, label: str = ""
    ) -> Written:
        """Write the added clips and rejected files as a catalog.

        Args:
            out: path of the catalog.
            before: an older catalog, from which known clips keep their scores, captions that a
                model wrote, and origins.
            label: the caption that clips without one were given.

        Raises:
            DataError: the file cannot be written.
        """
        written, used, names = Written(), set[str](), set(self._names)
        kept: Iterator[_Row] = self._kept(written)
        if before is not None:
            names.update(before.attribute_names)
            kept = _with_scores(kept, before, label, written)
        first = next(kept, None)
        # Each clip has the same further inputs, which `sources` checks: the first tells their
        # columns.
        given = json.loads(first[_GIVEN] or "{}") if first else {}
        schema = catalog.with_attributes(_SCHEMA, sorted(names))
        for name, each in given.items():
            schema = schema.append(catalog.conditioning_field(name, each))
        # The fingerprint is in the file's metadata and covers whole columns, so the clips are
        # spilled to disk and read twice.
        with tempfile.NamedTemporaryFile(prefix="longtake-catalog-") as spill:
            has_spans = False
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.ipc.new_file(spill.name, schema, options=options) as writer:
                rows = chain([first] if first else [], kept)
                while some := list(islice(rows, _ROWS_IN_MEMORY)):
                    written.accepted += len(some)
                    written.without_caption += sum(not row[_CAPTION] for row in some)
                    written.in_hdr += sum(row[_TRANSFER] in HDR for row in some)
                    written.with_several += sum(len(captions_of(row[_CAPTION])) > 1 for row in some)
                    has_spans |= any(row[_SPAN_START] is not None for row in some)
                    values = [json.loads(row[_ATTRIBUTES] or "{}") for row in some]
                    used.update(*values)
                    written.trusted += sum(bool(each.get(catalog.TRUSTED)) for each in values)
                    writer.write_batch(_batch_of(some, values, schema))
            # The spill has all attributes that might occur, the catalog those that do.
            columns = [
                *catalog.CLIP_SCHEMA.names,
                *(catalog.ATTRIBUTE + name for name in sorted(used)),
                *(catalog.SPAN_SCHEMA.names if has_spans else ()),
                *(catalog.CONDITIONING + name for name in given),
            ]
            spilled = _Spilled(Path(spill.name), pa.schema([schema.field(n) for n in columns]))
            fingerprint = catalog.fingerprint_of_columns(
                written.accepted, spilled.schema, spilled.chunks
            )
            catalog.write(
                out,
                spilled.schema.append(catalog.ASIDE_SCHEMA.field("reason")),
                chain(spilled.tables(), self._set_aside()),
                fingerprint,
            )
        return written

    def _kept(self, written: Written) -> Iterator[_Row]:
        """Yield the clips to keep by identity; further clips of the same content are left out."""
        rows = self._database.execute(f"SELECT * FROM clips ORDER BY {_ORDER}")  # noqa: S608
        bytes_at, mtime_at = map(_COLUMNS.index, ("file_bytes", "file_mtime_ns"))
        last: _Row = (b"",)
        for row in rows:
            if row[0] != last[0]:
                last = row
                yield row
            else:
                written.duplicates += 1
                differs = row[_CAPTION] and row[_CAPTION] != last[_CAPTION]
                if differs and len(written.other_captions) < MOST_LISTED:
                    written.other_captions.append((row[2], row[_CAPTION]))
                self._insert("aside", (*row[:3], row[bytes_at], row[mtime_at], "duplicate"))

    def _set_aside(self) -> Iterator[pa.Table]:
        rows = self._database.execute(
            "SELECT * FROM aside ORDER BY identity IS NOT NULL, has_no_caption, path, rowid"
        )
        # `has_no_caption` decides the order only, and is no column of the catalog.
        names = ("identity", "", "path", "file_bytes", "file_mtime_ns", "reason")
        while some := rows.fetchmany(_ROWS_IN_MEMORY):
            columns = dict(zip(names, zip(*some, strict=True), strict=True))
            arrays = [pa.array(columns[each.name], each.type) for each in catalog.ASIDE_SCHEMA]
            yield pa.Table.from_arrays(arrays, schema=catalog.ASIDE_SCHEMA)

    def _insert(self, table: str, row: _Row) -> None:
        places = ", ".join("?" * len(row))
        self._database.execute(f"INSERT INTO {table} VALUES ({places})", row)  # noqa: S608

    def close(self) -> None:
        self._database.close()

    __del__ = close


class _Spilled:
    """Sorted clips in a temporary Arrow file, read one batch at a time."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self.schema = path, schema

    def tables(self) -> Iterator[pa.Table]:
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number).select(self.schema.names)
                yield pa.Table.from_batches([batch])

    def chunks(self, name: str) -> Iterator[pa.Array]:
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_file(file) as whole:
            # The file is opened again for this column alone, so that no other one is decompressed.
            options = pa.ipc.IpcReadOptions(included_fields=[whole.schema.get_field_index(name)])
        with (
            pa.OSFile(str(self._path)) as file,
            pa.ipc.open_file(file, options=options) as reader,
        ):
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number).column(0)


def _row_of(clip: Clip, stamp: catalog.Stamp | None) -> _Row:
    # The values have the order of `_COLUMNS`.
    media, timing = clip.media, clip.timing
    listed = timing.listed if timing else ()
    return (
        bytes.fromhex(clip.identity),
        not clip.caption,
        clip.path,
        media.path,
        media.member,
        media.offset,
        media.num_bytes,
        clip.kind,
        clip.caption,
        clip.num_frames,
        clip.width,
        clip.height,
        clip.fps,
        clip.duration_seconds,
        clip.stream_index,
        clip.rotation,
        clip.codec,
        clip.pix_fmt,
        clip.color_range,
        clip.color_transfer,
        clip.color_matrix,
        timing.first if timing else None,
        timing.step if timing else None,
        array(_LISTS["pts"], listed).tobytes() if listed else None,
        array(_LISTS["keyframes"], clip.keyframes).tobytes(),
        clip.prepared_from,
        *_stamp(stamp),
        *(media.span or (None, None)),
        clip.seek_pts if media.span else None,
        json.dumps(dict(clip.attributes)) if clip.attributes else None,
        json.dumps(dict(clip.conditioning)) if clip.conditioning else None,
    )


def _stamp(stamp: catalog.Stamp | None) -> tuple[int | None, int | None]:
    return (None, None) if stamp is None else (stamp.num_bytes, stamp.mtime_ns)


def _batch_of(
    rows: Sequence[_Row], attributes: Sequence[dict[str, float]], schema: pa.Schema
) -> pa.RecordBatch:
    columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
    given = [json.loads(each or "{}") for each in columns["given"]]
    arrays = []
    for each in schema:
        name: str = each.name
        if name in _LISTS:
            arrays.append(_lists_of(columns[name], each.type))
        elif name in columns:
            arrays.append(pa.array(columns[name], each.type))
        elif name.startswith(catalog.ATTRIBUTE):
            bare = name.removeprefix(catalog.ATTRIBUTE)
            values = (some.get(bare) for some in attributes)
            # An unknown score is null in a catalog.
            known = [None if value is None or math.isnan(value) else value for value in values]
            arrays.append(pa.array(known, each.type))
        else:
            bare = name.removeprefix(catalog.CONDITIONING)
            arrays.append(pa.array([some[bare] for some in given], each.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _lists_of(column: Sequence[bytes | None], kind: pa.ListType) -> pa.Array:
    # All integers of a column are one buffer of bytes: no Python object is made for each.
    values = np.frombuffer(b"".join(filter(None, column)), kind.value_type.to_pandas_dtype())
    sizes = [len(each or b"") // values.itemsize for each in column]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    is_null = pa.array([each is None for each in column])
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=kind, mask=is_null)


def _with_scores(
    clips: Iterable[_Row], before: catalog.StoredCatalog, label: str, written: Written
) -> Iterator[_Row]:
    """Yield clips with the scores and origin that an older catalog has for them.

    Scores that are dropped, because the caption has changed, are counted.
    """
    # These attributes are set by each index itself.
    no_scores = catalog.TRUSTED, catalog.OTHER_CAPTION
    names = {
        catalog.ATTRIBUTE + name: name for name in before.attribute_names if name not in no_scores
    }
    columns = ["identity", "caption", "prepared_from", *names]
    older = (row for some in before.clips() for row in some.table.select(columns).to_pylist())
    old = next(older, None)
    for row in clips:
        # Both sequences are sorted by identity.
        while old is not None and old["identity"] < row[0]:
            old = next(older, None)
        if old is None or old["identity"] != row[0]:
            yield row
            continue
        caption = old["caption"]
        scores = {bare: old[name] for name, bare in names.items() if old[name] is not None}
        changed = list(row)
        changed[_PREPARED_FROM] = old["prepared_from"]
        # Captions that a model wrote survive where the sources still have none.
        given = caption_without_file(label, row[_MEMBER] or row[_PATH])
        if row[_CAPTION] in ("", given) and scores.get(catalog.CAPTIONED):
            changed[_CAPTION] = caption
        if caption == changed[_CAPTION]:
            # Numbers that the sources give now replace older scores of the same name.
            mine = json.loads(row[_ATTRIBUTES] or "{}")
            changed[_ATTRIBUTES] = json.dumps({**scores, **mine})
        else:
            written.scores_dropped += bool(scores)
        yield tuple(changed)
