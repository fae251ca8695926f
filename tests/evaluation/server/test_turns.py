"""Runs take turns, so that none waits until the others end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.run_dir import RunDirectory

_SECOND = '[evaluation.presets.second]\nprompts = ["a blue circle"]\n'


@pytest.fixture
def done(probe: Any) -> Any:
    """Work that notes run, step and preset of what it does."""

    class Noting:
        def __init__(self) -> None:
            self.tasks: list[tuple[str, int, str]] = []

        def __call__(self, task: Any, folder: Path, tick: Any) -> Any:
            self.tasks.append((task.run.path.name, task.step, task.preset.name))
            return probe.Probe()(task, folder, tick)

    return Noting()


def test_two_runs_take_turns_of_a_few_checkpoints(
    make_run: Callable[..., RunDirectory], save: Any, serve: Any, done: Any, tmp_path: Path
) -> None:
    """Three each; the one that was served the longest time ago comes next."""
    for run in (make_run("runs/a"), make_run("runs/b")):
        for step in (10, 20, 30, 40):
            save(run, step)
    serve(tmp_path / "runs", done)
    assert [f"{run}{step}" for run, step, _ in done.tasks] == [
        *("a10", "a20", "a30", "b10", "b20", "b30"),
        *("a40", "b40"),
    ]


def test_a_checkpoint_keeps_its_turn_until_all_its_presets_are_done(
    make_run: Callable[..., RunDirectory], save: Any, serve: Any, done: Any, tmp_path: Path
) -> None:
    """A change of the run in between would load its model twice."""
    for run in (make_run("runs/a", _SECOND), make_run("runs/b")):
        for step in (10, 20, 30, 40):
            save(run, step)
    serve(tmp_path / "runs", done)
    presets = ("probe", "second")
    assert done.tasks[:6] == [("a", step, name) for step in (10, 20, 30) for name in presets]
    assert done.tasks[6] == ("b", 10, "probe")
