"""W&B gets every row and every evaluation once, over resumes, writers, kills and outages."""

import json
import os
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb
from tests.build import wait_until
from tests.tracking.build import add_result, add_steps, cursor, scalars

from longtake.config import TrackingSection
from longtake.evaluation_dir import writer_path
from longtake.lease import history
from longtake.run_dir import RunDirectory
from longtake.tracking.follower import Follower
from longtake.tracking.reader import Cursor
from longtake.tracking.wandb import Wandb, WandbFile, missing_key, run_id_of

_OFFLINE = TrackingSection(wandb="offline")
_ONLINE = TrackingSection(wandb="online")


def _segments(run: RunDirectory) -> list[list[dict[str, Any]]]:
    files = sorted(run.path.glob("wandb/*run-*/*.wandb"))
    return [list(WandbFile(path).new_rows()) for path in files]


def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for segment in _segments(run) for row in segment]


def _called(run: RunDirectory) -> set[tuple[str, str]]:
    paths = run.path.glob("wandb/*run-*/*.wandb")
    records = [record for path in paths for record in WandbFile(path)._new_records()]
    return {
        (record.run.entity, record.run.display_name)
        for record in records
        if record.WhichOneof("record_type") == "run"
    }


def _is_rising(rows: list[dict[str, Any]]) -> bool:
    numbers = [row["_step"] for row in rows]
    return numbers == sorted(set(numbers))


def _send(run: RunDirectory, section: TrackingSection) -> None:
    follower = Follower(run, "evaluator", section)
    follower.start()
    follower.close(60.0)
    _wait_for_end(follower)


def _wait_for_end(follower: Follower) -> None:
    assert follower.pid is not None
    with suppress(psutil.NoSuchProcess):  # it may end at any moment, also before it is looked up
        psutil.wait_procs([psutil.Process(follower.pid)], timeout=300)


def test_a_training_and_an_evaluator_write_one_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step and each result once, never in one row, with numbers that never go back."""
    monkeypatch.setenv("WANDB_ENTITY", "a-team")
    monkeypatch.setenv("WANDB_NAME", "a name")
    trainers = Follower(run, "trainer", _OFFLINE)
    trainers.start()
    add_steps(run, range(1, 9))
    wait_until(lambda: _rows(run))
    for preset in ("demo", "other"):
        add_result(run, preset, 6)
        add_steps(run, range(9, 17) if preset == "demo" else range(17, 25))
    trainers.close(30.0)
    wait_until(lambda: history(writer_path(run))[-1]["ended"])
    add_result(run, "demo", 12)
    _send(run, _OFFLINE)
    assert len([rows for rows in _segments(run) if rows]) >= 2  # W&B may have been begun again
    rows = _rows(run)
    assert _is_rising(rows)
    steps = [row for row in rows if "train/step" in row]
    assert [row["train/step"] for row in steps] == list(range(1, 25))
    assert [row["train/loss"] for row in steps] == [row["loss"] for row in run.metrics()]
    assert _called(run) == {("a-team", "a name")}
    results = [row for row in rows if "eval/checkpoint_step" in row]
    found = sorted((row["eval/preset"], row["eval/checkpoint_step"]) for row in results)
    assert found == [("demo", 6), ("demo", 12), ("other", 6)]
    assert len(steps) + len(results) == len(rows)
    last = results[-1]
    assert (last["eval/demo/brightness"], last["eval/demo/held_out/mean"]) == (12.25, 0.5)
    assert last["eval/demo/alarms"] == "brightness at 12"
    video = last["eval/demo/00_s0"]
    assert (video["_type"], video["caption"]) == ("video-file", "a red disc (seed 0)")
    (kept,) = run.path.glob(f"wandb/*run-*/files/{video['path']}")
    result = run.evaluation_path("demo", 12) / "00_s0.mp4"
    assert kept.read_bytes() == result.read_bytes()


def test_two_segments_of_one_second_have_folders_of_their_own(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As W&B does: time.strftime alone reads a coarser clock, which may lag behind.
    pattern = f"offline-run-%Y%m%d_%H%M%S-{run_id_of(run)}"
    now = f"{datetime.now():{pattern}}"
    (run.path / "wandb" / now).mkdir(parents=True)
    begun = list[str]()

    def begin(**_: object) -> None:
        begun.append(f"{datetime.now():{pattern}}")
        raise ConnectionError

    monkeypatch.setattr(wandb, "init", begin)
    with pytest.raises(ConnectionError):
        Wandb(run, _OFFLINE).open(1)
    assert begun > [now]


@pytest.mark.usefixtures("unreachable")
def test_what_an_unreachable_server_has_missed_is_sent_later(run: RunDirectory) -> None:
    follower = Follower(run, "trainer", _ONLINE)
    follower.start()
    add_steps(run, range(1, 20))
    log = run.path / "tracking" / "follower.log"
    wait_until(lambda: "http://127.0.0.1:9 cannot be reached" in log.read_text())
    add_steps(run, range(20, 40))
    add_result(run, "demo", 6)
    follower.close(30.0)
    lease = history(writer_path(run))[-1]
    assert list(lease["troubles"]) == ["wandb"]
    assert list(scalars(run)) == list(range(1, 40))
    assert cursor(run, "wandb") == Cursor()
    assert follower.pid is not None
    os.kill(follower.pid, signal.SIGTERM)
    _wait_for_end(follower)
    _send(run, _OFFLINE)
    rows = _rows(run)
    assert [row["train/step"] for row in rows if "train/step" in row] == list(range(1, 40))
    assert [row["eval/checkpoint_step"] for row in rows if "eval/preset" in row] == [6]
    assert log.read_text().count("cannot be reached") == 1


@pytest.mark.slow
def test_a_kill_neither_repeats_nor_loses_a_row(run: RunDirectory) -> None:
    """Not even where W&B's own process is killed, which writes the file; nor does a resume."""
    follower = Follower(run, "trainer", _OFFLINE)
    follower.start()
    for first in range(1, 100, 10):  # so that kills come between being handed over and written
        add_steps(run, range(first, first + 10))
    wait_until(lambda: _rows(run))
    assert follower.pid is not None
    process = psutil.Process(follower.pid)
    (core,) = [each for each in process.children() if "wandb-core" in each.name()]
    add_steps(run, range(101, 150))
    core.kill()
    add_steps(run, range(150, 200))
    wait_until(lambda: len(_segments(run)) > 1)
    for each in [*process.children(), process]:
        each.kill()
    add_steps(run, range(190, 220), loss=2.0)
    follower.close(30.0)
    _wait_for_end(follower)
    _send(run, _OFFLINE)
    rows = _rows(run)
    assert _is_rising(rows)
    lines = run.metrics_path.read_text().splitlines()
    written = [json.loads(line)["step"] for line in lines]
    assert [row["train/step"] for row in rows] == written


def test_a_missing_key_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line of netrc is a key, and so is the environment's; offline needs none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    assert missing_key(_OFFLINE) is None
    assert "no key for https://wandb.example.org" in str(missing_key(_ONLINE))
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password abc\n")
    assert missing_key(_ONLINE) is None
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.example.org")
    assert missing_key(_ONLINE) is not None
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    assert missing_key(_ONLINE) is None
