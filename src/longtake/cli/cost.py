"""What `plan --failures-per-day` prints of a whole run: JSON, and a table made from that."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from longtake.formatting import escape, format_duration, format_short_duration, plural

if TYPE_CHECKING:
    from longtake.planner.cost import RunCost

_DAY_SECONDS, _HOUR_SECONDS = 86_400.0, 3600.0
_OF_STEPS = {
    "encoder": ("encoders", "codec and text encoder in the step, on average"),
    "exposed": ("waits", "for other ranks, on average"),
    "sampling": ("samples", "between steps; each: of one step"),
}


def cost_facts(cost: "RunCost", processes: int) -> dict[str, Any]:
    """What the whole run costs, by part, and the interval of saves at which least is lost."""
    saving, wall = cost.stages[-1].failures, cost.wall_seconds()
    lost = sum(each.wall_seconds * each.failures.lost_share for each in cost.stages)
    best = None
    if saving.failures_per_day:
        found = cost.at_best()
        minutes = found.stages[-1].failures.interval / 60
        best = {"minutes": _rounded(minutes), "goodput": round(found.goodput, 5)}
    return {
        "processes": processes,
        "stages": [
            {
                "name": each.name,
                "steps": each.steps,
                "compute_seconds": _rounded(each.compute_seconds),
                "exposed_seconds": _rounded(each.exposed_seconds),
                "encoder_seconds": _rounded(each.encoder_seconds),
                "sampling_seconds": _rounded(each.sampling_seconds),
                "network_bytes": each.network_bytes,
                "save_interval_seconds": _rounded(each.failures.interval),
                "lost_per_failure_seconds": _rounded(each.failures.lost_per_failure),
                "goodput": round(each.failures.goodput, 5),
            }
            for each in cost.stages
        ],
        "failures_per_day": saving.failures_per_day,
        "failures": round(wall * saving.failures_per_day / _DAY_SECONDS, 3),
        "lost_seconds": _rounded(lost),
        "restart_seconds": _rounded(saving.restart),
        "saves": round(cost.num_saves, 2),
        "save_bytes": cost.save_bytes,
        "kept_bytes": cost.num_kept * cost.save_bytes,
        "save_write_seconds": _rounded(saving.write),
        "stalled_seconds": _rounded(wall - lost - cost.work_seconds),
        "work_seconds": _rounded(cost.work_seconds),
        "wall_seconds": _rounded(wall),
        "gpu_hours": _rounded(wall * processes / _HOUR_SECONDS),
        "goodput": round(cost.goodput, 5),
        "best": best,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def cost_report(cost: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The whole run's time by part, what is written and sent, and what failures take."""
    wall, per_hour = cost["wall_seconds"], cost["processes"] / _HOUR_SECONDS
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(
        ("the whole run", "times", "each", "time", "GPU-hours", "share", "")
    ):
        is_text = number in (0, 6)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for what, times, seconds, note in _rows(cost):
        each = format_short_duration(seconds / times)
        cells = f"{times:,.0f}", each, format_duration(seconds), f"{seconds * per_hour:,.0f}"
        table.add_row(escape(what), *cells, f"{seconds / wall:.1%}", note)
    table.add_section()
    hours = f"{cost['gpu_hours']:,.0f}"
    table.add_row("all", "", "", format_duration(wall), hours, "100.0%", "", style="bold")
    yield table
    yield _of_bytes(cost)
    yield _of_failures(cost)


def _rows(cost: Mapping[str, Any]) -> Iterator[tuple[str, float, float, str]]:
    """What, how often, seconds of all together, and what it is."""
    stages = cost["stages"]
    for each in stages:
        note = "steps of the model, all at the longest shape"
        yield f"stage {each['name']}", each["steps"], each["steps"] * each["compute_seconds"], note
    for name, (what, note) in _OF_STEPS.items():
        if seconds := sum(each["steps"] * each[f"{name}_seconds"] for each in stages):
            yield what, sum(each["steps"] for each in stages), seconds, note
    if cost["saves"] >= 1:
        yield (
            "saves",
            cost["saves"],
            cost["stalled_seconds"],
            "copies to the computer's memory, for which training waits",
        )
    if cost["failures"]:
        work = cost["lost_seconds"] / cost["failures"] - cost["restart_seconds"]
        note = (
            f"on average {format_duration(work)} of work that no whole save has, and "
            f"{format_duration(cost['restart_seconds'])} for the restart"
        )
        yield "failures", cost["failures"], cost["lost_seconds"], note


def _of_bytes(cost: Mapping[str, Any]) -> str:
    days, each = cost["wall_seconds"] / _DAY_SECONDS, cost["save_bytes"]
    sent = sum(stage["steps"] * stage["network_bytes"] for stage in cost["stages"])
    text = (
        f"A save has {_amount(each)}, written in "
        f"{format_short_duration(cost['save_write_seconds'])} while training continues "
        f"({_amount(each / cost['save_write_seconds'])}/s: --storage). All saves write "
        f"{_amount(cost['saves'] * each)}, {_amount(cost['saves'] * each / days)} a day; "
        f"{_amount(cost['kept_bytes'])} stay ({plural(round(cost['kept_bytes'] / each), 'save')})."
    )
    return text + (f" All ranks together send {_amount(sent / days)} a day." if sent else "")


def _amount(num_bytes: float) -> str:
    for unit, of_one in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if num_bytes >= of_one:
            return f"{num_bytes / of_one:.3g} {unit}"
    return f"{num_bytes / 1e6:.3g} MB"


def _of_failures(cost: Mapping[str, Any]) -> str:
    """What part of the time is kept, and the interval of saves that keeps most."""
    text = f"{cost['goodput']:.2%} of the time is training that is kept"
    best = cost["best"]
    if best is None:
        return f"{text}; no failures are assumed."
    longest = max(each["save_interval_seconds"] for each in cost["stages"])
    return (
        f"{text}, with {cost['failures_per_day']:g} failures a day, restarts of "
        f"{format_duration(cost['restart_seconds'])} (--restart-seconds) and a save every "
        f"{format_duration(longest)} at most. Least is lost with one every "
        f"{format_duration(60 * best['minutes'])}: {best['goodput']:.2%} is kept, and "
        f"{_amount(cost['save_bytes'] * _DAY_SECONDS / 60 / best['minutes'])} a day are written "
        f"(--set checkpoint.minutes={best['minutes']:.2g}; Young 1974, Daly 2006). All of it is "
        "predicted."
    )
