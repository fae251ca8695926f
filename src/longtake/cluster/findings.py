"""Preflight checks, comparisons between nodes, and the report of findings; torch-free.

To add a check: write `measure_...` and `judge_...` in the checks module of its subject, and add a
row to `preflight.CHECKS`. A report is JSON; the printed tables are made from it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median, median_high, median_low
from typing import Any, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from longtake import __version__
from longtake.cluster.topology import ProcessInfo, fold_hosts
from longtake.config import Recipe
from longtake.formatting import escape, escape_lines

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""All severities of findings, the mildest first."""
Facts = dict[str, Any]
"""Measurements of a check on a node or process as JSON values; `failed`: why it failed."""
FactsByNode = Mapping[str, Facts]
"""Measurements of a check by node name or, for checks of each rank, by process name."""
ABSENT = "absent"
"""Value that stands for a fact that a node lacks, such as a package."""

_MAX_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """A problem of nodes, or a remark on them, that the preflight reports to the user."""

    severity: Severity  # note: nothing to do; warning: the run will suffer; error: it will fail
    nodes: tuple[str, ...]  # empty: all nodes
    what: str  # description, with the measured values
    expected: str = ""
    advice: str = ""
    check: str = ""  # name of the check, filled in by preflight


@dataclass(frozen=True)
class NodeDifference:
    """A fact that differs between nodes, such as a package's version."""

    group: str  # such as packages
    name: str
    majority: str | None  # value on most nodes; None: no value is more frequent than all others
    values: dict[str, tuple[str, ...]]  # nodes by value, the most frequent first
    command: str = ""  # command that removes the difference on the others; empty: there is none

    @property
    def reference(self) -> str:
        """Value that all nodes should have: the majority's, or else the most frequent."""
        return next(iter(self.values)) if self.majority is None else self.majority

    @property
    def outliers(self) -> tuple[str, ...]:
        return tuple(
            node for value, nodes in self.values.items() if value != self.majority for node in nodes
        )


@dataclass(frozen=True)
class NodeMeasure:
    """A number measured on each node or process, for the table of the report."""

    name: str
    unit: str
    values: dict[str, float]
    outliers: tuple[str, ...] = ()  # nodes that a finding names


@dataclass(frozen=True)
class SkippedCheck:
    """A check of the preflight that was skipped, and the reason."""

    what: str
    why: str


@dataclass
class CheckResult:
    """Findings and measures of one check from the facts of all nodes, or of several checks."""

    findings: list[Finding] = field(default_factory=list)
    differences: list[NodeDifference] = field(default_factory=list)
    measures: list[NodeMeasure] = field(default_factory=list)
    skipped: list[SkippedCheck] = field(default_factory=list)

    def find(
        self,
        severity: Severity,
        nodes: Sequence[str],
        what: str,
        expected: str = "",
        advice: str = "",
    ) -> None:
        self.findings.append(Finding(severity, tuple(nodes), what, expected, advice))

    def measure(
        self, name: str, unit: str, values: dict[str, float], outliers: Sequence[str] = ()
    ) -> None:
        self.measures.append(NodeMeasure(name, unit, values, tuple(outliers)))

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(SkippedCheck(what, why))

    def add(self, other: "CheckResult") -> None:
        self.findings += other.findings
        self.differences += other.differences
        self.measures += other.measures
        self.skipped += other.skipped


@dataclass(frozen=True)
class CheckContext:
    """Input of a preflight's check: the recipe, this process, and the nodes that take part."""

    process: ProcessInfo
    recipe: Recipe | None = None  # the recipe as read on this node
    recipe_path: Path | None = None  # None: no recipe was given
    recipe_problem: str = ""  # reason why the recipe cannot be read
    token: str = ""  # the same on all processes, different in each preflight
    seconds: float = 120.0  # time limit of a check
    hosts: Sequence[str] = ()  # names of the nodes
    ranks: Sequence[Sequence[int]] = ((0,),)  # ranks of each node, its leader first

    @property
    def leaders(self) -> list[int]:
        return [each[0] for each in self.ranks]

    def node_of(self, rank: int) -> str:
        nodes = zip(self.hosts, self.ranks, strict=True)
        return next(host for host, ranks in nodes if rank in ranks)

    def name_of(self, rank: int) -> str:
        ranks = next(list(each) for each in self.ranks if rank in each)
        return self.node_of(rank) + (f":{ranks.index(rank)}" if len(ranks) > 1 else "")


@dataclass(frozen=True)
class Check:
    """A check of the preflight, such as "clocks": a row of `preflight.CHECKS`.

    `measure` runs on every node (or rank) in a thread with a time limit, and may raise. `judge`
    runs on rank 0 with the facts of all nodes that could measure, and only compares them.
    """

    name: str
    measure: Callable[[CheckContext], Facts]
    judge: Callable[[FactsByNode], CheckResult]
    # together: on all nodes at the same time, after the earlier checks; connected: also with a
    # process group of torch.distributed.
    when: Literal["independent", "together", "connected"] = "independent"
    each: Literal["node", "rank"] = "node"  # measured by one process per node, or by every rank


def same_everywhere(
    name: str,
    facts: Mapping[str, Mapping[str, str]],
    severity: Severity,
    advice: str,
    exceptions: Mapping[str, Severity] | None = None,
    command: Callable[[NodeDifference], str] | None = None,
) -> CheckResult:
    """Compare facts of each node with the majority of the nodes, and report differences.

    Facts that differ on the same nodes with the same severity form one finding.

    Args:
        name: group of the facts, such as packages.
        facts: values of the facts by node and fact.
        severity: severity of a difference.
        advice: advice for the user.
        exceptions: severities of single facts.
        command: returns the command that removes a difference; without a majority, it gets the most
            frequent value as the majority's.
    """
    differences = []
    for fact in sorted({fact for each in facts.values() for fact in each}):
        by_node = {node: each.get(fact, ABSENT) for node, each in facts.items()}
        if len(set(by_node.values())) > 1:
            found = _difference(name, fact, by_node)
            if command is not None:
                found = replace(found, command=command(replace(found, majority=found.reference)))
            differences.append(found)
    together: dict[tuple[Severity, tuple[str, ...]], list[NodeDifference]] = defaultdict(list)
    for each in differences:
        together[(exceptions or {}).get(each.name, severity), each.outliers].append(each)
    findings = [
        Finding(
            severity,
            nodes,
            "; ".join(map(_describe_difference, some[:_MAX_NAMED]))
            + (f"; and {len(some) - _MAX_NAMED} more" if len(some) > _MAX_NAMED else ""),
            "the same on all nodes",
            "" if severity == "note" else advice,
        )
        for (severity, nodes), some in together.items()
    ]
    return CheckResult(findings, differences)


def _difference(group: str, name: str, by_node: Mapping[str, str]) -> NodeDifference:
    nodes = defaultdict(list)
    for node, value in by_node.items():
        nodes[value].append(node)
    ranked = sorted(nodes.items(), key=lambda each: -len(each[1]))
    has_majority = len(ranked[0][1]) > len(ranked[1][1])
    values = {value: tuple(some) for value, some in ranked}
    return NodeDifference(group, name, ranked[0][0] if has_majority else None, values)


def _describe_difference(each: NodeDifference) -> str:
    if each.majority is None:
        by_value = (f"{value} on {fold_hosts(nodes)}" for value, nodes in each.values.items())
        return f"{each.name} is {', '.join(by_value)}"
    others = [value for value in each.values if value != each.majority]
    shown = ", ".join(others[:_MAX_NAMED]) + (", ..." if len(others) > _MAX_NAMED else "")
    return f"{each.name} is {shown} instead of {each.majority}"


def far_from_median(
    name: str,
    values: Mapping[str, float],
    worse: Literal["lower", "higher"],
    *,
    factor: float,
    advice: str,
    error_factor: float | None = None,
    harmless: float | None = None,
    limit: float | None = None,
) -> CheckResult:
    """Compare a number of each node with the median of all, and report outliers.

    Args:
        name: name of the number; its unit follows the last comma.
        values: the number by node.
        worse: the bad direction.
        factor: an outlier is worse than this multiple of the median.
        advice: advice for the user.
        error_factor: worse than this multiple of the median is an error, else a warning.
        harmless: values not worse than this are never outliers.
        limit: if there are no outliers, values worse than this are reported.
    """
    name, _, unit = name.rpartition(", ")
    if not values:
        return CheckResult()
    outliers = outliers_of(values, worse, factor)
    if harmless is not None:
        outliers = tuple(o for o in outliers if _is_worse(values[o], harmless, worse))
    if limit is not None and not outliers:
        outliers = tuple(o for o, value in values.items() if _is_worse(value, limit, worse))
    result = CheckResult(measures=[NodeMeasure(name, unit, dict(values), outliers)])
    if outliers:
        value, usual = values[outliers[0]], median_of(values.values(), worse)
        side = "at least" if worse == "lower" else "at most"
        expected = f"{side} {factor:g} times the median, {format_number(usual)} {unit}"
        expected += "" if limit is None else f", and {side} {format_number(limit)} {unit}"
        is_error = error_factor is not None and _is_worse(value, error_factor * usual, worse)
        what = f"{name}: {format_number(value)} {unit}"
        severity: Severity = "error" if is_error else "warning"
        result.findings.append(Finding(severity, outliers, what, expected, advice))
    return result


def outliers_of(
    values: Mapping[str, float], worse: Literal["lower", "higher"], factor: float
) -> tuple[str, ...]:
    """Return nodes whose value is worse than `factor` times the median of all, the worst first.

    The median of two values is the better one.
    """
    if len(values) < 2:
        return ()
    limit = factor * median_of(values.values(), worse)
    found = [who for who, value in values.items() if _is_worse(value, limit, worse)]
    return tuple(sorted(found, key=values.__getitem__, reverse=worse == "higher"))


def median_of(values: Iterable[float], worse: Literal["lower", "higher"] = "lower") -> float:
    # The median of two values is the better one: neither could be far from their mean.
    return median_high(values) if worse == "lower" else median_low(values)


def format_number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _is_worse(value: float, limit: float, worse: Literal["lower", "higher"]) -> bool:
    return value < limit if worse == "lower" else value > limit


# --- Report ---------------------------------------------------------------------------------------

PreflightReport = dict[str, Any]
"""A report of a preflight as JSON values, so that any machine can show it.

Keys: nodes, processes, recipe, findings, differences, measures, skipped, severity, exit_status,
verdict and seconds."""

_EXIT_STATUS: dict[Severity, int] = {"ok": 0, "note": 0, "warning": 0, "error": 1}
_WIDTH = 80
_MAX_COLUMNS, _MAX_ROWS = 4, 12
_VERSIONS = ("longtake", "Python", "torch", "CUDA", "NCCL", "driver")
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def make_report(
    nodes: list[dict[str, Any]],
    num_processes: int,
    recipe: str | None,
    result: CheckResult,
    seconds: float,
) -> PreflightReport:
    """Build the report of all checks of a preflight.

    `nodes` has the name, number of processes, versions and digests of each node.
    """
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
    """Return a preflight's report with findings sorted, the worst first, and the verdict."""
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
    """Print a preflight's report, 80 columns wide in a pipe."""
    if not console.is_terminal:
        console.width = _WIDTH
    for part in _parts(report):
        text = Text.from_markup(part) if isinstance(part, str) else part
        for line in console.render_lines(text, pad=False):
            # Strip the blanks with which tables fill their lines, so that lines can be copied.
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last, style, control = line.pop()
                line.append(Segment(last.rstrip(), style, control))
            console.print(Segments([*line, Segment.line()]), end="")


def _parts(report: PreflightReport) -> Iterator[RenderableType]:
    names = [node["name"] for node in report["nodes"]]
    measured_nodes = [node for node in report["nodes"] if node["processes"]]
    has_more = report["processes"] > len(measured_nodes)
    processes = f", {report['processes']} processes" if has_more else ""
    recipe = f", {report['recipe']}" if report["recipe"] else ""
    yield f"[bold]{escape(f'Preflight of {fold_hosts(names)}{processes}{recipe}')}[/bold]"
    if same := _agreed(measured_nodes):
        yield f"[dim]{escape(same)}[/dim]"
    if report["differences"]:
        yield ""
        yield _differences(report["differences"])
        yield from _commands(report["differences"])
    if report["measures"]:
        yield ""
        yield _measures(report["measures"], [node["name"] for node in measured_nodes])
    if report["findings"]:
        yield ""
        yield from _findings(report["findings"])
    if report["skipped"]:
        yield ""
        yield "[dim]Not checked[/dim]"
        table = Table.grid(padding=(0, 1))
        table.add_column(width=7)
        table.add_column(overflow="fold")
        for each in report["skipped"]:
            table.add_row("", f"[dim]{escape(each['what'])}: {escape(each['why'])}[/dim]")
        yield table
    yield ""
    colour = _COLOURS[report["severity"]]
    yield f"[{colour}]{escape(report['verdict'])}[/{colour}] [dim]{report['seconds']:.1f} s[/dim]"


def _agreed(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return a line of the most important facts (versions ...) that all nodes have in common."""
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
    """Build a table of facts that differ between nodes: a row per value of a minority."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("differs", "most nodes", "others", "which"):
        table.add_column(name, overflow="fold")
    for group, some in groupby(differences, key=lambda each: str(each["group"])):
        rows = list(some)
        for each in rows[:_MAX_ROWS]:
            values, majority = each["values"], each["majority"]
            others = [value for value in values if value != majority]
            for number, value in enumerate(others[:_MAX_NAMED]):
                name, most = f"{group}: {each['name']}", "-" if majority is None else majority
                first = (name, most) if number == 0 else ("", "")
                table.add_row(*map(escape, (*first, value, fold_hosts(values[value]))))
            if left := others[_MAX_NAMED:]:
                nodes = [node for value in left for node in values[value]]
                said = f"[dim]{len(nodes)} more values[/dim]"
                table.add_row("", "", said, escape(fold_hosts(nodes)))
        if len(rows) > _MAX_ROWS:
            table.add_row(f"[dim]{len(rows) - _MAX_ROWS} more of {escape(group)} (--json)[/dim]")
    return table


def _commands(differences: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield shell commands that make nodes equal, each once, with the nodes to run it on."""
    found: dict[str, list[str]] = {}
    for each in differences:
        if each["command"]:
            reference = each["majority"] or next(iter(each["values"]))
            nodes = [n for v, some in each["values"].items() if v != reference for n in some]
            found.setdefault(each["command"], []).extend(nodes)
    if found:
        yield "To make them equal:"
    for command, nodes in found.items():
        yield f"  [bold]{escape(fold_hosts(nodes))}[/bold]: {escape(command)}"


def _measures(measures: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> RenderableType:
    """Build the table of measured numbers: a column per node or, for many, median and extremes."""
    few = len(nodes) <= _MAX_COLUMNS and all(len(node) <= 12 for node in nodes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("measured")
    for name in nodes if few else ("least", "median", "most", "out of line"):
        table.add_column(escape(name), justify="right")
    of_links = []
    for each in measures:
        if few and each["values"].keys() <= set(nodes):
            shown = {node: format_number(value) for node, value in each["values"].items()}
            for node in shown.keys() & set(each["outliers"]):
                shown[node] = f"[bold yellow]{shown[node]}[/bold yellow]"
            cells = [shown.get(node, "-") for node in nodes]
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


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Yield a table for each finding of the preflight, with advice; equal ones share it."""
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in findings:
        key = tuple(str(each[name]) for name in ("severity", "check", "what", "advice"))
        merged.setdefault(key, {**each, "nodes": []})["nodes"] += each["nodes"]
    for each in merged.values():
        table = Table.grid(padding=(0, 1))
        table.add_column(width=7, no_wrap=True)
        table.add_column(overflow="fold")
        colour = _COLOURS[each["severity"]]
        where = f"[bold]{escape(fold_hosts(each['nodes']))}[/bold]: " if each["nodes"] else ""
        table.add_row(
            f"[{colour}]{each['severity']}[/{colour}]",
            where + escape_lines(each["what"].rstrip(".")) + ".",
        )
        for name in ("expected", "advice"):
            if each[name]:
                text = f"expected: {each[name]}" if name == "expected" else each[name]
                table.add_row("", f"[dim]{escape_lines(text)}[/dim]")
        yield table
