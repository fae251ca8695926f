"""What the plots of a run page draw, as JSON: series, branches that were given up, marks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

import numpy as np

from longtake.board.pages import rounded
from longtake.inspection.columns import SIGMA_NAMES
from longtake.inspection.rows import MetricRows
from longtake.inspection.series import (
    MAX_PIXELS,
    NAMES,
    Series,
    XAxis,
    abandoned_branches,
    read_branch,
    read_series,
)
from longtake.inspection.timeline import Mark

DEFAULT_PIXELS: Final = 1000
_MOST_BRANCH_PIXELS = 200


@dataclass(frozen=True)
class Panel:
    """One plot of a run page."""

    key: str
    title: str
    names: tuple[str, ...]  # of the series that it draws at first
    more: tuple[str, ...] = ()  # that can be shown in it too

    @property
    def unit(self) -> str:
        unit = NAMES[self.names[0]].unit
        return "GiB" if unit == "B" else unit


PANELS: Final = (
    Panel(
        "loss",
        "Loss",
        ("loss", "loss_smoothed"),
        ("loss_sigma_1", "loss_sigma_2", "loss_sigma_3", "loss_sigma_4"),
    ),
    Panel("grad_norm", "Gradient norm", ("grad_norm",)),
    Panel("weight_norm", "Weight norm", ("weight_norm",), ("update_ratio",)),
    Panel("learning_rate", "Learning rate", ("learning_rate",)),
    Panel("seconds", "Time of a step", ("step_seconds", "data_seconds")),
    Panel("speed", "Clips per second", ("samples_per_second",)),
    Panel("memory", "Peak memory of rank 0's GPU", ("peak_memory_bytes",)),
    Panel("flops", "Computed", ("tflops_per_second",), ("mfu",)),
)


def panels_of(rows: MetricRows) -> list[Panel]:
    """Those of which there is a number, or may be one."""
    always = ("loss", "grad_norm", "weight_norm", "learning_rate", "seconds", "speed")
    return [each for each in PANELS if each.key in always or _has(rows, each.names[0])]


def _has(rows: MetricRows, name: str) -> bool:
    return bool(len(rows)) and bool(rows.is_recorded(name).any())


def series_payload(rows: MetricRows, query: Mapping[str, str]) -> dict[str, Any]:
    """Series of some steps.

    Args:
        rows: of the run.
        query: `names` (with commas), `first`, `last`, `pixels` and `x`, all optional.

    Raises:
        ValueError: a name is unknown, or what should be a number is none.
    """
    names = [name for name in query.get("names", "loss,loss_smoothed").split(",") if name]
    unknown = [name for name in names if name not in NAMES]
    x = query.get("x", "step")
    if unknown or x not in get_args(XAxis):
        known = ", ".join((*NAMES, *get_args(XAxis)))
        raise ValueError(f"{', '.join([*unknown, x])[:100]} is no series or axis. Known: {known}.")
    newest = int(rows.kept.step[-1]) if len(rows.kept) else 0
    first, last = _count(query, "first", 0), _count(query, "last", newest)
    pixels = min(_count(query, "pixels", DEFAULT_PIXELS), MAX_PIXELS)
    found = read_series(rows, names, first, last, pixels, x=cast("XAxis", x))
    return {
        "first": first,
        "last": last,
        "newest": newest,
        "x": found[0].x.tolist() if found else [],
        "series": [as_json(each) for each in found],
        "branches": _branches(rows, names, first, last) if x == "step" else [],
    }


def _count(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{name}={text[:40]!r} is not a number of steps.")
    return int(text)


def as_json(series: Series) -> dict[str, Any]:
    """Least, greatest and mean number of each pixel; the first two only where they differ."""
    is_range = bool(np.any(series.low < series.high))
    # Of a part of the sigmas that no clip of a step drew, there is no loss: that is no fault.
    is_sparse = series.name in SIGMA_NAMES
    bad = [] if is_sparse else series.x[np.flatnonzero(series.is_not_finite)].tolist()
    return {
        "name": series.name,
        "label": series.label,
        "unit": series.unit,
        "mean": rounded(series.mean),
        "low": rounded(series.low) if is_range else None,
        "high": rounded(series.high) if is_range else None,
        "bad": bad,
        "sparse": is_sparse,
    }


def _branches(
    rows: MetricRows, names: Sequence[str], first: int, last: int
) -> list[dict[str, Any]]:
    found = []
    for branch in abandoned_branches(rows):
        if branch.last_step < first or branch.first_step > last:
            continue
        series = read_branch(branch, names, first, last, _MOST_BRANCH_PIXELS)
        found.append(
            {
                "first": branch.first_step,
                "last": branch.last_step,
                "returned_to": branch.returned_to,
                "x": series[0].x.tolist() if series else [],
                "series": [as_json(each) for each in series],
            }
        )
    return found


def marks_payload(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """The time line; times are seconds since 1970."""
    return [
        {
            "step": mark.step,
            "time": mark.time,
            "kind": mark.kind,
            "lane": mark.lane,
            "level": mark.level,
            "text": mark.text,
            "span": mark.span,
            "count": mark.count,
        }
        for mark in marks
    ]
