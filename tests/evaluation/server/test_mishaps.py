"""What nobody has foreseen is told once, and ends neither the server nor one of its threads."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.checkpoint.deletion import needed_steps
from longtake.evaluation.server import keeper
from longtake.evaluation.server.wanted import Wanted
from longtake.evaluation.sync.source import Source
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import append_json
from longtake.run_dir import RunDirectory


def _failing_at_first(function: Any, times: int) -> Any:
    """The same function, which fails so often before."""
    left = [times]

    def failing(*given: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyError("unforeseen")
        return function(*given)

    return failing


def test_one_run_that_cannot_be_looked_at_holds_up_no_other(
    make_run: Callable[..., RunDirectory],
    save: Any,
    serve: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is told of in one line, which says where it happened, though it is tried at each look."""
    runs = [make_run(f"runs/{name}") for name in "abc"]
    for run in runs:
        save(run, 10)
        save(run, 20)
    read, tried = Wanted.read, []

    def failing(wanted: Wanted) -> None:
        if wanted._run == runs[1]:
            tried.append(wanted)
            raise KeyError("unforeseen")
        read(wanted)

    monkeypatch.setattr(Wanted, "read", failing)
    serve(tmp_path / "runs")
    assert [EvaluationDirectory(run).steps("probe") for run in runs] == [[10, 20], [], [10, 20]]
    said = capsys.readouterr().out
    assert said.count("unforeseen") == 1
    assert f"{runs[1].path}: KeyError in test_mishaps.py, line " in said
    assert len(tried) > 1


def test_garbage_in_others_files_ends_nothing(
    make_run: Callable[..., RunDirectory], save: Any, serve: Any, tmp_path: Path
) -> None:
    """In a result, in a claim and among the events; a result that is none gives way."""
    run, other = make_run("runs/a"), make_run("runs/b")
    for each in (run, other):
        save(each, 10)
    serve(run)
    result = EvaluationDirectory(run).result_path("probe", 10)
    (result / "scores.json").write_text('{"step": 10}\n')
    run.events_path.write_text('[1]\n"finished"\n')
    (claim,) = (EvaluationDirectory(run).path / "claims" / "probe").iterdir()
    released = {**json.loads((claim / "0.json").read_text()), "ended": "released"}
    for number, text in enumerate(("{}", "[]", "", json.dumps(released))):
        (claim / f"{number}.json").write_text(text)
    serve(tmp_path / "runs", until_finished=False)
    for each in (run, other):
        assert EvaluationDirectory(each).scores("probe", 10) is not None


def test_the_keeper_outlives_an_error(
    run: RunDirectory,
    save: Any,
    serve: Any,
    probe: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It reports it, and needs the next checkpoint at a later look."""
    save(run, 10)
    save(run, 20)
    failing = _failing_at_first(keeper.waiting_steps, 3)
    monkeypatch.setattr(keeper, "waiting_steps", failing)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        limit = time.monotonic() + 20
        while task.step == 10 and 20 not in needed_steps(run):
            assert time.monotonic() < limit, "20 is never needed"
            time.sleep(0.01)
        return probe.Probe()(task, folder, tick)

    assert [each["step"] for each in serve(run, work).evaluated] == [10, 20]
    assert capsys.readouterr().out.count("unforeseen") == 1


def test_the_thread_that_pulls_outlives_an_error(
    make_run: Callable[..., RunDirectory],
    save: Any,
    serve: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While runs are followed it tries again; else the server tells of it and ends."""
    origin = make_run("elsewhere/run")
    save(origin, 10)
    append_json(origin.events_path, {"time": "1", "event": "launched"})
    append_json(origin.events_path, {"time": "2", "event": "finished"})
    look = Source.look
    monkeypatch.setattr(Source, "look", _failing_at_first(look, 1))
    assert serve(tmp_path / "one", source=str(origin.path)).evaluated == []
    assert "unforeseen" in capsys.readouterr().out
    monkeypatch.setattr(Source, "look", _failing_at_first(look, 2))
    options = {"follows": True, "until_finished": True, "every_seconds": 0.1}
    server = serve(tmp_path / "two", source=str(origin.path), **options)
    assert [each["step"] for each in server.evaluated] == [10]
    assert "It is tried again." in capsys.readouterr().out


def test_a_full_disk_does_not_fail_the_end_of_a_mirroring(
    make_run: Callable[..., RunDirectory],
    save: Any,
    serve: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease of the mirror is given back where that can be written."""
    origin = make_run("elsewhere/run")
    save(origin, 10)
    close = Source.close

    def failing(source: Source) -> None:
        close(source)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Source, "close", failing)
    server = serve(tmp_path / "mirror", source=str(origin.path))
    assert [each["step"] for each in server.evaluated] == [10]
