"""Draws a run's numbers over its steps, with verdicts, incidents and rollbacks above them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from longtake import errors, node_dir
from longtake.drawing import INK, PALE_INK, PAPER, RULE, SERIES, figure_text, save_picture
from longtake.inspection.facts import incidents, step_of, verdicts
from longtake.inspection.rows import MetricRows, read_rows
from longtake.inspection.series import Series, abandoned_branches, read_branch, read_series
from longtake.inspection.tables import incident_words
from longtake.run_dir import RolledBack, RunDirectory, skipped_batches

LOG_SCALE_RATIO = 20.0
"""From this quotient of the largest and the smallest value on, an axis is logarithmic."""

_FEW_DECADES = 1e3
_PIXELS = 1000  # of the panels' width
_MARGIN = 0.005  # of the width, beside the first and the last step
_MAX_LABELS = 6
_MAX_EDGES = 12
_MIN_LABEL_WIDTH = 0.45  # of the width, for a rollback in words
_NEAR = 0.06  # of the width: closer marks have no room for labels of their own

_PANELS = {"loss": "loss", "grad_norm": "gradient norm", "weight_norm": "weight norm"}
_LEGEND = ["kept", "abandoned", "no number"]
_KEPT, _ABANDONED, _VERDICT, _ROLLBACK, _INCIDENT, _SHADE = (
    *(SERIES[0], "#8fb1dc", SERIES[1]),
    *(SERIES[3], SERIES[4], "#f3ead8"),
)

Events = Sequence[dict[str, Any]]
Span = tuple[int, int]
"""First and last step that are shown."""


@figure_text()
def draw_curves(run: RunDirectory, path: Path, around: int | None, span: int) -> None:
    """Write a PNG of loss, gradient norm and weight norm over the steps.

    Kept steps are dark, abandoned ones light; where a pixel has many steps, a band shows their
    least and greatest number. Above are the guard's verdicts and the rollbacks. A number that is
    not finite is a cross at its panel's upper edge.

    Args:
        run: the run.
        path: the file to write; aside first, then renamed.
        around: the step in the middle; None: all steps.
        span: steps on each side of that one.

    Raises:
        RunError: there is no run or no such step in it, or the file cannot be written.
    """
    run.recipe()
    everything, events = read_rows(run), list(node_dir.read_events(run))
    rows = everything if around is None else everything[abs(everything.step - around) <= span]
    if not len(rows):
        where = "" if around is None else f" within {span} steps of step {around}"
        raise errors.RunError(f"{run.path} has no metrics{where}, so there is nothing to draw.")
    last = int(rows.step.max())
    if last == everything.step.max():
        # A hang is at the step after the last one that was done.
        last = max([last, *(each["at"] for each in incidents(events, everything))])
    shown = (int(rows.step.min()), last)
    strip = strip_of(events, run.rollbacks(), everything, shown)
    figure = Figure(figsize=(9.6, 7.6), dpi=120, layout="constrained", facecolor=PAPER)
    heights = [0.12 + 0.16 * strip.num_lanes, *([1.0] * len(_PANELS))]
    top, *panels = figure.subplots(1 + len(_PANELS), 1, sharex=True, height_ratios=heights)
    _draw_strip(top, strip, shown)
    for axes, name in zip(panels, _PANELS, strict=True):
        _draw_panel(axes, everything, name, shown)
        _mark_steps(axes, strip, shown, is_last=axes is panels[-1])
    top.set_title(_title(run, rows, around), loc="left", color=INK)
    _explain(top, panels)
    panels[-1].set_xlabel("step", color=INK)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    beside = max(0.5, _MARGIN * (shown[1] - shown[0]))
    panels[-1].set_xlim(shown[0] - beside, shown[1] + beside)
    save_picture(figure, path)


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


def _draw_panel(axes: Axes, rows: MetricRows, name: str, shown: Span) -> None:
    """One number over the steps: the abandoned ones light, and the others over them."""
    counts, label, _ = _LEGEND
    kept, abandoned = (
        read_series(rows, [name], *shown, _PIXELS, abandoned=each)[0] for each in (False, True)
    )
    width = 1.3 if len(kept.x) < 500 else 0.8
    for branch in abandoned_branches(rows):
        for each in read_branch(branch, [name], *shown, _PIXELS):
            if len(each.x):
                _draw_line(axes, each, _ABANDONED, width, label)
                label = "_"  # one entry in the legend
    _draw_line(axes, kept, _KEPT, width, counts)
    bad = np.concatenate([each.x[each.is_not_finite] for each in (kept, abandoned)])
    if len(bad):  # a curve shows only a gap
        edge, heights = axes.get_xaxis_transform(), np.full(len(bad), 0.95)
        axes.plot(bad, heights, "x", color=_VERDICT, transform=edge, label=_LEGEND[-1])
    numbers = np.concatenate([kept.low, kept.high, abandoned.low, abandoned.high])
    axes.set_yscale(axis_scale(numbers))
    if axes.get_yscale() == "log":
        _label_decades(axes)
    axes.set_ylabel(_PANELS[name], color=INK)
    axes.set_facecolor(PAPER)
    axes.grid(color=RULE, linewidth=0.7)
    axes.tick_params(which="both", colors=PALE_INK)
    axes.spines[["top", "right"]].set_visible(False)
    if np.isnan(numbers).all() and not len(bad):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=PALE_INK)


def _draw_line(axes: Axes, series: Series, color: str, width: float, label: str) -> None:
    """The mean of each pixel, over a band from its least to its greatest number."""
    if (series.high > series.low).any():
        axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.4, linewidth=0)
    axes.plot(series.x, series.mean, color=color, linewidth=width, label=label)


def _label_decades(axes: Axes) -> None:
    """Write 1, 2 and 5 of each decade as plain numbers; of many decades only 1."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if high < _FEW_DECADES * low:
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))


def axis_scale(values: NDArray[np.float64]) -> str:
    finite = values[~np.isnan(values)]
    is_wide = len(finite) and finite.min() > 0 and finite.max() / finite.min() >= LOG_SCALE_RATIO
    return "log" if is_wide else "linear"


def _title(run: RunDirectory, rows: MetricRows, around: int | None) -> str:
    name = run.path.resolve().name
    if around is not None:
        return f"{name}, around step {around}"
    return f"{name}, {rows.step.max()} steps"


# --- The strip of marks above the panels ---------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """What there is to mark among the steps that are shown."""

    verdicts: tuple[tuple[int, str], ...]
    """(step, in a few words) of those that are not about a rollback."""
    rollbacks: tuple[RolledBack, ...]
    edges: tuple[tuple[int, str], ...]
    """(first step, name) of epochs and stages; none where there are too many to distinguish."""
    incidents: tuple[tuple[int, str], ...] = ()
    """(step, in a few words) of what happened to processes and nodes."""

    @property
    def num_lanes(self) -> int:
        return self.first_rollback + min(len(self.rollbacks), _MAX_LABELS)

    @property
    def first_rollback(self) -> int:
        return bool(self.verdicts) + bool(self.incidents)


def strip_of(
    events: Events, rollbacks: Sequence[RolledBack], rows: MetricRows, shown: Span
) -> Strip:
    """What there is to mark among the steps that are shown; all else is of the whole run."""
    rollbacks = [
        each for each in rollbacks if each["from_step"] >= shown[0] and each["to_step"] <= shown[1]
    ]
    ends = {each["from_step"] for each in rollbacks}
    others = (each for each in verdicts(events) if each["step"] not in ends)
    said = [(each["step"], _words(f"{each['verdict']}: {each['reason']}")) for each in others]
    edges = {
        _edge(event): step
        for event in events
        if event["event"] in ("epoch", "stage") and (step := step_of(event, rows)) is not None
    }
    inside = ((step, name) for name, step in edges.items() if shown[0] < step <= shown[1])
    inner = tuple(sorted(inside))
    return Strip(
        verdicts=tuple(each for each in said if shown[0] <= each[0] <= shown[1]),
        incidents=tuple(
            (each["at"], incident_words(each))
            for each in incidents(events, rows)
            if shown[0] <= each["at"] <= shown[1]
        ),
        rollbacks=tuple(rollbacks),
        edges=inner if len(inner) <= _MAX_EDGES else (),
    )


def _draw_strip(axes: Axes, strip: Strip, shown: Span) -> None:
    """Fill the strip: lanes of verdicts and incidents, and an arrow back for each rollback."""
    axes.set_ylim(strip.num_lanes - 0.3, -0.7)
    axes.set_facecolor(PAPER)
    axes.tick_params(left=False, labelleft=False, bottom=False)
    axes.spines[:].set_visible(False)
    _draw_marks(axes, strip.verdicts, 0, _VERDICT, shown)
    _draw_marks(axes, strip.incidents, int(bool(strip.verdicts)), _INCIDENT, shown)
    for number, each in enumerate(strip.rollbacks):
        lane = strip.first_rollback + number % _MAX_LABELS
        ends = max(each["to_step"], shown[0]), min(each["from_step"], shown[1])
        arrow = {"arrowstyle": "-|>", "color": _ROLLBACK, "shrinkA": 0, "shrinkB": 0, "lw": 1.4}
        axes.annotate("", xy=(ends[0], lane), xytext=(ends[1], lane), arrowprops=arrow)
        _label(axes, ends, lane, _rollback_text(each), INK, shown)


def _draw_marks(
    axes: Axes, marks: Sequence[tuple[int, str]], lane: int, color: str, shown: Span
) -> None:
    groups = _together(marks, _NEAR * (shown[1] - shown[0]))
    for group in groups:
        steps = [step for step, _ in group]
        axes.plot(steps, [lane] * len(steps), "v", color=color, markersize=5)
        if len(groups) <= _MAX_LABELS:
            times = f"{len(group)} × " if len(group) > 1 else ""  # noqa: RUF001 - in a picture
            _label(axes, (steps[0], steps[-1]), lane, f"{times}{group[0][1]}", color, shown)


def _together(marks: Sequence[tuple[int, str]], near: float) -> list[list[tuple[int, str]]]:
    """Marks that say the same, one close after the other, as one group."""
    groups: list[list[tuple[int, str]]] = []
    for step, text in sorted(marks):
        if groups and groups[-1][-1][1] == text and step - groups[-1][-1][0] <= near:
            groups[-1].append((step, text))
        else:
            groups.append([(step, text)])
    return groups


def _mark_steps(axes: Axes, strip: Strip, shown: Span, *, is_last: bool) -> None:
    """Draw in a panel what the strip says: verdicts, abandoned steps, and edges."""
    named_until = float(shown[0])
    for each in strip.rollbacks:
        axes.axvspan(each["to_step"] + 0.5, each["from_step"] + 0.5, color=_SHADE, zorder=0)
        axes.axvline(each["from_step"], color=_ROLLBACK, linewidth=1, linestyle="--")
    for step, _ in strip.verdicts:
        axes.axvline(step, color=_VERDICT, linewidth=0.8, linestyle="--", alpha=0.7)
    for step, _ in strip.incidents:
        axes.axvline(step, color=_INCIDENT, linewidth=0.8, linestyle="--", alpha=0.7)
    for step, name in strip.edges:
        axes.axvline(step - 0.5, color=PALE_INK, linewidth=0.8, linestyle=":")
        if is_last and step >= named_until:
            named_until = step + _NEAR * (shown[1] - shown[0])
            axes.annotate(
                name,
                xy=(step - 0.5, 0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 3),
                textcoords="offset points",
                color=PALE_INK,
                fontsize=7.5,
            )


def _label(axes: Axes, ends: Span, lane: int, text: str, color: str, shown: Span) -> None:
    """Beside what it is of, on the side where there is more room; over it where there is none."""
    left, right = ends[0] - shown[0], shown[1] - ends[1]
    place, shift, side = sum(ends) / 2, (0, 7), "center"
    if max(left, right) > _MIN_LABEL_WIDTH * (shown[1] - shown[0]):
        place, shift, side = (
            (ends[0], (-7, 0), "right") if left > right else (ends[1], (7, 0), "left")
        )
    label = axes.annotate(
        text,
        xy=(place, lane),
        xytext=shift,
        textcoords="offset points",
        ha=side,
        va="center",
        color=color,
        fontsize=8,
    )
    label.set_in_layout(False)  # a long one may not push the panels aside


def _rollback_text(rolled_back: RolledBack) -> str:
    went = f"from {rolled_back['from_step']} back to {rolled_back['to_step']}"
    return f"{_words(rolled_back['reason'])}: {went}, {skipped_batches(rolled_back)} skipped"


def _edge(event: dict[str, object]) -> str:
    stage = event["stage"]
    if event["event"] == "stage":
        return f"stage {stage}"
    # Without stages in the recipe there is one, of this name.
    return f"epoch {event['epoch']}" + (f" of stage {stage}" if stage != "all" else "")


def _words(text: str) -> str:
    return text.replace("_", " ")
