"""What is due is done once, whatever comes in between."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.checkpoint.deletion import needed_steps
from longtake.evaluation.server.backlog import Backlog, parse_backlog
from longtake.evaluation.server.stop import Stop
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
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


def test_each_checkpoint_is_evaluated_once(run: RunDirectory, save: Any, serve: Any) -> None:
    """The oldest first; a second server finds nothing to do; nothing is left beside results."""
    for step in (10, 20, 30):
        save(run, step)
    assert [each["step"] for each in serve(run).evaluated] == [10, 20, 30]
    assert serve(run).evaluated == []
    assert _steps(run) == [10, 20, 30]
    assert [record["ended"] for record in _claims(run, 20)] == ["done"]
    assert _leftovers(run) == []
    kinds = [event["event"] for event in read_events(run)]
    assert kinds == ["evaluating", "evaluated"] * 3


def test_what_was_read_is_what_was_saved(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """The result names the bytes of the weights that the preset wants, and their key."""
    checkpoint = save(run, 10)
    serve(run)
    scores = EvaluationDirectory(run).scores("probe", 10)
    assert scores is not None
    assert scores["videos"][0]["prompt"] == probe.read_weights(checkpoint, scores["weights"])


@pytest.mark.parametrize(
    ("text", "steps"),
    [("all", [10, 20, 30, 40, 50]), ("newest", [50]), ("every=20", [20, 40, 50])],
)
def test_a_backlog_says_which_of_them(
    run: RunDirectory, save: Any, serve: Any, text: str, steps: list[int]
) -> None:
    """All, the newest alone, or those of every so many steps and the last."""
    for step in range(10, 60, 10):
        save(run, step)
    serve(run, backlog=parse_backlog(text))
    assert _steps(run) == steps


def test_while_a_run_goes_on_its_newest_checkpoint_is_not_its_last() -> None:
    """Else each would be, once, and every=K would be all."""
    assert Backlog(20).choose([10, 20, 30], with_last=False) == [20]
    assert Backlog(20).choose([10, 20, 30], with_last=True) == [20, 30]


def test_a_run_that_went_back_is_evaluated_anew(run: RunDirectory, save: Any, serve: Any) -> None:
    """The result of the weights that were given up is kept apart; the same weights keep theirs."""
    save(run, 10, b"first")
    save(run, 20, b"second")
    serve(run)
    before = EvaluationDirectory(run).scores("probe", 20)
    shutil.rmtree(run.checkpoint_path(20))
    save(run, 20, b"another")
    assert [each["step"] for each in serve(run).evaluated] == [20]
    after = EvaluationDirectory(run).scores("probe", 20)
    assert before is not None
    assert after is not None
    assert before["key"] != after["key"]
    old = EvaluationDirectory(run).superseded_path("probe", 20, before["key"])
    assert json.loads((old / "scores.json").read_text()) == before
    assert _steps(run) == [10, 20]


def test_who_is_asked_to_end_gives_its_work_back(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """The claim is released, which counts for nothing, and nothing half is left."""
    save(run, 10)
    stop = Stop()

    def work(task: Any, folder: Path, tick: Any) -> Any:
        (folder / "half.mp4").write_text("half")
        stop.ask("SIGTERM")
        return probe.Probe()(task, folder, tick)

    assert serve(run, work, stop, follows=True).evaluated == []
    assert [record["ended"] for record in _claims(run, 10)] == ["released"]
    assert _leftovers(run) == []
    assert len(serve(run).evaluated) == 1


def test_runs_in_a_folder_are_found_and_take_turns(
    make_run: Callable[..., RunDirectory], save: Any, serve: Any, tmp_path: Path, probe: Any
) -> None:
    """One that appears later is found; one whose recipe is broken is told of; others go on."""
    first, second = make_run("runs/a"), make_run("runs/b")
    broken = make_run("runs/broken", "[training\n")
    (tmp_path / "runs" / "none").mkdir()
    for run in (first, second, broken):
        save(run, 10)
        save(run, 20)
    late: list[RunDirectory] = []

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if not late:
            late.append(make_run("runs/late"))
            save(late[0], 10)
        return probe.Probe()(task, folder, tick)

    server = serve(tmp_path / "runs", work)
    assert len(server.evaluated) == 5
    assert [_steps(run) for run in (first, second, late[0], broken)] == [
        [10, 20],
        [10, 20],
        [10],
        [],
    ]


def test_until_finished_waits_for_the_end_of_the_run_and_no_longer(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """A checkpoint of the last moment is evaluated still."""
    append_json(run.events_path, {"time": "1", "event": "launched"})
    save(run, 10)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 10:
            save(run, 20)
            append_json(run.events_path, {"time": "2", "event": "finished"})
        return probe.Probe()(task, folder, tick)

    server = serve(run, work, follows=True, until_finished=True)
    assert [each["step"] for each in server.evaluated] == [10, 20]


def test_a_server_says_once_a_second_what_it_does(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """Its heartbeat names the checkpoint while it works, and says at the end that it ended."""
    save(run, 10)
    seen: list[Any] = []

    def work(task: Any, folder: Path, tick: Any) -> Any:
        tick("sample", 3, 4)
        directory = ServerDirectory(run, server_name())
        limit = time.monotonic() + 20
        while not seen and time.monotonic() < limit:
            heartbeat = directory.read_heartbeat()
            if heartbeat and (heartbeat.get("doing") or {}).get("done") == 3:
                seen.append(heartbeat)
            time.sleep(0.02)
        return probe.Probe()(task, folder, tick)

    def server_name() -> str:
        (path,) = (run.path / "evaluations" / "servers").iterdir()
        return path.name

    server = serve(run, work)
    doing = seen[0]["doing"]
    assert (doing["preset"], doing["step"], doing["what"], doing["of"]) == (
        "probe",
        10,
        "sample",
        4,
    )
    assert seen[0]["needs"] == [10]
    last = ServerDirectory(run, server.name).read_heartbeat()
    assert last is not None
    assert last["needs"] == []
    assert last["beat"] > seen[0]["beat"]
    assert last["doing"] is None
    assert last["ended"]
