"""What a preflight reports: plain JSON, and the tables for people that are made of it.

Everything fits 80 columns, for two nodes or two hundred: most are alike, and the others are named.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import median
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from longtake import __version__
from longtake.cluster.findings import SEVERITIES, CheckResult, Severity, format_number
from longtake.cluster.topology import fold_hosts
from longtake.formatting import escape

PreflightReport = dict[str, Any]
"""nodes, processes, recipe, findings, differences, measures, skipped, severity, exit_status,
verdict and seconds, as JSON, so that one machine can show what another found."""

_EXIT_STATUS: dict[Severity, int] = {"ok": 0, "note": 0, "warning": 0, "error": 1}
_WIDTH = 80
_MAX_COLUMNS, _MAX_ROWS, _MAX_NAMED = 4, 12, 3
_VERSIONS = ("longtake", "Python", "torch", "CUDA", "NCCL", "driver")
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def make_report(
    nodes: list[dict[str, Any]],
    num_processes: int,
    recipe: str | None,
    result: CheckResult,
    seconds: float,
) -> PreflightReport:
    """The report of all checks; `nodes` are their names, numbers of processes and digests."""
    facts = {
        "longtake": __version__,
        "recipe": recipe,
        "nodes": nodes,
        "processes": num_processes,
        **asdict(result),
        "seconds": round(seconds, 2),
    }
    return with_verdict(facts)


def with_verdict(report: PreflightReport) -> PreflightReport:
    """The report with its findings in order, the worst first, and the verdict that follows."""
    findings = sorted(report["findings"], key=lambda each: -SEVERITIES.index(each["severity"]))
    worst: Severity = findings[0]["severity"] if findings else "ok"
    concluded = {**report, "findings": findings, "severity": worst}
    return {**concluded, "exit_status": _EXIT_STATUS[worst], "verdict": _verdict(concluded)}


def _verdict(report: PreflightReport) -> str:
    findings = report["findings"]
    severities = [each["severity"] for each in findings]
    counts = {each: severities.count(each) for each in ("error", "warning", "note")}
    counted = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n)
    number = len(report["nodes"])
    of = f"{number} node{'s' * (number != 1)}"
    if counts["error"]:
        named = {n for each in findings if each["severity"] == "error" for n in each["nodes"]}
        where = f" (see {fold_hosts(named)})" if named else ""
        return f"Not ready: {counted} on {of}{where}."
    if counts["warning"]:
        return f"It will run, but look at this first: {counted} on {of}."
    return f"Ready: {of}, {counted or 'nothing to remark'}."


def print_report(console: Console, report: PreflightReport) -> None:
    """Print a report, 80 columns wide in a pipe."""
    if not console.is_terminal:
        console.width = _WIDTH
    for part in _parts(report):
        text = Text.from_markup(part) if isinstance(part, str) else part
        for line in console.render_lines(text, pad=False):
            shown = [*_without_trailing_blanks(line), Segment.line()]
            console.print(Segments(shown), end="")


def _without_trailing_blanks(line: list[Segment]) -> list[Segment]:
    """A line that can be copied: tables fill theirs up to their width."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    if not line:
        return line
    text, style, control = line[-1]
    return [*line[:-1], Segment(text.rstrip(), style, control)]


def _parts(report: PreflightReport) -> Iterator[RenderableType]:
    yield f"[bold]{escape(_title(report))}[/bold]"
    if same := _agreed([node for node in report["nodes"] if node["processes"]]):
        yield f"[dim]{escape(same)}[/dim]"
    if report["differences"]:
        yield ""
        yield _differences(report["differences"])
    if report["measures"]:
        yield ""
        yield _measures(
            report["measures"], [node["name"] for node in report["nodes"] if node["processes"]]
        )
    if report["findings"]:
        yield ""
        yield from _findings(report["findings"])
    if report["skipped"]:
        yield ""
        yield "[dim]Not checked[/dim]"
        yield _skipped(report["skipped"])
    yield ""
    colour = _COLOURS[report["severity"]]
    yield f"[{colour}]{escape(report['verdict'])}[/{colour}] [dim]{report['seconds']:.1f} s[/dim]"


def _title(report: PreflightReport) -> str:
    names = [node["name"] for node in report["nodes"]]
    more = report["processes"] - sum(node["processes"] > 0 for node in report["nodes"])
    processes = f", {report['processes']} processes" if more > 0 else ""
    recipe = f", {report['recipe']}" if report["recipe"] else ""
    return f"Preflight of {fold_hosts(names)}{processes}{recipe}"


def _agreed(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The most important of what all nodes have in common."""
    facts = [
        {
            **{name: each.get("versions", {}).get(name) for name in _VERSIONS},
            "packages": each.get("packages"),
            "recipe": each.get("recipe"),
            "stacks by": each.get("inspection"),
        }
        for each in nodes
    ]
    first = facts[0] if facts else {}
    same = [name for name, value in first.items() if all(each[name] == value for each in facts)]
    shown = ", ".join(f"{name} {first[name]}" for name in same if first[name])
    return shown and (f"The same on all {len(nodes)}: {shown}" if len(nodes) > 1 else shown)


def _differences(differences: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One row for each value that is not the majority's."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("differs", "most nodes", "others", "which"):
        table.add_column(name, overflow="fold")
    for group, some in groupby(differences, key=lambda each: str(each["group"])):
        rows = list(some)
        for each in rows[:_MAX_ROWS]:
            _add_difference(table, group, each)
        if len(rows) > _MAX_ROWS:
            table.add_row(f"[dim]{len(rows) - _MAX_ROWS} more of {escape(group)} (--json)[/dim]")
    return table


def _add_difference(table: Table, group: str, each: Mapping[str, Any]) -> None:
    others = [value for value in each["values"] if value != each["majority"]]
    majority = "-" if each["majority"] is None else each["majority"]
    for number, value in enumerate(others[:_MAX_NAMED]):
        first = (f"{group}: {each['name']}", majority) if number == 0 else ("", "")
        table.add_row(*map(escape, (*first, value, fold_hosts(each["values"][value]))))
    if len(others) > _MAX_NAMED:
        nodes = [node for value in others[_MAX_NAMED:] for node in each["values"][value]]
        table.add_row("", "", f"[dim]{len(nodes)} more values[/dim]", escape(fold_hosts(nodes)))


def _measures(measures: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> RenderableType:
    """A column per node; of many nodes the median, the extremes and the outliers."""
    few = len(nodes) <= _MAX_COLUMNS and all(len(node) <= 12 for node in nodes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("measured")
    for name in nodes if few else ("least", "median", "most", "out of line"):
        table.add_column(escape(name), justify="right")
    of_links = []
    for each in measures:
        if few and each["values"].keys() <= set(nodes):
            cells = [_cell(each, node) for node in nodes]
        elif few:
            of_links.append(each)
            continue
        else:
            values = list(each["values"].values())
            cells = [format_number(value) for value in (min(values), median(values), max(values))]
            cells.append(escape(fold_hosts(each["outliers"])))
        table.add_row(escape(f"{each['name']}, {each['unit']}"), *cells)
    for each in of_links:
        for link, value in each["values"].items():
            table.add_row(escape(f"{each['name']}, {each['unit']}: {link}"), format_number(value))
    return table


def _cell(each: Mapping[str, Any], node: str) -> str:
    if node not in each["values"]:
        return "-"
    text = format_number(each["values"][node])
    return f"[bold yellow]{text}[/bold yellow]" if node in each["outliers"] else text


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """What to know and to do; nodes with the same finding share it."""
    for each in _merge_nodes(findings):
        table = Table.grid(padding=(0, 1))
        table.add_column(width=7, no_wrap=True)
        table.add_column(overflow="fold")
        colour = _COLOURS[each["severity"]]
        where = f"[bold]{escape(fold_hosts(each['nodes']))}[/bold]: " if each["nodes"] else ""
        table.add_row(
            f"[{colour}]{each['severity']}[/{colour}]",
            where + escape(each["what"].rstrip(".")) + ".",
        )
        for name in ("expected", "advice"):
            if each[name]:
                text = f"expected: {each[name]}" if name == "expected" else each[name]
                table.add_row("", f"[dim]{escape(text)}[/dim]")
        yield table


def _merge_nodes(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in findings:
        key = tuple(str(each[name]) for name in ("severity", "check", "what", "advice"))
        if key in found:
            found[key]["nodes"] = [*found[key]["nodes"], *each["nodes"]]
        else:
            found[key] = dict(each)
    return list(found.values())


def _skipped(skipped: Sequence[Mapping[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=7)
    table.add_column(overflow="fold")
    for each in skipped:
        table.add_row("", f"[dim]{escape(each['what'])}: {escape(each['why'])}[/dim]")
    return table
