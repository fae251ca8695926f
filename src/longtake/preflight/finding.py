"""What checks say: findings by severity, differences between nodes, numbers, and what was left out.

All of it is plain data that JSON can hold: one process judges, another may show what it said.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""The mildest first."""


@dataclass(frozen=True)
class Finding:
    """One thing that somebody should know.

    Attributes:
        severity: `note`: nothing to do; `warning`: the run will suffer; `error`: it will fail.
        check: the check that says so.
        nodes: where; empty: everywhere.
        what: what was found, with its values.
        expected: what was expected.
        advice: what to do; empty where there is nothing.
    """

    severity: Severity
    check: str
    nodes: tuple[str, ...]
    what: str
    expected: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same on all nodes.

    Attributes:
        group: what it is of, such as packages.
        name: of the fact.
        majority: its value on most nodes; None: no value is more frequent than all others.
        values: nodes by value, the most frequent first; of the majority too.
    """

    group: str
    name: str
    majority: str | None
    values: dict[str, tuple[str, ...]]

    @property
    def outliers(self) -> tuple[str, ...]:
        """Nodes that differ from the majority; all, if there is none."""
        return tuple(
            node for value, nodes in self.values.items() if value != self.majority for node in nodes
        )


@dataclass(frozen=True)
class Measure:
    """A number of each node, or of each process.

    Attributes:
        name: what was measured.
        unit: its unit.
        values: by node.
        outliers: nodes whose number a finding is about.
    """

    name: str
    unit: str
    values: dict[str, float]
    outliers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """What was not checked, and why."""

    what: str
    why: str


@dataclass
class Judged:
    """All that one check says, or all of them together."""

    findings: list[Finding] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, other: "Judged") -> None:
        """Take over what another check says."""
        self.findings += other.findings
        self.differences += other.differences
        self.measures += other.measures
        self.skipped += other.skipped

    def as_dict(self) -> dict[str, Any]:
        """As what JSON can hold, findings by severity, the worst first."""
        found = asdict(self)
        found["findings"] = worst_first(found["findings"])
        return found


def worst_first(findings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings as JSON has them, ordered by severity, else as they came."""
    return sorted(findings, key=lambda each: -SEVERITIES.index(each["severity"]))


def worst(severities: Iterable[Severity]) -> Severity:
    """The worst of some severities; ok if there are none."""
    return max(severities, key=SEVERITIES.index, default="ok")
