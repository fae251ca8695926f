"""A look reads no file again that has not changed, and misses nothing that comes."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from tests.evaluation.build import save
from tests.evaluation.probe import scores_of

from longtake import fsio
from longtake.evaluation.options import ServerOptions, ServerReport
from longtake.evaluation.pending import PendingTasks, RunEnd
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import checkpoint_key

_STEPS = range(10, 110, 10)


@pytest.fixture
def view(run: RunDirectory) -> PendingTasks:
    for step in _STEPS:
        key = str(checkpoint_key(save(run, step), "ema/main"))
        result = EvaluationDirectory(run).result_path("probe", step)
        result.mkdir(parents=True)
        (result / "scores.json").write_text(json.dumps(scores_of(step, key, "another")))
    view = PendingTasks(
        run, "server-1", ServerOptions(places=(), follows=True), ServerReport(Console(width=400))
    )
    assert view.look() == []
    return view


def _steps(view: PendingTasks) -> list[int]:
    return [task.step for task in view.look()]


def test_a_look_at_what_is_settled_reads_no_file(
    view: PendingTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    for name in ("read_json", "read_record", "read_regular"):
        monkeypatch.setattr(fsio, name, lambda path, *_: reads.append(path))
    assert view.look() == []
    view.report_missed()
    assert not reads


def test_a_checkpoint_that_comes_is_seen_at_the_next_look(
    run: RunDirectory, view: PendingTasks, tmp_path: Path
) -> None:
    whole = save(run, 300)
    (whole / "COMMITTED").rename(tmp_path / "COMMITTED")
    assert _steps(view) == []
    assert _steps(view) == []
    (tmp_path / "COMMITTED").rename(whole / "COMMITTED")
    assert _steps(view) == [300]
    assert _steps(view) == [300]


def test_files_that_come_after_committed_are_seen_at_the_next_look(
    run: RunDirectory, view: PendingTasks
) -> None:
    weights = save(run, 300) / "ema" / "main" / "__0_0.distcp"
    content = weights.read_bytes()
    weights.unlink()
    assert _steps(view) == []
    assert _steps(view) == []
    weights.write_bytes(content)
    assert _steps(view) == [300]


def test_what_is_saved_anew_or_loses_its_result_is_due_again(
    run: RunDirectory, view: PendingTasks
) -> None:
    shutil.rmtree(run.checkpoint_path(50))
    save(run, 50, content=b"another")
    assert _steps(view) == [50]
    save(run, 60, content=b"replaced in place")
    assert _steps(view) == [50, 60]
    shutil.rmtree(EvaluationDirectory(run).result_path("probe", 70))
    assert _steps(view) == [50, 60, 70]


def test_a_refused_preset_comes_back_in_time_or_with_another_recipe(
    run: RunDirectory, view: PendingTasks
) -> None:
    save(run, 300)
    (task,) = view.look()
    view.presets.refuse(task.preset, 1000.0)
    assert _steps(view) == []
    with run.recipe_path.open("a") as file:
        file.write("# changed\n")
    assert _steps(view) == [300]
    view.presets.refuse(task.preset)
    assert _steps(view) == []
    view.presets.refuse(task.preset, 0.0)
    assert _steps(view) == [300]


def _line(kind: str) -> str:
    return json.dumps({"event": kind}) + "\n"


def test_the_newest_beginning_or_ending_counts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ending = RunEnd(run)
    assert not ending.is_reached()
    with run.events_path.open("a") as file:
        for text, expected in (
            (_line("launched") + "[1]\n" + "{broken\n", False),
            (_line("finished") + _line("checkpoint"), True),
            (_line("resumed")[:9], True),
            (_line("resumed")[9:], False),
            (_line("diverged"), True),
        ):
            file.write(text)
            file.flush()
            assert ending.is_reached() == expected


def test_no_line_is_read_twice_and_another_file_is_read_anew(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ending = RunEnd(run)
    run.events_path.write_text(_line("launched") + _line("finished"))
    assert ending.is_reached()
    with run.events_path.open("r+") as file:
        file.write(" " * len(_line("launched") + _line("finished")))
    with run.events_path.open("a") as file:
        file.write(_line("checkpoint"))
    assert ending.is_reached()
    run.events_path.write_text(_line("launched"))
    assert not ending.is_reached()
    run.events_path.unlink()
    assert not ending.is_reached()
