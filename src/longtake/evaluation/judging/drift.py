"""Tells when a measure moves from checkpoint to checkpoint, or lies where no training clip's does.

Pure functions of what is in scores.json. A loss does not see that videos get a little brighter at
each checkpoint; a row of means that only ever rises does.
"""

from collections.abc import Mapping, Sequence

from longtake.evaluation.judging.reference import Reference, Spread
from longtake.evaluation.measures.catalogue import MEASURES
from longtake.evaluation_dir import Alarm

_MARGIN = 0.1
"""Of a reference's own width: the quantiles of a few dozen clips are rough."""


def find_drift(
    preset: str,
    history: Sequence[Mapping[str, float]],
    steps: Sequence[int],
    checkpoints: int,
    change: float,
    reference: Reference | None = None,
) -> list[Alarm]:
    """Measures of ours that have risen, or fallen, at each of the last checkpoints.

    While a model learns, all measures move: a row counts from the checkpoint on that `learnt`
    gives. No alarm is given for a measure that has come nearer to what the training's clips have,
    for one that moved in a direction that is no failure (`bad` of `MEASURES`), nor for a user's
    own, which may be meant to rise. What counts is the row that ends at the highest step. Its
    change is told as a share of `base`. A checkpoint that lacks a measure is passed over.

    Args:
        preset: its name, for the message.
        history: the measures of each result, in any order.
        steps: of each; of two of the same step the later one counts.
        checkpoints: how often in a row it has to rise; that takes one result more.
        change: by which share in all.
        reference: of the training's clips, where it is known.
    """
    assert len(history) == len(steps)
    rows = dict(zip(steps, history, strict=True))
    alarms = []
    for name in dict.fromkeys(name for row in history for name in row if name in MEASURES):
        series = [(step, rows[step][name]) for step in sorted(rows) if name in rows[step]]
        start = learnt(name, [value for _, value in series], checkpoints, reference)
        row = last_row([value for _, value in series])
        row = row[-max(1, len(series) - start) :]
        share = (row[-1] - row[0]) / base(name, row)
        is_drift = len(row) > checkpoints and abs(share) >= change
        is_drift = is_drift and MEASURES[name].bad in ("both", "up" if share > 0 else "down")
        if is_drift and not _comes_nearer(name, row, reference):
            first_step, last_step = series[-len(row)][0], series[-1][0]
            told = _told(preset, name, row, share)
            message = f"{told} (from step {first_step} to {last_step})."
            alarms.append(Alarm(measure=name, kind="drift", message=message))
    return alarms


def learnt(
    name: str, values: Sequence[float], checkpoints: int, reference: Reference | None
) -> int:
    """The place of the first value that shows a trained model: what moved before was learning.

    The last of the first `checkpoints` values, or the first one within the range of the training's
    clips, whichever is later; the number of values where none is within that range.
    """
    inside = 0
    if reference is not None and name in reference.measures:
        low, high = _range(name, reference.measures[name])
        inside = next(
            (place for place, value in enumerate(values) if low <= value <= high), len(values)
        )
    return max(checkpoints - 1, inside)


def last_row(values: Sequence[float]) -> list[float]:
    """The longest end of a series that only rises, or only falls; at least its last value."""
    backwards = [values[-1]]
    for earlier in values[-2::-1]:
        goes_on = len(backwards) == 1 or (backwards[0] > backwards[1]) == (backwards[-1] > earlier)
        if earlier == backwards[-1] or not goes_on:
            break
        backwards.append(earlier)
    return backwards[::-1]


def base(name: str, row: Sequence[float]) -> float:
    """What a change of a measure is told as a share of.

    Its first value, but not less than the measure's `floor`: near 0 any change would be a multiple.
    """
    return max(abs(row[0]), MEASURES[name].floor) or 1.0


def _comes_nearer(name: str, row: Sequence[float], reference: Reference | None) -> bool:
    """Whether a measure ends nearer to the median of the training's clips than it began."""
    if reference is None or name not in reference.measures:
        return False
    median = reference.measures[name].median
    return abs(row[-1] - median) < abs(row[0] - median)


def find_out_of_range(
    preset: str, measures: Mapping[str, float], reference: Reference
) -> list[Alarm]:
    """Measures whose mean lies outside of what 98 % of the training's clips have, and a margin.

    The margin is a tenth of that range, or the measure's `floor` where that is more.
    """
    alarms = []
    for name, value in measures.items():
        if name not in reference.measures or name not in MEASURES:
            continue
        span = reference.measures[name]
        low, high = _range(name, span)
        if not low <= value <= high:
            message = (
                f"{name} of {preset} is {_short(value)}; of {reference.num_clips} training clips "
                f"98 % lie between {_short(span.low)} and {_short(span.high)}."
            )
            alarms.append(Alarm(measure=name, kind="range", message=message))
    return alarms


def _range(name: str, span: Spread) -> tuple[float, float]:
    """What 98 % of the training's clips have, and a margin on both sides."""
    margin = max(_MARGIN * (span.high - span.low), MEASURES[name].floor)
    return span.low - margin, span.high + margin


def _told(preset: str, name: str, row: Sequence[float], share: float) -> str:
    verb = "rose" if share > 0 else "fell"
    return f"{name} of {preset} {verb} {len(row) - 1} checkpoints in a row, {100 * share:+.0f} %"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
