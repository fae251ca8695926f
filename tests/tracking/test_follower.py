"""One process at a time writes to a run's trackers, and what it has sent outlives it."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.build import wait_until
from tests.tracking.build import (
    add_result,
    add_steps,
    cursor,
    make_feed,
    scalars,
    send_to_tensorboard,
)

from longtake import stacks
from longtake.config import TrackingSection
from longtake.evaluation_dir import writer_path
from longtake.lease import Leases, history, kept, newest
from longtake.run_dir import RunDirectory
from longtake.tracking import follower
from longtake.tracking.follower import Follower, Followers, Shutdown, follow
from longtake.tracking.reader import Cursor

_CHANGED = """
import os, sys
from longtake.tracking import follower
{changes}
os._exit(follower.main(sys.argv[1:]))
"""


def _changed(**changes: float) -> str:
    lines = [f"follower.{name} = {value}" for name, value in changes.items()]
    return _CHANGED.format(changes="\n".join(lines))


def _writer(run: RunDirectory) -> dict[str, Any]:
    found = newest(writer_path(run)) or {"ended": "never begun"}
    return {} if found["ended"] else found


def _roles(run: RunDirectory) -> list[str]:
    return [each["role"] for each in history(writer_path(run))]


# --- The process ------------------------------------------------------------------------------


def test_an_evaluators_follower_ends_when_a_launch_begins(run: RunDirectory) -> None:
    evaluators, trainers = Follower(run, "evaluator"), Follower(run, "trainer")
    evaluators.start()
    wait_until(lambda: _writer(run).get("role") == "evaluator")
    add_result(run, "demo", 6)
    trainers.start()
    run.append_event("launched")
    wait_until(lambda: _writer(run).get("role") == "trainer")
    wait_until(lambda: evaluators.is_over)
    add_steps(run, range(1, 40))
    trainers.close(600.0)
    add_result(run, "demo", 12)
    evaluators = Follower(run, "evaluator")
    evaluators.start()
    wait_until(lambda: _writer(run).get("role") == "evaluator")
    evaluators.close(600.0)
    assert list(scalars(run)) == list(range(1, 40))
    assert sorted(scalars(run, "eval/demo/motion", "eval")) == [6, 12]
    assert _roles(run) == ["evaluator", "trainer", "evaluator"]


def test_a_trainers_follower_ends_only_at_a_later_launch(run: RunDirectory) -> None:
    run.tensorboard_path.write_text("in the way")
    run.append_event("rolled_back", step=3, message="The loss rose.")
    with Shutdown(None) as shutdown:
        threading.Thread(target=lambda: _relaunch(run, shutdown), daemon=True).start()
        assert follow(run, "trainer", TrackingSection(), shutdown)
    assert shutdown.requested_seconds < follower._MAX_END_SECONDS
    assert list(history(writer_path(run))[-1]["troubles"]) == ["tensorboard"]


def _relaunch(run: RunDirectory, shutdown: Shutdown) -> None:
    run.append_event("launched")
    try:
        wait_until(lambda: _writer(run).get("troubles"))
    finally:
        shutdown.request("a test")
    while _writer(run):
        time.sleep(0.2)
        run.append_event("resumed")


def test_an_evaluators_follower_ends_when_a_tracker_cannot_be_reached(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine's may have a network or a key; the lease says what is wrong."""
    monkeypatch.setattr(follower, "_MAX_TROUBLE_SECONDS", 0.1)
    add_steps(run, range(1, 4))
    run.tensorboard_path.write_text("in the way")
    with Shutdown(None) as shutdown:
        assert follow(run, "evaluator", TrackingSection(), shutdown)
    (lease,) = history(writer_path(run))
    assert (lease["ended"], list(lease["troubles"])) == ("released", ["tensorboard"])


def test_a_trainers_end_does_not_wait_for_a_follower_that_cannot_write(run: RunDirectory) -> None:
    """Another process has the lease and keeps it: the trainer's follower is left to itself."""
    add_steps(run, range(1, 5))
    other = Leases(20.0, {"role": "trainer", "caught_up": True}).take(writer_path(run))
    assert other is not None
    trainers = Follower(run, "trainer")
    trainers.start()
    assert trainers.pid is not None
    trainers.close(600.0)  # the test's own time limit ends a wait
    assert psutil.pid_exists(trainers.pid)
    other.end("released")
    wait_until(lambda: cursor(run).metrics_offset)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_is_killed_is_replaced_and_nothing_is_sent_twice(
    run: RunDirectory, number: signal.Signals
) -> None:
    trainers = Follower(run, "trainer")
    trainers.start()
    trainers.start()
    add_steps(run, range(1, 20))
    wait_until(lambda: cursor(run).metrics_offset)
    first = trainers.pid
    assert first is not None
    os.kill(first, number)
    add_steps(run, range(20, 40))
    wait_until(lambda: trainers.pid != first)
    trainers.close(600.0)
    assert list(scalars(run)) == list(range(1, 40))
    wait_until(lambda: history(writer_path(run))[-1]["ended"])
    released = None if number == signal.SIGKILL else "released"
    assert [each["ended"] for each in history(writer_path(run))] == [released, "released"]


def test_one_that_is_stopped_is_replaced_at_the_end(run: RunDirectory) -> None:
    """Else trackers end in mid-run without a word, and it is left behind."""
    trainers = Follower(run, "trainer")
    trainers.start()
    add_steps(run, range(1, 20))
    wait_until(lambda: cursor(run).metrics_offset)
    first = trainers.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    add_steps(run, range(20, 40))
    wait_until(lambda: stacks.state_of(first) == "T")
    trainers.close(600.0)
    assert list(scalars(run)) == list(range(1, 40))
    wait_until(lambda: not psutil.pid_exists(first))


def test_a_full_disk_keeps_it_waiting(run: RunDirectory) -> None:
    """The same process continues when there is room again; the log says what was wrong."""
    in_the_way = run.path / "tracking" / "writer"
    in_the_way.parent.mkdir()
    in_the_way.write_text("")
    following = Follower(run, "trainer")
    following.start()
    add_steps(run, range(1, 4))
    log = run.path / "tracking" / "follower.log"
    wait_until(lambda: log.exists() and "cannot be written" in log.read_text())
    first = following.pid
    in_the_way.unlink()
    wait_until(lambda: cursor(run).metrics_offset)
    following.close(600.0)
    assert following.pid == first
    assert list(scalars(run)) == [1, 2, 3]


def test_it_ends_with_a_run_that_is_deleted(run: RunDirectory) -> None:
    following = Follower(run, "evaluator")
    following.start()
    add_steps(run, range(1, 20))
    wait_until(lambda: cursor(run).metrics_offset)
    run.path.rename(run.path.with_name("deleted"))  # at once, while it writes
    wait_until(lambda: following.is_over)
    assert following.pid is not None
    assert not psutil.pid_exists(following.pid)
    assert not run.path.exists()


def test_whose_follower_it_is_has_to_be_said(tmp_path: Path) -> None:
    """A trainer's keeps the lease while the training runs, and an evaluator's gives way."""
    with pytest.raises(SystemExit):
        follower.main([str(tmp_path)])


def test_one_that_cannot_end_its_writing_gives_the_lease_to_no_other_while_it_lives(
    run: RunDirectory, tmp_path: Path
) -> None:
    """It ends instead: two would write at a time, its thread and the next follower."""
    run.tensorboard_path.mkdir()
    for second in range(int(time.time()), int(time.time()) + 600):  # none is free to begin a file
        (run.tensorboard_path / f"events.out.tfevents.{second}.x").touch()
    add_steps(run, range(1, 4))
    command = [sys.executable, "-c", _changed(_MAX_CLOSE_SECONDS=0.2)]
    command += [str(run.path), "--as", "evaluator"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        leases = Leases(20.0, {"role": "trainer"})
        try:
            wait_until(lambda: _writer(run))
            run.append_event("launched")
            wait_until(lambda: leases.take(writer_path(run)) is not None)
            assert process.wait(30) == 1
        finally:
            process.kill()
        assert process.stderr is not None
        assert "tensorboard does not end in 0.2 s" in process.stderr.read()
    assert [each["ended"] for each in history(writer_path(run))] == [None, None]


_PARENT = """
import sys, time
from pathlib import Path
from longtake.run_dir import RunDirectory
from longtake.tracking.follower import Follower
following = Follower(RunDirectory(Path(sys.argv[1])), "trainer")
following.start()
print(following.pid, flush=True)
time.sleep(60)
"""


def test_it_outlives_a_killed_training_until_all_is_sent(run: RunDirectory, tmp_path: Path) -> None:
    """And no longer: the rows of a launch that was killed are there a moment later."""
    command = [sys.executable, "-c", _PARENT, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        add_steps(run, range(1, 30))
        parent.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert list(scalars(run)) == list(range(1, 30))


def test_it_never_imports_torch_nor_what_is_not_wanted() -> None:
    code = (
        "import sys, longtake.tracking.follower, longtake.tracking.tensorboard;"
        "sys.exit(bool({'torch', 'wandb', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- Who starts it ----------------------------------------------------------------------------


def test_none_is_started_without_a_tracker(small_recipe: Callable[..., Any]) -> None:
    """No process, no file."""
    recipe = small_recipe()
    run = RunDirectory(recipe.out)
    run.path.mkdir()
    run.create(recipe)
    following = Follower(run, "trainer")
    following.start()
    assert following.pid is None
    following.close()
    assert not (run.path / "tracking").exists()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    code = _changed(_MAX_TROUBLE_SECONDS=0.2, _MAX_END_SECONDS=0.2)
    monkeypatch.setattr(follower, "program", lambda _, *given: [sys.executable, "-c", code, *given])
    monkeypatch.setattr(follower, "_SERVER_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(follower, "_FREE_SECONDS", 0.3)
    monkeypatch.setattr(follower, "_QUIET_SECONDS", 0.3)


def _serve(
    followers: Followers, run: RunDirectory, is_so: Callable[[], object], seconds: float = 60
) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        followers.serve([run] if run.exists() else [])
        time.sleep(0.05)


def _evaluated(run: RunDirectory) -> list[int]:
    return sorted(step for _, step, _ in cursor(run).evaluations)


@pytest.mark.usefixtures("brief")
def test_a_server_starts_one_for_each_new_result_and_for_what_is_left_at_its_end(
    run: RunDirectory,
) -> None:
    with Followers() as followers:
        for count in (1, 2):
            add_result(run, "demo", 10 * count)
            _serve(followers, run, lambda: _evaluated(run)[count - 1 :])  # noqa: B023
            _serve(followers, run, lambda: not _writer(run))
        count = len(history(writer_path(run)))
        add_result(run, "demo", 30)
    wait_until(lambda: _evaluated(run) == [10, 20, 30])
    assert len(history(writer_path(run))) == count + 1


@pytest.mark.usefixtures("brief")
def test_a_server_starts_none_while_another_has_the_lease_or_soon_after(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_FREE_SECONDS", 1.5)
    add_result(run, "demo", 10)
    leases = Leases(1.0, {"role": "trainer", "caught_up": True})
    with Followers() as followers:
        for _ in range(2):
            lease = leases.take(writer_path(run))
            assert lease is not None
            with kept(lease):
                for _ in range(40):  # 2 s
                    followers.serve([run])
                    time.sleep(0.05)
            lease.end("released")
            followers.serve([run])
        assert _roles(run) == ["trainer", "trainer"]
        _serve(followers, run, lambda: _evaluated(run) == [10])
        assert _roles(run) == ["trainer", "trainer", "evaluator"]


@pytest.mark.usefixtures("brief")
def test_a_server_tries_a_tracker_again_that_could_not_be_reached(run: RunDirectory) -> None:
    run.tensorboard_path.write_text("in the way")
    add_result(run, "demo", 10)
    with Followers() as followers:
        _serve(followers, run, lambda: len(history(writer_path(run))) == 2)
        run.tensorboard_path.unlink()
        _serve(followers, run, lambda: _evaluated(run) == [10])


# --- Sending to one tracker --------------------------------------------------------------------


def test_a_record_that_a_tracker_always_rejects_is_left_out(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After some attempts, and the log says so; TensorBoard has no step of 31 digits."""
    monkeypatch.setattr(follower, "_MAX_FAILURES", 2)
    monkeypatch.setattr(follower, "_FIRST_PAUSE_SECONDS", 0.001)
    add_steps(run, range(1, 2))
    add_steps(run, range(10**30, 10**30 + 1))
    add_steps(run, range(2, 4))
    send_to_tensorboard(run)
    assert list(scalars(run)) == [1, 2, 3]
    assert capsys.readouterr().err.count("rejected, and left out (ValueError") == 1
    assert cursor(run).metrics_offset == run.metrics_path.stat().st_size


def test_rows_alone_do_not_move_the_cursor_each_time(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_SAVE_SECONDS", 3600.0)
    monkeypatch.setattr(follower, "_FEED_POLL_SECONDS", 0.02)
    sending = make_feed(run)
    sending.start()
    add_steps(run, range(1, 4))
    wait_until(lambda: cursor(run).metrics_offset)
    first = cursor(run)
    add_steps(run, range(4, 7))
    wait_until(lambda: max(scalars(run)) == 6)
    assert cursor(run) == first
    add_result(run, "demo", 6)
    wait_until(lambda: cursor(run).evaluations)
    second = cursor(run)
    add_steps(run, range(7, 10))
    wait_until(lambda: max(scalars(run)) == 9)
    assert cursor(run) == second
    sending.finish()
    assert sending.join(30.0)
    assert cursor(run).metrics_offset == run.metrics_path.stat().st_size
    assert list(scalars(run)) == list(range(1, 10))


def test_without_the_lease_no_cursor_moves(run: RunDirectory) -> None:
    """Not even before the follower has noticed: the cursor is the next writer's."""
    lease = Leases(60.0, {}).take(writer_path(run))
    assert lease is not None
    lease.end("taken over")
    assert Leases(60.0, {}).take(writer_path(run)) is not None
    sending = make_feed(run, lease)
    add_steps(run, range(1, 4))
    sending.start()
    sending.finish()
    assert sending.join(30.0)
    assert cursor(run) == Cursor()


def test_what_could_not_be_sent_is_sent_later(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a full disk nor a file in its way loses a row; the log has the reason."""
    run.tensorboard_path.write_text("in the way")
    add_steps(run, range(1, 200))
    sending = make_feed(run)
    sending.start()
    wait_until(lambda: sending.trouble)
    assert "NotADirectoryError" in sending.trouble or "FileExistsError" in sending.trouble
    assert sending.is_settled
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, most))  # as on a full disk
    try:
        run.tensorboard_path.unlink()
        wait_until(lambda: "too large" in sending.trouble)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    sending.finish()
    assert sending.join(60.0)
    assert list(scalars(run)) == list(range(1, 200))
    said = capsys.readouterr().err
    assert said.count("It is tried again") == 2
    assert said.count("it can be reached again") == 1
