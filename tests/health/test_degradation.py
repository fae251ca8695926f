"""Slow ranks and weak GPUs are found in a few windows; noise is not."""

import random
from itertools import count
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.health.degradation import Degradation, Finding
from longtake.health.peers import ALL_UP_TO, Living, peers_of

_RANKS_OF_NODE = 8
_NOISE = 0.03


def _node(ranks: range, rng: random.Random, slow: float = 0.0) -> dict[str, float]:
    """Work per step of a node's ranks; the first is slower."""
    factors = [1 + slow if rank == ranks[0] else 1.0 for rank in ranks]
    return {
        f"step_work_seconds:{rank}": 0.7 * factor * rng.gauss(1, _NOISE)
        for rank, factor in zip(ranks, factors, strict=True)
    }


def _windows(
    num_ranks: int, seed: int, slow: float = 0.0, from_window: int = 0
) -> list[list[Finding]]:
    """What the node of rank 0 finds in its own ranks, window by window."""
    rng = random.Random(seed)  # noqa: S311 - noise
    of_node = min(_RANKS_OF_NODE, max(1, num_ranks // 2))
    nodes = [range(first, first + of_node) for first in range(0, num_ranks, of_node)]
    judge = Degradation()
    found = []
    for window in range(1000 if not slow else 60):
        own = _node(nodes[0], rng, slow if window >= from_window else 0.0)
        others = {str(ranks[0]): _node(ranks, rng) for ranks in nodes[1:]}
        found.append(judge.judge(own, others))
    return found


def _until_found(num_ranks: int, seed: int, slow: float, from_window: int = 20) -> int:
    """Windows until the slow rank is found."""
    windows = _windows(num_ranks, seed, slow, from_window)[from_window:]
    return next((number for number in count(1) if windows[number - 1]), 99)


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 0), (2, 1), (2, 2), (8, 3), (200, 4)])
def test_no_false_alarm(num_ranks: int, seed: int) -> None:
    """A thousand windows of 3 % noise are a thousand windows without a finding."""
    assert not any(_windows(num_ranks, seed))


@pytest.mark.parametrize("num_ranks", [2, 8, 200])
def test_slow_rank(num_ranks: int) -> None:
    """A rank that becomes 10 % slower is found after about five windows of 3 % noise.

    One that becomes 30 % slower is found after three or four; and no other rank is.
    """
    assert mean(_until_found(num_ranks, seed, 0.10) for seed in range(10)) <= 7
    assert mean(_until_found(num_ranks, seed, 0.30) for seed in range(10)) <= 4
    (finding,) = _windows(num_ranks, 0, 0.30)[-1]
    assert (finding.signal.name, finding.device) == ("step_work_seconds", "0")
    assert finding.percent == pytest.approx(30, abs=12)
    assert finding.words().startswith("rank 0 step time +")


@given(st.integers(2, 12), st.floats(1e-3, 100), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_slow_from_the_start_whatever_the_scale(num: int, seconds: float, seed: int) -> None:
    """A rank 15 % above all others is found in six windows, at 1 % noise and any step time."""
    rng = random.Random(seed)  # noqa: S311 - noise
    judge, found = Degradation(), []
    for _ in range(6):
        others = {
            str(r): {f"step_work_seconds:{r}": seconds * rng.gauss(1, 0.01)} for r in range(1, num)
        }
        found = judge.judge({"step_work_seconds:0": 1.15 * seconds * rng.gauss(1, 0.01)}, others)
    assert [each.device for each in found] == ["0"]


def test_one_bad_window_is_none() -> None:
    """A single window, however bad, is no degradation; nor is being faster or cooler."""
    judge = Degradation()
    others = {str(rank): {f"step_work_seconds:{rank}": 1.0} for rank in range(1, 8)}
    seen = [
        judge.judge({"step_work_seconds:0": each}, others) for each in (1, 50, 1, 1, 50, 1, 0.5)
    ]
    assert not any(seen)


def test_recovers() -> None:
    """A rank that is as fast as the others again is no finding a few windows later."""
    judge = Degradation()
    others = {str(rank): {f"step_work_seconds:{rank}": 1.0} for rank in range(1, 8)}
    bad = [bool(judge.judge({"step_work_seconds:0": 1.3}, others)) for _ in range(30)]
    good = [bool(judge.judge({"step_work_seconds:0": 1.0}, others)) for _ in range(10)]
    assert bad[3:] == [True] * 27
    assert good[-1] is False


def _gpu(power: float, utilization: float = 1.0) -> dict[str, float]:
    devices = range(4)
    powers = {f"gpu_power_watts:{d}": power + d for d in devices}
    return powers | {f"gpu_utilization_share:{d}": utilization for d in devices}


def test_weak_gpus() -> None:
    """GPUs that draw 412 W where others draw 655 W are found, and the words say both.

    GPUs that nobody uses are no finding, and none is measured by them.
    """
    judge = Degradation()
    others = {f"gpu{n:02d}": _gpu(655) for n in range(8)}
    for _ in range(4):
        found = judge.judge(_gpu(412), {**others, "idle": _gpu(70, utilization=0.0)})
    assert found[0].words() == "GPU 0 power 412 W against 656 W median"
    idle = Degradation()
    assert not any(idle.judge(_gpu(70, utilization=0.0), others) for _ in range(20))


def test_own_past() -> None:
    """A link that has agreed on half its speed is found by its own past, without other nodes."""
    judge = Degradation()
    fast, slow = ({"link_speed_bits_per_second:mlx5_0/1": each * 1e9} for each in (400, 200))
    assert not any(judge.judge(fast, {}) for _ in range(20))
    found = [judge.judge(slow, {}) for _ in range(4)][-1]
    told = "link mlx5_0/1 speed 200 Gbit/s against 400 Gbit/s in its own past"
    assert [each.words() for each in found] == [told]


def test_peers() -> None:
    """Up to 17 nodes each is compared with all others; of 200 with 14, not all next to it.

    Whoever one reads reads that one.
    """
    few = [f"gpu{n:02d}" for n in range(ALL_UP_TO)]
    assert peers_of("gpu03", few) == [host for host in few if host != "gpu03"]
    many = [f"gpu{n:03d}" for n in range(200)]
    table = {host: peers_of(host, many) for host in many}
    assert {len(found) for found in table.values()} == {14}
    assert all(host in table[other] for host in many for other in table[host])
    assert "gpu064" in table["gpu000"]


def test_living() -> None:
    """A heartbeat counts once its beat has changed, and only in the same launch."""
    living = Living()
    beat = {
        "a": {"pid": 1, "beat": 5, "launch": "x"},
        "b": {"pid": 2, "beat": 1, "launch": "y"},
        "c": {},
    }
    assert living.of(beat, "x") == []
    beat = {"a": {**beat["a"], "beat": 6}, "b": {**beat["b"], "beat": 2}, "c": {}}
    assert living.of(beat, "x") == ["a"]
    assert living.of(beat, "x") == []
