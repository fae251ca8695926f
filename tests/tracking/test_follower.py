"""The follower as a process: one writes at a time, and what it has told outlives it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtake.evaluation_dir import cursor_path, writer_path
from longtake.lease import Leases, history
from longtake.run_dir import RunDirectory
from longtake.tracking import cursor
from longtake.tracking.process import Follower
from longtake.tracking.turn import Turn


def _steps(run: RunDirectory, tag: str = "train/loss", folder: str = ".") -> list[int]:
    path = run.tensorboard_path / folder
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars(tag)]


def _writer(run: RunDirectory) -> dict[str, Any]:
    """The lease of who writes; empty if nobody does."""
    newest = (history(writer_path(run)) or [{"ended": "never begun"}])[-1]
    return {} if newest["ended"] else newest


def _told(run: RunDirectory) -> int:
    return cursor.load(cursor_path(run, "tensorboard")).metrics_offset


def test_an_evaluators_follower_gives_way_to_the_trainers(
    run: RunDirectory,
    add_steps: Callable[..., None],
    add_result: Callable[..., Path],
    until: Callable[..., None],
) -> None:
    """One writes at a time; whoever comes next goes on where the one before has ended."""
    evaluators, trainers = Follower(run, "evaluator"), Follower(run, "trainer")
    evaluators.start()
    until(lambda: _writer(run).get("role") == "evaluator")
    add_result(run, "demo", 6)
    trainers.start()
    until(lambda: _writer(run).get("role") == "trainer")
    add_steps(run, range(1, 40))
    trainers.close(30.0)
    until(lambda: _writer(run).get("role") == "evaluator")
    assert not (run.path / "tracking" / "wanted").exists()
    add_result(run, "demo", 12)
    evaluators.close(30.0)
    assert _steps(run) == list(range(1, 40))
    assert sorted(_steps(run, "eval/demo/motion", "eval")) == [6, 12]
    roles = [each["role"] for each in history(writer_path(run))]
    assert roles == ["evaluator", "trainer", "evaluator"]


def test_a_trainers_end_does_not_wait_for_a_follower_that_cannot_write(
    run: RunDirectory, add_steps: Callable[..., None], until: Callable[..., None]
) -> None:
    """Another process has the lease and keeps it: the trainer's follower is left to itself."""
    add_steps(run, range(1, 5))
    other = Leases(20.0, {"role": "trainer", "caught_up": True}).take(writer_path(run))
    assert other is not None
    follower = Follower(run, "trainer")
    follower.start()
    assert follower.pid is not None
    follower.close(600.0)  # the test's own time limit ends a wait
    assert psutil.pid_exists(follower.pid)
    other.end("released")
    until(lambda: _told(run))


def test_one_that_is_killed_is_replaced_and_nothing_is_told_twice(
    run: RunDirectory, add_steps: Callable[..., None], until: Callable[..., None]
) -> None:
    """Within seconds; a second start is none."""
    follower = Follower(run, "trainer")
    follower.start()
    follower.start()
    add_steps(run, range(1, 20))
    until(lambda: _told(run))
    first = follower.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    add_steps(run, range(20, 40))
    until(lambda: follower.pid != first)
    follower.close(30.0)
    assert _steps(run) == list(range(1, 40))
    assert [each["ended"] for each in history(writer_path(run))] == [None, "released"]


def test_a_full_disk_keeps_it_waiting(
    run: RunDirectory, add_steps: Callable[..., None], until: Callable[..., None]
) -> None:
    """The same process goes on when there is room again; what was in its way is said."""
    in_the_way = run.path / "tracking" / "writer"
    in_the_way.parent.mkdir()
    in_the_way.write_text("")
    follower = Follower(run, "trainer")
    follower.start()
    add_steps(run, range(1, 4))
    log = run.path / "tracking" / "follower.log"
    until(lambda: log.exists() and "cannot be written" in log.read_text())
    first = follower.pid
    in_the_way.unlink()
    until(lambda: _told(run))
    follower.close(30.0)
    assert follower.pid == first
    assert _steps(run) == [1, 2, 3]


def test_it_ends_with_a_run_that_is_deleted(
    run: RunDirectory, add_steps: Callable[..., None], until: Callable[..., None]
) -> None:
    """Nothing of the run is made anew, and no other process is started."""
    follower = Follower(run, "evaluator")
    follower.start()
    add_steps(run, range(1, 20))
    until(lambda: _told(run))
    shutil.rmtree(run.path)
    until(lambda: follower.is_over)
    assert follower.pid is not None
    assert not psutil.pid_exists(follower.pid)
    assert not run.path.exists()


_IMPATIENT = """
import sys
from longtake.tracking import follower
from longtake.tracking.__main__ import leave, main
follower._SECONDS_TO_GIVE_WAY = 0.2
leave(main(sys.argv[1:]))
"""


def test_one_that_cannot_end_its_writing_gives_the_lease_to_nobody_while_it_lives(
    run: RunDirectory, add_steps: Callable[..., None], until: Callable[..., None], tmp_path: Path
) -> None:
    """Its process ends instead; then another has the lease."""
    run.tensorboard_path.mkdir()
    for second in range(int(time.time()), int(time.time()) + 600):  # it waits for a free one
        (run.tensorboard_path / f"events.out.tfevents.{second}.x").touch()
    add_steps(run, range(1, 4))
    command = [sys.executable, "-c", _IMPATIENT, str(run.path), "--as", "evaluator"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        trainers = Turn(run, "trainer")
        try:
            until(lambda: _writer(run))
            until(lambda: trainers.take() is not None)
        finally:
            process.kill()  # it has ended
            trainers.leave()
        assert process.stderr is not None
        assert "does not come to its end" in process.stderr.read()
    assert [each["ended"] for each in history(writer_path(run))] == [None, None]


_PARENT = """
import sys, time
from pathlib import Path
from longtake.run_dir import RunDirectory
from longtake.tracking.process import Follower
follower = Follower(RunDirectory(Path(sys.argv[1])), "trainer")
follower.start()
print(follower.pid, flush=True)
time.sleep(60)
"""


def test_it_outlives_a_killed_training_until_all_is_told(
    run: RunDirectory, add_steps: Callable[..., None], until: Callable[..., None], tmp_path: Path
) -> None:
    """And no longer: the rows of a launch that was killed are there a moment later."""
    command = [sys.executable, "-c", _PARENT, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        follower = psutil.Process(int(parent.stdout.readline()))
        add_steps(run, range(1, 30))
        parent.kill()
    until(lambda: not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE)
    assert _steps(run) == list(range(1, 30))


def test_none_is_started_where_nothing_is_to_be_told(small_recipe: Callable[..., Any]) -> None:
    """The recipe wants neither tracker: no process, no file."""
    recipe = small_recipe()
    run = RunDirectory(recipe.out)
    run.path.mkdir()
    run.create(recipe)
    follower = Follower(run, "trainer")
    follower.start()
    assert follower.pid is None
    follower.close()
    assert not (run.path / "tracking").exists()
