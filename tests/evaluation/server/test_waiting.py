"""What waits for its turn is not deleted before it, up to a limit; what is beyond that is told."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.checkpoint.holds import hold_path
from longtake.checkpoint.store import abandon, thin_out
from longtake.config import CheckpointSection
from longtake.evaluation.server.backlog import parse_backlog
from longtake.evaluation.server.checkpoints import checkpoint_key
from longtake.evaluation.server.hold import Holds
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import write_json
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.run_dir import RunDirectory


def _until(is_so: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < limit, f"waited in vain until {what}"
        time.sleep(0.01)


def _held(run: RunDirectory) -> set[int]:
    return {int(path.parent.name.removeprefix("step_")) for path in run.holds_path.glob("*/[!.]*")}


def _thin_out(run: RunDirectory, saved: int) -> None:
    thin_out(run, saved, saved - 10, CheckpointSection(keep=1), reach=0)


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
            _until(lambda step=step: step in _held(run), f"{step} is held")  # type: ignore[misc]
            _thin_out(run, step)
        save(run, 60)
        _thin_out(run, 60)

    server = serve(run, _working_on_10(work, probe))
    assert [each["step"] for each in server.evaluated] == [10, 20, 30, 40, 50, 60]
    assert _missed(run) == []
    assert not list(run.holds_path.glob("*/*"))
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
        _until(lambda: 20 in _held(run), "20 is held")
        assert _held(run) == {10, 20}
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
        _until(lambda: _held(run) == {10, 20, 30}, "both are held")
        abandon(run, 10)
        _until(lambda: _held(run) == {10}, "they are given back")
        save(run, 20, b"saved anew")

    server = serve(run, _working_on_10(work, probe))
    assert [each["step"] for each in server.evaluated] == [10, 20]
    assert _missed(run) == []


def test_what_another_server_has_done_is_held_no_more(
    run: RunDirectory, save: Any, serve: Any, probe: Any
) -> None:
    """While this one still works."""
    save(run, 10)
    checkpoint = save(run, 20)

    def work() -> None:
        _until(lambda: 20 in _held(run), "20 is held")
        result = EvaluationDirectory(run).result_path("probe", 20)
        result.mkdir(parents=True)
        key = checkpoint_key(checkpoint, "ema/main")
        write_json(result / "scores.json", probe.scores_of(20, key, "another"))
        _until(lambda: _held(run) == {10}, "20 is given back")

    assert [e["step"] for e in serve(run, _working_on_10(work, probe)).evaluated] == [10]


@pytest.mark.parametrize(("text", "is_held"), [("all", True), ("newest", False)])
def test_where_only_the_newest_is_wanted_nothing_waits(
    run: RunDirectory, save: Any, serve: Any, probe: Any, text: str, is_held: bool
) -> None:
    """No thread looks for it."""
    save(run, 10)
    seen: list[bool] = []

    def work() -> None:
        seen.append("waiting" in [thread.name for thread in threading.enumerate()])

    serve(run, _working_on_10(work, probe), backlog=parse_backlog(text))
    assert seen == [is_held]


def test_a_hold_stays_until_nothing_needs_it(run: RunDirectory) -> None:
    """Taken for the work and for the waiting, it is one file, which goes with the last of them."""
    holds, path = Holds("server-1"), hold_path(run, 10, "server-1")
    with holds.held(run, 10):
        holds.take(run, 10)
        path.unlink()  # somebody took the server for dead
        with holds.held(run, 10):
            assert path.exists()
    assert path.exists()
    holds.give_back(run, 10)
    assert not path.exists()
