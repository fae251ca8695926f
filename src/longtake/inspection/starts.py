"""Where the seconds between the command and the first step went, of each launch of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from longtake.inspection.verdicts import events
from longtake.run_dir import RunDirectory

WORDS = {
    "imports": "process and imports",
    "rendezvous": "ranks meet",
    "data": "data and run directory",
    "plan": "plan of the memory",
    "build": "model is built",
    "cache": "cache is filled",
    "load": "checkpoint is loaded",
    "first_batch": "first batch",
    "first_step": "first step",
}


def starts(run: RunDirectory) -> list[dict[str, Any]]:
    """The launches that have come to their first step, the oldest first.

    JSON: `time`, `step` (done before it), `seconds` by part, `total`, `slowest` (rank by part), and
    `down_seconds` since the last step of the launch before, where a crash ended that one.
    """
    names = ("time", "step", "seconds", "total", "slowest", "down_seconds")
    found = (event for event in events(run) if event["event"] == "started")
    return [{name: event.get(name) for name in names} for event in found]


def in_line(start: Mapping[str, Any]) -> str:
    """One launch: from which step, how long, most of it on what."""
    parts = sorted(start["seconds"].items(), key=lambda each: -each[1])[:3]
    most = ", ".join(f"{WORDS.get(part, part)} {seconds:.1f} s" for part, seconds in parts)
    down = start["down_seconds"]
    again = "" if down is None else f"; a step again {down:.1f} s after the last one before a crash"
    return f"from step {start['step']} to the next in {start['total']:.1f} s: {most}{again}"


def as_table(start: Mapping[str, Any], num_ranks: int) -> Table:
    """The parts of one launch; with the slowest rank of each where there are several."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("start-up", no_wrap=True)
    table.add_column("seconds", justify="right")
    if num_ranks > 1:
        table.add_column("slowest rank", justify="right")
    for part, seconds in start["seconds"].items():
        cells = [WORDS.get(part, part), f"{seconds:.2f}", str(start["slowest"].get(part, ""))]
        table.add_row(*cells[: len(table.columns)])
    table.add_section()
    table.add_row("to the end of the first step", f"{start['total']:.2f}")
    if start["down_seconds"] is not None:
        table.add_row("since the last step before a crash", f"{start['down_seconds']:.2f}")
    return table


def in_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """All but the newest, of which there is a table."""
    return [in_line(each) for each in found[:-1]]
