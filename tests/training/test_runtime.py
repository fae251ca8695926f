"""A run is watched to its end; freed memory and compiled code are kept."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.build import QUIET, Recipes, wait_until

from longtake.config import Recipe
from longtake.errors import DataError
from longtake.fsio import read_json
from longtake.heartbeat import (
    Heartbeat,
    HeartbeatWriter,
    heartbeat_dir,
    read_heartbeat,
    read_heartbeats,
)
from longtake.node_dir import read_events, this_node
from longtake.run_dir import RunDirectory
from longtake.training import loop
from longtake.training import train as training
from longtake.training.runtime import keep_compiled_code
from longtake.training.session import Session, TrainingState
from longtake.training.step import apply_update
from longtake.training.train import train


def _when(step: int, act: Callable[[Recipe], None]) -> Callable[..., float]:
    """The update, and something else before that of one step."""

    def update(session: Session, state: TrainingState, *of_step: Any) -> float:
        if state.global_step == step:
            act(session.recipe)
        return apply_update(session, state, *of_step)

    return update


def _watcher(recipe: Recipe) -> int:
    """The process that watches; 0: none has said so yet."""
    pid = read_json(this_node(RunDirectory(recipe.out)).heartbeat_path).get("pid", 0)
    return pid if pid and Path(f"/proc/{pid}").exists() else 0


def _events(recipe: Recipe) -> list[str]:
    return [event["event"] for event in read_events(RunDirectory(recipe.out))]


def test_a_watcher_that_dies_is_replaced_and_nothing_is_left(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two have watched; after the run there is none, nor anything in the node's memory."""

    def replace(recipe: Recipe) -> None:
        first = wait_until(lambda: _watcher(recipe))
        wait_until(lambda: "watcher_started" in _events(recipe))
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: _watcher(recipe) not in (0, first))

    monkeypatch.setattr(loop, "apply_update", _when(3, replace))
    recipe = small_recipe.trained("watch.enabled=true")
    events = _events(recipe)
    assert (events.count("watcher_started"), events.count("finished")) == (2, 1)
    assert not events.count("rank_failed")
    wait_until(lambda: not _watcher(recipe) and not heartbeat_dir(recipe.out).exists())


def test_the_heart_says_what_is_done(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Heartbeat] = []
    monkeypatch.setattr(
        loop,
        "apply_update",
        _when(11, lambda recipe: seen.extend(read_heartbeats(heartbeat_dir(recipe.out)))),
    )
    train(small_recipe(), QUIET)
    (pulse,) = seen
    assert (pulse.step, pulse.phase, pulse.detail) == (11, "collective", "8 frames of 32x32")
    assert len(pulse.launch) == 8
    assert {"data", "forward", "backward", "collective", "optimizer"} <= set(pulse.timings)
    assert pulse.work_count == 6
    assert 0 < pulse.work_seconds < 30


def test_after_a_rollback_nothing_is_expected_for_a_while(tmp_path: Path) -> None:
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
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """An error that a person is told of, and Ctrl-C, are ends; the heart is there until then."""
    phases: list[str] = []

    def fail(*_: object) -> None:
        (pulse,) = read_heartbeats(heartbeat_dir(recipe.out))
        phases.append(pulse.phase)
        raise error

    monkeypatch.setattr(training, "find_resume_point", fail)
    recipe = small_recipe("watch.enabled=true")
    with pytest.raises(type(error)):
        train(recipe, QUIET)
    assert phases == ["open"]
    assert not heartbeat_dir(recipe.out).exists()


def test_a_rank_that_is_alone_records_why_it_failed(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not before it holds the run: another process may train it, and has not failed."""
    recipe = small_recipe("training.steps=2", "watch.enabled=false")
    pages: list[Heartbeat | None] = []  # at its end: what a watcher could read
    monkeypatch.setattr(
        HeartbeatWriter, "remove", lambda writer: pages.append(read_heartbeat(writer.path))
    )

    def fail(*_: object) -> None:
        raise ValueError("a layer broke")

    monkeypatch.setattr(loop, "apply_update", _when(1, fail))
    with pytest.raises(ValueError, match="broke"):
        train(recipe, QUIET)
    assert [page.error for page in pages if page] == ["ValueError: a layer broke"]
    monkeypatch.setattr(training, "find_resume_point", fail)
    with pytest.raises(ValueError, match="broke"):
        train(recipe, QUIET)
    events = [each for each in read_events(RunDirectory(recipe.out)) if "kind" in each]
    assert [(each["event"], each["kind"], each["error"], each["step"]) for each in events] == [
        ("rank_failed", "exception", "ValueError: a layer broke", 1)
    ]


def test_a_fresh_run_has_its_heart_in_a_place_of_its_own(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though which folder it gets is agreed upon only when all ranks have met."""
    recipe = small_recipe.trained("training.steps=2")
    places: list[bool] = []

    def look(_: Recipe) -> None:
        beside = recipe.out.with_name("run-2")
        places.extend(
            [heartbeat_dir(recipe.out).exists(), bool(read_heartbeats(heartbeat_dir(beside)))]
        )

    monkeypatch.setattr(loop, "apply_update", _when(1, look))
    train(recipe, QUIET, fresh=True)
    assert places == [False, True]


def test_the_hook_is_not_on_the_watchers_command_line(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def look(recipe: Recipe) -> None:
        wait_until(lambda: bool(_watcher(recipe)))
        process = Path(f"/proc/{_watcher(recipe)}")
        lines.extend((process / name).read_text() for name in ("cmdline", "environ"))

    monkeypatch.setattr(loop, "apply_update", _when(2, look))
    changes = ("watch.enabled=true", "watch.hook='echo s3cret'", "training.steps=4")
    train(small_recipe(*changes), QUIET)
    assert ["s3cret" in each for each in lines] == [False, True]


@pytest.mark.parametrize("named", [None, "mine"])
def test_compiled_code_is_kept_in_the_users_cache_or_where_it_was(
    named: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And torch looks there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(variable, str(tmp_path / (named or "")))  # so that it is put back
    if named is None:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    assert cache_dir() == str(tmp_path / (named or "longtake/compiled"))
