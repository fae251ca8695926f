"""Who differs from most, and whose number is far from the median."""

from longtake.cluster.findings import ABSENT, far_from_median, outliers_of, same_everywhere


def test_an_outlier_differs_from_the_majority() -> None:
    """One of eight nodes with another version is the outlier, and what it lacks is absent there."""
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
    """An error from `error_factor` on; nothing on the good side of `harmless`."""

    def judge(**values: float) -> list[tuple[str, ...]]:
        result = far_from_median(
            "writing",
            values,
            unit="MB/s",
            worse="lower",
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
