"""Who differs from most, and whose number is far from the median."""

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from longtake.cluster.findings import (
    ABSENT,
    CheckResult,
    Finding,
    NodeDifference,
    NodeMeasure,
    Severity,
    SkippedCheck,
    _commands,
    far_from_median,
    make_report,
    outliers_of,
    print_report,
    same_everywhere,
)


def test_an_outlier_differs_from_the_majority() -> None:
    facts = {f"gpu{n:02d}": {"torch": "2.13", "av": "17"} for n in range(8)}
    facts["gpu07"] = {"torch": "2.12"}
    result = same_everywhere("packages", facts, "error", "")
    found = {each.name: each for each in result.differences}
    assert found["torch"].majority == "2.13"
    assert found["torch"].outliers == ("gpu07",)
    assert found["av"].values[ABSENT] == ("gpu07",)
    [finding] = result.findings
    assert finding.nodes == ("gpu07",)
    assert finding.what == "av is absent instead of 17; torch is 2.12 instead of 2.13"


def test_of_two_nodes_neither_is_the_majority() -> None:
    """Nobody knows which is right, and both are named with values."""
    facts = {"a": {"torch": "2.13"}, "b": {"torch": "2.12"}}
    result = same_everywhere("versions", facts, "note", "do something")
    [difference], [finding] = result.differences, result.findings
    assert difference.majority is None
    assert set(difference.outliers) == {"a", "b"}
    assert finding.what == "torch is 2.13 on a, 2.12 on b"
    assert (finding.severity, finding.advice) == ("note", "")


def test_what_removes_a_difference_is_printed_once_with_its_nodes() -> None:
    facts = {
        node: {
            "torch": "2.12" if node in ("c1", "c2") else "2.13",
            "cuda": "x" if node == "c1" else "y",
        }
        for node in ("a", "b", "d", "c1", "c2")
    }
    result = same_everywhere(
        "versions", facts, "note", "", command=lambda each: f"install {each.majority}"
    )
    lines = list(_commands([asdict(each) for each in result.differences]))
    assert [Text.from_markup(line).plain for line in lines] == [
        "To make them equal:",
        "  c1: install y",
        "  c1, c2: install 2.13",
    ]
    assert list(_commands([])) == []


def test_each_fact_may_have_its_own_severity() -> None:
    facts = {"a": {"x": "1", "y": "1"}, "b": {"x": "2", "y": "2"}}
    findings = same_everywhere("versions", facts, "note", "", {"y": "error"}).findings
    assert [each.severity for each in findings] == ["note", "error"]


def test_equal_facts_are_no_difference() -> None:
    result = same_everywhere("versions", {"a": {"x": "1"}, "b": {"x": "1"}}, "error", "")
    assert (result.findings, result.differences) == ([], [])


def test_far_from_the_median() -> None:
    """The worst comes first; of two nodes the better one is the measure; one alone is never far."""
    values = {"a": 100.0, "b": 98.0, "c": 40.0, "d": 101.0, "e": 20.0}
    assert outliers_of(values, "lower", 0.7) == ("e", "c")
    assert outliers_of({"a": 100.0, "b": 60.0}, "lower", 0.7) == ("b",)
    assert outliers_of({"a": 1.0, "b": 9.0, "c": 1.1}, "higher", 3.0) == ("b",)
    assert outliers_of({"a": 1.0, "b": 9.0}, "higher", 3.0) == ("b",)
    assert outliers_of({"a": 1.0}, "lower", 0.7) == ()


def test_a_number_is_bad_beyond_a_factor_or_a_limit() -> None:
    def judge(**values: float) -> list[tuple[str, ...]]:
        result = far_from_median(
            "writing, MB/s",
            values,
            "lower",
            factor=0.5,
            error_factor=0.1,
            harmless=400.0,
            limit=20.0,
            advice="",
        )
        return [(each.severity, *each.nodes) for each in result.findings]

    assert judge(a=900.0, b=900.0, c=300.0) == [("warning", "c")]
    assert judge(a=900.0, b=900.0, c=80.0) == [("error", "c")]
    assert judge(a=2000.0, b=2000.0, c=500.0) == []
    assert judge(a=10.0) == [("warning", "a")]


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
    result = CheckResult(measures=[NodeMeasure("clock ahead", "ms", {"a": 0.0, "b": 12.5}, ("b",))])
    lines = _shown(_report(["a", "b"], result)).splitlines()
    (heading,) = [line for line in lines if line.startswith("measured")]  # not indented
    assert heading.split() == ["measured", "a", "b"]
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
