"""Each pending task is done once; an error in one run holds up no other."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until
from tests.evaluation.build import (
    MakeRun,
    at_10,
    claims_of,
    leftovers,
    save,
    serve,
    steps_in,
    steps_of,
)
from tests.evaluation.probe import read_weights, scores_of

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
from longtake.sampling.claims import EvaluationTask, Progress, checkpoint_key
from longtake.tracking.reader import Cursor


def test_each_checkpoint_is_evaluated_once(run: RunDirectory) -> None:
    save(run, 10, 20, 30)
    assert [each["step"] for each in serve(run).evaluated] == [10, 20, 30]
    assert serve(run).evaluated == []
    assert steps_of(run) == [10, 20, 30]
    assert [record["ended"] for record in claims_of(run, 20)] == ["done"]
    assert leftovers(run) == []
    kinds = [event["event"] for event in read_events(run)]
    assert kinds == ["evaluation_started", "evaluation_finished"] * 3


@pytest.mark.parametrize(
    ("text", "steps"), [("all", [10, 20, 30, 40, 50]), ("newest", [50]), ("every=20", [20, 40, 50])]
)
def test_a_backlog_says_which_of_them(run: RunDirectory, text: str, steps: list[int]) -> None:
    save(run, *range(10, 60, 10))
    serve(run, backlog=parse_backlog(text))
    assert steps_of(run) == steps


def test_while_a_run_goes_on_its_newest_checkpoint_is_not_its_last() -> None:
    """Else each would be, once, and every=K would be all."""
    assert Backlog(20).choose([10, 20, 30], with_last=False) == [20]
    assert Backlog(20).choose([10, 20, 30], with_last=True) == [20, 30]


def test_a_run_that_went_back_is_evaluated_anew(run: RunDirectory) -> None:
    save(run, 10, 20)
    serve(run)
    before = EvaluationDirectory(run).scores("probe", 20)
    shutil.rmtree(run.checkpoint_path(20))
    checkpoint = save(run, 20, content=b"another")
    assert [each["step"] for each in serve(run).evaluated] == [20]
    after = EvaluationDirectory(run).scores("probe", 20)
    assert before is not None
    assert after is not None
    assert before["key"] != after["key"]
    assert after["videos"][0]["prompt"] == read_weights(checkpoint, after["weights"])
    old = EvaluationDirectory(run).superseded_path("probe", 20, before["key"])
    assert json.loads((old / "scores.json").read_text()) == before
    assert steps_of(run) == [10, 20]


def test_who_is_asked_to_end_gives_its_work_back(run: RunDirectory) -> None:
    save(run, 10)
    stop = StopSignal()

    def end(_: EvaluationTask, folder: Path, __: Progress) -> None:
        (folder / "half.mp4").write_text("half")
        stop.request("SIGTERM")

    assert serve(run, end, stop, follows=True).evaluated == []
    assert [record["ended"] for record in claims_of(run, 10)] == ["released"]
    assert leftovers(run) == []
    assert len(serve(run).evaluated) == 1


def test_runs_in_a_folder_are_found_and_take_turns(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run("runs/a"), make_run("runs/b")
    broken = make_run("runs/broken", "[training\n")
    (tmp_path / "runs" / "none").mkdir()
    for run in (first, second, broken):
        save(run, 10, 20)
    late: list[RunDirectory] = []

    def begin_late(*_: object) -> None:
        if not late:
            late.append(make_run("runs/late"))
            save(late[0], 10)

    server = serve(tmp_path / "runs", begin_late)
    assert len(server.evaluated) == 5
    found = [steps_of(run) for run in (first, second, late[0], broken)]
    assert found == [[10, 20], [10, 20], [10], []]


def test_until_finished_waits_for_the_end_of_the_run_and_no_longer(run: RunDirectory) -> None:
    append_json(run.events_path, {"time": "1", "event": "launched"})
    save(run, 10)

    def finish() -> None:
        save(run, 20)
        append_json(run.events_path, {"time": "2", "event": "finished"})

    server = serve(run, at_10(finish), follows=True, until_finished=True)
    assert [each["step"] for each in server.evaluated] == [10, 20]


def test_a_server_says_once_a_second_what_it_does(run: RunDirectory) -> None:
    save(run, 10)
    seen: list[Any] = []

    def find_progress() -> Any:
        (server,) = all_servers(run)
        heartbeat: Any = server.read_heartbeat() or {}
        return heartbeat if (heartbeat.get("doing") or {}).get("done") == 3 else None

    def wait_for_heartbeat(_: EvaluationTask, __: Path, progress: Progress) -> None:
        progress("sample", 3, 4)
        seen.append(wait_until(find_progress, 20))

    server = serve(run, wait_for_heartbeat)
    doing = {name: seen[0]["doing"][name] for name in ("preset", "step", "what", "of")}
    assert doing == {"preset": "probe", "step": 10, "what": "sample", "of": 4}
    assert seen[0]["needs"] == [10]
    last = ServerDirectory(run, server.name).read_heartbeat()
    assert last is not None
    assert last["needs"] == []
    assert last["beat"] > seen[0]["beat"]
    assert last["doing"] is None
    assert last["ended"]


_SECOND = '[evaluation.presets.second]\nprompts = ["a blue circle"]\n'


def test_two_runs_take_turns_of_a_few_checkpoints(make_run: MakeRun, tmp_path: Path) -> None:
    for run in (make_run("runs/a"), make_run("runs/b")):
        save(run, 10, 20, 30, 40)
    tasks: list[str] = []
    serve(tmp_path / "runs", lambda task, *_: tasks.append(f"{task.run.path.name}{task.step}"))
    assert tasks == ["a10", "a20", "a30", "b10", "b20", "b30", "a40", "b40"]


def test_a_checkpoint_keeps_its_turn_until_all_its_presets_are_done(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for run in (make_run("runs/a", _SECOND), make_run("runs/b")):
        save(run, 10, 20, 30, 40)
    tasks: list[EvaluationTask] = []
    serve(tmp_path / "runs", lambda task, *_: tasks.append(task))
    assert [task.run.path.name for task in tasks[:7]] == [*"aaaaaab"]
    expected = [(step, name) for step in (10, 20, 30) for name in ("probe", "second")]
    assert [(task.step, task.preset.name) for task in tasks[:6]] == expected


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is told of in one line, which says where it happened, though it is tried at each look."""
    runs = [make_run(f"runs/{name}") for name in "abc"]
    for run in runs:
        save(run, 10, 20)
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


def test_garbage_in_others_files_ends_nothing(make_run: MakeRun, tmp_path: Path) -> None:
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
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 10, 20)
    failing = _failing_at_first(waiting_steps, 3)
    monkeypatch.setattr("longtake.evaluation.server.waiting_steps", failing)
    server = serve(run, at_10(lambda: wait_until(lambda: 20 in needed_steps(run), 20)))
    assert [each["step"] for each in server.evaluated] == [10, 20]
    assert capsys.readouterr().out.count("unforeseen") == 1


def test_the_thread_that_pulls_outlives_an_error(
    make_run: MakeRun,
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
    options: dict[str, Any] = {"follows": True, "until_finished": True, "every_seconds": 0.1}
    server = serve(tmp_path / "two", source=str(origin.path), **options)
    assert [each["step"] for each in server.evaluated] == [10]
    assert "It is tried again." in capsys.readouterr().out


def test_a_full_disk_does_not_fail_the_end_of_a_mirroring(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_trackers_have_all_results_when_a_server_has_ended(run: RunDirectory) -> None:
    """It serves for less than the 30 s for which it leaves the trackers to a training."""
    recipe = run.recipe_path.read_text()
    run.recipe_path.write_text(recipe.replace("tensorboard = false", "tensorboard = true"))
    save(run, 10, 20)
    serve(run, lambda _, folder, __: (folder / "sheet.png").touch())
    path = cursor_path(run, "tensorboard")
    found = wait_until(lambda: Cursor.load(path).evaluations)  # soon, unless the machine is busy
    assert sorted(step for _, step, _ in found) == [10, 20]


def test_the_server_is_imported_without_torch() -> None:
    code = "import sys, longtake.evaluation.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- The keeper: checkpoints that wait are not deleted, up to a limit -------------------------


def _thin_out(run: RunDirectory, saved: int) -> None:
    prune(run, saved, saved - 10, CheckpointSection(keep=1), reach=0)


def test_what_waits_outlives_the_rules_of_retention(run: RunDirectory) -> None:
    save(run, 10)

    def work() -> None:
        for step in (20, 30, 40, 50):
            save(run, step)
            wait_until(lambda step=step: step in needed_steps(run))  # type: ignore[misc]
            _thin_out(run, step)
        save(run, 60)
        _thin_out(run, 60)

    server = serve(run, at_10(work))
    assert [each["step"] for each in server.evaluated] == [10, 20, 30, 40, 50, 60]
    assert steps_in(run, "evaluation_missed") == []
    assert needed_steps(run) == set()
    _thin_out(run, 60)
    assert run.checkpoint_steps() == [60]


def test_what_is_beyond_the_limit_is_told_once(make_run: MakeRun, capsys: Any) -> None:
    run = make_run(more="[evaluation]\nhold_waiting = 1\n")
    save(run, 10, 20, 30, 40)

    def work() -> None:
        wait_until(lambda: 20 in needed_steps(run))
        assert needed_steps(run) == {10, 20}
        save(run, 50)
        _thin_out(run, 50)

    server = serve(run, at_10(work))
    assert [each["step"] for each in server.evaluated] == [10, 20, 50]
    assert steps_in(run, "evaluation_missed") == [30, 40]
    said = capsys.readouterr().out
    assert said.count("deleted before it was evaluated: probe of step 30, 40.") == 1
    assert "evaluation.hold_waiting" in said
    claims = EvaluationDirectory(run).path / "claims" / "probe"
    ended = [record["ended"] for path in sorted(claims.iterdir()) for record in history(path)]
    assert ended == ["done", "done", "missed", "missed", "done"]
    assert serve(run).evaluated == []
    assert steps_in(run, "evaluation_missed") == [30, 40]


def test_a_run_that_went_back_has_missed_nothing(run: RunDirectory) -> None:
    save(run, 10, 20, 30)

    def work() -> None:
        wait_until(lambda: needed_steps(run) == {10, 20, 30})
        delete_after(run, 10)
        wait_until(lambda: needed_steps(run) == {10})
        save(run, 20, content=b"saved anew")

    server = serve(run, at_10(work))
    assert [each["step"] for each in server.evaluated] == [10, 20]
    assert steps_in(run, "evaluation_missed") == []


def test_what_another_server_has_done_is_needed_no_more(run: RunDirectory) -> None:
    save(run, 10)
    checkpoint = save(run, 20)

    def work() -> None:
        wait_until(lambda: 20 in needed_steps(run))
        result = EvaluationDirectory(run).result_path("probe", 20)
        result.mkdir(parents=True)
        key = str(checkpoint_key(checkpoint, "ema/main"))
        write_json(result / "scores.json", scores_of(20, key, "another"))
        wait_until(lambda: needed_steps(run) == {10})

    assert [e["step"] for e in serve(run, at_10(work)).evaluated] == [10]


@pytest.mark.parametrize(("text", "needs"), [("all", {10, 20}), ("newest", {10})])
def test_where_only_the_newest_is_wanted_no_checkpoint_is_promised(
    run: RunDirectory, text: str, needs: set[int]
) -> None:
    save(run, 10)
    seen: list[set[int]] = []

    def work() -> None:
        save(run, 20)
        wait_until(lambda: needed_steps(run) == needs)
        (server,) = all_servers(run)
        heartbeat = server.read_heartbeat()
        assert heartbeat is not None
        wait_until(lambda: (server.read_heartbeat() or heartbeat)["beat"] > heartbeat["beat"] + 1)
        seen.append(needed_steps(run))

    serve(run, at_10(work), backlog=parse_backlog(text))
    assert seen == [needs]


def test_a_heartbeat_that_was_removed_comes_back(run: RunDirectory) -> None:
    save(run, 10)

    def work() -> None:
        (server,) = all_servers(run)
        server.remove_heartbeat()
        assert needed_steps(run) == set()
        wait_until(lambda: needed_steps(run) == {10})

    assert len(serve(run, at_10(work)).evaluated) == 1
