"""Ranks that are gone without having ended."""

from pathlib import Path

import pytest

from longtake.heartbeat import Phase, Pulse, Role
from longtake.watch.lost import Roll, alert_of


def _pulse(
    pid: int, phase: Phase = "backward", role: Role = "rank", launch: str = "one", rank: int = 0
) -> Pulse:
    where = (Path(f"{role}_{pid}"), role, pid, pid, rank, rank, 2, launch)
    return Pulse(*where, 7, 7, phase, 2.0, "8x32x32", "", True, {}, 0.0, 0)


def test_a_rank_that_was_seen_alive_is_missed_once() -> None:
    """With what it was at; the first of a launch is told from those that may follow from it."""
    roll, (one, two) = Roll(), (_pulse(1), _pulse(2, rank=1))
    assert roll.call([one, two], []) == []
    (lost,) = roll.call([two], [one])
    assert lost.is_first
    assert lost.as_event(0) == {
        "pid": 1,
        "rank": 0,
        "launch": "one",
        "step": 7,
        "phase": "backward",
        "detail": "8x32x32",
        "seconds": 2.0,
        "out_of_memory": False,
        "reason": "rank 0 (process 1) is gone without having ended: step 7, backward on 8x32x32.",
    }
    (lost,) = roll.call([], [one, two])
    assert (lost.pulse, lost.is_first) == (two, False)


@pytest.mark.parametrize("dead", [_pulse(1, "ended"), _pulse(1, "decode", "decode")])
def test_who_has_ended_and_who_is_replaced_is_not_missed(dead: Pulse) -> None:
    """The end of a run is no loss, and a decoding process is its pool's affair."""
    roll = Roll()
    roll.call([dead], [])
    assert roll.call([], [dead]) == []


def test_who_was_dead_before_anybody_looked_counts_if_others_of_its_launch_live() -> None:
    """A watcher that was started anew tells of what happened in between, not of yesterday."""
    living, dead, yesterday = _pulse(1), _pulse(2, rank=1), _pulse(3, launch="zero")
    lost = Roll().call([living], [dead, yesterday])
    assert [each.pulse for each in lost] == [dead]


def test_a_death_for_want_of_memory_says_so() -> None:
    """By the count of the control group, which rises before the process is gone."""
    roll = Roll()
    assert roll.wants_count(0.0)
    for now, kills in ((0.0, 3), (6.0, 3), (12.0, 4)):
        roll.count_kills(kills, now)
    assert not roll.wants_count(12.1)
    roll.call([_pulse(1)], [])
    (lost,) = roll.call([], [_pulse(1)])
    event = lost.as_event(roll.kills_since(4))
    assert event["out_of_memory"]
    assert "out of memory" in event["reason"]


def test_what_was_killed_long_ago_is_no_reason() -> None:
    """A count from minutes ago, or from before the launch; nor is a count that nobody keeps."""
    roll = Roll()
    assert roll.kills_since(5) == 0
    for now in range(0, 120, 6):
        roll.count_kills(5 if now else 4, float(now))
    assert roll.kills_since(5) == 0
    assert roll.kills_since(None) == 0


def test_several_that_die_at_once_are_one_alert() -> None:
    """Which names all of them; of one alone the alert is what its event is."""
    roll = Roll()
    one, two, three = (_pulse(number, rank=number) for number in (0, 2, 3))
    roll.call([one, two, three], [])
    found = roll.call([], [one, two, three])
    assert [lost.is_first for lost in found] == [True, False, False]
    alert = alert_of(found, 0)
    assert alert["ranks"] == [0, 2, 3]
    assert alert["reason"].startswith("ranks 0, 2 and 3 are gone: rank 0 (process 0) is gone")
    assert alert_of(found[:1], 0) == found[0].as_event(0)
