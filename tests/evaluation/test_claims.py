"""Failed, lost and repeated attempts: they are reported, come last and hold up no other task."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.build import wait_until
from tests.evaluation.build import MakeRun, claims_of, leftovers, save, serve, steps_in
from tests.evaluation.probe import scores_of

from longtake import fsio
from longtake.checkpoint.files import needed_steps
from longtake.errors import DataError, PlanError, RecipeError
from longtake.evaluation import pending
from longtake.evaluation.options import ServerReport
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
from longtake.fsio import append_json, partial_path, write_json
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import EvaluationTask, Progress, checkpoint_key, forget_server

_OTHER = "[evaluation.presets.other]\nprompts = ['a blue circle']\n"


def test_bytes_that_are_not_there_yet_are_no_attempt(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save(run, 10) / "ema" / "main" / "__0_0.distcp"
    whole = weights.read_bytes()
    weights.write_bytes(bytes(len(whole)))
    server = serve(run)
    assert (server.evaluated, len(server.failed)) == ([], 1)
    assert "its checksum (xxh3_64) differs" in capsys.readouterr().out
    for _ in range(4):  # more than a task's attempts
        serve(run)
    weights.write_bytes(whole)
    assert len(serve(run).evaluated) == 1
    assert {record["ended"] for record in claims_of(run, 10)} == {"damaged", "done"}


class _FailsAt10:
    """Fails at step 10, with half a video; notes which steps are tried."""

    def __init__(self, error: Exception) -> None:
        self._error, self.tried = error, list[int]()

    def __call__(self, task: EvaluationTask, folder: Path, _: Progress) -> None:
        self.tried.append(task.step)
        if task.step == 10:
            (folder / "half.mp4").write_text("half")
            raise self._error


def test_a_failure_goes_last_and_is_tried_so_often(run: RunDirectory) -> None:
    save(run, 10, 20, 30)
    work = _FailsAt10(RuntimeError("boom"))
    server = serve(run, work)
    assert work.tried == [10, 20, 30, 10, 10]
    assert server.failed == {f"{run.path}: probe of step 10"}
    again = _FailsAt10(RuntimeError("boom"))
    serve(run, again)
    assert again.tried == []
    records = claims_of(run, 10)
    assert [(record["ended"], record["reason"]) for record in records] == [
        ("failed", "RuntimeError: boom")
    ] * 3
    assert "raise self._error" in records[0]["traceback"]
    failed = [event for event in read_events(run) if event["event"] == "evaluation_failed"]
    assert [event["attempt"] for event in failed] == [1, 2, 3]
    assert leftovers(run) == []


def test_a_preset_that_cannot_be_is_tried_once(make_run: MakeRun, capsys: Any) -> None:
    run = make_run(more=_OTHER)
    save(run, 10, 20)

    def refuse_other(task: EvaluationTask, *_: object) -> None:
        if task.preset.name == "other" and task.preset.prompts[0] == "a blue circle":
            raise RecipeError("33 cannot be divided by 8. Take 32.")

    server = serve(run, refuse_other)
    assert [each["preset"] for each in server.evaluated] == ["probe", "probe"]
    assert capsys.readouterr().out.count("33 cannot be divided") == 1
    assert [record["final"] for record in claims_of(run, 10, "other")] == [True]
    assert claims_of(run, 20, "other") == []
    run.recipe_path.write_text(run.recipe_path.read_text().replace("a blue circle", "a red one"))
    assert [each["step"] for each in serve(run, refuse_other).evaluated] == [10, 20]


def test_a_full_disk_is_not_the_presets_fault(run: RunDirectory) -> None:
    save(run, 10)
    error = DataError("00_s0.mp4 cannot be written: No space left on device.")
    error.__cause__ = OSError(28, "No space left on device")
    work = _FailsAt10(error)
    serve(run, work)
    assert work.tried == [10, 10, 10]


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_failure(run: RunDirectory) -> None:
    save(run, 10, 20)

    def delete_10(task: EvaluationTask, *_: object) -> None:
        if task.step == 10:
            shutil.rmtree(task.checkpoint)

    server = serve(run, delete_10)
    assert [each["step"] for each in server.evaluated] == [20]
    assert server.failed == set()
    assert [record["ended"] for record in claims_of(run, 10)] == ["gone"]


def test_what_failed_rests_while_a_server_follows(run: RunDirectory) -> None:
    """So that what was wrong, such as a full disk, has time to pass."""
    save(run, 10)
    append_json(run.events_path, {"time": "1", "event": "finished"})
    tried: list[float] = []

    def fail_first(*_: object) -> None:
        tried.append(time.monotonic())
        if len(tried) == 1:
            raise OSError(28, "No space left on device")

    server = serve(run, fail_first, follows=True, until_finished=True, pause_seconds=0.4)
    assert len(server.evaluated) == 1
    assert server.failed == set()
    assert tried[1] - tried[0] >= 0.4


def test_a_preset_that_does_not_fit_the_memory_is_tried_again_later(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(pending, "time", clock)
    run = make_run(more=_OTHER)
    save(run, 10, 20)
    tried = list[tuple[str, int]]()

    def fail_first(task: EvaluationTask, *_: object) -> None:
        tried.append((task.preset.name, task.step))
        if len(tried) == 1:
            raise PlanError("One video does not fit the memory.")
        if len(tried) == 3:  # nothing else is left to do
            monkeypatch.setattr(clock, "monotonic", lambda: time.monotonic() + 600)
        if len(tried) == 5:
            append_json(run.events_path, {"time": "1", "event": "finished"})

    server = serve(run, fail_first, follows=True, until_finished=True, pause_seconds=0.0)
    assert tried[:3] == [("probe", 10), ("other", 10), ("other", 20)]
    assert set(tried[3:]) == {("probe", 10), ("probe", 20)}
    assert server.failed == set()
    failed = [record["final"] for record in claims_of(run, 10) if record["ended"] == "failed"]
    assert failed == [False]


def test_what_cannot_be_claimed_is_told_with_its_reason(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 10)
    EvaluationDirectory(run).path.mkdir()
    (EvaluationDirectory(run).path / "claims").write_text("in the way")
    server = serve(run)
    assert server.failed == {f"{run.path}: probe of step 10"}
    said = capsys.readouterr().out
    assert "probe of step 10 cannot be claimed: " in said
    assert "Not a directory" in said
    assert "Make room" not in said


def test_a_report_tells_each_thing_once_and_forgets_what_is_long_past(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Over weeks it needs no more memory; what is told again and again is not forgotten."""
    report = ServerReport(Console(width=80))
    for number in range(3000):
        report.wrong("again and again")
        report.wrong(f"number {number}")
    report.wrong("number 2999")
    report.wrong("number 0")
    said = capsys.readouterr().out.splitlines()
    assert said.count("longtake: again and again") == 1
    assert said.count("longtake: number 2999") == 1
    assert said.count("longtake: number 0") == 2
    assert report.num_wrong == len(said) == 3002


def test_a_preset_that_is_kept_is_served_from_a_full_disk(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 10)
    serve(run)
    save(run, 20)

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(fsio.writing, "_write_durably", full)
        assert serve(run).failed == {f"{run.path}: probe of step 20"}
    said = capsys.readouterr().out
    reason = "somewhere: No space left on device. Make room: it is tried again."
    assert f"probe of step 20 cannot be claimed: {reason}" in said
    assert "preset.json" not in said
    assert leftovers(run) == []
    assert [each["step"] for each in serve(run).evaluated] == [20]


def test_a_checkpoint_whose_commit_is_garbage_is_told_of(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (save(run, 10) / "COMMITTED").write_bytes(b"")
    save(run, 20)
    assert [each["step"] for each in serve(run).evaluated] == [20]
    assert f"{run.checkpoint_path(10)}/COMMITTED cannot be read" in capsys.readouterr().out


def test_a_server_that_was_stopped_too_long_does_not_publish(
    run: RunDirectory, probing: Any, tmp_path: Path
) -> None:
    """Of another machine, so that nobody can tell it from a dead one; it wakes and goes on."""
    save(run, 10)
    gate = tmp_path / "gate"
    directory = EvaluationDirectory(run)
    with probing(run, "--gate", str(gate), "--place", "another machine") as stopped:
        wait_until(lambda: list(directory.path.glob("probe/.step_*/*.mp4")))
        os.kill(stopped.pid, signal.SIGSTOP)
        with probing(run) as other:
            wait_until(lambda: directory.steps("probe"))
            other.terminate()
            assert other.wait(20) == 0
        first = directory.scores("probe", 10)
        assert first is not None
        gate.touch()
        save(run, 20)
        os.kill(stopped.pid, signal.SIGCONT)
        wait_until(lambda: directory.steps("probe") == [10, 20])
        stopped.terminate()
        assert stopped.wait(20) == 0
    assert directory.scores("probe", 10) == first
    assert steps_in(run, "evaluation_finished") == [10, 20]
    (lost,) = (event for event in read_events(run) if event["event"] == "evaluation_lost")
    assert lost["by"].endswith(f"-{stopped.pid}")
    assert not list(directory.path.glob("*/.*"))


def test_a_checkpoint_that_kills_its_servers_is_given_up(
    run: RunDirectory, probing: Any, tmp_path: Path, capsys: Any
) -> None:
    save(run, 10)
    directory = EvaluationDirectory(run)
    for _ in range(3):
        with probing(run, "--gate", str(tmp_path / "never")) as server:
            own = f"probe/.step_*-{server.pid}-*/*.mp4"
            wait_until(lambda own=own: list(directory.path.glob(own)))  # type: ignore[misc]
            server.kill()
            server.wait(20)
    server = serve(run)
    assert server.evaluated == []
    assert "after 3 attempts" in capsys.readouterr().out
    assert not list(directory.path.glob("*/.*"))
    assert needed_steps(run) == set()
    assert serve(run).failed == set()  # it is known


def test_a_server_on_a_full_disk_goes_on_when_there_is_room(
    make_run: MakeRun, tmp_path: Path
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
        save(run, 10, 20)
        hog = run.path / "hog"

        def fill_the_disk(task: EvaluationTask, folder: Path, _: Progress) -> None:
            if task.step == 10 and not hog.exists() and task.attempts == 0:
                hog.write_bytes(bytes(300_000))
                (folder / "big.mp4").write_bytes(bytes(1_000_000))

        server = serve(run, fill_the_disk)
        assert [each["step"] for each in server.evaluated] == [20, 10]
        claims = [history(path) for path in (run.path / "evaluations/claims/probe").iterdir()]
        endings = sorted([record["ended"] for record in each] for each in claims)
        assert endings == [["done"], ["failed", "done"]]
        assert not list(run.path.glob("evaluations/*/.*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_who_comes_second_drops_its_own(run: RunDirectory) -> None:
    save(run, 10, 20)
    directory = EvaluationDirectory(run)

    def publish_first(task: EvaluationTask, *_: object) -> None:
        if task.step == 20:  # the run went back, and another has evaluated what it saved anew
            save(run, 20, content=b"saved anew")
        whole = directory.result_path("probe", task.step)
        whole.mkdir(parents=True)
        key = str(checkpoint_key(task.checkpoint, task.preset.weights))
        write_json(whole / "scores.json", scores_of(task.step, key, "the first"))

    server = serve(run, publish_first)
    assert server.evaluated == []
    assert server.failed == set()
    for step in (10, 20):
        scores = directory.scores("probe", step)
        assert scores is not None
        assert scores["server"] == "the first"
    assert not list(directory.path.glob("*/.*"))


def test_what_waited_for_a_dead_server_is_needed_no_more(
    run: RunDirectory, probing: Any, tmp_path: Path
) -> None:
    save(run, 10, 20, 30)
    with probing(run, "--gate", str(tmp_path / "never")) as server:
        wait_until(lambda: len(needed_steps(run)) > 1 and claims_of(run, 10))
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
