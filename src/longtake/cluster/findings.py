"""What a preflight check is, what it finds, and the comparisons of nodes that checks are made of.

To add a check: write `measure_...` and `judge_...` in the checks module of its subject, and add a
row to `preflight.CHECKS`. Everything here can be JSON, is pure, and imports no torch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high, median_low
from typing import Any, Literal

from longtake.cluster.topology import ProcessInfo, fold_hosts
from longtake.config import Recipe

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""The mildest first."""
Facts = dict[str, Any]
"""What a node or process measured: values of JSON. `failed` holds why a check could not measure."""
FactsByNode = Mapping[str, Facts]
"""By the name of a node; for checks of each rank, by the name of the process."""
ABSENT = "absent"
"""The value of a fact that a node does not have."""

_MAX_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """Something that the user should know."""

    severity: Severity  # note: nothing to do; warning: the run will suffer; error: it will fail
    nodes: tuple[str, ...]  # empty: all
    what: str  # with values
    expected: str = ""
    advice: str = ""
    check: str = ""  # filled in by preflight


@dataclass(frozen=True)
class NodeDifference:
    """A fact that differs between nodes."""

    group: str  # such as packages
    name: str
    majority: str | None  # value on most nodes; None: no value is more frequent than all others
    values: dict[str, tuple[str, ...]]  # nodes by value, the most frequent first

    @property
    def outliers(self) -> tuple[str, ...]:
        return tuple(
            node for value, nodes in self.values.items() if value != self.majority for node in nodes
        )


@dataclass(frozen=True)
class NodeMeasure:
    """A number per node or process, for the table."""

    name: str
    unit: str
    values: dict[str, float]
    outliers: tuple[str, ...] = ()  # those that a finding names


@dataclass(frozen=True)
class SkippedCheck:
    """What was not checked, and why."""

    what: str
    why: str


@dataclass
class CheckResult:
    """What one check concludes from the facts of all nodes, or all checks together."""

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
    """What a process knows when a check begins."""

    process: ProcessInfo
    recipe: Recipe | None = None  # as this node reads it
    recipe_path: Path | None = None  # as asked for; None: no recipe was given
    recipe_problem: str = ""  # why it cannot be read
    token: str = ""  # the same on all processes, different in each preflight
    seconds: float = 120.0  # that a check may take
    hosts: Sequence[str] = ()  # names of the nodes
    ranks: Sequence[Sequence[int]] = ((0,),)  # of each node; its leader first

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
    """A row of `preflight.CHECKS`.

    `measure` runs on every node (or rank) in a thread with a time limit, and may raise; `judge`
    runs on rank 0, with the facts of all that could measure and the recipe, and measures nothing.
    """

    name: str
    measure: Callable[[CheckContext], Facts]
    judge: Callable[[FactsByNode, Recipe | None], CheckResult]
    # together: by all at the same time, after the checks before; connected: as together, with a
    # process group of torch.distributed
    when: Literal["independent", "together", "connected"] = "independent"
    each: Literal["node", "rank"] = "node"  # measured by one process per node, or by every rank


def same_everywhere(
    name: str,
    facts: Mapping[str, Mapping[str, str]],
    severity: Severity,
    advice: str,
    exceptions: Mapping[str, Severity] | None = None,
) -> CheckResult:
    """Compare each fact with the majority of the nodes.

    Facts that differ on the same nodes, equally severely, are one finding.
    """
    differences = []
    for fact in sorted({fact for each in facts.values() for fact in each}):
        by_node = {node: each.get(fact, ABSENT) for node, each in facts.items()}
        if len(set(by_node.values())) > 1:
            differences.append(_difference(name, fact, by_node))
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
    *,
    unit: str,
    worse: Literal["lower", "higher"],
    factor: float,
    advice: str,
    error_factor: float | None = None,
    harmless: float | None = None,
    limit: float | None = None,
) -> CheckResult:
    """Compare a number of each node with the median: a measure, and a warning about outliers."""
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
    """Whose value is beyond so many times the median (of two: the better one); the worst first."""
    if len(values) < 2:
        return ()
    limit = factor * median_of(values.values(), worse)
    found = [who for who, value in values.items() if _is_worse(value, limit, worse)]
    return tuple(sorted(found, key=values.__getitem__, reverse=worse == "higher"))


def median_of(values: Iterable[float], worse: Literal["lower", "higher"] = "lower") -> float:
    return median_high(values) if worse == "lower" else median_low(values)


def format_number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _is_worse(value: float, limit: float, worse: Literal["lower", "higher"]) -> bool:
    return value < limit if worse == "lower" else value > limit
