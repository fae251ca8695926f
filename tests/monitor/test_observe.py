"""What the processes of a node do: limits, deaths, stale pages."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.build import make_heartbeat

from longtake import heartbeat
from longtake.heartbeat import Heartbeat, Phase, PhaseTiming, Role, read_heartbeats
from longtake.monitor import observe
from longtake.monitor.observe import (
    HeartbeatScanner,
    LivenessTracker,
    PhaseMeans,
    PhaseTimeouts,
    Snapshot,
    WatchSettings,
    alert_of,
    has_moved,
    remove_heartbeats,
)
from longtake.node_dir import FLIGHT_FILE_PREFIX, FLIGHT_PIPE_PREFIX

_SECTION = WatchSettings()
_ALL = ["data", "forward", "backward", "collective", "optimizer"]
_NOW = 5000.0


def _pulse(
    phase: Phase = "forward",
    seconds: float = 0.0,
    *,
    role: Role = "rank",
    longest: dict[Phase, float] | None = None,
    settled: bool = True,
    **changes: Any,
) -> Heartbeat:
    timings = {name: PhaseTiming(25, value, value) for name, value in (longest or {}).items()}
    facts: dict[str, Any] = {"phase": phase, "seconds": seconds, "is_settled": settled}
    return make_heartbeat(role, timings=timings, **facts, **changes)


def _pulse_dead(
    pid: int, phase: Phase = "backward", role: Role = "rank", launch: str = "one", rank: int = 0
) -> Heartbeat:
    return _pulse(phase, 2.0, role=role, pid=pid, rank=rank, launch=launch, detail="8x32x32")


def _limit(pulse: Heartbeat, section: WatchSettings = _SECTION) -> float | None:
    expectations = PhaseTimeouts(section)
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
    low, high = bounds
    section = WatchSettings(factor=factor, min_seconds=low, max_seconds=high)
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
        (_pulse("sampling", longest={"checkpoint": 50.0}), 300.0),
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
def test_each_phase_has_its_allowance(pulse: Heartbeat, limit: float | None) -> None:
    """Rare and first ones more than others; before the first step the most; some have no limit."""
    assert _limit(pulse) == limit


def test_the_longest_is_that_of_all_processes_of_a_role() -> None:
    """Of decoding processes also of one that is gone; a rank's phases are not a worker's."""
    expectations = PhaseTimeouts(_SECTION)
    slow = _pulse("idle", role="decode", longest={"decode": 4.0}, pid=2)
    quick = _pulse("decode", role="decode", longest={"decode": 0.1}, pid=3)
    rank = _pulse(longest={"forward": 3.0})
    expectations.learn([rank, slow, quick])
    expectations.learn([rank, quick])
    assert expectations.limit_of(quick, _NOW) == 20.0
    assert expectations.limit_of(_pulse("forward", pid=9), _NOW) == 15.0


def test_another_launch_is_learnt_afresh() -> None:
    """Fewer processes, say, take longer; ranks of the old one that linger are not judged."""
    expectations = PhaseTimeouts(_SECTION)
    old = _pulse(longest={"forward": 0.1}, seconds=50.0)
    expectations.learn([old])
    assert [each.heartbeat for each in expectations.overdue([old], _NOW)] == [old]
    new = _pulse(launch="two", pid=2, started=2)
    expectations.learn([old, new])
    assert expectations.launch == "two"
    assert expectations.limit_of(new, _NOW) == 300.0
    assert expectations.overdue([old, new], _NOW) == []


def test_decoding_is_learnt_from_windows_enough() -> None:
    """From 20, and 4 of each process: those of processes that are gone count as well."""
    expectations = PhaseTimeouts(_SECTION)

    def _workers(count: int, windows: int, first: int = 1) -> list[Heartbeat]:
        timings: dict[Phase, PhaseTiming] = {"decode": PhaseTiming(windows, 0.1, 1.0)}
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


@given(seconds=st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_overdue_are_those_past_their_limits_the_oldest_first(seconds: list[float]) -> None:
    expectations = PhaseTimeouts(_SECTION)
    pulses = [
        _pulse(seconds=each, longest={"forward": 0.1}, pid=pid) for pid, each in enumerate(seconds)
    ]
    expectations.learn(pulses)
    found = [each.heartbeat.seconds for each in expectations.overdue(pulses, _NOW)]
    assert found == sorted((each for each in seconds if each > 6.0), reverse=True)


@given(slip=st.floats(1, 1000), ago=st.floats(0, 100), since=st.floats(0, 100))
def test_its_own_lateness_extends_the_limits_that_run(
    slip: float, ago: float, since: float
) -> None:
    """A suspended machine is no stall; a phase that began after it has its usual limit."""
    expectations = PhaseTimeouts(_SECTION)
    pulse = _pulse(seconds=since, longest={"forward": 0.1})
    expectations.learn([pulse])
    expectations.extend(slip, _NOW - ago)
    began_before = _NOW - since <= _NOW - ago
    assert expectations.limit_of(pulse, _NOW) == (6.0 + slip if began_before else 6.0)
    assert expectations.seconds_late == slip


def test_who_waited_for_another_has_time_to_go_on() -> None:
    expectations = PhaseTimeouts(_SECTION)
    waited = _pulse("collective", 40.0, longest={"collective": 0.1})
    expectations.learn([waited])
    expectations.stall_cleared(_NOW - 1.0)
    assert expectations.overdue([waited], _NOW) == []
    later = _pulse("collective", 46.0, longest={"collective": 0.1})
    assert len(expectations.overdue([later], _NOW + 6.0)) == 1


def test_a_rank_that_fails_has_time_to_end() -> None:
    """It may wait for a save, and its phase is that in which it failed."""
    failed = replace(_pulse("backward"), error="ValueError: a layer broke")
    expectations = PhaseTimeouts(_SECTION)
    expectations.learn([failed])
    assert expectations.limit_of(failed, _NOW) == _SECTION.checkpoint_seconds


def test_the_time_of_a_reported_stall_does_not_raise_limits() -> None:
    """Neither of the rank that stood, nor of one that waited for it and goes on later."""
    expectations = PhaseTimeouts(_SECTION)
    phases: list[Phase] = ["backward", "collective"]

    def learn(seconds: list[float], longest: list[float]) -> None:
        facts = zip(phases, seconds, longest, (1, 2), strict=True)
        expectations.learn(
            [_pulse(name, now, pid=pid, longest={name: most}) for name, now, most, pid in facts]
        )

    learn([13.0, 13.0], [0.1, 0.1])
    expectations.alarm_is_open()
    learn([14.0, 14.0], [0.1, 0.1])
    learn([0.2, 15.0], [14.5, 0.1])  # it has moved on before anybody saw that it was reported
    expectations.alarm_is_over(was_stall=True)
    learn([0.1, 0.2], [14.5, 15.5])
    learn([0.1, 0.2], [14.5, 15.5])
    limits = [expectations.limit_of(_pulse(phase), _NOW) for phase in phases]
    assert limits == [_SECTION.min_seconds] * 2
    learn([0.1, 0.2], [20.0, 15.5])  # later and not reported: usual
    assert expectations.limit_of(_pulse("backward"), _NOW) == 100.0
    learn([20.5, 0.2], [20.0, 15.5])
    expectations.alarm_is_open()
    learn([21.0, 0.2], [20.0, 15.5])
    learn([0.2, 0.2], [30.0, 15.5])
    expectations.alarm_is_over(was_stall=False)  # it was slow: usual, too
    learn([0.1, 0.2], [30.0, 15.5])
    assert expectations.limit_of(_pulse("backward"), _NOW) == 150.0
    assert expectations.limit_of(_pulse("collective"), _NOW) == _SECTION.min_seconds


def test_a_heart_has_moved_if_it_is_elsewhere_or_there_again() -> None:
    before = _pulse("forward", 7.0, step=3)
    assert not has_moved(before, _pulse("forward", 9.0, step=3))
    assert has_moved(before, _pulse("forward", 9.0, step=4))
    assert has_moved(before, _pulse("backward", 9.0, step=3))
    assert has_moved(before, _pulse("forward", 1.0, step=3))


def test_a_process_that_ends_during_a_scan_is_judged_by_its_last_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are read before it is seen which processes are gone."""
    pages = [_pulse_dead(2**22 + number) for number in (1, 2)]  # more than the kernel's pid_max
    last = {pages[0].path: replace(pages[0], phase="ended"), pages[1].path: None}
    monkeypatch.setattr(observe, "read_heartbeats", lambda folder: pages)
    monkeypatch.setattr(heartbeat, "read_heartbeat", last.get)
    found = HeartbeatScanner(tmp_path).scan()
    assert found.living == []
    assert found.dead == [last[pages[0].path], pages[1]]


def test_a_rank_that_was_seen_alive_is_missed_once() -> None:
    roll, (one, two) = LivenessTracker(), (_pulse_dead(1), _pulse_dead(2, rank=1))
    assert roll.dead_ranks([one, two], []) == []
    (lost,) = roll.dead_ranks([two], [one])
    assert lost.is_first
    event = lost.as_event(0)
    names = ("pid", "rank", "launch", "step", "phase", "detail", "seconds", "out_of_memory")
    facts = [event[name] for name in (*names, "kind", "source")]
    assert facts == [1, 0, "one", 7, "backward", "8x32x32", 2.0, False, "killed", "watcher"]
    assert event["reason"] == (
        "rank 0 (process 1) is gone without having ended: step 7, backward on 8x32x32."
    )
    (lost,) = roll.dead_ranks([], [one, two])
    assert (lost.heartbeat, lost.is_first) == (two, False)


@pytest.mark.parametrize("dead", [_pulse_dead(1, "ended"), _pulse_dead(1, "decode", "decode")])
def test_who_has_ended_and_who_is_replaced_is_not_missed(dead: Heartbeat) -> None:
    roll = LivenessTracker()
    roll.dead_ranks([dead], [])
    assert roll.dead_ranks([], [dead]) == []


def test_who_was_dead_before_anybody_looked_counts_if_others_of_its_launch_live() -> None:
    living, dead, yesterday = _pulse_dead(1), _pulse_dead(2, rank=1), _pulse_dead(3, launch="zero")
    lost = LivenessTracker().dead_ranks([living], [dead, yesterday])
    assert [each.heartbeat for each in lost] == [dead]


def test_a_death_for_want_of_memory_says_so() -> None:
    roll = LivenessTracker()
    for now, kills in ((0.0, 3), (6.0, 3), (12.0, 4), (12.1, 99)):  # the last one is not counted
        roll.count_oom_kills(partial(int, kills), now)
    roll.dead_ranks([_pulse_dead(1)], [])
    (lost,) = roll.dead_ranks([], [_pulse_dead(1)])
    event = lost.as_event(roll.recent_oom_kills(4))
    assert event["out_of_memory"]
    assert "out of memory" in event["reason"]


def test_a_rank_that_said_why_it_ends_is_reported_with_that() -> None:
    roll = LivenessTracker()
    roll.dead_ranks([_pulse_dead(1)], [])
    failed = replace(_pulse_dead(1), error="ValueError: a layer broke.")
    event = roll.dead_ranks([], [failed])[0].as_event(1)
    assert (event["kind"], event["error"], event["out_of_memory"]) == (
        "exception",
        "ValueError: a layer broke.",
        False,
    )
    assert event["reason"] == (
        "rank 0 (process 1) failed: step 7, backward on 8x32x32: ValueError: a layer broke."
    )


def test_what_was_killed_long_ago_is_no_reason() -> None:
    """A count from minutes ago, or from before the launch."""
    roll = LivenessTracker()
    assert roll.recent_oom_kills(5) == 0
    for now in range(0, 120, 6):
        roll.count_oom_kills(partial(int, 5 if now else 4), float(now))
    assert roll.recent_oom_kills(5) == 0


def test_several_that_die_at_once_are_one_alert() -> None:
    roll = LivenessTracker()
    one, two, three = (_pulse_dead(number, rank=number) for number in (0, 2, 3))
    roll.dead_ranks([one, two, three], [])
    found = roll.dead_ranks([], [one, two, three])
    assert [lost.is_first for lost in found] == [True, False, False]
    alert = alert_of(found, 0)
    assert alert["ranks"] == [0, 2, 3]
    assert alert["reason"].startswith("ranks 0, 2 and 3 are gone: rank 0 (process 0) is gone")
    assert alert_of(found[:1], 0) == found[0].as_event(0)


def test_a_dead_rank_s_flight_recorder_goes_with_its_record(stage: Any) -> None:
    first = stage.rank("sleeps", launch="one")
    dump = stage.folder() / f"{FLIGHT_FILE_PREFIX}0"
    pipe = stage.folder() / f"{FLIGHT_PIPE_PREFIX}0.pipe"
    dump.touch()
    os.mkfifo(pipe)
    stage.end(first)
    second = stage.rank("sleeps", launch="two")
    dead = [pulse for pulse in read_heartbeats(stage.folder()) if pulse.pid == first]
    remove_heartbeats(dead)
    assert [pulse.pid for pulse in read_heartbeats(stage.folder())] == [second]
    assert dump.exists()
    assert pipe.exists()
    stage.end(second)
    remove_heartbeats(read_heartbeats(stage.folder()))
    assert list(stage.folder().iterdir()) == []


def _trained(steps: int, forward: float, **changes: Any) -> Heartbeat:
    timings = {"forward": PhaseTiming(steps, 1.0, forward), "data": PhaseTiming(steps, 1.0, 0.5)}
    facts: dict[str, Any] = {
        "timings": timings,
        "work_count": steps,
        "work_seconds": forward,
        "step": steps,
    }
    return make_heartbeat(**facts, **changes)


def test_means_of_phases_are_of_the_steps_of_the_last_seconds() -> None:
    means = PhaseMeans()
    (first,) = means.update(Snapshot(0.0, [_trained(10, 10.0)], []))
    assert first["phases"] == {"forward": 1.0, "data": 0.05}
    (soon,) = means.update(Snapshot(1.0, [_trained(11, 20.0)], []))
    assert (soon["step"], soon["phases"]) == (11, first["phases"])
    (later,) = means.update(Snapshot(11.0, [_trained(20, 40.0)], []))
    assert (later["steps"], later["work_seconds"]) == (10, 3.0)
    assert later["phases"] == {"forward": 3.0}


def test_means_of_phases_outlive_their_rank_but_not_its_launch() -> None:
    means = PhaseMeans()
    before = means.update(Snapshot(0.0, [_trained(10, 10.0, rank=1)], []))
    assert means.update(Snapshot(1.0, [], [])) == before
    (after,) = means.update(Snapshot(2.0, [_trained(0, 0.0, pid=2, launch="two")], []))
    assert (after["rank"], "phases" in after) == (0, False)
