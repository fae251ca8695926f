"""A feed sends until all has arrived; what cannot be sent delays nothing else."""

import resource

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

from longtake.evaluation_dir import writer_path
from longtake.lease import Leases
from longtake.run_dir import RunDirectory
from longtake.tracking import feed
from longtake.tracking.reader import Cursor


def test_a_record_that_a_tracker_always_rejects_is_left_out(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After some attempts, and the log says so; TensorBoard has no step of 31 digits."""
    monkeypatch.setattr(feed, "_MAX_FAILURES", 2)
    monkeypatch.setattr(feed, "_FIRST_PAUSE_SECONDS", 0.001)
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
    monkeypatch.setattr(feed, "_SAVE_SECONDS", 3600.0)
    monkeypatch.setattr(feed, "_POLL_SECONDS", 0.02)
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
    assert capsys.readouterr().err.count("It is tried again") == 2
