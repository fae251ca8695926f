"""Limits: what phases may take, from what they have taken."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtake.config import WatchSection
from longtake.heartbeat import Phase, Pulse, Role, Timing
from longtake.watch.stall import Expectations, Overdue, has_moved, still_holds

_SECTION = WatchSection()
_ALL = ["data", "forward", "backward", "collective", "optimizer"]
_NOW = 5000.0


def _pulse(
    phase: Phase = "forward",
    seconds: float = 0.0,
    *,
    role: Role = "rank",
    longest: dict[Phase, float] | None = None,
    launch: str = "one",
    settled: bool = True,
    pid: int = 1,
    started: int = 1,
    step: int = 20,
    detail: str = "",
) -> Pulse:
    timings = {name: Timing(25, value, value) for name, value in (longest or {}).items()}
    where = (Path(f"{role}_{pid}"), role, pid, started, 0, 0, 1, launch if role == "rank" else "")
    return Pulse(*where, step, 20, phase, seconds, detail, "", settled, timings, 0.0, 0)


def _limit(pulse: Pulse, section: WatchSection = _SECTION) -> float | None:
    expectations = Expectations(section)
    expectations.learn([pulse])
    return expectations.limit_of(pulse, _NOW)


@given(
    longest=st.floats(0, 1e4),
    factor=st.floats(1.1, 100),
    bounds=st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)).map(sorted),
)
def test_a_settled_phase_may_take_a_multiple_of_the_longest(
    longest: float, factor: float, bounds: list[float]
) -> None:
    """Between the recipe's bounds, and never less than it has taken unless max_seconds says so."""
    low, high = bounds
    section = WatchSection(factor=factor, min_seconds=low, max_seconds=high)
    limit = _limit(_pulse(longest={"forward": longest}), section)
    assert limit == max(low, min(factor * longest, high))
    assert limit >= min(longest, high)


@pytest.mark.parametrize(
    ("pulse", "limit"),
    [
        (_pulse("forward", longest={"forward": 0.1}), 6.0),
        (_pulse("forward", longest={"forward": 2.0}), 10.0),
        (_pulse("forward", longest={"forward": 500.0}), 600.0),
        (_pulse("forward"), 300.0),
        (_pulse("forward", longest={"forward": 2.0}, settled=False), 300.0),
        (_pulse("forward", longest={"forward": 200.0}, settled=False), 600.0),
        (_pulse("checkpoint", longest={"checkpoint": 2.0}), 120.0),
        (_pulse("checkpoint", longest={"checkpoint": 50.0}), 250.0),
        (_pulse("evaluate", longest={"checkpoint": 50.0}), 300.0),
        (_pulse("rollback"), 1800.0),
        (_pulse("checkpoint"), 1800.0),
        (_pulse("checkpoint", settled=False), 1800.0),
        (_pulse("build"), 1800.0),
        (_pulse("start", role="decode"), 1800.0),
        (_pulse("cache"), None),
        (_pulse("ended"), None),
        (_pulse("idle", role="decode"), None),
        (_pulse("decode", role="decode"), 300.0),
        (_pulse("decode", role="decode", longest={"decode": 3.0}), 15.0),
    ],
)
def test_each_phase_has_its_allowance(pulse: Pulse, limit: float | None) -> None:
    """Rare and first ones more than others; before the first step the most; some have no limit."""
    assert _limit(pulse) == limit


def test_the_longest_is_that_of_all_processes_of_a_role() -> None:
    """Of decoding processes also of one that is gone; a rank's phases are not a worker's."""
    expectations = Expectations(_SECTION)
    slow = _pulse("idle", role="decode", longest={"decode": 4.0}, pid=2)
    quick = _pulse("decode", role="decode", longest={"decode": 0.1}, pid=3)
    rank = _pulse(longest={"forward": 3.0})
    expectations.learn([rank, slow, quick])
    expectations.learn([rank, quick])
    assert expectations.limit_of(quick, _NOW) == 20.0
    assert expectations.limit_of(_pulse("forward", pid=9), _NOW) == 15.0


def test_another_launch_is_learnt_afresh() -> None:
    """Fewer processes, say, take longer; ranks of the old one that linger are not judged."""
    expectations = Expectations(_SECTION)
    old = _pulse(longest={"forward": 0.1}, seconds=50.0)
    expectations.learn([old])
    assert [each.pulse for each in expectations.overdue([old], _NOW)] == [old]
    new = _pulse(launch="two", pid=2, started=2)
    expectations.learn([old, new])
    assert expectations.launch == "two"
    assert expectations.limit_of(new, _NOW) == 300.0
    assert expectations.overdue([old, new], _NOW) == []


def test_decoding_is_learnt_from_windows_enough() -> None:
    """From 20, and 4 of each process: those of processes that are gone count as well."""
    expectations = Expectations(_SECTION)

    def _workers(count: int, windows: int, first: int = 1) -> list[Pulse]:
        timings: dict[Phase, Timing] = {"decode": Timing(windows, 0.1, 1.0)}
        busy = (_pulse("decode", role="decode", pid=pid) for pid in range(first, first + count))
        return [replace(each, timings=timings) for each in busy]

    for count, windows, first, limit in (
        (2, 9, 1, 300.0),
        (2, 10, 1, 6.0),
        (10, 3, 1, 300.0),
        (10, 4, 1, 6.0),
        (10, 0, 11, 6.0),
    ):
        workers = _workers(count, windows, first)
        expectations.learn(workers)
        assert expectations.limit_of(workers[0], _NOW) == limit
    expectations.learn([_pulse(launch="two"), *_workers(2, 9, 30)])
    assert expectations.limit_of(_workers(1, 9, 30)[0], _NOW) == 300.0


def test_a_rank_that_has_ended_no_longer_holds_an_alarm() -> None:
    """Whether its record says so or is gone; one that died without a word still does."""
    before = Overdue(_pulse("checkpoint", 7.0), 6.0)  # no process: it has started at another time
    assert not still_holds(before, None, 6.0)
    assert not still_holds(before, _pulse("ended", 0.1), None)
    assert still_holds(before, _pulse("checkpoint", 9.0), 6.0)
    assert not still_holds(before, _pulse("decode", 9.0, role="decode"), 6.0)
    living = replace(before.pulse, pid=os.getpid(), started=_start(os.getpid()), seconds=9.0)
    assert still_holds(before, living, 6.0)
    assert not still_holds(before, living, 10.0)
    assert not still_holds(before, replace(living, phase="forward"), 6.0)


def _start(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


@given(seconds=st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_overdue_are_those_past_their_limits_the_oldest_first(seconds: list[float]) -> None:
    """Whoever hangs for longest is most likely to be whom the others wait for."""
    expectations = Expectations(_SECTION)
    pulses = [
        _pulse(seconds=each, longest={"forward": 0.1}, pid=pid) for pid, each in enumerate(seconds)
    ]
    expectations.learn(pulses)
    found = [each.pulse.seconds for each in expectations.overdue(pulses, _NOW)]
    assert found == sorted((each for each in seconds if each > 6.0), reverse=True)


@given(slip=st.floats(1, 1000), ago=st.floats(0, 100), since=st.floats(0, 100))
def test_its_own_lateness_extends_the_limits_that_run(
    slip: float, ago: float, since: float
) -> None:
    """A suspended machine is no stall; a phase that began after it has its usual limit."""
    expectations = Expectations(_SECTION)
    pulse = _pulse(seconds=since, longest={"forward": 0.1})
    expectations.learn([pulse])
    expectations.was_late(slip, _NOW - ago)
    began_before = _NOW - since <= _NOW - ago
    assert expectations.limit_of(pulse, _NOW) == (6.0 + slip if began_before else 6.0)
    assert expectations.seconds_late == slip


def test_who_waited_for_another_has_time_to_go_on() -> None:
    """When a stall is over, the others are not the next one."""
    expectations = Expectations(_SECTION)
    waited = _pulse("collective", 40.0, longest={"collective": 0.1})
    expectations.learn([waited])
    expectations.excuse(_NOW - 1.0)
    assert expectations.overdue([waited], _NOW) == []
    later = _pulse("collective", 46.0, longest={"collective": 0.1})
    assert len(expectations.overdue([later], _NOW + 6.0)) == 1


def test_a_heart_has_moved_if_it_is_elsewhere_or_there_again() -> None:
    """Another step of the same phase is another place."""
    before = _pulse("forward", 7.0, step=3)
    assert not has_moved(before, _pulse("forward", 9.0, step=3))
    assert has_moved(before, _pulse("forward", 9.0, step=4))
    assert has_moved(before, _pulse("backward", 9.0, step=3))
    assert has_moved(before, _pulse("forward", 1.0, step=3))
