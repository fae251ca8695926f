"""What a preflight tells, as tables for people; made of nothing but its JSON.

Everything fits 80 columns, whether there are two nodes or two hundred: most are alike, and those
that are not have a name.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from longtake.formatting import escape
from longtake.preflight.names import listed
from longtake.preflight.report import Report

_WIDTH = 80
_MOST_COLUMNS, _MOST_ROWS, _MOST_NAMED = 4, 12, 3
_AGREED = ("longtake", "Python", "torch", "CUDA", "NCCL", "driver")
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def print_report(console: Console, told: Report) -> None:
    """Print what `report` returned, 80 columns wide in a pipe."""
    if not console.is_terminal:
        console.width = _WIDTH
    for part in map(_as_renderable, _parts(told)):
        for line in console.render_lines(part, pad=False):
            shown = [*_without_trailing_blanks(line), Segment.line()]
            console.print(Segments(shown), end="")


def _as_renderable(part: RenderableType) -> RenderableType:
    return Text.from_markup(part) if isinstance(part, str) else part


def _without_trailing_blanks(line: list[Segment]) -> list[Segment]:
    """A line that can be copied: tables fill theirs up to their width."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    if not line:
        return line
    text, style, control = line[-1]
    return [*line[:-1], Segment(text.rstrip(), style, control)]


def _parts(told: Report) -> Iterator[RenderableType]:
    yield f"[bold]{escape(_title(told))}[/bold]"
    if same := _agreed([node for node in told["nodes"] if node["processes"]]):
        yield f"[dim]{escape(same)}[/dim]"
    if told["differences"]:
        yield ""
        yield _differences(told["differences"])
    if told["measures"]:
        yield ""
        yield _measures(
            told["measures"], [node["name"] for node in told["nodes"] if node["processes"]]
        )
    if told["findings"]:
        yield ""
        yield from _findings(told["findings"])
    if told["skipped"]:
        yield ""
        yield "[dim]Not looked at[/dim]"
        yield _skipped(told["skipped"])
    yield ""
    colour = _COLOURS[told["severity"]]
    yield f"[{colour}]{escape(told['verdict'])}[/{colour}] [dim]{told['seconds']:.1f} s[/dim]"


def _title(told: Report) -> str:
    names = [node["name"] for node in told["nodes"]]
    more = told["processes"] - sum(node["processes"] > 0 for node in told["nodes"])
    processes = f", {told['processes']} processes" if more > 0 else ""
    recipe = f", {told['recipe']}" if told["recipe"] else ""
    return f"Preflight of {listed(names)}{processes}{recipe}"


def _agreed(nodes: Sequence[Mapping[str, Any]]) -> str:
    """What all nodes have in common, of what matters most."""
    told = [
        {
            **{name: each.get("versions", {}).get(name) for name in _AGREED},
            "packages": each.get("packages"),
            "recipe": each.get("recipe"),
            "stacks by": each.get("inspection"),
        }
        for each in nodes
    ]
    first = told[0] if told else {}
    same = {name for name, value in first.items() if all(each[name] == value for each in told)}
    said = ", ".join(f"{name} {first[name]}" for name in first if name in same and first[name])
    return said and (f"The same on all {len(nodes)}: {said}" if len(nodes) > 1 else said)


def _differences(differences: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One row for each value that is not the majority's."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("differs", "most nodes", "others", "which"):
        table.add_column(name, overflow="fold")
    for group, some in groupby(differences, key=lambda each: str(each["group"])):
        rows = list(some)
        for each in rows[:_MOST_ROWS]:
            _add_difference(table, group, each)
        if len(rows) > _MOST_ROWS:
            table.add_row(f"[dim]{len(rows) - _MOST_ROWS} more of {escape(group)} (--json)[/dim]")
    return table


def _add_difference(table: Table, group: str, each: Mapping[str, Any]) -> None:
    others = [value for value in each["values"] if value != each["majority"]]
    majority = "-" if each["majority"] is None else each["majority"]
    for number, value in enumerate(others[:_MOST_NAMED]):
        first = (f"{group}: {each['name']}", majority) if number == 0 else ("", "")
        table.add_row(*map(escape, (*first, value, listed(each["values"][value]))))
    if len(others) > _MOST_NAMED:
        nodes = [node for value in others[_MOST_NAMED:] for node in each["values"][value]]
        table.add_row("", "", f"[dim]{len(nodes)} more values[/dim]", escape(listed(nodes)))


def _measures(measures: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> RenderableType:
    """Numbers by node; of many nodes the median and the extremes, and whose are out of line."""
    few = len(nodes) <= _MOST_COLUMNS and all(len(node) <= 12 for node in nodes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("measured")
    for name in nodes if few else ("least", "median", "most", "out of line"):
        table.add_column(escape(name), justify="right")
    apart = []
    for each in measures:
        if few and each["values"].keys() <= set(nodes):
            cells = [_cell(each, node) for node in nodes]
        elif few:
            apart.append(each)
            continue
        else:
            cells = _spread(each)
        table.add_row(escape(f"{each['name']}, {each['unit']}"), *cells)
    for each in apart:
        for link, value in each["values"].items():
            table.add_row(escape(f"{each['name']}, {each['unit']}: {link}"), _number(value))
    return table


def _cell(each: Mapping[str, Any], node: str) -> str:
    if node not in each["values"]:
        return "-"
    text = _number(each["values"][node])
    return f"[bold yellow]{text}[/bold yellow]" if node in each["outliers"] else text


def _spread(each: Mapping[str, Any]) -> list[str]:
    values = list(each["values"].values())
    spread = [_number(value) for value in (min(values), median(values), max(values))]
    return [*spread, escape(listed(each["outliers"]))]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """What to know and to do; nodes of which the same is said are told of together."""
    for each in _together(findings):
        table = Table.grid(padding=(0, 1))
        table.add_column(width=7, no_wrap=True)
        table.add_column(overflow="fold")
        colour = _COLOURS[each["severity"]]
        where = f"[bold]{escape(listed(each['nodes']))}[/bold]: " if each["nodes"] else ""
        table.add_row(
            f"[{colour}]{each['severity']}[/{colour}]", where + escape(each["what"]) + "."
        )
        for name in ("expected", "advice"):
            if each[name]:
                said = f"expected: {each[name]}" if name == "expected" else each[name]
                table.add_row("", f"[dim]{escape(said)}[/dim]")
        yield table


def _together(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
