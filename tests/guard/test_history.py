"""What the guard remembers: bounded, never changed, the same after a resume."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from longtake.config import GuardSection
from longtake.guard.history import History, Judged
from longtake.guard.judge import judge
from longtake.guard.statistics import Statistics

Healthy = Callable[..., list[Statistics]]
Histories = Callable[..., History]


def _steps(history: History) -> list[int]:
    return [each.statistics.step for each in history]


def test_it_remembers_four_windows(healthy: Healthy) -> None:
    """Older steps are forgotten, however long a run is."""
    history = History(32)
    for step in healthy(400):
        history = history.with_(Judged(step, "ok"))
    assert _steps(history) == list(range(400 - 128, 400))
    assert len(history) == len(history.rows) == 128
    assert history.rows.column("step").tolist() == _steps(history)


@pytest.mark.parametrize("length", [0, 5, 255, 256, 300])
def test_two_that_go_on_from_one_know_nothing_of_each_other(healthy: Healthy, length: int) -> None:
    """Also where the room that they share is just full, and where one of them went on before."""
    steps = healthy(302)
    shared = History(32)
    for step in steps[:length]:
        shared = shared.with_(Judged(step, "ok"))
    before = _steps(shared)
    one = shared.with_(Judged(steps[-2], "ok"))
    other = shared.with_(Judged(steps[-1], "skip"))
    assert _steps(shared) == before
    assert _steps(one) == [*before, 300][-128:]
    assert _steps(other) == [*before, 301][-128:]
    assert one.rows.column("step")[-1] == 300
    assert other.rows.are("skip").tolist()[-1]


def test_it_judges_after_a_resume_as_if_it_had_never_stopped(
    healthy: Healthy, history_of: Histories
) -> None:
    """Through JSON and back, the verdict is the same to the last digit of its message."""
    steps = healthy(300)
    history = history_of(steps[:-1], at_200="skip")
    kept = json.dumps(history.as_json(), allow_nan=False)
    resumed = History.from_json(json.loads(kept), GuardSection().window)
    assert list(resumed) == list(history)
    wild = replace(steps[-1], loss=9.0, loss_by_sigma=(12.0, 9.0, 7.0, 8.0))
    verdict = judge(history, wild, GuardSection())
    assert verdict.kind == "skip"
    assert judge(resumed, wild, GuardSection()) == verdict


def test_it_is_small_in_checkpoints(healthy: Healthy, history_of: Histories) -> None:
    """A full history is less than half a kilobyte a step."""
    history = history_of(healthy(600))
    assert len(history) == 512
    assert len(json.dumps(history.as_json())) < 512 * 512


def test_an_empty_one_comes_back_empty() -> None:
    """Of a run that is saved before its first step."""
    assert len(History.from_json(History(64).as_json(), 64)) == 0


def test_another_window_takes_over_what_it_wants(healthy: Healthy, history_of: Histories) -> None:
    """The recipe's window may change on resume."""
    kept = history_of(healthy(500)).as_json()
    assert _steps(History.from_json(kept, 32)) == list(range(500 - 128, 500))
    assert _steps(History.from_json(kept, 1000)) == list(range(500))
