"""The data of a run page's plots as JSON: metrics, steps that were given up, and event marks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast, get_args

import numpy as np

from longtake.board.pages import rounded
from longtake.inspection.rows import MetricRows
from longtake.inspection.series import SERIES, Series, XAxis, abandoned_branches, read_series
from longtake.inspection.timeline import Mark

DEFAULT_PIXELS: Final = 1000
_MOST_BRANCH_PIXELS = 200


TITLES: Final = {
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "weight_norm": "Weight norm",
    "learning_rate": "Learning rate",
    "seconds": "Time of a step",
    "speed": "Clips per second",
    "memory": "Peak memory of rank 0's GPU",
    "flops": "Computed",
}
"""Titles of a run page's plots in their order; `Metric.panel` says which plot shows a metric."""


@dataclass(frozen=True)
class Panel:
    """One plot of a run page, and the metrics that it shows."""

    key: str
    names: tuple[str, ...]
    """Metrics that the plot shows at first."""
    more: tuple[str, ...]
    """Further metrics that a reader can switch on."""

    @property
    def title(self) -> str:
        return TITLES[self.key]

    @property
    def unit(self) -> str:
        unit = SERIES[self.names[0]].unit
        return "GiB" if unit == "B" else unit

    @property
    def is_logarithmic(self) -> bool:
        return SERIES[self.names[0]].is_logarithmic


PANELS: Final = tuple(
    Panel(
        key,
        tuple(name for name, each in SERIES.items() if each.panel == key and not each.is_extra),
        tuple(name for name, each in SERIES.items() if each.panel == key and each.is_extra),
    )
    for key in TITLES
)


def panels_of(rows: MetricRows) -> list[Panel]:
    """Return the plots of a run; a plot is left out if the run has no numbers for it."""
    return [
        each
        for each in PANELS
        if not SERIES[each.names[0]].is_sparse
        or (len(rows) and rows.is_recorded(each.names[0]).any())
    ]


def series_payload(rows: MetricRows, query: Mapping[str, str]) -> dict[str, Any]:
    """Return metrics of a range of steps, reduced for plotting, as JSON-able data.

    Args:
        rows: the run's metrics.
        query: `names` (with commas), `first`, `last`, `pixels` and `x`, all optional.

    Raises:
        ValueError: a name is unknown, or a value that should be a number is not.
    """
    names = [name for name in query.get("names", "loss,loss_smoothed").split(",") if name]
    unknown = [name for name in names if name not in SERIES]
    x = query.get("x", "step")
    if unknown or x not in get_args(XAxis):
        known = ", ".join((*SERIES, *get_args(XAxis)))
        raise ValueError(f"{', '.join([*unknown, x])[:100]} is no series or axis. Known: {known}.")
    newest = int(rows.kept.step[-1]) if len(rows.kept) else 0
    first, last = _count(query, "first", 0), _count(query, "last", newest)
    pixels = _count(query, "pixels", DEFAULT_PIXELS)
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
    """Return a metric's mean, minimum and maximum per pixel; the last two only if they differ."""
    is_range = bool(np.any(series.low < series.high))
    # A step in which no clip drew a sigma of a part has no loss of that part: not a fault.
    is_sparse = series.metric.is_sparse
    bad = [] if is_sparse else series.x[np.flatnonzero(series.is_not_finite)].tolist()
    return {
        "name": series.name,
        "label": series.metric.label,
        "unit": series.metric.unit,
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
        series = branch.read(names, first, last, _MOST_BRANCH_PIXELS)
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
    """Return marks of events on the time line as JSON-able data; times are seconds since 1970."""
    return [asdict(mark) for mark in marks]
