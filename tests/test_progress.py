"""Progress that a person sees: a bar in a terminal, a line now and then in a log."""

import signal
import time
from io import StringIO

import pytest
from rich.console import Console
from tests.build import make_row, wait_until
from tests.monitor.build import make_heartbeat

from longtake import progress
from longtake.progress import counted, phase_lines, step_progress


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with step_progress(Console(file=out, width=100), 0, 100) as shown:
        for step in range(1, 11):
            clock[0] += 2.0
            shown.update(make_row(step))
        assert out.getvalue() == ""
        clock[0] += 2.0
        shown.update(make_row(11))
    assert out.getvalue() == "step 11/100 · loss 0.5000 · 0.50 steps/s · 2:58 left\n"


def test_a_terminal_gets_a_bar() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with step_progress(console, 50, 100) as shown:
        shown.update(make_row(51, loss=1.0))
        shown.update(make_row(52, loss=0.0))
    assert "52/100" in out.getvalue()
    assert "loss 0.9500" in out.getvalue()


def test_a_quiet_console_stays_quiet() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, quiet=True)
    with step_progress(console, 0, 10) as shown:
        shown.update(make_row(1))
    assert out.getvalue() == ""


def test_phases_that_last_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_OF_A_LONG_PHASE", 0.05)
    out, quiet = StringIO(), StringIO()
    with phase_lines(Console(file=out), "importing") as enter:
        wait_until(lambda: out.getvalue())
        enter("planning")
        wait_until(lambda: "planning" in out.getvalue())
    with phase_lines(Console(file=quiet, quiet=True), "importing"):
        pass
    assert out.getvalue() == "importing …\nplanning …\n"
    assert quiet.getvalue() == ""


def test_phases_that_are_asked_for_are_told_where_they_last_until_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, clock, looks = StringIO(), [100.0], list[str | None]()
    phases: list[str | None] = ["importing"]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "_PHASE_LOOK_SECONDS", 0.001)

    def phase() -> str | None:
        looks.append(phases[-1])
        return phases[-1]

    def look() -> None:  # the first of two looks has ended when the second has begun
        before = len(looks)
        wait_until(lambda: len(looks) > before + 1)

    with phase_lines(Console(file=out), "importing", phase):
        for name, seconds in (("importing", 1.1), ("passing", 0.9), ("planning", 1.1)):
            phases.append(name)
            look()
            clock[0] += seconds
            look()
        phases.append(None)
        wait_until(lambda: looks[-1] is None)
        clock[0] += 10.0
    assert out.getvalue() == "importing …\nplanning …\n"


def test_a_log_is_told_how_far_counting_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = StringIO(), [100.0]
    monkeypatch.setattr("longtake.progress.time.monotonic", lambda: clock[0])
    with counted(Console(file=out), "index") as advance:
        for done, seconds in ((1, 0.5), (2, 1.0), (3, 1.0), (4, 30.0)):
            clock[0] += seconds
            advance(done, 4000)
    assert out.getvalue() == "index: 2/4,000\nindex: 4/4,000\n"


def test_things_can_be_counted_before_their_number_is_known() -> None:
    out = StringIO()
    with counted(Console(file=out, force_terminal=True, width=80), "index") as advance:
        advance(3, 7)
    assert "3/7" in out.getvalue()


def test_the_time_left_follows_the_speed_and_not_the_first_step() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with step_progress(console, 0, 400) as shown:
        shown.update(make_row(1, step_seconds=60.0))
        for step in range(2, 101):
            shown.update(make_row(step, step_seconds=10.0 if step == 90 else 1.0))
    assert "0.85 steps/s · 5:54 left" in out.getvalue()


def test_a_request_to_stop_is_answered_with_what_it_waits_for() -> None:
    ranks = [
        make_heartbeat(pid=1, phase="collective", step=23, seconds=11.0),
        make_heartbeat(pid=2, rank=1, phase="forward", step=23, seconds=12.0),
        make_heartbeat(pid=3, rank=2, phase="collective", step=23, seconds=10.0),
    ]
    assert progress.answer_to(signal.SIGINT, ranks) == (
        "SIGINT: training ends after this step and saves it. It waits for rank 1 (in the forward "
        "pass of step 23, for 12 s) and ranks 0 and 2 (where the ranks compare step 23, for 11 s). "
        "Ctrl-C again stops it at once, without saving."
    )
    assert "again" not in progress.answer_to(signal.SIGTERM, ranks)
