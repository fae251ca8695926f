"""Checkpoints that wait are not deleted, up to a limit; what is deleted beyond that is reported."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.checkpoint.files import delete_after, needed_steps, prune
from longtake.config import CheckpointSection
from longtake.evaluation.options import parse_backlog
from longtake.evaluation_dir import EvaluationDirectory, all_servers
from longtake.fsio import write_json
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import checkpoint_key


def _until(is_so: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < limit, f"waited in vain until {what}"
        time.sleep(0.01)


def _thin_out(run: RunDirectory, saved: int) -> None:
    prune(run, saved, saved - 10, CheckpointSection(keep=1), reach=0)


def _missed(run: RunDirectory) -> list[int]:
    return [event["step"] for event in read_events(run) if event["event"] == "evaluation_missed"]


def _working_on_10(work: Callable[[], None], probe: Any) -> Any:
    """Work that does something else while it works on the first step."""

    def worked(task: Any, folder: Path, tick: Any) -> Any:
        if task.step == 10:
            work()
        return probe.Probe()(task, folder, tick)

    return worked


def test_what_waits_outlives_the_rules_of_retention(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """Four wait while one is sampled, of a run that keeps only its newest: none is lost."""
    save(run, 10)

    def work() -> None:
        for step in (20, 30, 40, 50):
            save(run, step)
            _until(lambda step=step: step in needed_steps(run), f"{step} is needed")  # type: ignore[misc]
            _thin_out(run, step)
        save(run, 60)
        _thin_out(run, 60)

    server = serve(run, _working_on_10(work, probe))
    assert [each["step"] for each in server.evaluated] == [10, 20, 30, 40, 50, 60]
    assert _missed(run) == []
    assert needed_steps(run) == set()
    _thin_out(run, 60)
    assert run.checkpoint_steps() == [60]


def test_what_is_beyond_the_limit_is_told_once(
    make_run: Callable[..., RunDirectory], save: Any, serve: Any, probe: Any, capsys: Any
) -> None:
    """In one line, with what to do about it, and an event; a second server says nothing of it."""
    run = make_run()
    recipe = run.recipe_path.read_text().replace("[evaluation]", "[evaluation]\nhold_waiting = 1")
    run.recipe_path.write_text(recipe)
    for step in (10, 20, 30, 40):
        save(run, step)

    def work() -> None:
        _until(lambda: 20 in needed_steps(run), "20 is needed")
        assert needed_steps(run) == {10, 20}
        save(run, 50)
        _thin_out(run, 50)

    server = serve(run, _working_on_10(work, probe))
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


def test_a_run_that_went_back_has_missed_nothing(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """Nobody wants what it gave up; what it saves in its place is evaluated."""
    for step in (10, 20, 30):
        save(run, step)

    def work() -> None:
        _until(lambda: needed_steps(run) == {10, 20, 30}, "both are needed")
        delete_after(run, 10)
        _until(lambda: needed_steps(run) == {10}, "they are needed no more")
        save(run, 20, b"saved anew")

    server = serve(run, _working_on_10(work, probe))
    assert [each["step"] for each in server.evaluated] == [10, 20]
    assert _missed(run) == []


def test_what_another_server_has_done_is_needed_no_more(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """While this one still works."""
    save(run, 10)
    checkpoint = save(run, 20)

    def work() -> None:
        _until(lambda: 20 in needed_steps(run), "20 is needed")
        result = EvaluationDirectory(run).result_path("probe", 20)
        result.mkdir(parents=True)
        key = checkpoint_key(checkpoint, "ema/main")
        write_json(result / "scores.json", probe.scores_of(20, key, "another"))
        _until(lambda: needed_steps(run) == {10}, "20 is needed no more")

    assert [e["step"] for e in serve(run, _working_on_10(work, probe)).evaluated] == [10]


@pytest.mark.parametrize(("text", "needs"), [("all", {10, 20}), ("newest", {10})])
def test_where_only_the_newest_is_wanted_no_checkpoint_is_promised(
    run: RunDirectory, save: Any, serve: Any, probe: Any, text: str, needs: set[int]
) -> None:
    save(run, 10)
    seen: list[set[int]] = []

    def work() -> None:
        save(run, 20)
        _until(lambda: needed_steps(run) == needs, f"{needs} are needed")
        _until(lambda: _num_beats(run) > first + 1, "it writes two more heartbeats")
        seen.append(needed_steps(run))

    def _num_beats(run: RunDirectory) -> int:
        heartbeats = [server.read_heartbeat() for server in all_servers(run)]
        return max((each.get("beat", 0) for each in heartbeats if each), default=0)

    first = _num_beats(run)
    serve(run, _working_on_10(work, probe), backlog=parse_backlog(text))
    assert seen == [needs]


def test_a_heartbeat_that_was_removed_comes_back(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """Another server took this one for dead."""
    save(run, 10)

    def work() -> None:
        (server,) = all_servers(run)
        server.remove_heartbeat()
        assert needed_steps(run) == set()
        _until(lambda: needed_steps(run) == {10}, "10 is needed again")

    assert len(serve(run, _working_on_10(work, probe)).evaluated) == 1
