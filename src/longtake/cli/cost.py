"""The table of a whole run that `longtake plan --failures-per-day` prints."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table

from longtake.formatting import escape, format_duration, format_short_duration, plural

if TYPE_CHECKING:
    from longtake.planner.cost import RunCost

_DAY_SECONDS, _HOUR_SECONDS = 86_400.0, 3600.0


def plan_table(*columns: str) -> Table:
    """Return an empty table for a plan: numbers at the right, words and outer columns left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        is_text = number in (0, len(columns) - 1) or column in ("fits", "over", "activations")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def cost_report(cost: "RunCost") -> Iterator[RenderableType]:
    """Yield tables and sentences on a whole run: its time by part, data sent, cost of failures."""
    wall, per_hour = cost.wall_seconds, cost.num_ranks / _HOUR_SECONDS
    table = plan_table("the whole run", "times", "each", "time", "GPU-hours", "share", "")
    for what, times, seconds, note in _rows(cost):
        each = format_short_duration(seconds / times)
        cells = f"{times:,.0f}", each, format_duration(seconds), f"{seconds * per_hour:,.0f}"
        table.add_row(escape(what), *cells, f"{seconds / wall:.1%}", note)
    table.add_section()
    hours = f"{wall * per_hour:,.0f}"
    table.add_row("all", "", "", format_duration(wall), hours, "100.0%", "", style="bold")
    yield table
    days, save = wall / _DAY_SECONDS, cost.save_bytes
    sent = sum(stage.steps * stage.network_bytes for stage in cost.stages)
    text = (
        f"A save of {_amount(save)} is written in "
        f"{format_short_duration(cost.saving.write)} while training continues "
        f"({_amount(save / cost.saving.write)}/s: --storage). All saves write "
        f"{_amount(cost.num_saves * save)}, {_amount(cost.num_saves * save / days)} a day; "
        f"{_amount(cost.num_kept * save)} are kept ({plural(cost.num_kept, 'save')})."
    )
    yield text + (f" All ranks together send {_amount(sent / days)} a day." if sent else "")
    yield _describe_failures(cost)


def _rows(cost: "RunCost") -> Iterator[tuple[str, float, float, str]]:
    """Yield name, count, total seconds and explanation of each part of a run's time."""
    stages, num_steps = cost.stages, sum(stage.steps for stage in cost.stages)
    for stage in stages:
        note = "steps of the model, all at the longest shape"
        yield f"stage {stage.name}", stage.steps, stage.steps * stage.compute_seconds, note
    encoding = sum(stage.steps * stage.encoder_seconds for stage in stages)
    waiting = sum(stage.steps * stage.exposed_seconds for stage in stages)
    sampling = sum(stage.steps * stage.sampling_seconds for stage in stages)
    for what, seconds, note in (
        ("encoders", encoding, "codec and text encoder in the step, on average"),
        ("waits", waiting, "for other ranks, on average"),
        ("samples", sampling, "between steps; each: of one step"),
    ):
        if seconds:
            yield what, num_steps, seconds, note
    if cost.num_saves >= 1:
        note = "copies to host RAM, for which training waits"
        yield "saves", cost.num_saves, cost.stalled_seconds, note
    if cost.num_failures:
        # A failure costs the work since the last whole save, and a restart.
        work = cost.lost_seconds / cost.num_failures - cost.saving.restart
        note = (
            f"on average {format_duration(work)} of work since the last complete save, and "
            f"{format_duration(cost.saving.restart)} for the restart"
        )
        yield "failures", cost.num_failures, cost.lost_seconds, note


def _amount(num_bytes: float) -> str:
    for unit, of_one in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if num_bytes >= of_one:
            return f"{num_bytes / of_one:.3g} {unit}"
    return f"{num_bytes / 1e6:.3g} MB"


def _describe_failures(cost: "RunCost") -> str:
    """Say which share of a run's time is kept, and which interval of saves keeps most of it."""
    text = f"{cost.goodput:.2%} of the time is training that is kept"
    if not cost.saving.failures_per_day:
        return f"{text}; no failures are assumed."
    best, longest = cost.at_best(), max(stage.failures.interval for stage in cost.stages)
    minutes = best.saving.interval / 60
    return (
        f"{text}, with {cost.saving.failures_per_day:g} failures a day, restarts of "
        f"{format_duration(cost.saving.restart)} (--restart-seconds) and a save every "
        f"{format_duration(longest)} at most. A save every {format_duration(60 * minutes)} loses "
        f"least: {best.goodput:.2%} is kept, and "
        f"{_amount(cost.save_bytes * _DAY_SECONDS / 60 / minutes)} a day are written "
        f"(--set checkpoint.minutes={minutes:.2g}; Young 1974, Daly 2006). All numbers "
        "are predicted."
    )
