"""Runs that are trained elsewhere: brought here, evaluated, and told of there."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.checkpoint.files import needed_steps
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import append_json
from longtake.node_dir import read_events
from longtake.run_dir import RunDirectory


@pytest.fixture
def origin(make_run: Callable[..., RunDirectory], save: Any) -> RunDirectory:
    """A run of two checkpoints, trained elsewhere."""
    run = make_run("elsewhere/run")
    for step in (10, 20):
        save(run, step)
    return run


def test_what_is_wanted_is_brought_here_and_its_results_go_back(
    origin: RunDirectory, serve: Any, tmp_path: Path
) -> None:
    """A second server, of a mirror that is empty again, finds the results there, and pulls none."""
    mirror = tmp_path / "mirror"
    server = serve(mirror, source=str(origin.path))
    assert [each["step"] for each in server.evaluated] == [10, 20]
    assert EvaluationDirectory(origin).steps("probe") == [10, 20]
    pulled = [e["step"] for e in read_events(RunDirectory(mirror)) if e["event"] == "pulled"]
    assert pulled == [10, 20]
    assert needed_steps(origin) == set()
    shutil.rmtree(mirror)
    assert serve(mirror, source=str(origin.path)).evaluated == []
    assert RunDirectory(mirror).checkpoint_steps() == []


def test_it_follows_a_source_until_the_run_has_ended(
    origin: RunDirectory, save: Any, serve: Any, probe: Any, tmp_path: Path
) -> None:
    """A checkpoint that comes with the end is brought here still, and nothing done is kept."""
    append_json(origin.events_path, {"time": "1", "event": "launched"})

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 20 and not origin.checkpoint_path(30).exists():
            save(origin, 30)
            append_json(origin.events_path, {"time": "2", "event": "finished"})
        return probe.Probe()(task, folder, tick)

    source, mirror = str(origin.path), tmp_path / "mirror"
    options = {"follows": True, "until_finished": True, "every_seconds": 0.2}
    server = serve(mirror, work, source=source, **options)
    assert [each["step"] for each in server.evaluated] == [10, 20, 30]
    assert EvaluationDirectory(origin).steps("probe") == [10, 20, 30]
    assert RunDirectory(mirror).checkpoint_steps()[-1:] == [30]


def test_what_was_brought_here_waits_though_the_source_has_deleted_it(
    origin: RunDirectory, save: Any, serve: Any, probe: Any, tmp_path: Path
) -> None:
    """A mirror forgets what is evaluated; nothing that it has is missed."""
    append_json(origin.events_path, {"time": "1", "event": "launched"})
    source, mirror = str(origin.path), tmp_path / "mirror"

    def until_here(step: int) -> None:
        limit = time.monotonic() + 30
        while step not in RunDirectory(mirror).checkpoint_steps():
            assert time.monotonic() < limit, f"{step} never came"
            time.sleep(0.02)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 10:
            until_here(20)
            shutil.rmtree(origin.checkpoint_path(20))
            for step in (30, 40):  # two more looks at the source
                save(origin, step)
                until_here(step)
            append_json(origin.events_path, {"time": "2", "event": "finished"})
        return probe.Probe()(task, folder, tick)

    options = {"follows": True, "until_finished": True, "every_seconds": 0.2}
    server = serve(mirror, work, source=source, **options)
    assert [each["step"] for each in server.evaluated] == [10, 20, 30, 40]
    kinds = {event["event"] for event in read_events(RunDirectory(mirror))}
    assert "evaluation_missed" not in kinds


def test_a_source_that_is_not_there_is_told_of(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --follow the server ends."""
    server = serve(tmp_path / "mirror", source=str(tmp_path / "nowhere"))
    assert server.evaluated == []
    assert "nowhere" in capsys.readouterr().out
