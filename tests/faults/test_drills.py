"""A drill from end to end; `make drills` has all of them."""

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from longtake.faults import evaluation, sandbox
from longtake.faults.numerics import guard_reports
from longtake.faults.registry import DrillResult, all_faults, run_drill
from longtake.faults.sandbox import BATCH_SIZE, LONG_RECIPE, Injection, Sandbox
from longtake.fsio import read_json_lines

pytestmark = pytest.mark.slow

_UNWATCHED = "watch.enabled = false\ntracking.tensorboard = false\n"
_WATCHED = "watch.min_seconds = 2.0\ntracking.tensorboard = false\n"


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """A sandbox for drills in which the watcher has no part."""
    return Sandbox(tmp_path_factory.mktemp("unwatched"), Console(quiet=True), _UNWATCHED)


@pytest.fixture(autouse=True)
def _start_warm(start_warm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that have imported everything: half of what most drills take."""
    for module in (sandbox, evaluation):
        monkeypatch.setattr(module, "start", start_warm)


def _drill(sandbox: Sandbox, name: str, *, bitwise: bool | None = None) -> DrillResult:
    result = run_drill(all_faults()[name], sandbox)
    assert result.passed, result.message
    assert result.equal_to_undisturbed is bitwise
    assert result.detected_seconds is not None
    assert 0 < result.detected_seconds < result.drill_seconds
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    return result


def test_a_run_that_is_killed_while_it_saves(unwatched: Sandbox) -> None:
    result = _drill(unwatched, "kill-while-saving", bitwise=True)
    assert result.samples_skipped == 0
    assert result.steps_lost is not None


@pytest.mark.drill
def test_nan_on_one_rank(unwatched: Sandbox) -> None:
    result = _drill(unwatched, "nan-on-one-rank")
    assert result.detected_steps is not None
    assert (result.samples_skipped, result.steps_lost) == (BATCH_SIZE, 0)


@pytest.mark.drill
def test_a_frozen_worker_that_holds_the_gil(tmp_path_factory: pytest.TempPathFactory) -> None:
    watched = Sandbox(tmp_path_factory.mktemp("watched"), Console(quiet=True), _WATCHED)
    result = _drill(watched, "frozen-loader-worker-holding-gil", bitwise=True)
    assert "in holding_gil (longtake/faults/faulty_processes.py:" in result.message


@pytest.mark.drill
def test_a_run_that_keeps_diverging_stops_with_a_report(unwatched: Sandbox) -> None:
    site = unwatched.fresh("hopeless", LONG_RECIPE)
    inject = Injection("raise-rate", at=60, lasting=True)
    with site.launch("guard.max_rollbacks=1", inject=inject) as process:
        assert process.wait() == 2
        output = " ".join(process.output.split())
    assert "It has rolled back 1 time without progress" in output
    assert f"longtake show {site.run.path.name} --around" in output
    assert len(site.run.rollbacks()) == 1
    last = list(read_json_lines(site.run.events_path))[-1]
    assert last["event"] == "diverged"
    assert last["message"] in output
    reports = guard_reports(site.run)
    assert len(reports) == 2
    assert all((site.run.path / report["report"]).is_file() for report in reports)
