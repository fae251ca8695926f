"""Slow ranks and weak GPUs are found in a few windows; noise is not."""

import random
from collections.abc import Iterator
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.health.system import Numbers
from longtake.monitor.outliers import (
    ALL_UP_TO,
    LivingNodes,
    Outlier,
    OutlierDetector,
    SlowLinks,
    peers_of,
)
from longtake.node_numbers import CHECKPOINT

_RANKS_OF_NODE = 8


def _node(
    ranks: range, rng: random.Random, slow: float = 0.0, noise: float = 0.03
) -> dict[str, float]:
    factors = [1 + slow if rank == ranks[0] else 1.0 for rank in ranks]
    return {
        f"step_work_seconds:{rank}": 0.7 * factor * rng.gauss(1, noise)
        for rank, factor in zip(ranks, factors, strict=True)
    }


def _equal_ranks(count: int, seconds: float = 1.0) -> dict[str, Numbers]:
    """Nodes of a rank each, but for rank 0, of which a step takes as long on all."""
    return {str(rank): {f"step_work_seconds:{rank}": seconds} for rank in range(1, count)}


def _windows(
    num_ranks: int, seed: int, count: int, noise: float = 0.03, slow: float = 0.0, since: int = 0
) -> Iterator[list[Outlier]]:
    rng = random.Random(seed)  # noqa: S311 - noise
    of_node = min(_RANKS_OF_NODE, max(1, num_ranks // 2))
    nodes = [range(first, first + of_node) for first in range(0, num_ranks, of_node)]
    judge = OutlierDetector()
    for window in range(count):
        own = _node(nodes[0], rng, slow if window >= since else 0.0, noise)
        others = {str(ranks[0]): _node(ranks, rng, 0.0, noise) for ranks in nodes[1:]}
        yield judge.judge(own, others)


def _until_found(num_ranks: int, seed: int, slow: float, noise: float) -> int:
    windows = _windows(num_ranks, seed, 60, noise, slow, since=20)
    return next((number - 19 for number, found in enumerate(windows) if found), 99)


@pytest.mark.parametrize(
    ("num_ranks", "noise", "seed", "num_windows"),
    [
        (2, 0.03, 0, 1000),
        (2, 0.06, 5, 200),
        (2, 0.06, 16, 1000),
        (3, 0.06, 3, 500),
        (4, 0.06, 4, 400),
        (8, 0.03, 3, 500),
        (200, 0.03, 4, 200),
    ],
)
def test_no_false_alarm(num_ranks: int, noise: float, seed: int, num_windows: int) -> None:
    """Windows that differ by 3 or 6 % by chance, of two ranks or of many, are no finding.

    A test by a fixed spread, or by the noise of a few windows, finds something in four of these.
    """
    assert not any(_windows(num_ranks, seed, num_windows, noise))


@pytest.mark.parametrize(("num_ranks", "num_runs"), [(2, 20), (8, 10), (200, 3)])
def test_a_rank_10_percent_slower_is_found_in_eight_windows(num_ranks: int, num_runs: int) -> None:
    runs = range(num_runs)
    assert mean(_until_found(num_ranks, seed, 0.10, 0.03) for seed in runs) <= 8
    assert mean(_until_found(num_ranks, seed, 0.10, 0.015) for seed in runs) <= 6
    assert mean(_until_found(num_ranks, seed, 0.30, 0.03) for seed in runs) <= 4
    (finding,) = list(_windows(num_ranks, 0, 60, slow=0.30, since=20))[-1]
    assert (finding.signal.name, finding.device) == ("step_work_seconds", "0")
    assert finding.percent == pytest.approx(30, abs=5)
    assert str(finding).startswith("rank 0 step time +")


@pytest.mark.parametrize("own", [(1.15, 1.3, 1.3, 1.3), (1.3, 1.3, 1.28, 1.5), (1.3, 1.3, 1.3)])
def test_the_percentage_is_that_of_all_windows_that_added_up(own: tuple[float, ...]) -> None:
    judge, found = OutlierDetector(), []
    for number, value in enumerate([1.0, 0.99, 1.01, 1.0, *own]):
        size = 1 + number % 3
        others = _equal_ranks(4, 1.0 * size)
        found = judge.judge({"step_work_seconds:0": value * size}, others)
    assert [round(each.percent) for each in found] == [30]


def test_a_slow_rank_stays_slow_in_windows_without_a_step() -> None:
    judge = OutlierDetector()
    others = _equal_ranks(4, 20.0)
    found = [
        bool(judge.judge({"step_work_seconds:0": 26.0} if window % 2 else {}, others))
        for window in range(40)
    ]
    assert found[8:] == [True] * 32
    gone = [bool(judge.judge({}, others)) for _ in range(30)]
    assert gone[0]
    assert not gone[-1]


@given(st.integers(2, 12), st.floats(1e-3, 100), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)  # 1 seed of 3,000 takes 7
def test_slow_from_the_start_whatever_the_scale(num: int, seconds: float, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - noise
    judge, found = OutlierDetector(), []
    for _ in range(6):
        others = {
            str(r): {f"step_work_seconds:{r}": seconds * rng.gauss(1, 0.01)} for r in range(1, num)
        }
        found = judge.judge({"step_work_seconds:0": 1.15 * seconds * rng.gauss(1, 0.01)}, others)
    assert [each.device for each in found] == ["0"]


def test_one_bad_window_is_no_degradation() -> None:
    judge = OutlierDetector()
    others = _equal_ranks(8)
    seen = [
        judge.judge({"step_work_seconds:0": each}, others) for each in (1, 50, 1, 1, 50, 1, 0.5)
    ]
    assert not any(seen)


def test_a_rank_as_fast_as_the_others_again_is_no_finding() -> None:
    judge = OutlierDetector()
    others = _equal_ranks(8)
    bad = [bool(judge.judge({"step_work_seconds:0": 1.3}, others)) for _ in range(30)]
    good = [bool(judge.judge({"step_work_seconds:0": 1.0}, others)) for _ in range(10)]
    assert bad[3:] == [True] * 27
    assert good[-1] is False


def _gpu(power: float, utilization: float = 1.0) -> dict[str, float]:
    devices = range(4)
    powers = {f"gpu_power_watts:{d}": power + d for d in devices}
    return powers | {f"gpu_utilization_share:{d}": utilization for d in devices}


def test_gpus_that_draw_less_than_those_of_others_are_found_with_both_numbers() -> None:
    judge = OutlierDetector()
    others = {f"gpu{n:02d}": _gpu(655) for n in range(8)}
    for _ in range(4):
        found = judge.judge(_gpu(412), {**others, "idle": _gpu(70, utilization=0.0)})
    assert str(found[0]) == "GPU 0 power 412 W against 656 W median"
    idle = OutlierDetector()
    assert not any(idle.judge(_gpu(70, utilization=0.0), others) for _ in range(20))


def test_a_link_at_half_its_speed_is_found_by_its_own_past() -> None:
    judge = OutlierDetector()
    fast, slow = ({"link_speed_bits_per_second:mlx5_0/1": each * 1e9} for each in (400, 200))
    assert not any(judge.judge(fast, {}) for _ in range(20))
    found = [judge.judge(slow, {}) for _ in range(4)][-1]
    told = "link mlx5_0/1 speed 200 Gbit/s against 400 Gbit/s in its own past"
    assert [str(each) for each in found] == [told]


def _disk(seconds: float, saves: bool = False) -> dict[str, float]:
    return {"disk_write_seconds:run": seconds, CHECKPOINT: float(saves)}


def test_a_disk_that_is_slow_beside_a_checkpoint_has_no_fault() -> None:
    judge = OutlierDetector()
    for around in range(6):
        assert not any(judge.judge(_disk(8.0, saves=True), {}) for _ in range(9)), around
        assert not any(judge.judge(_disk(0.6), {}) for _ in range(3)), around
        assert not any(judge.judge(_disk(0.004), {}) for _ in range(3)), around
    found = [judge.judge(_disk(8.0), {}) for _ in range(4)][-1]
    told = "disk run writing 4 KiB 8 s against 0.302 s in its own past"
    assert [str(each) for each in found] == [told]


def test_a_disk_is_not_compared_with_those_of_nodes_that_save() -> None:
    judge = OutlierDetector()
    others = {str(n): _disk(9.0, saves=n < 3) for n in range(4)}
    assert not any(judge.judge(_disk(8.0), others) for _ in range(12))
    others = {str(n): _disk(9.0 if n < 3 else 0.01, saves=n < 3) for n in range(4)}
    found = [judge.judge(_disk(9.0), others) for _ in range(4)][-1]
    assert [(each.device, each.usual, each.against) for each in found] == [("run", 0.01, "others")]


def _port(**rates: float) -> dict[str, float]:
    names = ("symbol_errors", "recoveries", "transmit_discards", "ack_timeouts")
    return {f"link_{name}_per_second:mlx5_0/1": rates.get(name, 0.0) for name in names}


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ({"symbol_errors": 1200.0}, "1,200 symbol errors per second, others 0"),
        ({"recoveries": 1.5}, "1.5 recoveries from link errors per second, others 0"),
        ({"transmit_discards": 300.0}, "300 discarded packets per second, others 0"),
        ({"ack_timeouts": 40.0}, "40 retries for lack of an answer per second, others 0"),
    ],
)
def test_a_port_with_errors_is_named_with_both_rates(rates: dict[str, float], told: str) -> None:
    judge = OutlierDetector()
    others = {f"gpu{n:02d}": _port() for n in range(3)}
    assert not any(judge.judge(_port(), others) for _ in range(10))
    found = [judge.judge(_port(**rates), others) for _ in range(4)][-1]
    assert [str(each) for each in found] == [f"mlx5_0 port 1: {told}"]


def test_a_gpu_whose_links_have_errors() -> None:
    name = "gpu_nvlink_errors_per_second:3"
    judge, others = OutlierDetector(), {f"gpu{n:02d}": {name: 0.0} for n in range(3)}
    found = [judge.judge({name: rate}, others) for rate in [0.0] * 10 + [40.0] * 4][-1]
    assert [str(each) for each in found] == ["GPU 3: 40 errors of NVLinks per second, others 0"]


def test_errors_in_every_second_window_are_found_and_those_of_all_are_none() -> None:
    judge, others = OutlierDetector(), {f"gpu{n:02d}": _port() for n in range(3)}
    windows = [_port(symbol_errors=1200.0 * (number % 2)) for number in range(40)]
    assert any(judge.judge(each, others) for each in windows)
    calm = OutlierDetector()
    assert not any(calm.judge(_port(recoveries=0.1 * (n == 5)), others) for n in range(20))
    busy = {host: _port(transmit_discards=280.0) for host in others}
    assert not any(calm.judge(_port(transmit_discards=300.0), busy) for _ in range(20))
    # Some ten a second are where they begin to count.
    for rate, is_found in ((5.0, False), (12.0, True)):
        judge = OutlierDetector()
        port = _port(transmit_discards=rate)
        assert any(judge.judge(port, others) for _ in range(20)) == is_found


def test_up_to_17_nodes_each_is_compared_with_all_and_of_200_with_14() -> None:
    few = [f"gpu{n:02d}" for n in range(ALL_UP_TO)]
    assert peers_of("gpu03", few) == [host for host in few if host != "gpu03"]
    many = [f"gpu{n:03d}" for n in range(200)]
    table = {host: peers_of(host, many) for host in many}
    assert {len(found) for found in table.values()} == {14}
    assert all(host in table[other] for host in many for other in table[host])
    assert "gpu064" in table["gpu000"]


def test_a_heartbeat_counts_once_its_beat_has_changed_in_the_same_launch() -> None:
    living = LivingNodes()
    beat = {
        "a": {"pid": 1, "beat": 5, "launch": "x"},
        "b": {"pid": 2, "beat": 1, "launch": "y"},
        "c": {},
    }
    assert living.of(beat, "x") == []
    beat = {"a": {**beat["a"], "beat": 6}, "b": {**beat["b"], "beat": 2}, "c": {}}
    assert living.of(beat, "x") == ["a"]
    assert living.of(beat, "x") == []


def _link(busy: float, rate: float, host: str = "gpu08") -> Numbers:
    return {f"peer_busy_share:{host}": busy, f"peer_send_bytes_per_second:{host}": rate}


def test_a_link_is_slow_against_others() -> None:
    """At once, where it is waited for; one that is idle may take what it wants."""
    others = {f"gpu{number}": _link(0.05, 40e6, "gpu01") for number in (2, 3)}
    links = SlowLinks()
    assert links.judge(_link(0.9, 1e6), others) == {"peer_send_share:gpu08": 0.025}
    assert links.judge(_link(0.2, 1e6), others) == {}


def test_a_link_is_slow_against_its_own_past() -> None:
    """Where both links of a run of two nodes are slow, nothing else could tell."""
    links = SlowLinks()
    for _ in range(5):
        assert links.judge(_link(0.1, 30e6), {"gpu08": _link(0.1, 30e6, "gpu07")}) == {}
    now = links.judge(_link(0.9, 1e6), {"gpu08": _link(0.9, 1e6, "gpu07")})
    assert now == {"peer_send_share:gpu08": pytest.approx(1 / 15.5, abs=1e-4)}


def test_a_run_that_waits_for_all_links_alike_has_no_slow_one() -> None:
    links = SlowLinks()
    others = {"gpu02": _link(0.9, 1.1e9), "gpu03": _link(0.95, 0.9e9)}
    assert links.judge(_link(0.9, 1e9), others)["peer_send_share:gpu08"] == 1.0
    assert SlowLinks().judge(_link(0.9, 1e9), {}) == {}


def test_a_slow_link_does_not_become_usual() -> None:
    """However long it lasts; of a run that always waits for its links the past counts, too."""
    links = SlowLinks()
    for _ in range(5):
        links.judge(_link(0.9, 30e6), {})
    shares = [links.judge(_link(0.95, 1e6), {})["peer_send_share:gpu08"] for _ in range(100)]
    assert shares == [pytest.approx(1 / 30, abs=1e-4)] * 100
