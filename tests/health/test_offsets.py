"""How far the clocks of two nodes are apart, by dates in heartbeats."""

import random

import pytest

from longtake.health.offsets import Offsets


def _exchange(ahead: float, reads: int, seed: int = 0) -> tuple[dict[str, float], dict[str, float]]:
    """What two nodes know after reading each other so often; b's clock is ahead by so much.

    Each writes once a second, and each read comes at any moment in between.
    """
    rng = random.Random(seed)  # noqa: S311 - delays
    a, b = Offsets("a"), Offsets("b")
    of_a: dict[str, float] = {}
    of_b: dict[str, float] = {}
    for read in range(reads):
        now = 1e9 + 10.0 * read
        age_a, age_b = rng.uniform(0, 1), rng.uniform(0, 1)
        heart_a = {"wall": now - age_a, "health": dict(of_a)}
        heart_b = {"wall": now - age_b + ahead, "health": dict(of_b)}
        of_a = a.look("b", heart_b, now)
        of_b = b.look("a", heart_a, now + ahead)
    return of_a, of_b


@pytest.mark.parametrize("ahead", [0.0, 0.03, -0.03, 3.0, -3.0])
@pytest.mark.parametrize("seed", range(5))
def test_interval_holds_the_offset(ahead: float, seed: int) -> None:
    """Both bounds hold, on both nodes; after thirty reads they are within 0.3 s."""
    for known, other in zip(_exchange(ahead, 30, seed), "ba", strict=True):
        at_least = known.get(f"clock_offset_at_least_seconds:{other}", 0.0)
        at_most = known[f"clock_offset_at_most_seconds:{other}"]
        assert at_least <= abs(ahead) + 1e-5
        assert at_most >= abs(ahead) - 1e-5
        assert at_most - at_least < 0.3


def test_one_side_alone() -> None:
    """A date that is still to come proves an offset by itself; one that is past proves none."""
    ahead = Offsets("a").look("b", {"wall": 105.0}, 100.0)
    assert ahead["clock_offset_at_least_seconds:b"] == 5
    assert "clock_offset_at_most_seconds:b" not in ahead
    behind = Offsets("a").look("b", {"wall": 95.0}, 100.0)
    assert set(behind) == {"clock_lead_seconds:b"}
    assert Offsets("a").look("b", {}, 100.0) == {}


def test_forgets() -> None:
    """After this node's clock was set, what was known before does not count."""
    offsets = Offsets("a")
    offsets.look("b", {"wall": 105.0}, 100.0)
    offsets.forget()
    assert offsets.look("b", {"wall": 104.9}, 105.0)["clock_lead_seconds:b"] == pytest.approx(-0.1)
