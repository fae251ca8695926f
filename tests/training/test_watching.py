"""A run is watched from its beginning to its end, whatever becomes of its watcher."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from longtake.config import Recipe
from longtake.errors import DataError
from longtake.fsio import read_json
from longtake.heartbeat import Heartbeat, heartbeat_dir, read_heartbeat, read_heartbeats
from longtake.node_dir import read_events, this_node
from longtake.run_dir import RunDirectory
from longtake.training import loop, run
from longtake.training.own_work import OwnWork
from longtake.training.run import train
from longtake.training.step import TrainingState, apply_update

_QUIET = Console(quiet=True)


def _when(step: int, act: Callable[[Recipe], None]) -> Callable[..., float]:
    """The update, and something else before that of one step."""

    def update(state: TrainingState, recipe: Recipe, grad_norm: float, scale: float) -> float:
        if state.global_step == step:
            act(recipe)
        return apply_update(state, recipe, grad_norm, scale)

    return update


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def _watcher(recipe: Recipe) -> int:
    """The process that watches; 0: none has said so yet."""
    pid = read_json(this_node(RunDirectory(recipe.out)).heartbeat_path).get("pid", 0)
    return pid if pid and Path(f"/proc/{pid}").exists() else 0


def test_a_watcher_that_dies_is_replaced_and_nothing_is_left(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two have watched; after the run there is none, nor anything in the node's memory."""

    def replace(recipe: Recipe) -> None:
        _until(lambda: bool(_watcher(recipe)))
        first = _watcher(recipe)
        os.kill(first, signal.SIGKILL)
        _until(lambda: _watcher(recipe) not in (0, first))

    monkeypatch.setattr(loop, "apply_update", _when(3, replace))
    recipe = small_recipe("watch.enabled=true")
    train(recipe, _QUIET)
    events = [event["event"] for event in read_events(RunDirectory(recipe.out))]
    assert (events.count("watching"), events.count("finished")) == (2, 1)
    assert not events.count("rank_died")
    _until(lambda: not _watcher(recipe) and not heartbeat_dir(recipe.out).exists())


def test_a_run_that_nobody_is_to_watch_has_no_watcher(
    small_recipe: Callable[..., Recipe],
) -> None:
    """And leaves nothing in the node's memory either."""
    recipe = small_recipe("training.steps=2")
    train(recipe, _QUIET)
    assert not this_node(RunDirectory(recipe.out)).path.exists()
    assert not heartbeat_dir(recipe.out).exists()


def test_the_heart_says_what_is_done(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step, shape, launch; once it has settled, how long each phase takes, saves too."""
    seen: list[Heartbeat] = []
    monkeypatch.setattr(
        loop,
        "apply_update",
        _when(11, lambda recipe: seen.extend(read_heartbeats(heartbeat_dir(recipe.out)))),
    )
    train(small_recipe(), _QUIET)
    (pulse,) = seen
    assert (pulse.step, pulse.phase, pulse.detail) == (11, "collective", "8 frames of 32x32")
    assert len(pulse.launch) == 8
    assert {"data", "forward", "backward", "collective", "optimizer"} <= set(pulse.timings)
    assert pulse.work_count == 6
    assert 0 < pulse.work_seconds < 30


def test_after_a_rollback_nothing_is_expected_for_a_while(tmp_path: Path) -> None:
    """Decoding processes begin anew, and nothing lies ready."""
    from longtake.heartbeat import HeartbeatWriter

    heart = HeartbeatWriter(tmp_path, "rank")
    for step in range(8):
        heart.begin_step(step, "8x32x32")
        heart.set_phase("forward")
        heart.end_step()
    before = read_heartbeat(heart.path)
    heart.set_phase("rollback")
    heart.set_phase("data")
    after = read_heartbeat(heart.path)
    assert before is not None
    assert after is not None
    assert (before.is_settled, after.is_settled) == (True, False)
    assert after.steps_done == 8


@pytest.mark.parametrize("error", [DataError("a clip"), KeyboardInterrupt()])
def test_who_ends_with_a_word_has_not_died(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """An error that a person is told of, and Ctrl-C, are ends; the heart is there until then."""
    phases: list[str] = []

    def fail(*_: object) -> None:
        (pulse,) = read_heartbeats(heartbeat_dir(recipe.out))
        phases.append(pulse.phase)
        raise error

    monkeypatch.setattr(run, "_train", fail)
    recipe = small_recipe("watch.enabled=true")
    with pytest.raises(type(error)):
        train(recipe, _QUIET)
    assert phases == ["open"]
    assert not heartbeat_dir(recipe.out).exists()


def test_a_fresh_run_has_its_heart_in_a_place_of_its_own(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though which folder it gets is agreed upon only when all ranks have met."""
    recipe = small_recipe("training.steps=2")
    train(recipe, _QUIET)
    places: list[bool] = []

    def look(_: Recipe) -> None:
        beside = recipe.out.with_name("run-2")
        places.extend(
            [heartbeat_dir(recipe.out).exists(), bool(read_heartbeats(heartbeat_dir(beside)))]
        )

    monkeypatch.setattr(loop, "apply_update", _when(1, look))
    train(recipe, _QUIET, fresh=True)
    assert places == [False, True]


def test_own_work_is_what_was_counted() -> None:
    """And nothing between."""
    work = OwnWork(torch.device("cpu"))
    with work.counted():
        time.sleep(0.02)
    time.sleep(0.05)
    with work.counted():
        time.sleep(0.02)
    assert 0.04 <= work.seconds() < 0.07


def test_the_hook_is_not_on_the_watchers_command_line(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of the node read command lines; the watcher finds it in its environment."""
    lines: list[str] = []

    def look(recipe: Recipe) -> None:
        _until(lambda: bool(_watcher(recipe)))
        process = Path(f"/proc/{_watcher(recipe)}")
        lines.extend((process / name).read_text() for name in ("cmdline", "environ"))

    monkeypatch.setattr(loop, "apply_update", _when(2, look))
    changes = ("watch.enabled=true", "watch.hook='echo s3cret'", "training.steps=4")
    train(small_recipe(*changes), _QUIET)
    assert ["s3cret" in each for each in lines] == [False, True]
