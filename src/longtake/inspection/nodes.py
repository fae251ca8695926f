"""The health of a run's nodes, from the files of their watchers: facts, and a table of them.

Outliers come from the watchers' own detector: it compares each node's last windows with those of
the other nodes, and with windows sampled from all of the node's past.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from longtake import errors, fsio, node_dir, node_events
from longtake.formatting import escape, escape_lines, for_seconds, format_time, plural
from longtake.monitor import node_health, outliers
from longtake.node_numbers import COLUMNS, SHOWN_SIGNALS, by_device, links_down, numbers_of
from longtake.run_dir import RunDirectory

Windows = Sequence[Mapping[str, float]]
_RECENT_WINDOWS, _PAST_WINDOWS = 48, 12  # windows to compare; windows sampled from the past
_ENOUGH_WINDOWS = _PAST_WINDOWS + 4  # fewer do not show what is worse than in the past
_SHOWN_WINDOWS = 6  # the table shows medians of this many last windows
_TAIL_BYTES = 2**20
SILENT_SECONDS = 60.0
NodeState = Literal["running", "silent", "ended", "unread"]
_PIPE_WIDTH = 120


# --- Facts ------------------------------------------------------------------------------------


def node_facts(run: RunDirectory, seconds: float = 3600.0) -> dict[str, Any]:
    """Return measurements and reports of the watchers of a run's nodes.

    Args:
        run: the run.
        seconds: maximum age of an event, counted back from its node's newest sign of life; an event
            that is not over is always included.

    Returns:
        JSON-able: `run`, `seconds`, `nodes`, each with `host`, `state` (running, ended or silent),
        `silent_seconds` (None: no sign of life), `windows` (samples that were compared), `numbers`
        (medians of the last minute, the worst of the node's devices), `links_down`, `outliers`
        (what is worse than on other nodes or in its own past) and `events`.

    Raises:
        RunError: there is no run.
    """
    if not run.exists():
        raise errors.RunError(
            f"{run.path} is not a run directory: it has no recipe.toml. Name a run directory."
        )
    nodes = node_dir.all_nodes(run)
    past = {node.host: _windows(node.health_path) for node in nodes}
    found = compare({host: [*before, *now] for host, (before, now) in past.items() if now})
    return {
        "run": str(run.path),
        "seconds": seconds,
        "nodes": [
            _facts(node, *past[node.host], found.get(node.host, []), seconds) for node in nodes
        ],
    }


def _windows(path: Path) -> tuple[Windows, Windows]:
    """Read health samples from a node's health.jsonl: some from all of its past, and the last."""
    size = path.stat().st_size if path.is_file() else 0
    start = max(0, size - _TAIL_BYTES)
    recent = _read(path, start, None) if size else []
    before = recent[:-_RECENT_WINDOWS]
    # The file is longer than its tail that was read: one record after each of a few evenly
    # spaced offsets stands for the past.
    if start:
        spaced = (start * number // _PAST_WINDOWS for number in range(_PAST_WINDOWS))
        before = [each for offset in spaced for each in _read(path, offset, 1)]
    step = max(1, len(before) // _PAST_WINDOWS)
    return before[::step][:_PAST_WINDOWS], recent[-_RECENT_WINDOWS:]


def _read(path: Path, offset: int, limit: int | None) -> list[dict[str, float]]:
    most = () if limit is None else (limit,)
    records: list[dict[str, Any]] = []
    with suppress(OSError):
        records, _ = fsio.read_new_records(path, dict[str, Any], offset, *most)
    return [numbers_of(each) for each in records]


def compare(windows: Mapping[str, Windows]) -> dict[str, list[outliers.Outlier]]:
    """Return each node's outlying health numbers; samples of nodes are aligned at the last one."""
    found: dict[str, list[outliers.Outlier]] = {}
    for host, own in windows.items():
        detector = outliers.OutlierDetector(SHOWN_SIGNALS)
        others = [each for other, each in windows.items() if other != host]
        for back in range(len(own), 0, -1):
            beside = {str(n): each[-back] for n, each in enumerate(others) if len(each) >= back}
            found[host] = detector.judge(own[-back], beside)
    return found


def _facts(
    node: node_dir.NodeDirectory,
    past: Windows,
    recent: Windows,
    flagged: Sequence[outliers.Outlier],
    seconds: float,
) -> dict[str, Any]:
    heartbeat = node.read_heartbeat()
    state, silent = state_of_node(node, heartbeat)
    events = node_events.of_node(node, heartbeat)
    kept = [each for each in events if each.seconds_ago <= seconds or not each.is_over]
    return {
        "host": node.host,
        "state": state,
        "silent_seconds": silent,
        "windows": len(past) + len(recent),
        "numbers": _numbers(recent),
        "links_down": links_down(recent[-1]) if recent else [],
        "outliers": [
            {
                "number": each.signal.name,
                "device": each.device,
                "against": each.against,
                "value": each.value,
                "usual": each.usual,
                "sentence": str(each),
            }
            for each in flagged
        ],
        "events": [
            {**asdict(each), "sentence": str(each)}
            for each in sorted(kept, key=lambda each: each.seconds_ago)
        ],
    }


def state_of_node(
    node: node_dir.NodeDirectory, heartbeat: Mapping[str, Any], *, is_live: bool = True
) -> tuple[NodeState, float | None]:
    """Return a node's state, and the seconds since its watcher's last sign of life (None: none).

    If the run is not being trained (`is_live` is false), a node that writes nothing has ended.
    """
    silent = None
    with suppress(OSError):
        # The clock of a file server may be ahead of this host's.
        silent = max(0.0, time.time() - node.heartbeat_path.lstat().st_mtime)
    if heartbeat.get("ended"):
        return "ended", silent
    if silent is None or silent > SILENT_SECONDS:
        return "silent" if is_live else "ended", silent
    return "running", silent


def _numbers(recent: Windows) -> dict[str, float]:
    """Return a node's health numbers by table column: medians of the last samples, worst device."""
    numbers = {}
    for label, column in COLUMNS.items():
        found = [by_device(each, column.number) for each in recent[-_SHOWN_WINDOWS:]]
        devices = {device for each in found for device in each}
        medians = [statistics.median(e[d] for e in found if d in e) for d in devices]
        if medians:
            numbers[label] = column.worst(medians)
    return numbers


# --- Table ------------------------------------------------------------------------------------


def state_words(state: NodeState, silent_seconds: float | None) -> str:
    if state == "silent" and silent_seconds is not None:
        return f"silent for {for_seconds(silent_seconds)}"
    return state


def cell_of_node(
    label: str, numbers: Mapping[str, float], links_down: Sequence[str]
) -> tuple[str, bool]:
    """Return the text of one cell of the nodes' table, and whether it says that links are down."""
    said = COLUMNS[label].text(numbers[label]) if label in numbers else "-"
    if label == "link" and links_down:
        return f"{len(links_down)} down, {said}", True
    return said, False


def print_nodes(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the facts of `node_facts` as a table of nodes with remarks."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    nodes = facts["nodes"]
    if not nodes:
        console.print(
            f"No node of {escape(facts['run'])} has been watched: it was never trained, or "
            "watch.enabled is false.",
            highlight=False,
        )
        return
    console.print(f"[bold]{escape(facts['run'])}: {plural(len(nodes), 'node')}[/bold]")
    shown = [label for label in COLUMNS if any(label in each["numbers"] for each in nodes)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("node", "", *shown):
        table.add_column(name, justify="right" if name in shown else "left", no_wrap=True)
    for node in nodes:
        state = state_words(node["state"], node["silent_seconds"])
        table.add_row(escape(node["host"]), state, *(_cell(node, label) for label in shown))
    console.print(table, highlight=False)
    for line in (*_outliers(nodes), *_events(nodes, facts["seconds"]), *_remarks(nodes)):
        console.print(line, highlight=False, soft_wrap=True)


def _cell(node: Mapping[str, Any], label: str) -> str:
    said, is_down = cell_of_node(label, node["numbers"], node["links_down"])
    marked_by = COLUMNS[label].marked_by
    marks = [each for each in node["outliers"] if each["number"].startswith(marked_by)]
    if not marks and not is_down:
        return said
    against = {each["against"] for each in marks}
    suffix = "".join(mark for mark, of in (("*", "others"), ("'", "own past")) if of in against)
    return f"[bold red]{said}{suffix}[/bold red]"


def _outliers(nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines below the nodes' table that list the outliers which it marks."""
    marked = [node for node in nodes if node["outliers"] or node["links_down"]]
    if not marked:
        return
    yield "Worse than on other nodes (*), or than in the node's own past ('):"
    for node in marked:
        said = [each["sentence"] for each in node["outliers"]]
        said += [f"link {device} is down" for device in node["links_down"]]
        yield f"  {escape(node['host'])}: {escape('; '.join(said))}"


def _events(nodes: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[str]:
    events = [each for node in nodes for each in node["events"]]
    if events:
        yield "Events of clocks, links and GPUs, and how long before the node's last sign of life:"
        for each in events:
            yield f"  {format_time(each['time'], with_date=True)}  {escape_lines(each['sentence'])}"
        if any(each["kind"].startswith("clock_") for each in events):
            yield f"[dim]Clocks: {escape(node_health.CLOCK_ADVICE)}[/dim]"
    else:
        span = f"the {for_seconds(seconds)} before its last sign of life"
        yield f"No node has an event of clocks, links and GPUs in {span}."


def _remarks(nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines that name the nodes that were not compared with others, and the reason."""
    measured = [node for node in nodes if node["windows"]]
    if len(measured) == 1:
        yield "One node alone: it is compared with its own past only."
    if without := [node["host"] for node in nodes if not node["windows"]]:
        yield f"No samples yet of {escape(', '.join(without))}."
    if measured and not any("power" in node["numbers"] for node in measured):
        yield "No node has a GPU that the driver (NVML) reports."
    few = [node["host"] for node in measured if node["windows"] < _ENOUGH_WINDOWS]
    if few:
        yield (
            f"Of {escape(', '.join(few))} there are fewer than {_ENOUGH_WINDOWS} samples: what is "
            "worse than in the past shows later."
        )
