"""The overview page of a run: metrics over the steps, events, and how its time was spent."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from longtake import config, errors, process
from longtake.board import charts, svg
from longtake.board.pages import STATES, PageLinks, percent, render
from longtake.board.plots import DEFAULT_PIXELS, marks_payload, panels_of, series_payload
from longtake.config import Recipe
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import for_seconds, format_duration
from longtake.inspection.facts import next_commands
from longtake.inspection.files import is_folder_below, read_end
from longtake.inspection.reader import RunFacts
from longtake.inspection.run_list import RunSummary
from longtake.inspection.series import speeds_by_bucket
from longtake.inspection.timeline import share_of_training
from longtake.node_dir import all_nodes
from longtake.planner.record import newest_measurements, newest_plan

_LOG_BYTES = 2**14
_MOST_LOGS = 200
_MOST_EVENTS = 500
_MOST_BUCKETS = 20
_PART_COLOURS: Final = {
    "training": "good",
    "waiting for data": "4",
    "saving": "6",
    "sampling": "5",
    "starting": "1",
    "trained again": "2",
    "rolled back": "2",
    "stuck": "bad",
    "down": "bad",
    "other": "pale",
}


def status_of(facts: RunFacts) -> dict[str, str]:
    """Return `status_line` of a run, with the exact share of training time, not an estimate."""
    exact = replace(facts.summary, goodput=share_of_training(facts.goodput))
    return status_line(exact)


def status_line(summary: RunSummary) -> dict[str, str]:
    """Return the texts in the head of a run's pages (state, step ...); unknown ones are empty."""
    state = STATES.get(summary.state or "", "unknown")
    if summary.state == "running" and summary.recovered:
        state = "recovered"
    speed = summary.step_seconds
    total = f" of {summary.total_steps:,}" if summary.total_steps else ""
    is_running = summary.state in ("running", "stalled")
    left = summary.seconds_left
    return {
        "state": state,
        "speed": said_of_speed(speed) if speed and is_running else "",
        "progress": f"step {summary.steps:,}{total}",
        "left": f"{format_duration(left)} left" if left is not None else "",
        "goodput": f"goodput {percent(summary.goodput)}" if summary.goodput is not None else "",
    }


def said_of_speed(step_seconds: float) -> str:
    if step_seconds < 1:
        return f"{1 / step_seconds:.3g} steps/s"
    return f"{step_seconds:.3g} s a step"


def render_overview(facts: RunFacts, links: PageLinks, query: Mapping[str, str]) -> str:
    """Return the HTML of a run's overview page.

    Args:
        facts: the run's facts.
        links: how the page refers to others.
        query: `log`, the name of a log whose end is shown; in a file, `first` and `last`, the steps
            that plots show. What the plots of a server show is up to the script.
    """
    panels, series = panels_of(facts.rows), None
    # A file cannot load series later, so it has those of all plots.
    if not links.series(facts.name):
        names = ",".join(name for panel in panels for name in (*panel.names, *panel.more))
        span = {name: query[name] for name in ("first", "last") if name in query}
        chosen = {"names": names, "pixels": str(DEFAULT_PIXELS), **span}
        series = series_payload(facts.rows, chosen)
    return render(
        "overview.html",
        links,
        page="overview",
        facts=facts,
        status=status_of(facts),
        panels=panels,
        marks=marks_payload(facts.marks),
        samples=samples_of(facts, links),
        series=series,
        planned=planned_bytes(facts.events),
        memory=next(newest_measurements(facts.events), None),
        events=facts.marks[::-1][:_MOST_EVENTS],
        num_events=len(facts.marks),
        hours=hours(facts),
        goodput=share_of_training(facts.goodput),
        speeds=speeds_by_bucket(facts.rows),
        most_speeds=_MOST_BUCKETS,
        keys=[] if facts.recipe is None else keys_of(facts.recipe),
        commands=commands(facts),
        launches=facts.record.get("launches", []),
        logs=logs_of(facts),
        log=read_log(facts, query.get("log")),
    )


def hours(facts: RunFacts) -> Any:
    """Return a picture of how the run's time was spent, or None if no time has passed."""
    parts = [each for each in facts.goodput if each.seconds > 0]
    if not parts:
        return None
    total, begin, rows = sum(each.seconds for each in parts), 0.0, list[charts.Stack]()
    for each in parts:
        said = f"{for_seconds(each.seconds)}, {100 * each.seconds / total:.1f} %"
        bar = svg.Bar(each.part, each.seconds, said, _PART_COLOURS[each.part])
        rows.append(charts.Stack(each.part, [bar], said, begin))
        begin += each.seconds
    return charts.stacks(rows, kind="waterfall")


def planned_bytes(events: list[dict[str, Any]]) -> int | None:
    """Return the peak memory of a step in the newest launch's memory plan, in bytes."""
    plan = newest_plan(events)
    return plan.memory.step_peak_bytes if plan and plan.memory else None


def samples_of(facts: RunFacts, links: PageLinks) -> list[dict[str, Any]]:
    """Return each step whose checkpoint was sampled, with the URL of the page that shows it."""
    directory, found = EvaluationDirectory(facts.run), dict[int, str]()
    for preset in directory.presets():
        for step in directory.steps(preset):
            found.setdefault(step, links.page("samples", facts.name, preset=preset, step=step))
    return [{"step": step, "page": page} for step, page in sorted(found.items())]


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe, with its value and its default, as a row on the overview page."""

    name: str
    value: str
    default: str
    is_default: bool


def keys_of(recipe: Recipe) -> list[RecipeKey]:
    """Return a recipe's keys with values and defaults; a required key has no default."""
    known, values = config.defaults(), config.flat(recipe)
    return [
        RecipeKey(
            name,
            spelled(value),
            spelled(known[name]) if name in known else "",
            name in known and spelled(known[name]) == spelled(value),
        )
        for name, value in values.items()
    ]


def spelled(value: object) -> str:
    """Format a recipe's value like TOML; None, which TOML lacks, becomes "unset"."""
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case list() | tuple():
            return f"[{', '.join(map(spelled, value))}]"
        case dict():
            inner = ", ".join(f"{key} = {spelled(each)}" for key, each in value.items())
            return f"{{ {inner} }}"
        case _:
            return str(value)


def commands(facts: RunFacts) -> list[dict[str, str]]:
    """Return commands that can be typed next: those of `longtake show`, and `longtake report`."""
    own, path, run = process.command(), shlex.quote(str(facts.run.path)), facts.run
    try:
        found = next_commands(
            run,
            facts.summary.state or "dead",
            facts.rows,
            # Damage is not looked for: a page must not read all checkpoints.
            can_sample=bool(run.checkpoint_steps()),
            presets=EvaluationDirectory(run).presets(),
        )
    except (errors.LongtakeError, OSError):
        found = []
    report = {"command": f"{own} report {path} --out report.html", "for": "these pages as one file"}
    return [*found, report]


def logs_of(facts: RunFacts) -> list[str]:
    """Return paths, relative to the run, of its processes' logs, the newest launch's first."""
    run, found = facts.run, ["evaluate.log"]
    for node in all_nodes(run):
        found.append(node.log_path.relative_to(run.path).as_posix())
        # The folder of a launch is named by its time.
        for folder in sorted(node.logs_path.glob("*"), reverse=True):
            name = folder.relative_to(run.path).as_posix()
            if is_folder_below(run.path, name):
                found += [f"{name}/{path.name}" for path in sorted(folder.glob("*.log"))]
        if len(found) > _MOST_LOGS:
            break
    paths = {name: run.path / name for name in found[:_MOST_LOGS]}
    return [name for name, path in paths.items() if path.is_file() and not path.is_symlink()]


def read_log(facts: RunFacts, name: str | None) -> dict[str, str] | None:
    """Return the end of a run's log (the first if `name` is None), or None if it is unknown."""
    known = logs_of(facts)
    # Only names that `logs_of` has found are read: the query could name any other file.
    if not known or (name is not None and name not in known):
        return None
    name = name or known[0]
    try:
        return {"name": name, "text": read_end(facts.run.path, name, _LOG_BYTES)}
    except OSError as error:
        return {"name": name, "text": f"{name} cannot be read: {error.strerror}."}
