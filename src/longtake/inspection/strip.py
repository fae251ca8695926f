"""The strip above a run's curves: verdicts, hangs, rollbacks, and where epochs and stages begin."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from longtake.drawing import INK, PALE_INK, PAPER, SERIES
from longtake.inspection.around import step_of
from longtake.inspection.rows import Row
from longtake.inspection.troubles import in_words, troubles
from longtake.inspection.verdicts import events, verdicts
from longtake.run_dir import RolledBack, RunDirectory

_TROUBLE, _WENT_BACK, _OF_A_NODE, _SHADE = SERIES[1], SERIES[3], SERIES[4], "#f3ead8"
_MOST_LABELS = 6
_MOST_EDGES = 12
_ROOM_BESIDE = 0.45  # of the width, for a rollback in words
_NEAR = 0.06  # of the width: what is closer has no room for words of its own

Span = tuple[int, int]
"""First and last step that are shown."""


@dataclass(frozen=True)
class Strip:
    """What there is to mark among the steps that are shown."""

    verdicts: tuple[tuple[int, str], ...]
    """(step, in a few words) of those that are not about a rollback."""
    rollbacks: tuple[RolledBack, ...]
    edges: tuple[tuple[int, str], ...]
    """(first step, name) of epochs and stages; none where there are too many to tell apart."""
    troubles: tuple[tuple[int, str], ...] = ()
    """(step, in a few words) of what befell processes and nodes."""

    @property
    def num_lanes(self) -> int:
        """Lines of marks above each other: verdicts, troubles, and a few rollbacks."""
        return self.first_rollback + min(len(self.rollbacks), _MOST_LABELS)

    @property
    def first_rollback(self) -> int:
        """The first lane of rollbacks."""
        return bool(self.verdicts) + bool(self.troubles)


def strip_of(run: RunDirectory, rows: Sequence[Row], shown: Span) -> Strip:
    """What a run's directory says of the steps that are shown; `rows` are all of the run's."""
    rollbacks = [
        each
        for each in run.rollbacks()
        if each["from_step"] >= shown[0] and each["to_step"] <= shown[1]
    ]
    ends = {each["from_step"] for each in rollbacks}
    others = (each for each in verdicts(run) if each["step"] not in ends)
    said = [(each["step"], _words(f"{each['verdict']}: {each['reason']}")) for each in others]
    edges = {
        _edge(event): step
        for event in events(run)
        if event["event"] in ("epoch", "stage") and (step := step_of(event, rows)) is not None
    }
    inside = ((step, name) for name, step in edges.items() if shown[0] < step <= shown[1])
    inner = tuple(sorted(inside))
    return Strip(
        verdicts=tuple(each for each in said if shown[0] <= each[0] <= shown[1]),
        troubles=tuple(
            (each["at"], in_words(each))
            for each in troubles(run, rows)
            if shown[0] <= each["at"] <= shown[1]
        ),
        rollbacks=tuple(rollbacks),
        edges=inner if len(inner) <= _MOST_EDGES else (),
    )


def draw_strip(axes: Axes, strip: Strip, shown: Span) -> None:
    """Fill the strip: a lane of verdicts, one of troubles, and an arrow back for each rollback."""
    axes.set_ylim(strip.num_lanes - 0.3, -0.7)
    axes.set_facecolor(PAPER)
    axes.tick_params(left=False, labelleft=False, bottom=False)
    axes.spines[:].set_visible(False)
    _draw_marks(axes, strip.verdicts, 0, _TROUBLE, shown)
    _draw_marks(axes, strip.troubles, int(bool(strip.verdicts)), _OF_A_NODE, shown)
    for number, each in enumerate(strip.rollbacks):
        lane = strip.first_rollback + number % _MOST_LABELS
        ends = max(each["to_step"], shown[0]), min(each["from_step"], shown[1])
        arrow = {"arrowstyle": "-|>", "color": _WENT_BACK, "shrinkA": 0, "shrinkB": 0, "lw": 1.4}
        axes.annotate("", xy=(ends[0], lane), xytext=(ends[1], lane), arrowprops=arrow)
        _label(axes, ends, lane, _told(each), INK, shown)


def _draw_marks(
    axes: Axes, marks: Sequence[tuple[int, str]], lane: int, color: str, shown: Span
) -> None:
    groups = _together(marks, _NEAR * (shown[1] - shown[0]))
    for group in groups:
        steps = [step for step, _ in group]
        axes.plot(steps, [lane] * len(steps), "v", color=color, markersize=5)
        if len(groups) <= _MOST_LABELS:
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


def mark_steps(axes: Axes, strip: Strip, shown: Span, *, is_last: bool) -> None:
    """Draw in a panel what the strip says: verdicts, the steps given up, and edges."""
    named_until = float(shown[0])
    for each in strip.rollbacks:
        axes.axvspan(each["to_step"] + 0.5, each["from_step"] + 0.5, color=_SHADE, zorder=0)
        axes.axvline(each["from_step"], color=_WENT_BACK, linewidth=1, linestyle="--")
    for step, _ in strip.verdicts:
        axes.axvline(step, color=_TROUBLE, linewidth=0.8, linestyle="--", alpha=0.7)
    for step, _ in strip.troubles:
        axes.axvline(step, color=_OF_A_NODE, linewidth=0.8, linestyle="--", alpha=0.7)
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
    if max(left, right) > _ROOM_BESIDE * (shown[1] - shown[0]):
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


def _told(rolled_back: RolledBack) -> str:
    first, end = rolled_back["skipped"]
    went = f"from {rolled_back['from_step']} back to {rolled_back['to_step']}"
    return f"{_words(rolled_back['reason'])}: {went}, without batches {first} to {end - 1}"


def _edge(event: dict[str, object]) -> str:
    stage = event["stage"]
    if event["event"] == "stage":
        return f"stage {stage}"
    # Without stages in the recipe there is one, of this name.
    return f"epoch {event['epoch']}" + (f" of stage {stage}" if stage != "all" else "")


def _words(text: str) -> str:
    return text.replace("_", " ")
