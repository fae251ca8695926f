"""What people read: on 80 columns, of two nodes or of two hundred."""

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from longtake.cluster.findings import (
    CheckResult,
    Finding,
    NodeDifference,
    NodeMeasure,
    Severity,
    SkippedCheck,
)
from longtake.cluster.report import make_report, print_report


def _shown(report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), highlight=False)
    print_report(console, report)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _report(names: list[str], result: CheckResult) -> dict[str, Any]:
    nodes = [{"name": name, "processes": 1} for name in names]
    return make_report(nodes, len(names), "r.toml", result, 1.0)


def test_two_hundred_nodes_fit_on_a_screen() -> None:
    """Most are alike and are one line; who is not has a name; no line is longer than 80."""
    names = [f"gpu{n:03d}" for n in range(200)]
    speeds = {name: 700.0 + n % 5 for n, name in enumerate(names)} | {"gpu007": 412.0}
    others = tuple(name for name in names if name != "gpu007")
    versions = {"2.13.0": others, "2.12.1": ("gpu007",)}
    result = CheckResult(
        [Finding("warning", ("gpu007",), "x " * 90, "y " * 60, "z " * 60, "compute")]
        + [Finding("error", (name,), "the same of each", check="dataset") for name in names],
        [NodeDifference("packages", "torch", "2.13.0", versions)],
        [NodeMeasure("matrix products", "TFLOP/s", speeds, ("gpu007",))],
    )
    shown = _shown(_report(names, result))
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) < 40
    assert not any(line.endswith(" ") for line in shown.splitlines())
    assert "gpu[000-199]: the same of each." in shown
    assert "412" in shown
    assert "2.12.1" in shown


def test_of_a_few_nodes_each_has_a_column() -> None:
    """Numbers stand below their node's name; the values of the others are not lost."""
    result = CheckResult(measures=[NodeMeasure("clock ahead", "ms", {"a": 0.0, "b": 12.5}, ("b",))])
    lines = _shown(_report(["a", "b"], result)).splitlines()
    assert any(line.split() == ["measured", "a", "b"] for line in lines)
    assert any(line.split() == ["clock", "ahead,", "ms", "0", "12.5"] for line in lines)


@pytest.mark.parametrize(
    ("severities", "status", "verdict"),
    [
        ([], 0, "Ready: 1 node, nothing to remark."),
        (["note"], 0, "Ready: 1 node, 1 note."),
        (["note", "warning"], 0, "look at this first: 1 warning, 1 note on 1 node"),
        (["warning", "error", "error"], 1, "Not ready: 2 errors, 1 warning on 1 node (see a)."),
    ],
)
def test_the_worst_decides(severities: list[Severity], status: int, verdict: str) -> None:
    """The exit status and the last line follow from the worst finding, which is report first."""
    findings = [Finding(each, ("a",), f"{each}!") for each in severities]
    report = _report(["a"], CheckResult(findings, skipped=[SkippedCheck("links", "one node")]))
    assert report["exit_status"] == status
    shown = _shown(report)
    assert verdict in " ".join(shown.split())
    assert "links: one node" in shown
    assert [line for line in shown.splitlines() if line != line.rstrip()] == [], "trailing blanks"
    places = [shown.find(f"{each}!") for each in ("error", "warning", "note") if each in severities]
    assert places == sorted(places)


def test_what_is_report_is_json_of_plain_values() -> None:
    """A finding comes out of a report as it went in, so that another machine can show it."""
    finding = Finding("note", ("a",), "what", "expected", "advice", "x")
    report = _report(["a"], CheckResult([finding]))
    assert report["findings"] == [asdict(finding)]
