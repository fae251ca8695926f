"""Each pending task is done once; an error in one run holds up no other."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until
from tests.evaluation.build import MakeRun, claims_of, leftovers, steps_of
from tests.evaluation.probe import Probe, read_weights, scores_of

from longtake.checkpoint.files import delete_after, needed_steps, prune
from longtake.config import CheckpointSection
from longtake.evaluation.mirror import Mirror
from longtake.evaluation.options import Backlog, parse_backlog
from longtake.evaluation.pending import WantedPresets, waiting_steps
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory, all_servers, cursor_path
from longtake.fsio import append_json, write_json
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.process import StopSignal
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import checkpoint_key
from longtake.tracking.reader import Cursor


def test_each_checkpoint_is_evaluated_once(run: RunDirectory, save: Any, serve: Any) -> None:
    for step in (10, 20, 30):
        save(run, step)
    assert [each["step"] for each in serve(run).evaluated] == [10, 20, 30]
    assert serve(run).evaluated == []
    assert steps_of(run) == [10, 20, 30]
    assert [record["ended"] for record in claims_of(run, 20)] == ["done"]
    assert leftovers(run) == []
    kinds = [event["event"] for event in read_events(run)]
    assert kinds == ["evaluation_started", "evaluation_finished"] * 3


def test_what_was_read_is_what_was_saved(run: RunDirectory, save: Any, serve: Any) -> None:
    checkpoint = save(run, 10)
    serve(run)
    scores = EvaluationDirectory(run).scores("probe", 10)
    assert scores is not None
    assert scores["videos"][0]["prompt"] == read_weights(checkpoint, scores["weights"])


@pytest.mark.parametrize(
    ("text", "steps"), [("all", [10, 20, 30, 40, 50]), ("newest", [50]), ("every=20", [20, 40, 50])]
)
def test_a_backlog_says_which_of_them(
    run: RunDirectory, save: Any, serve: Any, text: str, steps: list[int]
) -> None:
    for step in range(10, 60, 10):
        save(run, step)
    serve(run, backlog=parse_backlog(text))
    assert steps_of(run) == steps


def test_while_a_run_goes_on_its_newest_checkpoint_is_not_its_last() -> None:
    """Else each would be, once, and every=K would be all."""
    assert Backlog(20).choose([10, 20, 30], with_last=False) == [20]
    assert Backlog(20).choose([10, 20, 30], with_last=True) == [20, 30]


def test_a_run_that_went_back_is_evaluated_anew(run: RunDirectory, save: Any, serve: Any) -> None:
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
    assert steps_of(run) == [10, 20]


def test_who_is_asked_to_end_gives_its_work_back(run: RunDirectory, save: Any, serve: Any) -> None:
    save(run, 10)
    stop = StopSignal()

    def work(task: Any, folder: Path, tick: Any) -> Any:
        (folder / "half.mp4").write_text("half")
        stop.request("SIGTERM")
        return Probe()(task, folder, tick)

    assert serve(run, work, stop, follows=True).evaluated == []
    assert [record["ended"] for record in claims_of(run, 10)] == ["released"]
    assert leftovers(run) == []
    assert len(serve(run).evaluated) == 1


def test_runs_in_a_folder_are_found_and_take_turns(
    make_run: MakeRun, save: Any, serve: Any, tmp_path: Path
) -> None:
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
        return Probe()(task, folder, tick)

    server = serve(tmp_path / "runs", work)
    assert len(server.evaluated) == 5
    assert [steps_of(run) for run in (first, second, late[0], broken)] == [
        [10, 20],
        [10, 20],
        [10],
        [],
    ]


def test_until_finished_waits_for_the_end_of_the_run_and_no_longer(
    run: RunDirectory, save: Any, serve: Any
) -> None:
    append_json(run.events_path, {"time": "1", "event": "launched"})
    save(run, 10)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 10:
            save(run, 20)
            append_json(run.events_path, {"time": "2", "event": "finished"})
        return Probe()(task, folder, tick)

    server = serve(run, work, follows=True, until_finished=True)
    assert [each["step"] for each in server.evaluated] == [10, 20]


def test_a_server_says_once_a_second_what_it_does(run: RunDirectory, save: Any, serve: Any) -> None:
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
        return Probe()(task, folder, tick)

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


_SECOND = '[evaluation.presets.second]\nprompts = ["a blue circle"]\n'


@pytest.fixture
def done() -> Any:

    class Noting:
        def __init__(self) -> None:
            self.tasks: list[tuple[str, int, str]] = []

        def __call__(self, task: Any, folder: Path, tick: Any) -> Any:
            self.tasks.append((task.run.path.name, task.step, task.preset.name))
            return Probe()(task, folder, tick)

    return Noting()


def test_two_runs_take_turns_of_a_few_checkpoints(
    make_run: MakeRun, save: Any, serve: Any, done: Any, tmp_path: Path
) -> None:
    for run in (make_run("runs/a"), make_run("runs/b")):
        for step in (10, 20, 30, 40):
            save(run, step)
    serve(tmp_path / "runs", done)
    assert [f"{run}{step}" for run, step, _ in done.tasks] == [
        *("a10", "a20", "a30", "b10", "b20", "b30"),
        *("a40", "b40"),
    ]


def test_a_checkpoint_keeps_its_turn_until_all_its_presets_are_done(
    make_run: MakeRun, save: Any, serve: Any, done: Any, tmp_path: Path
) -> None:
    for run in (make_run("runs/a", _SECOND), make_run("runs/b")):
        for step in (10, 20, 30, 40):
            save(run, step)
    serve(tmp_path / "runs", done)
    presets = ("probe", "second")
    assert done.tasks[:6] == [("a", step, name) for step in (10, 20, 30) for name in presets]
    assert done.tasks[6] == ("b", 10, "probe")


def _failing_at_first(function: Any, times: int) -> Any:
    left = [times]

    def failing(*given: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyError("unforeseen")
        return function(*given)

    return failing


def test_one_run_that_cannot_be_looked_at_holds_up_no_other(
    make_run: MakeRun,
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
    read, tried = WantedPresets.read, []

    def failing(wanted: WantedPresets) -> None:
        if wanted._run == runs[1]:
            tried.append(wanted)
            raise KeyError("unforeseen")
        read(wanted)

    monkeypatch.setattr(WantedPresets, "read", failing)
    serve(tmp_path / "runs")
    assert [EvaluationDirectory(run).steps("probe") for run in runs] == [[10, 20], [], [10, 20]]
    said = capsys.readouterr().out
    assert said.count("unforeseen") == 1
    assert f"{runs[1].path}: KeyError in test_server.py, line " in said
    assert len(tried) > 1


def test_garbage_in_others_files_ends_nothing(
    make_run: MakeRun, save: Any, serve: Any, tmp_path: Path
) -> None:
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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(run, 10)
    save(run, 20)
    failing = _failing_at_first(waiting_steps, 3)
    monkeypatch.setattr("longtake.evaluation.server.waiting_steps", failing)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        limit = time.monotonic() + 20
        while task.step == 10 and 20 not in needed_steps(run):
            assert time.monotonic() < limit, "20 is never needed"
            time.sleep(0.01)
        return Probe()(task, folder, tick)

    assert [each["step"] for each in serve(run, work).evaluated] == [10, 20]
    assert capsys.readouterr().out.count("unforeseen") == 1


def test_the_thread_that_pulls_outlives_an_error(
    make_run: MakeRun,
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
    look = Mirror.look
    monkeypatch.setattr(Mirror, "look", _failing_at_first(look, 1))
    assert serve(tmp_path / "one", source=str(origin.path)).evaluated == []
    assert "unforeseen" in capsys.readouterr().out
    monkeypatch.setattr(Mirror, "look", _failing_at_first(look, 2))
    options = {"follows": True, "until_finished": True, "every_seconds": 0.1}
    server = serve(tmp_path / "two", source=str(origin.path), **options)
    assert [each["step"] for each in server.evaluated] == [10]
    assert "It is tried again." in capsys.readouterr().out


def test_a_full_disk_does_not_fail_the_end_of_a_mirroring(
    make_run: MakeRun, save: Any, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = make_run("elsewhere/run")
    save(origin, 10)
    close = Mirror.close

    def failing(source: Mirror) -> None:
        close(source)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Mirror, "close", failing)
    server = serve(tmp_path / "mirror", source=str(origin.path))
    assert [each["step"] for each in server.evaluated] == [10]


def test_trackers_have_all_results_when_a_server_has_ended(
    run: RunDirectory, save: Any, serve: Any
) -> None:
    """It serves for less than the 30 s for which it leaves the trackers to a training."""
    recipe = run.recipe_path.read_text()
    run.recipe_path.write_text(recipe.replace("tensorboard = false", "tensorboard = true"))
    for step in (10, 20):
        save(run, step)

    def work(task: Any, folder: Path, tick: Any) -> Any:
        (folder / "sheet.png").touch()
        return Probe()(task, folder, tick)

    serve(run, work)
    path = cursor_path(run, "tensorboard")
    found = wait_until(lambda: Cursor.load(path).evaluations)  # soon, unless the machine is busy
    assert sorted(step for _, step, _ in found) == [10, 20]


def test_the_server_is_imported_without_torch() -> None:
    code = "import sys, longtake.evaluation.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- The keeper: checkpoints that wait are not deleted, up to a limit -------------------------


def _thin_out(run: RunDirectory, saved: int) -> None:
    prune(run, saved, saved - 10, CheckpointSection(keep=1), reach=0)


def _missed(run: RunDirectory) -> list[int]:
    return [event["step"] for event in read_events(run) if event["event"] == "evaluation_missed"]


def _working_on_10(work: Callable[[], None]) -> Any:
    """Work that does something else while it works on the first step."""

    def worked(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 10:
            work()
        return Probe()(task, folder, tick)

    return worked


def test_what_waits_outlives_the_rules_of_retention(
    run: RunDirectory, save: Any, serve: Any
) -> None:
    save(run, 10)

    def work() -> None:
        for step in (20, 30, 40, 50):
            save(run, step)
            wait_until(lambda step=step: step in needed_steps(run))  # type: ignore[misc]
            _thin_out(run, step)
        save(run, 60)
        _thin_out(run, 60)

    server = serve(run, _working_on_10(work))
    assert [each["step"] for each in server.evaluated] == [10, 20, 30, 40, 50, 60]
    assert _missed(run) == []
    assert needed_steps(run) == set()
    _thin_out(run, 60)
    assert run.checkpoint_steps() == [60]


def test_what_is_beyond_the_limit_is_told_once(
    make_run: MakeRun, save: Any, serve: Any, capsys: Any
) -> None:
    run = make_run(more="[evaluation]\nhold_waiting = 1\n")
    for step in (10, 20, 30, 40):
        save(run, step)

    def work() -> None:
        wait_until(lambda: 20 in needed_steps(run))
        assert needed_steps(run) == {10, 20}
        save(run, 50)
        _thin_out(run, 50)

    server = serve(run, _working_on_10(work))
    assert [each["step"] for each in server.evaluated] == [10, 20, 50]
    assert _missed(run) == [30, 40]
    said = capsys.readouterr().out
    assert said.count("deleted before it was evaluated: probe of step 30, 40.") == 1
    assert "evaluation.hold_waiting" in said
    claims = EvaluationDirectory(run).path / "claims" / "probe"
    ended = [[record["ended"] for record in history(path)] for path in sorted(claims.iterdir())]
    assert ended == [["done"], ["done"], ["missed"], ["missed"], ["done"]]
    assert serve(run).evaluated == []
    assert _missed(run) == [30, 40]


def test_a_run_that_went_back_has_missed_nothing(run: RunDirectory, save: Any, serve: Any) -> None:
    for step in (10, 20, 30):
        save(run, step)

    def work() -> None:
        wait_until(lambda: needed_steps(run) == {10, 20, 30})
        delete_after(run, 10)
        wait_until(lambda: needed_steps(run) == {10})
        save(run, 20, b"saved anew")

    server = serve(run, _working_on_10(work))
    assert [each["step"] for each in server.evaluated] == [10, 20]
    assert _missed(run) == []


def test_what_another_server_has_done_is_needed_no_more(
    run: RunDirectory, save: Any, serve: Any
) -> None:
    save(run, 10)
    checkpoint = save(run, 20)

    def work() -> None:
        wait_until(lambda: 20 in needed_steps(run))
        result = EvaluationDirectory(run).result_path("probe", 20)
        result.mkdir(parents=True)
        key = str(checkpoint_key(checkpoint, "ema/main"))
        write_json(result / "scores.json", scores_of(20, key, "another"))
        wait_until(lambda: needed_steps(run) == {10})

    assert [e["step"] for e in serve(run, _working_on_10(work)).evaluated] == [10]


@pytest.mark.parametrize(("text", "needs"), [("all", {10, 20}), ("newest", {10})])
def test_where_only_the_newest_is_wanted_no_checkpoint_is_promised(
    run: RunDirectory, save: Any, serve: Any, text: str, needs: set[int]
) -> None:
    save(run, 10)
    seen: list[set[int]] = []

    def work() -> None:
        save(run, 20)
        wait_until(lambda: needed_steps(run) == needs)
        wait_until(lambda: _num_beats(run) > first + 1)
        seen.append(needed_steps(run))

    def _num_beats(run: RunDirectory) -> int:
        heartbeats = [server.read_heartbeat() for server in all_servers(run)]
        return max((each.get("beat", 0) for each in heartbeats if each), default=0)

    first = _num_beats(run)
    serve(run, _working_on_10(work), backlog=parse_backlog(text))
    assert seen == [needs]


def test_a_heartbeat_that_was_removed_comes_back(run: RunDirectory, save: Any, serve: Any) -> None:
    save(run, 10)

    def work() -> None:
        (server,) = all_servers(run)
        server.remove_heartbeat()
        assert needed_steps(run) == set()
        wait_until(lambda: needed_steps(run) == {10})

    assert len(serve(run, _working_on_10(work)).evaluated) == 1
