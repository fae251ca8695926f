"""What is concluded from what nodes measured of the network between them."""

from typing import Any

import pytest
from tests.cluster.build import severities

from longtake.cluster.checks_network import (
    judge_addresses,
    judge_clocks,
    judge_devices,
    judge_links,
    ring_rounds,
)


def test_a_link_that_runs_at_a_tenth_of_its_speed() -> None:
    usual = {"ethernet": {"eth0": {"link_up": 1.0, "link_speed_bits_per_second": 1e11}}}
    slow = {"ethernet": {"eth0": {"link_up": 1.0, "link_speed_bits_per_second": 1e10}}}
    port = {"infiniband": {"mlx5_0/1": {"link_up": 1.0}}}
    down = {"infiniband": {"mlx5_0/1": {"link_up": 0.0}}}
    facts = {"a": usual | port, "b": usual | port, "c": slow | port, "d": usual | down}
    said = [(each.nodes, each.what) for each in judge_devices(facts).findings]
    assert (("c",), "eth0 is up, 10 Gbit/s instead of up, 100 Gbit/s") in said
    assert (("d",), "InfiniBand ports are down: mlx5_0/1") in said


def test_a_name_that_resolves_to_loopback() -> None:
    """127.0.1.1, as Debian writes it, keeps others from connecting, unless gloo is told another."""
    fine, wrong = {"own": ["10.0.0.1"], "interface": ""}, {"own": ["127.0.1.1"], "interface": ""}
    result = judge_addresses({"a": fine, "b": wrong, "c": wrong | {"interface": "eth0"}})
    assert severities(result) == [("error", ("b",))]
    assert "127.0.1.1" in result.findings[0].what
    assert judge_addresses({"a": wrong}).skipped[0].why == "one node"


def test_a_clock_that_is_off_is_found_though_the_first_asked() -> None:
    """The node that asks is the one whose clock is off: all others seem to be, and it is named."""
    offsets = {node: [-2.0, 0.0002] for node in "bcd"}
    result = judge_clocks({"a": {"offsets": offsets}, "b": {}, "c": {}, "d": {}})
    [finding] = result.findings
    assert (finding.severity, finding.nodes) == ("error", ("a",))
    assert "2.000 s ahead of the median" in finding.what


def test_a_clock_offset_within_its_uncertainty_is_none() -> None:
    """A slow answer proves nothing: 3 ms with +- 2.5 ms is no warning, with +- 0.1 ms it is."""
    assert not judge_clocks({"a": {"offsets": {"b": [0.003, 0.0025]}}, "b": {}}).findings
    [finding] = judge_clocks({"a": {"offsets": {"b": [-0.003, 0.0001]}}, "b": {}}).findings
    assert (finding.severity, finding.nodes) == ("warning", ("b",))
    assert "3.000 ms behind that of a (+-0.100 ms)" in finding.what


def _ring(count: int, **slow: float) -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = {f"n{n}": {"to": {}, "all": 900.0} for n in range(count)}
    for number in range(count):
        for other in ((number + 1) % count, (number - 1) % count):
            facts[f"n{number}"]["to"][f"n{other}"] = slow.get(f"n{number}_n{other}", 1000.0)
    return facts


def test_one_slow_link_is_named_by_its_ends() -> None:
    """Between two nodes that are well connected to others it is the link."""
    result = judge_links(_ring(5, n1_n2=200.0, n2_n1=210.0))
    assert [each.nodes for each in result.findings] == [("n1", "n2"), ("n2", "n1")]
    assert all(each.severity == "error" for each in result.findings)


def test_a_node_all_of_whose_links_are_slow_is_named() -> None:
    slow = {"n2_n1": 500.0, "n1_n2": 500.0, "n2_n3": 480.0, "n3_n2": 490.0}
    [finding] = judge_links(_ring(5, **slow)).findings
    assert (finding.severity, finding.nodes) == ("warning", ("n2",))
    assert "all links of n2 are slow" in finding.what


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_a_ring_in_rounds(count: int) -> None:
    rounds = list(ring_rounds(count))
    pairs = [frozenset(pair) for each in rounds for pair in each]
    expected = {frozenset((n, (n + 1) % count)) for n in range(count)} if count > 1 else set()
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    assert all(len({n for pair in each for n in pair}) == 2 * len(each) for each in rounds)
    assert len(rounds) <= 3
