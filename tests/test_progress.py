"""What a person sees: a bar in a terminal, a line now and then in a log."""

import io
import time
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from longtake import progress
from longtake.progress import counted, phase_lines, step_progress
from longtake.run_dir import Metrics


def _row(step: int, loss: float = 0.5, seconds: float = 2.0) -> Metrics:
    return Metrics(
        step=step,
        epoch=0,
        loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        step_seconds=seconds,
        data_seconds=0.0,
        time=0.0,
    )


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with step_progress(Console(file=out, width=100), 0, 100) as shown:
        for step in range(1, 11):
            shown.update(_row(step))
        assert out.getvalue() == ""
        monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
        shown.update(_row(11))
    assert out.getvalue() == "step 11/100 · loss 0.5000 · 0.50 steps/s · 2:58 left\n"


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with step_progress(console, 50, 100) as shown:
        shown.update(_row(51, loss=1.0))
        shown.update(_row(52, loss=0.0))
    assert "52/100" in out.getvalue()
    assert "loss 0.9500" in out.getvalue()


def test_a_quiet_console_stays_quiet() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, quiet=True)
    with step_progress(console, 0, 10) as shown:
        shown.update(_row(1))
    assert out.getvalue() == ""


def test_a_phase_that_lasts_is_told_and_a_short_one_is_not() -> None:
    out, quiet = StringIO(), StringIO()
    with phase_lines(Console(file=out), "importing") as enter:
        _wait_for(lambda: out.getvalue())
        enter("passing")
        enter("planning")
        _wait_for(lambda: "planning" in out.getvalue())
    with phase_lines(Console(file=quiet, quiet=True), "importing"):
        pass
    assert out.getvalue() == "importing …\nplanning …\n"
    assert quiet.getvalue() == ""


def test_phases_can_be_asked_for_until_the_first_step() -> None:
    out, phases = StringIO(), ["building"]
    with phase_lines(Console(file=out), "importing", lambda: phases[0] if phases else None):
        _wait_for(lambda: out.getvalue())
        phases.clear()
    assert out.getvalue() == "building …\n"


def test_a_log_is_told_how_far_counting_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = StringIO(), [100.0]
    monkeypatch.setattr("longtake.progress.time.monotonic", lambda: clock[0])
    with counted(Console(file=out), "index") as advance:
        for done, seconds in ((1, 0.5), (2, 1.0), (3, 1.0), (4, 30.0)):
            clock[0] += seconds
            advance(done, 4000)
    assert out.getvalue() == "index: 2/4,000\nindex: 4/4,000\n"


def _wait_for(is_there: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_there() and time.monotonic() < end:
        time.sleep(0.02)


def test_things_can_be_counted_before_their_number_is_known() -> None:
    out = io.StringIO()
    with counted(Console(file=out, force_terminal=True, width=80), "index") as advance:
        advance(3, 7)
    assert "3/7" in out.getvalue()


def test_the_time_left_follows_the_speed_and_not_the_first_step() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with step_progress(console, 0, 400) as shown:
        shown.update(_row(1, seconds=60.0))
        for step in range(2, 101):
            shown.update(_row(step, seconds=10.0 if step == 90 else 1.0))
    assert "0.85 steps/s · 5:54 left" in out.getvalue()
