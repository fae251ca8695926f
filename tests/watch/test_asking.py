"""All nodes of a run are asked where their processes are, at any moment."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longtake.errors import RunError
from longtake.heartbeat import Heart, folder_of
from longtake.node_dir import NodeDirectory
from longtake.run_dir import RunDirectory
from longtake.watch.asking import ask_nodes, ask_process
from longtake.watch.picture import picture

Stage = Any
"""Plays a run: see conftest.py."""


@pytest.fixture
def run(stage: Stage) -> Iterator[RunDirectory]:
    """A run directory, with no hearts where this node's would be."""
    run: RunDirectory = stage.run
    run.recipe_path.touch()
    yield run
    shutil.rmtree(folder_of(run.path), ignore_errors=True)


def _await(found: Callable[[], Any]) -> None:
    end = time.monotonic() + 15
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


def _watched(stage: Stage, *hosts: str) -> list[Any]:
    """A rank and a watcher on each of these nodes."""
    watchers = []
    for rank, host in enumerate(hosts):
        stage.rank("waits", rank, host)
        watchers.append(stage.watcher(host=host, min_seconds=100.0, max_seconds=100.0))
    _await(lambda: all(stage.node(host).read_heartbeat() for host in hosts))
    first = [stage.node(host).read_heartbeat()["beat"] for host in hosts]
    # A request that is there before a watcher's first look is none for it.
    _await(lambda: not _beats(stage, hosts) & set(zip(hosts, first, strict=True)))
    return watchers


def _beats(stage: Stage, hosts: Sequence[str]) -> set[tuple[str, int]]:
    return {(host, stage.node(host).read_heartbeat()["beat"]) for host in hosts}


def _hearts_here(run: RunDirectory) -> Heart:
    heart = Heart(folder_of(run.path), "rank", rank=4)
    heart.join("abcdefgh")
    heart.enter("forward")
    return heart


def test_every_node_with_a_watcher_answers(stage: Stage, run: RunDirectory) -> None:
    """And those of all nodes that stand at the same line are one group."""
    _watched(stage, "gpu1", "gpu2")
    answers = ask_nodes(run, native=False)
    facts = picture(answers)
    assert (facts["hosts"], facts["silent"]) == (["gpu1", "gpu2"], [])
    ranks = [each for each in facts["groups"] if each["role"] == "rank"]
    assert [each["count"] for each in ranks] == [2]
    assert [each["host"] for each in ranks[0]["members"]] == ["gpu1", "gpu2"]
    assert [path.parent.parent.name for path in answers.files] == ["gpu1", "gpu2"]


def test_a_node_whose_watcher_does_not_live_is_not_waited_for(
    stage: Stage, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found out within some seconds; what the others said is told."""
    monkeypatch.setattr("longtake.watch.asking._SIGN_OF_LIFE_SECONDS", 1.5)
    _, frozen = _watched(stage, "gpu1", "gpu2")
    os.kill(frozen.pid, signal.SIGSTOP)
    answers = ask_nodes(run, native=False)
    assert picture(answers)["hosts"] == ["gpu1"]
    assert answers.silent == ()


def test_a_watcher_that_lives_and_does_not_answer_is_named(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heart beats, and that is all that is known of it."""
    monkeypatch.setattr("longtake.watch.asking._SIGN_OF_LIFE_SECONDS", 0.5)
    monkeypatch.setattr("longtake.watch.asking._WAIT_SECONDS", 1.5)
    node, is_over = NodeDirectory(run, "gpu1"), threading.Event()
    node.write_heartbeat({"pid": 1, "beat": 0})

    def beat() -> None:
        while not is_over.wait(0.2):
            node.write_heartbeat({"pid": 1, "beat": time.monotonic_ns()})

    thread = threading.Thread(target=beat)
    thread.start()
    answers = ask_nodes(run, native=False)
    is_over.set()
    thread.join()
    assert answers.silent == ("gpu1",)
    assert (answers.files, answers.own) == ((), None)


def test_without_a_watcher_this_nodes_processes_are_read(run: RunDirectory) -> None:
    """By the hearts that they have; at once, if nobody else could answer."""
    heart = _hearts_here(run)
    facts = picture(ask_nodes(run, native=False))
    assert facts["hosts"] == [socket.gethostname()]
    [rank] = [each for each in facts["groups"] if each["role"] == "rank"]
    assert [(each["pid"], each["rank"]) for each in rank["members"]] == [(os.getpid(), 4)]
    assert rank["stack"]
    assert facts["files"] == []
    heart.close()


def test_a_run_directory_that_cannot_be_written_is_read_here(
    run: RunDirectory, tmp_path: Path
) -> None:
    """A full disk is when somebody wants to know where all are."""
    (run.path / "requests").write_text("not a folder")
    heart = _hearts_here(run)
    assert picture(ask_nodes(run, native=False))["launch"] == "abcdefgh"
    heart.close()


def test_nobody_is_there(run: RunDirectory, tmp_path: Path) -> None:
    """It is said, and where to look; a folder that is no run's is another mistake."""
    with pytest.raises(RunError, match=r"Nobody is running .*longtake show"):
        ask_nodes(run, native=False)
    with pytest.raises(RunError, match=r"is not a run directory: it has no recipe\.toml"):
        ask_nodes(RunDirectory(tmp_path / "nowhere"), native=False)


def test_a_process_that_cannot_be_asked() -> None:
    """None of this number, or one that has ended."""
    with pytest.raises(RunError, match="There is no process 4194305 on this node"):
        ask_process(2**22 + 1, native=False)
    process = subprocess.Popen(["true"])
    _await(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z")
    with pytest.raises(RunError, match=f"has ended, and only waits for its parent, {os.getpid()}"):
        ask_process(process.pid, native=False)
    process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_users_process_is_not_asked() -> None:
    """It says whose it is, and who could ask."""
    with subprocess.Popen(["sleep", "60"]) as process:
        os.seteuid(65534)
        try:
            with pytest.raises(RunError, match=r"belongs to root, and this is nobody: .*by root"):
                ask_process(process.pid, native=False)
        finally:
            os.seteuid(0)
            process.kill()
