"""Who dies, sleeps too long or finds no room: others go on, and nothing comes twice."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.checkpoint.deletion import needed_steps
from longtake.evaluation.server.attempt import forget_server
from longtake.evaluation.server.checkpoints import checkpoint_key
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
from longtake.fsio import partial_path, write_json
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.run_dir import RunDirectory


def _until(is_so: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, f"waited {seconds} s until {what}"
        time.sleep(0.02)


def _as_seen_by(events: list[dict[str, Any]], kind: str) -> list[int]:
    return [event["step"] for event in events if event["event"] == kind]


def test_a_server_that_was_stopped_too_long_does_not_publish(
    run: RunDirectory, save: Any, probing: Any, serve: Any, tmp_path: Path
) -> None:
    """Of another machine, so that nobody can tell it from a dead one; it wakes and goes on."""
    save(run, 10)
    gate = tmp_path / "gate"
    directory = EvaluationDirectory(run)
    with probing(run, "--gate", str(gate), "--place", "another machine") as stopped:
        _until(lambda: list(directory.path.glob("probe/.step_*/*.mp4")), "it samples")
        os.kill(stopped.pid, signal.SIGSTOP)
        with probing(run) as other:
            _until(lambda: directory.steps("probe"), "another has taken it over")
            other.terminate()
            assert other.wait(20) == 0
        first = directory.scores("probe", 10)
        assert first is not None
        gate.touch()
        save(run, 20)
        os.kill(stopped.pid, signal.SIGCONT)
        _until(lambda: directory.steps("probe") == [10, 20], "it goes on with the next")
        stopped.terminate()
        assert stopped.wait(20) == 0
    assert directory.scores("probe", 10) == first
    events = list(read_events(run))
    assert _as_seen_by(events, "evaluated") == [10, 20]
    lost = [event for event in events if event["event"] == "evaluation_lost"]
    assert [event["by"].endswith(f"-{stopped.pid}") for event in lost] == [True]
    assert not list(directory.path.glob("*/.*"))


def test_a_checkpoint_that_kills_its_servers_is_given_up(
    run: RunDirectory, save: Any, probing: Any, serve: Any, tmp_path: Path, capsys: Any
) -> None:
    """Who dies over it has tried it; the fourth says so and leaves it."""
    save(run, 10)
    directory = EvaluationDirectory(run)
    for _ in range(3):
        with probing(run, "--gate", str(tmp_path / "never")) as server:
            own = f"probe/.step_*-{server.pid}-*/*.mp4"
            _until(lambda own=own: list(directory.path.glob(own)), "it samples")  # type: ignore[misc]
            server.kill()
            server.wait(20)
    server = serve(run)
    assert server.evaluated == []
    assert "after 3 attempts" in capsys.readouterr().out
    assert not list(directory.path.glob("*/.*"))
    assert needed_steps(run) == set()
    assert serve(run).failed == set()  # it is known


def test_a_server_on_a_full_disk_goes_on_when_there_is_room(
    make_run: Callable[..., RunDirectory], save: Any, serve: Any, probe: Any, tmp_path: Path
) -> None:
    """Its partial result is removed, so that the small files fit; the checkpoint comes again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        run = make_run("disk/run")
        for step in (10, 20):
            save(run, step)
        hog = run.path / "hog"

        def work(task: Any, folder: Path, tick: Any) -> Any:
            if task.step == 10 and not hog.exists() and task.attempts == 0:
                hog.write_bytes(bytes(300_000))
                (folder / "big.mp4").write_bytes(bytes(1_000_000))
            return probe.Probe()(task, folder, tick)

        server = serve(run, work)
        assert [each["step"] for each in server.evaluated] == [20, 10]
        claims = [history(path) for path in (run.path / "evaluations/claims/probe").iterdir()]
        endings = sorted([record["ended"] for record in each] for each in claims)
        assert endings == [["done"], ["failed", "done"]]
        assert not list(run.path.glob("evaluations/*/.*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_who_comes_second_drops_its_own(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """A result that appears in the last moment stays; so does one of newer weights."""
    save(run, 10)
    save(run, 20)
    directory = EvaluationDirectory(run)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 20:  # the run went back, and another has evaluated what it saved anew
            save(run, 20, b"saved anew")
        own = probe.Probe()(task, folder, tick) if task.step == 10 else {}
        whole = directory.result_path("probe", task.step)
        whole.mkdir(parents=True)
        key = task.key if task.step == 10 else checkpoint_key(task.checkpoint, task.preset.weights)
        write_json(whole / "scores.json", probe.scores_of(task.step, key, "the first"))
        return own

    server = serve(run, work)
    assert server.evaluated == []
    assert server.failed == set()
    for step in (10, 20):
        scores = directory.scores("probe", step)
        assert scores is not None
        assert scores["server"] == "the first"
    assert not list(directory.path.glob("*/.*"))


def test_what_waited_for_a_dead_server_is_needed_no_more(
    run: RunDirectory, save: Any, probing: Any, serve: Any, tmp_path: Path
) -> None:
    """Whoever takes over what it died over frees the checkpoints that were to come next, too."""
    for step in (10, 20, 30):
        save(run, step)
    with probing(run, "--gate", str(tmp_path / "never")) as server:
        _until(lambda: len(needed_steps(run)) > 1, "others wait")
        server.kill()
        server.wait(20)
    (heartbeat,) = run.path.glob("evaluations/servers/*/heartbeat.json")
    partial_path(heartbeat).write_text("{")  # it was writing when it died
    serve(run)
    assert EvaluationDirectory(run).steps("probe") == [10, 20, 30]
    assert needed_steps(run) == set()
    assert [path.name for path in heartbeat.parent.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize(
    "name", ["{thesis}", "../../../thesis.txt", "a\0b", "..", "", "linked", "heartbeat.json"]
)
def test_a_dead_servers_name_deletes_nothing_but_its_heartbeat(
    name: str, run: RunDirectory, tmp_path: Path
) -> None:
    """A lease can say any name, and a server's folder can be a link to another folder."""
    thesis = tmp_path / "heartbeat.json"
    thesis.write_text("all of it")
    server = ServerDirectory(run, "vm-1")
    server.write_heartbeat({"server": "vm-1", "time": "2026-01-01", "needs": [10]})
    server.path.with_name("linked").symlink_to(tmp_path)
    forget_server(run, name.format(thesis=thesis), "vm-2")
    forget_server(run, "vm-1", "vm-1")  # itself
    assert thesis.exists()
    assert needed_steps(run) == {10}
    forget_server(run, "vm-1", "vm-2")
    assert needed_steps(run) == set()
