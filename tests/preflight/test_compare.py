"""Who differs from most, whose number is far from the median, and many names in one line."""

import pytest

from longtake.preflight.compare import ABSENT, differences, far_above, far_below, tell_differences
from longtake.preflight.names import listed
from longtake.preflight.nodes import nodes_of


def test_an_outlier_differs_from_the_majority() -> None:
    """One of eight nodes with another version is the outlier, and what it lacks is absent there."""
    facts = {f"gpu{n:02d}": {"torch": "2.13", "av": "17"} for n in range(8)}
    facts["gpu07"] = {"torch": "2.12"}
    found = {each.name: each for each in differences("packages", facts)}
    assert found["torch"].majority == "2.13"
    assert found["torch"].outliers == ("gpu07",)
    assert found["av"].values[ABSENT] == ("gpu07",)
    [finding] = tell_differences(
        "packages", list(found.values()), dict.fromkeys(found, "error"), ""
    )
    assert finding.nodes == ("gpu07",)
    assert finding.what == "av is absent instead of 17; torch is 2.12 instead of 2.13"


def test_of_two_nodes_neither_is_the_majority() -> None:
    """One node against another: nobody knows who is right, and both are named with values."""
    [found] = differences("versions", {"a": {"torch": "2.13"}, "b": {"torch": "2.12"}})
    assert found.majority is None
    assert set(found.outliers) == {"a", "b"}
    [finding] = tell_differences("versions", [found], {}, "do something")
    assert finding.what == "torch is 2.13 on a, 2.12 on b"
    assert (finding.severity, finding.advice) == ("note", "")


def test_what_is_the_same_is_no_difference() -> None:
    """Equal facts give nothing to tell."""
    assert not differences("versions", {"a": {"x": "1"}, "b": {"x": "1"}})


def test_far_from_the_median() -> None:
    """The worst comes first; of two nodes the better one is the measure; one alone is never far."""
    values = {"a": 100.0, "b": 98.0, "c": 40.0, "d": 101.0, "e": 20.0}
    assert far_below(values, 0.7) == ("e", "c")
    assert far_below({"a": 100.0, "b": 60.0}, 0.7) == ("b",)
    assert far_above({"a": 1.0, "b": 9.0, "c": 1.1}, 3.0) == ("b",)
    assert far_above({"a": 1.0, "b": 9.0}, 3.0) == ("b",)
    assert not far_below({"a": 1.0}, 0.7)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["b", "a"], "a, b"),
        (["gpu2", "gpu10", "gpu1", "gpu3"], "gpu[1-3,10]"),
        ([f"gpu{n:03d}" for n in range(200) if n != 7], "gpu[000-006,008-199]"),
        (["gpu0", "gpu1", "gpu2", "login"], "gpu[0-2], login"),
        (["r0n0", "r0n1", "r0n2", "r1n0"], "r0n[0-2], r1n0"),
        ([], ""),
    ],
)
def test_many_names_in_one_line(nodes: list[str], expected: str) -> None:
    """Names that differ in their last number are drawn together, in the numbers' order."""
    assert listed(nodes) == expected


def test_two_hundred_even_nodes_are_not_all_spelt_out() -> None:
    """A line stays short whatever the pattern of names is."""
    assert len(listed(f"gpu{n}" for n in range(0, 400, 2))) < 60


def test_processes_by_node() -> None:
    """Interleaved ranks belong to their nodes; two nodes of one name are told apart by a number."""
    came = {0: ("b", "0"), 1: ("a", "1"), 2: ("b", "0"), 3: ("a", "2")}
    assert nodes_of(came) == (["b", "a", "a (2)"], [[0, 2], [1], [3]])
