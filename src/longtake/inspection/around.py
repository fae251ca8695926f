"""What is known of the steps around one: numbers, events, and the clips of its batch."""

import shlex
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from longtake.errors import RunError
from longtake.inspection.clips import consumed_clips, reported_clips
from longtake.inspection.rows import Row, read_rows
from longtake.inspection.verdicts import Report, events, report_near, verdicts
from longtake.process import command
from longtake.run_dir import RunDirectory

_OF_A_BATCH = ("stage", "epoch", "sample_rejected", "decoder_stalled", "decoder_died")
"""Events whose step is the number of a batch."""
_OF_A_VERDICT = (
    "skipped",
    "suspected",
    "stalled",
    "rank_died",
    "rank_failed",
    "killed_rank",
    "restarted_worker",
)
"""Events whose step is that of the steps that were done before."""


def around(run: RunDirectory, step: int, span: int) -> dict[str, Any]:
    """All that a run's directory says of a step, and of `span` steps on each side of it.

    Returns:
        JSON: `run`, `step`, `rows` (of metrics, with `abandoned`), `events` (with `at`, their step
        as metrics count), `report` (the guard's nearest one, or None), `clips` (of the step's
        batch, or of the reported one) and `verdict_steps` (of all verdicts of the run).

    Raises:
        RunError: there is no run, it has not done that step, or a report cannot be read.
        DataError: the ledger is damaged.
    """
    run.recipe()
    rows = read_rows(run)
    _refuse_beyond(run, step, rows)
    report = report_near(run, step, span)
    return {
        "run": str(run.path),
        "step": step,
        "rows": [_facts(row) for row in rows if abs(row.step - step) <= span],
        "events": _events_near(run, step, span, rows),
        "report": None if report is None else _about(report, run),
        "clips": _clips(run, step, rows, report),
        "verdict_steps": sorted({each["step"] for each in verdicts(run)}),
    }


def step_of(event: dict[str, Any], rows: Sequence[Row]) -> int | None:
    """The step that an event belongs to, as metrics count: steps done with it; None: to no one."""
    step: int | None = event.get("step")
    if step is not None and event["event"] in _OF_A_VERDICT:
        return step + 1
    if step is None or event["event"] not in _OF_A_BATCH:
        return step
    mine = [row.step for row in rows if row.batch == step]
    return mine[-1] if mine else step + 1


def _refuse_beyond(run: RunDirectory, step: int, rows: Sequence[Row]) -> None:
    furthest = max((row.step for row in rows), default=0)
    if step > furthest:
        reached = f"has done {furthest} steps" if rows else "has not done a step"
        path = shlex.quote(str(run.path))
        look = f" Look at the last: {command()} show {path} --around {furthest}." if rows else ""
        raise RunError(f"{run.path} {reached} so far, and none is known of step {step}.{look}")


def _facts(row: Row) -> dict[str, Any]:
    return {**row.metrics, "batch": row.batch, "abandoned": row.is_abandoned}


def _events_near(
    run: RunDirectory, step: int, span: int, rows: Sequence[Row]
) -> list[dict[str, Any]]:
    near = []
    for event in events(run):
        at = step_of(event, rows)
        steps = [each for each in (at, event.get("from_step")) if each is not None]
        if any(abs(each - step) <= span for each in steps):
            near.append({**event, "at": at})
    return near


def _about(report: Report, run: RunDirectory) -> dict[str, Any]:
    facts = report.facts
    state = facts.get("state")
    return {
        "path": str(report.path.relative_to(run.path)),
        "step": report.step,
        "batch": facts.get("batch"),
        "verdict": facts["verdict"],
        "checkpoint": state["checkpoint"] if state else None,
    }


def _clips(
    run: RunDirectory, step: int, rows: Sequence[Row], report: Report | None
) -> dict[str, Any]:
    """The clips of a step: as the guard saw them; or by the ledger, where the step was kept."""
    if report is not None:
        shown = step if report.samples_of(step) else report.step
        samples = reported_clips(run, report, shown)
        batch = samples[0]["batch"] if samples else report.facts.get("batch")
        return {"source": "guard", "step": shown, "batch": batch, "samples": samples}
    kept = [row for row in rows if not row.is_abandoned]
    place = bisect_left([row.step for row in kept], step)
    if place == len(kept) or kept[place].step != step:
        return {"source": None, "step": step, "batch": None, "samples": []}
    batch = kept[place].batch
    samples = consumed_clips(run, batch)
    return {"source": "ledger", "step": step, "batch": batch, "samples": samples}
