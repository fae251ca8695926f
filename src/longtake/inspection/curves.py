"""Draws what a run's numbers did over its steps, the abandoned ones too, and what the guard did."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from longtake.drawing import INK, PALE_INK, PAPER, RULE, SERIES, figure_text
from longtake.errors import RunError
from longtake.fsio import atomic_write
from longtake.inspection.rows import Row, passes, read_rows
from longtake.inspection.strip import draw_strip, mark_steps, strip_of
from longtake.inspection.troubles import troubles
from longtake.run_dir import RunDirectory

LOG_SCALE_RATIO = 20.0
"""From this quotient of the largest and the smallest value on, an axis is logarithmic."""

_FEW_DECADES = 1e3
_MARGIN = 0.005  # of the width, beside the first and the last step

_PANELS = {"loss": "loss", "grad_norm": "gradient norm", "weight_norm": "weight norm"}
_LEGEND = ["kept", "abandoned", "no number"]
_KEPT, _ABANDONED, _TROUBLE = SERIES[0], "#8fb1dc", SERIES[1]


@figure_text()
def draw(run: RunDirectory, path: Path, around: int | None, span: int) -> None:
    """Write a PNG of loss, gradient norm and weight norm over the steps.

    What counts is dark, what was abandoned is light; above are the guard's verdicts and the
    rollbacks. A number that is none is a cross at its panel's upper edge.

    Args:
        run: the run.
        path: the file to write; aside first, then renamed.
        around: the step in the middle; None: all steps.
        span: steps on each side of that one.

    Raises:
        RunError: there is no run or no such step in it, or the file cannot be written.
    """
    run.recipe()
    everything = read_rows(run)
    rows = [row for row in everything if around is None or abs(row.step - around) <= span]
    if not rows:
        where = "" if around is None else f" within {span} steps of step {around}"
        raise RunError(f"{run.path} has no metrics{where}, so there is nothing to draw.")
    last = max(row.step for row in rows)
    if last == max(row.step for row in everything):
        # A hang is at the step after the last one that was done.
        last = max([last, *(each["at"] for each in troubles(run, everything))])
    shown = (min(row.step for row in rows), last)
    strip = strip_of(run, everything, shown)
    figure = Figure(figsize=(9.6, 7.6), dpi=120, layout="constrained", facecolor=PAPER)
    heights = [0.12 + 0.16 * strip.num_lanes, *([1.0] * len(_PANELS))]
    top, *panels = figure.subplots(1 + len(_PANELS), 1, sharex=True, height_ratios=heights)
    draw_strip(top, strip, shown)
    for axes, name in zip(panels, _PANELS, strict=True):
        _draw_panel(axes, rows, name)
        mark_steps(axes, strip, shown, is_last=axes is panels[-1])
    top.set_title(_title(run, rows, around), loc="left", color=INK)
    _explain(top, panels)
    panels[-1].set_xlabel("step", color=INK)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    beside = max(0.5, _MARGIN * (shown[1] - shown[0]))
    panels[-1].set_xlim(shown[0] - beside, shown[1] + beside)
    _save(figure, path)


def _explain(top: Axes, panels: Sequence[Axes]) -> None:
    """One legend for all panels, beside the title; none where there is only one curve."""
    handles = [axes.get_legend_handles_labels() for axes in panels]
    named = {
        name: line for lines, names in handles for line, name in zip(lines, names, strict=True)
    }
    if len(named) > 1:
        names = sorted(named, key=_LEGEND.index)
        top.legend(
            [named[name] for name in names],
            names,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(names),
            frameon=False,
            fontsize=8,
            labelcolor=INK,
        )


def _draw_panel(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """One number of all rows: the abandoned ones light, and the others over them."""
    width = 1.3 if len(rows) < 500 else 0.8
    counts, label, _ = _LEGEND
    for tail in _abandoned(rows):
        steps, values = _series(tail, name)
        axes.plot(steps, values, color=_ABANDONED, linewidth=width, label=label)
        label = "_"  # one entry in the legend
    steps, values = _series([row for row in rows if not row.is_abandoned], name)
    axes.plot(steps, values, color=_KEPT, linewidth=width, label=counts)
    _cross_out(axes, rows, name)
    axes.set_yscale(_scale([row.metrics.get(name) for row in rows]))
    if axes.get_yscale() == "log":
        _label_decades(axes)
    axes.set_ylabel(_PANELS[name], color=INK)
    axes.set_facecolor(PAPER)
    axes.grid(color=RULE, linewidth=0.7)
    axes.tick_params(which="both", colors=PALE_INK)
    axes.spines[["top", "right"]].set_visible(False)
    if not any(name in row.metrics for row in rows):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=PALE_INK)


def _label_decades(axes: Axes) -> None:
    """Write 1, 2 and 5 of each decade as plain numbers; of many decades only 1."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if high < _FEW_DECADES * low:
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))


def _abandoned(rows: Sequence[Row]) -> list[list[Row]]:
    """The abandoned end of each pass, from its last row that counts on."""
    tails = []
    for mine in passes(rows):
        given_up = [row for row in mine if row.is_abandoned]
        kept = [row for row in mine if not row.is_abandoned]
        if given_up:
            tails.append([*kept[-1:], *given_up])
    return tails


def _cross_out(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Mark the steps at which the number was none: a curve only shows that something is not."""
    steps = [row.step for row in rows if name in row.metrics and row.metrics.get(name) is None]
    if steps:
        heights = [0.95] * len(steps)
        edge = axes.get_xaxis_transform()
        axes.plot(steps, heights, "x", color=_TROUBLE, transform=edge, label=_LEGEND[-1])


def _series(rows: Sequence[Row], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps and values; with a gap where steps have no row."""
    steps: list[float] = []
    values: list[float] = []
    for row, following in pairwise([*rows, None]):
        assert row is not None
        value = row.metrics.get(name)
        steps.append(row.step)
        values.append(float("nan") if value is None else float(str(value)))
        if following is not None and following.step > row.step + 1:
            steps.append(row.step + 0.5)
            values.append(float("nan"))
    return np.array(steps), np.array(values)


def _scale(values: Sequence[object]) -> str:
    """Logarithmic for positive values that span a factor of `LOG_SCALE_RATIO`, else linear."""
    finite = [float(str(value)) for value in values if value is not None]
    wide = finite and min(finite) > 0 and max(finite) / min(finite) >= LOG_SCALE_RATIO
    return "log" if wide else "linear"


def _title(run: RunDirectory, rows: Sequence[Row], around: int | None) -> str:
    name = run.path.resolve().name
    if around is not None:
        return f"{name}, around step {around}"
    return f"{name}, {max(row.step for row in rows)} steps"


def _save(figure: Figure, path: Path) -> None:
    try:
        with atomic_write(path) as aside:
            figure.savefig(aside, format="png")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}.") from error
