"""Catalogs of clips that are made up."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from longtake.data import catalog as tables
from longtake.data.catalog import ATTRIBUTE, CONDITIONING, Catalog, Duplicate, Rejection, Stamp
from longtake.data.clip import Clip


def make_catalog(
    clips: Iterable[Clip],
    rejected: Iterable[Rejection] = (),
    duplicates: Iterable[Duplicate] = (),
    stamps: Mapping[str, Stamp] | None = None,
) -> Catalog:
    """Make a catalog of clips in any order; `stamps` of their files are by `str(media)`."""
    ordered = sorted(clips, key=lambda clip: clip.identity)
    names = sorted({name for clip in ordered for name in clip.attributes})
    known = stamps or {}
    rows = [_row_of(clip, names) | _stamp_row(known.get(clip.path)) for clip in ordered]
    aside: list[dict[str, Any]] = [vars(each) for each in rejected]
    aside += [
        {"path": each.path, "reason": "duplicate", "identity": bytes.fromhex(each.identity)}
        for each in duplicates
    ]
    aside = [row | _stamp_row(known.get(row["path"])) for row in aside]
    schema = tables.with_attributes(tables.CLIP_SCHEMA, names)
    if any(clip.media.span for clip in ordered):
        schema = pa.schema([*schema, *tables.SPAN_SCHEMA])
    # All clips have the same further inputs.
    for name, given in next((each.conditioning for each in ordered), {}).items():
        schema = schema.append(tables.conditioning_field(name, given))
    catalog = Catalog(
        pa.Table.from_pylist(rows, schema=schema),
        pa.Table.from_pylist(aside, schema=tables.ASIDE_SCHEMA),
    )
    assert tables.is_ascending(catalog.identities), "no two clips have the same identity"
    return catalog


def _row_of(clip: Clip, attribute_names: Iterable[str]) -> dict[str, Any]:
    row = {name: getattr(clip, name, None) for name in tables.CLIP_SCHEMA.names}
    media, timing = clip.media, clip.timing
    row |= {"path": media.path, "member": media.member, "offset": media.offset}
    row |= {"identity": bytes.fromhex(clip.identity), "num_bytes": media.num_bytes}
    if timing is not None:
        row |= {"first_pts": timing.first, "pts_step": timing.step, "pts": timing.listed or None}
    if media.span is not None:
        row["span_start"], row["span_end"] = media.span
        row["seek_pts"] = clip.seek_pts
    known = {name: value for name, value in clip.attributes.items() if not math.isnan(value)}
    row |= {ATTRIBUTE + name: known.get(name) for name in attribute_names}
    return row | {CONDITIONING + name: given for name, given in clip.conditioning.items()}


def _stamp_row(stamp: Stamp | None) -> dict[str, Any]:
    return {"file_bytes": stamp.num_bytes, "file_mtime_ns": stamp.mtime_ns} if stamp else {}
