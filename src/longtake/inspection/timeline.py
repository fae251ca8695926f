"""The events of a run as marks on a time line, and how the run's time was spent."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from longtake import errors
from longtake.formatting import plural
from longtake.inspection import facts
from longtake.inspection.rows import MetricRows
from longtake.inspection.series import abandoned_spans
from longtake.inspection.tables import said
from longtake.node_dir import read_events
from longtake.run_dir import BEGINNINGS, ENDINGS, EventKind, RunDirectory

Level = Literal["info", "warn", "error"]
Lane = Literal[
    "launches", "stages", "epochs", "data", "guard", "checkpoints", "evaluations", "nodes"
]
Event = Mapping[str, Any]


class _Look(NamedTuple):
    kind: str
    lane: Lane
    level: Level


_LOOKS: Final[dict[str, _Look]] = {
    "begun_from": _Look("launch", "launches", "info"),
    "launched": _Look("launch", "launches", "info"),
    "resumed": _Look("restart", "launches", "info"),
    "ranks_differ": _Look("ranks", "launches", "warn"),
    "finished": _Look("end", "launches", "info"),
    "interrupted": _Look("end", "launches", "info"),
    "rank_failed": _Look("failure", "launches", "error"),
    "killed_rank": _Look("failure", "launches", "warn"),
    "stage": _Look("stage", "stages", "info"),
    "epoch": _Look("epoch", "epochs", "info"),
    "settings_changed": _Look("settings", "stages", "info"),
    "threads_chosen": _Look("threads", "nodes", "info"),
    "data_changed": _Look("data", "data", "warn"),
    "captions_truncated": _Look("captions", "data", "warn"),
    "sample_rejected": _Look("rejected", "data", "warn"),
    "decoder_stalled": _Look("decoder", "data", "warn"),
    "decoder_died": _Look("decoder", "data", "warn"),
    "restarted_worker": _Look("decoder", "data", "warn"),
    "ledger_damaged": _Look("ledger", "data", "error"),
    "update_skipped": _Look("skip", "guard", "warn"),
    "first_loss_high": _Look("loss", "guard", "warn"),
    "anomaly_detected": _Look("spike", "guard", "warn"),
    "rolled_back": _Look("rollback", "guard", "error"),
    "diverged": _Look("diverged", "guard", "error"),
    "checkpoint": _Look("checkpoint", "checkpoints", "info"),
    "checkpoint_failed": _Look("checkpoint", "checkpoints", "error"),
    "checkpoint_damaged": _Look("checkpoint", "checkpoints", "error"),
    "sampled": _Look("sample", "evaluations", "info"),
    "sampling_failed": _Look("sample", "evaluations", "warn"),
    "export_failed": _Look("checkpoint", "checkpoints", "warn"),
    "evaluation_finished": _Look("evaluation", "evaluations", "info"),
    "evaluation_failed": _Look("evaluation", "evaluations", "warn"),
    "evaluation_missed": _Look("evaluation", "evaluations", "warn"),
    "drift_alert": _Look("drift", "evaluations", "warn"),
    "stalled": _Look("stall", "nodes", "error"),
    "clock_stepped": _Look("clock", "nodes", "warn"),
    "clock_slewed": _Look("clock", "nodes", "warn"),
    "degraded": _Look("node", "nodes", "warn"),
    "recovered": _Look("node", "nodes", "info"),
    "disk_full": _Look("disk", "nodes", "error"),
}
"""Looks of kinds of events on the time line; kinds that are missing here are not drawn."""
_MOST_MARKS = 200
"""Number of marks of one kind and level above which neighbours on the time line are merged."""
_MOST_SECONDS = 1e9
_OF_A_LAUNCH: Final = {
    *get_args(EventKind),
    *("rank_failed", "killed_rank", "stalled", "stall_cleared"),
}
"""Kinds of events that a launch's processes, or troubles of these, have caused."""


@dataclass(frozen=True)
class Mark:
    """A mark on a run's time line: one event, or several of one kind that are close together."""

    step: int | None
    """Step of the mark's first event, as metrics count it; None without metrics."""
    time: float | None
    """Time of the mark's first event in seconds since 1970."""
    kind: str
    """Kind of the mark: one of launch restart end failure stage epoch settings data captions
    rejected decoder ledger skip spike rollback diverged checkpoint sample evaluation drift stall
    clock node disk"""
    text: str
    level: Level
    lane: Lane
    span: tuple[int, int] | None = None
    """Steps of the mark's first and last event. Of a rollback: the step that it returned to, and
    the last one that it gave up; of a restart: the first and the last step trained again."""
    count: int = 1


def all_events(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the events of a run, its nodes and its evaluation servers, in order of time.

    Raises:
        RecordError: a file or folder cannot be read.
    """
    try:
        return list(read_events(run))
    except OSError as error:
        path = Path(error.filename or run.path)
        raise errors.RecordError(path, error.strerror or str(error)) from error


def timeline(
    run: RunDirectory, rows: MetricRows, events: Sequence[Event] | None = None
) -> list[Mark]:
    """Return all marks of a run's time line in order of steps, and of times within a step.

    `events` is the result of `all_events`, if it is known already.

    Raises:
        RecordError: a file of events cannot be read.
    """
    events = all_events(run) if events is None else events
    shown = [(event, at) for event, at in _placed(events, rows) if event["event"] in _LOOKS]
    marks: list[Mark] = []
    shown.sort(key=lambda each: _look(each[0]))
    for look, group in groupby(shown, key=lambda each: _look(each[0])):
        some = sorted(group, key=lambda each: (each[1] is not None, each[1] or 0))
        marks += [_mark(look, together) for together in _together(some)]
    return sorted(marks, key=lambda mark: (mark.step or 0, mark.time or 0.0))


def _placed(events: Sequence[Event], rows: MetricRows) -> Iterator[tuple[Event, int | None]]:
    """Yield each event with its step; events of the same incident (stall ...) yield one."""
    for known in (*facts.settings_changes(events, rows), *facts.incidents(events, rows)):
        yield known, known["at"]
    for event in events:
        if event["event"] not in (*facts.INCIDENT_EVENTS, "settings_changed"):
            step = facts.step_of(event, rows)
            if event["event"] == "rolled_back":
                # Drawn at the step where it happened, not at the one that it returned to.
                step = event["from_step"]
            yield event, facts.incident_step(event, rows) if step is None and len(rows) else step


def _look(event: Event) -> _Look:
    look = _LOOKS[event["event"]]
    lost = event["event"] in BEGINNINGS and event.get("lost_steps")
    return _Look("restart", look.lane, "warn") if lost else look


def _together(
    events: Sequence[tuple[Event, int | None]],
) -> Iterator[Sequence[tuple[Event, int | None]]]:
    """Group events of one kind into marks: one each, or one per equal span of steps if many."""
    if len(events) <= _MOST_MARKS:
        yield from ([each] for each in events)
        return
    first, last = events[0][1] or 0, events[-1][1] or 0
    width = (last - first) // _MOST_MARKS + 1
    for _, group in groupby(events, key=lambda each: ((each[1] or 0) - first) // width):
        yield list(group)


def _mark(look: _Look, events: Sequence[tuple[Event, int | None]]) -> Mark:
    event, step = events[0]
    text, span = _text(event, step), None
    if event["event"] == "rolled_back":
        span = (min(event["step"], event["from_step"]), event["from_step"])
    elif look.kind == "restart" and event.get("lost_steps") and step is not None:
        span = (step + 1, step + event["lost_steps"])
    if len(events) > 1:
        last = events[-1][1]
        text = f"{len(events):,} times from step {step} to {last}; the first: {text}"
        if step is not None and last is not None:
            span = (step, last)
    time = seconds_of(event)
    return Mark(step, time, look.kind, text, look.level, look.lane, span, len(events))


def _text(event: Event, step: int | None) -> str:
    match event["event"]:
        case "rolled_back":
            return said({**event, "at": event["step"]})
        case "launched" | "resumed" as kind:
            lost = event.get("lost_steps")
            again = f"; {plural(lost, 'step')} had not been saved" if lost else ""
            given = {name: event[name] for name in ("world_size", "device") if event.get(name)}
            return said({"event": kind, "at": step, **given}) + again
        case "evaluation_finished" | "sampled" as kind:
            return said({"event": kind, "at": step, "preset": event.get("preset")})
        case _:
            return said({**event, "at": step})


def seconds_of(event: Event) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


# --- Where the hours went ---------------------------------------------------------------------


class TimePart(NamedTuple):
    """The seconds that a run spent on one use of its time, such as saving."""

    part: str
    seconds: float


PARTS: Final = (
    "training",
    "waiting for data",
    "saving",
    "sampling",
    "starting",
    "trained again",
    "rolled back",
    "stuck",
    "down",
    "other",
)
"""Uses of a run's time that `goodput` counts. `training` are steps that were kept, `trained again`
steps that a crash lost, `rolled back` steps that the guard gave up. `stuck` is from the last
step of a launch to its failure, and `down` from there to the next launch. `saving` is the time
above the median of steps after a save, and the time of the last save of a launch."""


@dataclass(frozen=True)
class _Period:
    """One launch of a run: its times in seconds since 1970, and its rows of metrics."""

    begin: float
    end: float  # its last sign of life
    rows: slice
    has_ended: bool  # whether it recorded how it ended


def goodput(
    run: RunDirectory, rows: MetricRows, events: Sequence[Event] | None = None
) -> list[TimePart]:
    """Return a run's seconds for each of `PARTS`, from the first launch to the last sign of life.

    They add up to that time, or to more if clocks were set back. `events` is the result of
    `all_events`, if it is known already.

    Raises:
        RecordError: a file of the run cannot be read.
    """
    events = all_events(run) if events is None else events
    # Clocks may be set back; differences of times must not be negative.
    times = np.maximum.accumulate(rows.part("time", 0, len(rows)))
    periods = _periods(events, times, rows)
    found = dict.fromkeys(PARTS, 0.0)
    if not periods:
        return [TimePart(*each) for each in found.items()]
    found |= _seconds_of_steps(run, rows, events, periods)
    for event in events:
        if event["event"] == "sampled":
            found["sampling"] += _number(event.get("seconds"))
    for period in periods:
        inside = times[period.rows]
        if not len(inside):
            found["starting"] += period.end - period.begin
            continue
        # A row has the time at which its step ended.
        first = inside[0] - _step_seconds(rows, period.rows.start)
        found["starting"] += max(0.0, first - period.begin)
        # After its last step, a launch that ended in order was saving; any other was stuck.
        found["saving" if period.has_ended else "stuck"] += max(0.0, period.end - inside[-1])
    for before, after in pairwise(periods):
        found["down"] += max(0.0, after.begin - before.end)
    wall = max(0.0, periods[-1].end - periods[0].begin)
    # Parts are measured each by itself, and may add up to more than the time that passed.
    found["other"] = max(0.0, wall - sum(found.values()))
    return [TimePart(name, float(seconds)) for name, seconds in found.items()]


def share_of_training(parts: Sequence[TimePart]) -> float | None:
    """Return the share of a run's time that was training, from `goodput`; None without time."""
    total = sum(each.seconds for each in parts)
    return dict(parts)["training"] / total if total else None


def _periods(
    events: Sequence[Event], times: NDArray[np.float64], rows: MetricRows
) -> list[_Period]:
    """Return a run's launches by their events; rows before the first are a launch of their own."""
    begins = [place for place, event in enumerate(events) if event["event"] in BEGINNINGS]
    if not begins and not len(rows):
        return []
    launched = [seconds_of(events[place]) for place in begins]
    # The rows of a launch are those from its beginning to that of the next.
    edges = np.searchsorted(times, launched).tolist()
    if not begins or edges[0] > 0:
        first = times[0] - _step_seconds(rows, 0)
        launched, edges, begins = [first, *launched], [0, *edges], [0, *begins]
    found: list[_Period] = []
    ends = zip([*begins[1:], len(events)], [*edges[1:], len(rows)], strict=True)
    for begin, first_row, time, (end, end_row) in zip(begins, edges, launched, ends, strict=True):
        own = events[begin:end]
        alive = [seconds_of(each) for each in own if each["event"] in _OF_A_LAUNCH]
        last = max([time, *alive, *times[max(first_row, end_row - 1) : end_row].tolist()])
        # The processes of a launch start before its event.
        starts = (
            seconds_of(each) - _number(each["total"])
            for each in own
            if each["event"] == "startup_timing"
        )
        began = min(time, next(starts, time))
        # Periods must not overlap, or seconds would count twice.
        began = max(found[-1].end, began) if found else began
        kinds = {each["event"] for each in own}
        has_ended = not kinds.isdisjoint(ENDINGS)
        found.append(_Period(began, max(began, last), slice(first_row, end_row), has_ended))
    return found


def _seconds_of_steps(
    run: RunDirectory, rows: MetricRows, events: Sequence[Event], periods: Sequence[_Period]
) -> dict[str, float]:
    """Return the seconds of a run's steps by use; a step after a save or rollback has two uses."""
    seconds = _clipped(rows.part("step_seconds", 0, len(rows)))
    data = np.minimum(_clipped(rows.part("data_seconds", 0, len(rows))), seconds)
    is_kept = ~rows.is_abandoned
    # Without the wait for data, which is a part of its own.
    usual = float(np.median((seconds - data)[is_kept])) if is_kept.any() else 0.0
    is_free, found = is_kept.copy(), {}
    firsts, lasts = abandoned_spans(rows)
    launches = np.array([period.rows.start for period in periods])
    saved = [event.get("step") for event in events if event["event"] == "checkpoint"]
    stalls = [each["at"] for each in facts.incidents(events, rows) if each.get("lasted_seconds")]
    after = {
        "starting": np.unique(launches[launches < len(rows)]),
        "rolled back": lasts[lasts + 1 < len(rows)] + 1,
        "stuck": _rows_of(rows, stalls),
        "saving": _rows_of(rows, [step + 1 for step in saved if isinstance(step, int)]),
    }
    # What such a step takes above the usual time belongs to its cause; each step counts once.
    for part, places in after.items():
        chosen = places[is_free[places]]
        found[part] = float(np.maximum(0.0, seconds[chosen] - data[chosen] - usual).sum())
        is_free[chosen] = False
    found["waiting for data"] = float(data[is_kept].sum())
    found["training"] = float(seconds[is_kept].sum()) - sum(found.values())
    # Prefix sums: the seconds of a branch are the difference of two of them.
    until = np.append(0.0, np.cumsum(seconds)) if len(lasts) else np.zeros(1)
    lost = until[lasts + 1] - until[firsts]
    # The guard gave up a branch if it says so, or if no launch begins where the branch ends: a
    # crash would have lost the steps up to the next launch.
    left = [each["from_step"] for each in run.rollbacks()]
    is_rollback = np.isin(rows.step[lasts], left) & rows.raw_column("has_verdict")[lasts]
    is_rollback |= ~np.isin(lasts + 1, [*launches.tolist(), len(rows)])
    found["rolled back"] += float(lost[is_rollback].sum())
    found["trained again"] = float(lost[~is_rollback].sum())
    return found


def _rows_of(rows: MetricRows, steps: Sequence[int]) -> NDArray[np.int64]:
    return np.flatnonzero(np.isin(rows.step, np.array(steps, np.int64)))


def _step_seconds(rows: MetricRows, place: int) -> float:
    return float(_clipped(rows.part("step_seconds", place, place + 1)[0]))


def _clipped(seconds: Any) -> Any:
    return np.clip(seconds, 0.0, _MOST_SECONDS)


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(_clipped(value)) if is_number else 0.0
