"""The page of a run's nodes: heat map of ranks, plots over time, outliers, stalls, failures."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from longtake import errors, node_events, process
from longtake.board import charts, heat_map, svg
from longtake.board.overview import status_of
from longtake.board.pages import PageLinks, render
from longtake.board.stall_view import read_stalls
from longtake.formatting import for_seconds, format_short_duration
from longtake.inspection.columns import Numbers
from longtake.inspection.files import read_end
from longtake.inspection.node_reader import DRAWN, HealthHistory, NodeNow, RankNow, read_nodes
from longtake.inspection.nodes import cell_of_node, state_words
from longtake.inspection.reader import RunFacts
from longtake.monitor import node_health
from longtake.node_dir import NodeDirectory
from longtake.node_numbers import COLUMNS, find_far

_MOST_LINES, _MOST_NAMED = 8, 4
_BINS = 120
_MOST_ROWS, _MOST_MARKED, _MOST_FAILURES, _MOST_LOG_ENDS, _LOG_BYTES = 2000, 40, 50, 5, 2**12
_MANY_RANKS = 16
_EVENT_SECONDS = 86400.0
_ENOUGH_NODES = 4
_OF_HEALTH = ("degraded", "clock_stepped", "clock_slewed")


def render_nodes(facts: RunFacts, links: PageLinks, query: Mapping[str, str]) -> str:
    """Return the HTML of the page of a run's nodes.

    Args:
        facts: the run's facts.
        links: how the page refers to others.
        query: the URL's query; `show` is the number that the heat map shows (`heat_map.MEASURES`),
            `stall` the token of the stall whose stacks are shown.
    """
    is_live = facts.summary.state in ("running", "stalled")
    nodes, problems = read_nodes(facts.run, is_live=is_live)
    health = _health(facts, nodes)
    stalls, unread = read_stalls(facts, query.get("stall"))
    maps, choices = _measures(nodes, query.get("show"), is_static=not links.series(facts.name))
    path = shlex.quote(str(facts.run.path))
    columns = [label for label in COLUMNS if any(label in node.numbers for node in nodes)]
    ranks = [rank for node in nodes for rank in node.ranks]
    return render(
        "nodes.html",
        links,
        page="nodes",
        facts=facts,
        status=status_of(facts),
        problems=[*problems, *unread],
        nodes=nodes,
        is_live=is_live,
        num_ranks=len(ranks),
        states=Counter(node.state for node in nodes),
        phases=_phases_now(ranks),
        maps=maps,
        choices=choices,
        outlier_key=heat_map.outlier_key(),
        times=_phase_times(ranks),
        table=_table(nodes, columns, health),
        columns=columns,
        plots=_plots(facts, nodes, health),
        is_thin=_history(facts).is_thin,
        health=health,
        advice=node_health.CLOCK_ADVICE,
        stalls=stalls,
        failures=_failures(facts),
        commands={
            "health": f"{process.command()} health {path}",
            "stacks": f"{process.command()} stacks {path}",
            "watch": f"{process.command()} watch {path}",
        },
    )


# --- Now --------------------------------------------------------------------------------------


def _measures(
    nodes: Sequence[NodeNow], chosen: str | None, *, is_static: bool
) -> tuple[list[heat_map.HeatMap], list[heat_map.RankNumber]]:
    """Return the chosen heat map, and the measurements that can be chosen for it.

    A page that cannot load another map has all of them.
    """
    ranks = [rank for node in nodes for rank in node.ranks]
    known = [
        each for each in heat_map.MEASURES if any(each.value(rank) is not None for rank in ranks)
    ]
    wanted = [each for each in known if each.key == chosen] or known[:1]
    drawn = (heat_map.heat_map(nodes, each) for each in (known if is_static else wanted))
    return [each for each in drawn if each is not None], known


def _phases_now(ranks: Sequence[RankNow]) -> list[dict[str, Any]]:
    """Count the ranks in each phase of training; if they are few, name them."""
    counts = Counter(rank.phase for rank in ranks if rank.phase)
    found = []
    for phase, count in counts.most_common():
        own = [rank for rank in ranks if rank.phase == phase]
        longest = max((rank.seconds or 0.0 for rank in own), default=0.0)
        named = ", ".join(f"rank {rank.rank} on {rank.host}" for rank in own[:3])
        found.append(
            {
                "phase": phase,
                "letter": heat_map.PHASES.get(phase, heat_map.UNKNOWN_PHASE).letter,
                "count": count,
                "who": named if count <= 3 and len(ranks) > 3 else "",
                "longest": for_seconds(longest),
            }
        )
    return found


def _phase_times(ranks: Sequence[RankNow]) -> dict[str, Any] | None:
    """Return bars of the phases of a step (data, forward ...) of each rank, or mean and slowest."""
    known = [rank for rank in ranks if rank.phases]
    if not known:
        return None
    sums = Counter[str]()
    for rank in known:
        sums.update(rank.phases)
    names = [name for name, _ in sums.most_common()]
    order = [name for name, each in heat_map.PHASES.items() if each.colour and name in names]
    # Phases that the board does not know come last.
    order += [name for name in names if name not in order][:8]
    mean = {name: sums[name] / len(known) for name in order}
    if len(known) <= _MANY_RANKS:
        rows = [_phase_bar(f"rank {rank.rank}", rank.phases, order) for rank in known]
    else:
        # In collectives and for data, a rank waits for others.
        waits = ("collective", "data")
        slowest = sorted(
            known,
            key=lambda rank: (
                rank.work_seconds
                or sum(seconds for name, seconds in rank.phases.items() if name not in waits)
            ),
            reverse=True,
        )
        rows = [_phase_bar(f"mean of {len(known):,}", mean, order)]
        rows += [_phase_bar(f"rank {rank.rank}", rank.phases, order) for rank in slowest[:5]]
    rows_of_table = []
    for name in order:
        times = [(rank.phases.get(name, 0.0), rank.rank) for rank in known]
        (least, first), (most, last) = min(times), max(times, key=lambda each: each[0])
        rows_of_table.append(
            {
                "name": name,
                "colour": _colour_of(name),
                "mean": format_short_duration(mean[name]),
                "least": f"{format_short_duration(least)} (rank {first})",
                "most": f"{format_short_duration(most)} (rank {last})",
            }
        )
    return {
        "picture": charts.stacks(rows, label_width=110, room=90),
        "rows": rows_of_table,
        "is_of_all": len(known) <= _MANY_RANKS,
        "is_of_one": len(known) == 1,
    }


def _phase_bar(label: str, phases: Mapping[str, float], order: Sequence[str]) -> charts.Stack:
    parts = [
        svg.Bar(name, phases[name], format_short_duration(phases[name]), _colour_of(name))
        for name in order
        if phases.get(name)
    ]
    return charts.Stack(label, parts, format_short_duration(sum(part.value for part in parts)))


def _colour_of(phase: str) -> str:
    return heat_map.PHASES.get(phase, heat_map.UNKNOWN_PHASE).colour or "rule"


# --- Health -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Health:
    """Outliers among a run's nodes, and the newest events about each node's health."""

    outliers: dict[str, list[str]]  # sentences by host
    flagged: dict[str, set[str]]  # marked columns of the table, by host
    events: list[tuple[str, str]]  # time and sentence, newest first
    has_clock_event: bool


def _health(facts: RunFacts, nodes: Sequence[NodeNow]) -> Health:
    """Collect outliers that watchers reported, and those in the nodes' newest health numbers."""
    # Only the newest of these counts: a recovery or a new watcher ends what was degraded.
    last: dict[str, dict[str, Any]] = {}
    for event in facts.events:
        if event["event"] in ("degraded", "recovered", "watcher_started"):
            last[str(event.get("host", ""))] = event
    outliers, flagged = dict[str, list[str]](), dict[str, set[str]]()
    for host, newest in last.items():
        causes = newest.get("causes")
        if newest["event"] == "degraded" and isinstance(causes, Mapping):
            outliers[host] = [str(text)[:300] for text in list(causes.values())[:20]]
            flagged[host] = {_column_of(str(key)) for key in causes}
    for label, column in COLUMNS.items():
        values = {node.host: node.numbers[label] for node in nodes if label in node.numbers}
        if not column.marked_by or len(values) < _ENOUGH_NODES:
            continue
        middle = column.text(float(np.median(list(values.values()))))
        for host, value in find_far(values, column.signal).items():
            # A node's watcher may have reported the same already.
            if label not in flagged.setdefault(host, set()):
                flagged[host].add(label)
                said = f"{label} {column.text(value)} against {middle} median"
                outliers.setdefault(host, []).append(said)
    there = {str(each.get("host", "")) for each in facts.events if each["event"] in _OF_HEALTH}
    events, kinds = list[tuple[str, str]](), set[str]()
    for node in nodes:
        if node.host in there:
            with suppress(errors.LongtakeError, OSError, ValueError, TypeError):
                for each in node_events.of_node(NodeDirectory(facts.run, node.host)):
                    events.append((each.time, str(each)))
                    kinds.add(each.kind)
    has_clock_event = any(kind.startswith("clock_") for kind in kinds)
    return Health(outliers, flagged, sorted(events, reverse=True)[:200], has_clock_event)


def _column_of(signal: str) -> str:
    """Return the column of the nodes' table that a health signal marks; empty if none."""
    return next((name for name, each in COLUMNS.items() if signal.startswith(each.marked_by)), "")


@dataclass(frozen=True)
class NodeRow:
    """One row of the table of nodes, in the form that the page shows."""

    host: str
    state: str
    is_bad: bool  # whether the state is bad
    cells: list[tuple[str, bool]]  # text, and whether it is marked
    is_marked: bool


def _table(nodes: Sequence[NodeNow], columns: Sequence[str], health: Health) -> dict[str, Any]:
    """Return the rows of the nodes' table, marked ones first if it is long, and usual values."""
    rows = [_node_row(node, columns, health) for node in nodes[:_MOST_ROWS]]
    marked = [row for row in rows if row.is_marked]
    is_long = len(rows) > 24
    usual = []
    for name, percent in (("median", 50), ("5 %", 5), ("95 %", 95)) if len(nodes) > 2 else ():
        cells = []
        for label in columns:
            values = [node.numbers[label] for node in nodes if label in node.numbers]
            cells.append(COLUMNS[label].text(float(np.percentile(values, percent))))
        usual.append((name, cells))
    return {
        "rows": marked[:_MOST_MARKED] if is_long else rows,
        "rest": rows if is_long else [],
        "usual": usual,
        "num_left": max(0, len(nodes) - _MOST_ROWS),
    }


def _node_row(node: NodeNow, columns: Sequence[str], health: Health) -> NodeRow:
    flagged, cells = health.flagged.get(node.host, set()), []
    for label in columns:
        text, is_down = cell_of_node(label, node.numbers, node.links_down)
        cells.append((text, label in flagged or is_down))
    is_bad = node.state in ("silent", "unread")
    is_marked = is_bad or bool(flagged) or any(each for _, each in cells)
    state = state_words(node.state, node.silent_seconds)
    return NodeRow(node.host, state, is_bad, cells, is_marked)


# --- Over time --------------------------------------------------------------------------------


def _history(facts: RunFacts) -> HealthHistory:
    # The version never changes, as a history reads what is new by itself.
    return facts.kept("health history", None, HealthHistory)


def _plots(facts: RunFacts, nodes: Sequence[NodeNow], health: Health) -> list[dict[str, Any]]:
    """Return a plot over time for each column of the nodes' table that has recorded numbers."""
    history, hosts = _history(facts), [node.host for node in nodes]
    if hosts:
        history.update(facts.run, hosts)
    found = []
    for label in DRAWN:
        series = {host: history.of(host, label) for host in hosts}
        known = {host: each for host, each in series.items() if np.isfinite(each[1]).any()}
        named = [host for host in known if label in health.flagged.get(host, set())]
        if (picture := _plot(known, named, label)) is not None:
            many = len(known) > _MOST_LINES
            shown = named[:_MOST_NAMED] if many else list(known)
            words = list(enumerate(shown, start=2 if many else 1))
            found.append({"label": label, "picture": picture, "names": words, "is_many": many})
    return found


def _plot(
    series: Mapping[str, tuple[Numbers, Numbers]], named: Sequence[str], label: str
) -> Markup | None:
    """Plot a health number, a line per node; for many nodes median, band, extremes, outliers."""
    ends = [float(end) for times, _ in series.values() for end in (times[0], times[-1])]
    is_long = max(ends, default=0.0) - min(ends, default=0.0) > 12 * 3600
    form = "%m-%d %H:%M UTC" if is_long else "%H:%M:%S UTC"
    in_unit = format_short_duration if label in ("step", "disk write") else COLUMNS[label].text
    axes = charts.Axes("", lambda x: datetime.fromtimestamp(x, UTC).strftime(form), in_unit)
    if len(series) <= _MOST_LINES:
        lines = [
            charts.Line(host, *each, str(place))
            for place, (host, each) in enumerate(series.items(), start=1)
        ]
        return charts.line_plot(lines, axes)
    times, table = _binned(series)
    low, middle, high = np.nanpercentile(table, [5, 50, 95], axis=0)
    lines = [
        charts.Line("least of all nodes", times, np.nanmin(table, axis=0), "pale"),
        charts.Line("greatest of all nodes", times, np.nanmax(table, axis=0), "pale"),
        charts.Line("median of all nodes", times, middle, "1"),
    ]
    lines += [
        charts.Line(host, *series[host], str(place))
        for place, host in enumerate(named[:_MOST_NAMED], start=2)
    ]
    return charts.line_plot(lines, axes, [charts.Band("5 to 95 % of all nodes", times, low, high)])


def _binned(series: Mapping[str, tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers]:
    """Return the middles of equal time spans, and [nodes, spans] one health number for each.

    A span's number is the one furthest from the node's mean, so that spikes stay. Spans without any
    number are left out.
    """
    first = min(float(times[0]) for times, _ in series.values())
    last = max(float(times[-1]) for times, _ in series.values())
    width = max(last - first, 1e-9) / _BINS
    table = np.full((len(series), _BINS), np.nan)
    for row, (times, values) in enumerate(series.values()):
        is_number = np.isfinite(values)
        # The last time is the end of the last span, which belongs to it.
        bins = np.minimum(_BINS - 1, (times[is_number] - first) // width).astype(np.int64)
        own: Numbers = values[is_number]
        order = np.argsort(np.abs(own - own.mean()), kind="stable")
        table[row, bins[order]] = own[order]  # in each bin the last, most extreme number stays
    has_numbers = np.isfinite(table).any(axis=0)
    middles = np.asarray(first + width * (np.arange(_BINS) + 0.5), np.float64)
    return middles[has_numbers], table[:, has_numbers]


# --- Failures ---------------------------------------------------------------------------------


def _failures(facts: RunFacts) -> list[dict[str, str]]:
    """Return a run's failed or ended ranks, and launches that resumed, the newest first."""
    found, ends = list[dict[str, str]](), 0
    kinds = ("rank_failed", "killed_rank", "restarted_worker", "resumed")
    for event in reversed(facts.events):
        if event["event"] not in kinds:
            continue
        log, end = _log_name(facts, str(event.get("log") or "")), ""
        if log and ends < _MOST_LOG_ENDS:
            ends += 1
            with suppress(OSError):
                end = read_end(facts.run.path, log, _LOG_BYTES)
        rank = event.get("rank")
        said = event.get("error") or event.get("reason") or ""
        step = [f"step {event['step']:,}"] if isinstance(event.get("step"), int) else []
        found.append(
            {
                "time": str(event["time"]),
                "what": _FAILURE_WORDS[event["event"]],
                "level": "bad" if event["event"] == "rank_failed" else "",
                "who": f"rank {rank} on {event.get('host', '?')}" if rank is not None else "",
                "where": ", ".join([*step, str(event["phase"])] if event.get("phase") else step),
                "said": str(said),
                "log": log or str(event.get("log") or ""),
                "end": end,
            }
        )
        if len(found) == _MOST_FAILURES:
            break
    return found


_FAILURE_WORDS: Final = {
    "rank_failed": "failed",
    "killed_rank": "ended by its watcher",
    "restarted_worker": "decode worker ended by its watcher",
    "resumed": "run resumed",
}


def _log_name(facts: RunFacts, path: str) -> str:
    """Return the path of a rank's log relative to the run; empty if the log is outside of it."""
    # The event has the path on the node that wrote it, where the run may be mounted elsewhere.
    _, mark, below = path.rpartition("/nodes/")
    name = f"nodes/{below}" if mark else ""
    return name if name and "/logs/" in name and (facts.run.path / name).is_file() else ""
