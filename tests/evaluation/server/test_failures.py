"""What fails is told, goes last, and never holds up the rest."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtake import fsio
from longtake.checkpoint.deletion import needed_steps
from longtake.errors import DataError, PlanError, RecipeError
from longtake.evaluation.server import attempt
from longtake.evaluation.server.report import Report
from longtake.evaluation.server.stop import Stop
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import append_json
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.run_dir import RunDirectory


def _claims(run: RunDirectory, step: int, preset: str = "probe") -> list[dict[str, Any]]:
    folders = (EvaluationDirectory(run).path / "claims" / preset).glob(f"step_{step:08d}-*")
    return [record for folder in sorted(folders) for record in history(folder)]


def _steps(run: RunDirectory, preset: str = "probe") -> list[int]:
    return EvaluationDirectory(run).steps(preset)


def _leftovers(run: RunDirectory) -> list[Path]:
    return [*run.path.glob("evaluations/*/.*"), *map(run.checkpoint_path, needed_steps(run))]


def test_a_checkpoint_that_arrives_is_left_alone_until_it_is_whole(
    run: RunDirectory, save: Any, serve: Any
) -> None:
    """COMMITTED first, and weights that are missing or short: not sampled, and no attempt."""
    weights = save(run, 10) / "ema" / "main" / "__0_0.distcp"
    whole = weights.read_bytes()
    weights.unlink()
    assert serve(run).evaluated == []
    weights.write_bytes(whole[:-1])
    assert serve(run).evaluated == []
    assert _claims(run, 10) == []
    weights.write_bytes(whole)
    assert len(serve(run).evaluated) == 1


def test_bytes_that_are_not_there_yet_are_no_attempt(
    run: RunDirectory, save: Any, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that has its size before its content is refused, told, and tried when it changes."""
    weights = save(run, 10) / "ema" / "main" / "__0_0.distcp"
    whole = weights.read_bytes()
    weights.write_bytes(bytes(len(whole)))
    server = serve(run)
    assert (server.evaluated, len(server.failed)) == ([], 1)
    assert "its checksum (sha256) differs" in capsys.readouterr().out
    for _ in range(4):  # more than a task's attempts
        serve(run)
    weights.write_bytes(whole)
    assert len(serve(run).evaluated) == 1
    assert {record["ended"] for record in _claims(run, 10)} == {"damaged", "done"}


class _Failing:
    """Fails at some steps; else as the probe."""

    def __init__(self, work: Any, error: Exception, steps: tuple[int, ...]) -> None:
        self._work, self._error, self._steps = work, error, steps
        self.tried: list[int] = []

    def __call__(self, task: Any, folder: Path, tick: Any) -> Any:
        self.tried.append(task.step)
        if task.step in self._steps:
            (folder / "half.mp4").write_text("half")
            raise self._error
        return self._work(task, folder, tick)


def test_a_failure_goes_last_and_is_tried_so_often(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """Three times by whichever servers; the others are done before the second."""
    for step in (10, 20, 30):
        save(run, step)
    work = _Failing(probe.Probe(), RuntimeError("boom"), (10,))
    server = serve(run, work)
    assert work.tried == [10, 20, 30, 10, 10]
    assert server.failed == {f"{run.path}: probe of step 10"}
    again = _Failing(probe.Probe(), RuntimeError("boom"), (10,))
    serve(run, again)
    assert again.tried == []
    records = _claims(run, 10)
    assert [(record["ended"], record["reason"]) for record in records] == [
        ("failed", "RuntimeError: boom")
    ] * 3
    assert "half.mp4" in records[0]["traceback"] or "raise self._error" in records[0]["traceback"]
    failed = [event for event in read_events(run) if event["event"] == "evaluation_failed"]
    assert [event["attempt"] for event in failed] == [1, 2, 3]
    assert _leftovers(run) == []


def test_a_preset_that_cannot_be_is_tried_once(
    make_run: Callable[..., RunDirectory], save: Any, serve: Any, probe: Any, capsys: Any
) -> None:
    """Of all its checkpoints; another preset goes on; when it is changed it is tried anew."""
    other = "[evaluation.presets.other]\nprompts = ['a blue circle']\n"
    run = make_run(more=other)
    for step in (10, 20):
        save(run, step)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if task.preset.name == "other" and task.preset.prompts[0] == "a blue circle":
            raise RecipeError("33 cannot be divided by 8. Take 32.")
        return probe.Probe()(task, folder, tick)

    server = serve(run, work)
    assert [each["preset"] for each in server.evaluated] == ["probe", "probe"]
    assert capsys.readouterr().out.count("33 cannot be divided") == 1
    assert [record["final"] for record in _claims(run, 10, "other")] == [True]
    assert _claims(run, 20, "other") == []
    run.recipe_path.write_text(run.recipe_path.read_text().replace("a blue circle", "a red one"))
    assert [each["step"] for each in serve(run, work).evaluated] == [10, 20]


def test_a_full_disk_is_not_the_presets_fault(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """An error that an OSError caused is tried again, whatever it is called."""
    save(run, 10)
    error = DataError("00_s0.mp4 cannot be written: No space left on device.")
    error.__cause__ = OSError(28, "No space left on device")
    work = _Failing(probe.Probe(), error, (10,))
    serve(run, work)
    assert work.tried == [10, 10, 10]


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_failure(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """It ends as gone; the server goes on."""
    save(run, 10)
    save(run, 20)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 10:
            shutil.rmtree(task.checkpoint)
        return probe.Probe()(task, folder, tick)

    server = serve(run, work)
    assert [each["step"] for each in server.evaluated] == [20]
    assert server.failed == set()
    assert [record["ended"] for record in _claims(run, 10)] == ["gone"]


def test_what_failed_rests_while_a_server_follows(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """So that what was wrong, such as a full disk, has time to pass."""
    save(run, 10)
    append_json(run.events_path, {"time": "1", "event": "finished"})
    tried: list[float] = []

    def work(task: Any, folder: Path, tick: Any) -> Any:
        tried.append(time.monotonic())
        if len(tried) == 1:
            raise OSError(28, "No space left on device")
        return probe.Probe()(task, folder, tick)

    server = serve(run, work, follows=True, until_finished=True, pause_seconds=0.4)
    assert len(server.evaluated) == 1
    assert server.failed == set()
    assert tried[1] - tried[0] >= 0.4


def test_a_preset_that_does_not_fit_the_memory_is_tried_again_later(
    make_run: Callable[..., RunDirectory],
    save: Any,
    serve: Any,
    probe: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may use it just now: the preset rests, another goes on, and both are done."""
    monkeypatch.setattr(attempt, "_PAUSE_SECONDS", 0.5)
    run = make_run(more="[evaluation.presets.other]\nprompts = ['a blue circle']\n")
    for step in (10, 20):
        save(run, step)
    stop, tried = Stop(), list[tuple[str, int, float]]()

    def work(task: Any, folder: Path, tick: Any) -> Any:
        tried.append((task.preset.name, task.step, time.monotonic()))
        if len(tried) == 1:
            raise PlanError("One video does not fit the memory.")
        if len(tried) == 5:
            stop.ask("all done")
        return probe.Probe()(task, folder, lambda *said: None)

    server = serve(run, work, stop, follows=True, pause_seconds=0.0)
    assert [each[:2] for each in tried[:3]] == [("probe", 10), ("other", 10), ("other", 20)]
    assert {each[:2] for each in tried[3:]} == {("probe", 10), ("probe", 20)}
    assert tried[3][2] - tried[0][2] >= 0.5
    assert server.failed == set()
    assert [record["final"] for record in _claims(run, 10) if record["ended"] == "failed"] == [
        False
    ]


def test_what_cannot_be_claimed_is_told_with_its_reason(
    run: RunDirectory, save: Any, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file lies where claims are to: that is no lack of room, and nobody is told to make some."""
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
    report = Report(Console(width=80))
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
    run: RunDirectory,
    save: Any,
    serve: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that starts then knows what is to be done, and tells that it has no room for it."""
    save(run, 10)
    serve(run)
    save(run, 20)

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "_write_durably", full)
        assert serve(run).failed == {f"{run.path}: probe of step 20"}
    said = capsys.readouterr().out
    reason = "somewhere: No space left on device. Make room: it is tried again."
    assert f"probe of step 20 cannot be claimed: {reason}" in said
    assert "preset.json" not in said
    assert _leftovers(run) == []
    assert [each["step"] for each in serve(run).evaluated] == [20]


def test_a_checkpoint_whose_commit_is_garbage_is_told_of(
    run: RunDirectory, save: Any, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """COMMITTED of 0 bytes, as a machine that lost its power leaves it; the others are done."""
    (save(run, 10) / "COMMITTED").write_bytes(b"")
    save(run, 20)
    assert [each["step"] for each in serve(run).evaluated] == [20]
    assert f"{run.checkpoint_path(10)}/COMMITTED cannot be read" in capsys.readouterr().out
