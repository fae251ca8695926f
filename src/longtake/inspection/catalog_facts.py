"""Facts of a catalog: sizes, codecs, colours, lengths, scores, and why files were rejected."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.data.catalog import MATRIX, Catalog
from longtake.data.clip import HDR, MIRRORED
from longtake.data.decode import HD_LINES

MOST_SIZES = 20  # picture sizes that are listed, the most frequent first
_ASPECTS = ((9, 16), (2, 3), (3, 4), (1, 1), (4, 3), (3, 2), (16, 9), (21, 9))
_QUANTILES = dict(
    zip(
        ("min", "q5", "q25", "median", "q75", "q95", "max"),
        (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0),
        strict=True,
    )
)
_HDR = pa.array(HDR)


def catalog_stats(catalog: Catalog) -> dict[str, Any]:
    """Return JSON-able facts of a catalog of clips: counts, sizes, formats, rejected files."""
    table = catalog.table
    kinds = _counted(table["kind"])
    is_video = pc.equal(table["kind"], "video").to_numpy().astype(bool)
    return {
        "clips": len(catalog),
        "videos": kinds.get("video", 0),
        "images": kinds.get("image", 0),
        "hours": float(catalog.column("duration_seconds").sum()) / 3600,
        "frames": int(catalog.column("num_frames").sum(dtype=np.int64)),
        "captioned": _count(pc.not_equal(table["caption"], "")),
        "duplicates": len(catalog.duplicates),
        "rejected": [{"path": each.path, "reason": each.reason} for each in catalog.rejected],
        "reject_reasons": dict(Counter(each.reason for each in catalog.rejected).most_common()),
        "hdr": _count(pc.is_in(table["color_transfer"], value_set=_HDR)),
        "variable_frame_rate": _count(pc.is_valid(table["pts"])),
        "unreliable_timestamps": int(
            np.count_nonzero(is_video & table["first_pts"].is_null().to_numpy())
        ),
        "prepared": _count(pc.not_equal(table["prepared_from"], "")),
        "sizes": _sizes(catalog),
        "aspects": _aspects(catalog),
        "codecs": _counted(table["codec"]),
        "pixel_formats": _counted(table["pix_fmt"]),
        "color_ranges": _counted(table["color_range"]),
        "color_transfers": _counted(table["color_transfer"]),
        "color_matrices": _counted(table[MATRIX].fill_null("not read; index again")),
        "untagged_hd": _count(_is_untagged_hd(catalog)),
        "rotations": {str(angle): n for angle, n in _counted(table["rotation"]).items()},
        "numbers": _numbers(catalog, is_video),
        "attributes": {name: spread(catalog.column(name)) for name in catalog.attribute_names},
    }


def spread(values: NDArray[Any]) -> dict[str, Any]:
    """Return the count (`known`), quantiles, mean and deviation of an array's finite values."""
    known = values[np.isfinite(values)].astype(np.float64)
    if not len(known):
        return {"known": 0, **dict.fromkeys([*_QUANTILES, "mean", "std"])}
    quantiles = np.quantile(known, list(_QUANTILES.values())).tolist()
    return {
        "known": len(known),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
        "mean": float(known.mean()),
        "std": float(known.std()),
    }


def _numbers(catalog: Catalog, is_video: NDArray[np.bool_]) -> dict[str, Any]:
    # Images are left out: they have neither length nor rate.
    lengths = pc.list_value_length(catalog.table["keyframes"]).to_numpy()
    frames = catalog.column("num_frames")
    return {
        "num_frames": spread(frames[is_video]),
        "duration_seconds": spread(catalog.column("duration_seconds")[is_video]),
        "fps": spread(catalog.column("fps")[is_video]),
        "frames_per_keyframe": spread((frames / np.maximum(lengths, 1))[is_video]),
    }


def _sizes(catalog: Catalog) -> list[dict[str, int]]:
    widths, heights = (catalog.column(name).astype(np.int64) for name in ("width", "height"))
    # Both sizes in one integer: `np.unique` is much faster on these than on pairs.
    different, counts = np.unique(widths << 32 | heights, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:MOST_SIZES]
    return [
        {"width": int(size >> 32), "height": int(size & 0xFFFFFFFF), "clips": int(count)}
        for size, count in zip(different[most], counts[most], strict=True)
    ]


def _aspects(catalog: Catalog) -> dict[str, int]:
    aspects = np.log(catalog.column("width") / catalog.column("height"))
    known = np.log([width / height for width, height in _ASPECTS])
    # The borders between ratios are halfway on a logarithmic scale.
    nearest = np.searchsorted((known[1:] + known[:-1]) / 2, aspects)
    counts = np.bincount(nearest, minlength=len(_ASPECTS)).tolist()
    return {f"{w}:{h}": n for (w, h), n in zip(_ASPECTS, counts, strict=True) if n}


def _counted(column: pa.ChunkedArray) -> dict[Any, int]:
    rows = pc.value_counts(column).to_pylist()
    return {row["values"]: row["counts"] for row in sorted(rows, key=lambda row: -row["counts"])}


def _is_untagged_hd(catalog: Catalog) -> pa.ChunkedArray:
    table = catalog.table
    # A clip that is shown turned has as many lines as its stored pictures have columns.
    turned = pa.array([90, 270, MIRRORED + 90, MIRRORED + 270], pa.int32())
    is_turned = pc.is_in(table["rotation"], value_set=turned)
    lines = pc.if_else(is_turned, table["width"], table["height"])
    is_untagged = pc.and_(pc.equal(table["kind"], "video"), pc.equal(table[MATRIX], ""))
    return pc.and_(is_untagged, pc.greater_equal(lines, HD_LINES))


def _count(mask: pa.ChunkedArray) -> int:
    return int(pc.sum(mask).as_py() or 0)
