"""The lease under which one launch writes a run."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.build import QUIET, MakeRecipe, wait_until

import longtake.lease
from longtake.data.audit import audit
from longtake.errors import RunError
from longtake.fsio import append_json
from longtake.lease import Leases, history
from longtake.node_dir import NodeDirectory, state
from longtake.parallel.mesh import World, join
from longtake.process import environment, program
from longtake.run_dir import LAUNCH_VARIABLE, RunDirectory
from longtake.training.run_lease import hold_run, refuse_lost
from longtake.training.train import train


@pytest.fixture
def world(small_recipe: MakeRecipe) -> Iterator[World]:
    """This process alone."""
    with join("cpu", small_recipe().parallel, None) as alone:
        yield alone


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A folder of a run that has begun."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.recipe_path.touch()
    return run


def _elsewhere(run: RunDirectory, **changes: Any) -> Path:
    """Make the newest lease look as if a process of another machine held it."""
    path = max(run.lease_path.glob("*.json"))
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "place": "elsewhere", "host": "gpu7", **changes}))
    return path


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.1):
            record = json.loads(path.read_text())
            aside = path.with_name(".beat")
            aside.write_text(json.dumps({**record, "beat": record["beat"] + 1}))
            aside.replace(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
def test_a_second_launch_is_refused_and_the_first_is_not_disturbed(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = small_recipe("training.steps=100000", "watch.enabled=true")
    run = RunDirectory(recipe.out)
    path = tmp_path / "own.toml"
    path.write_text((tmp_path / "small.toml").read_text())
    options = ["--set", f"out={recipe.out}", "--set", f"data.catalog={recipe.data.catalog}"]
    options += ["--set", "training.steps=100000", "--set", "watch.enabled=true"]
    command = program("longtake", "train", str(path), *options)
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as first:
        try:
            wait_until(run.metrics_path.exists)
            with pytest.raises(RunError) as refused:
                train(recipe, QUIET)
            assert state(run).kind == "running"
        finally:
            first.terminate()
        assert first.wait(240) == 143
    said = str(refused.value)
    assert f"{run.path} is being trained by process {first.pid} on " in said
    assert f"kill {first.pid} on " in said
    kinds = [each["event"] for each in run.events()]
    assert kinds.count("launched") + kinds.count("resumed") == 1
    assert kinds[-1] == "interrupted"
    assert state(run).kind == "interrupted"
    assert audit(run).ok


def test_a_live_holder_on_another_host_refuses_a_launch(run: RunDirectory, world: World) -> None:
    with hold_run(run, world, QUIET):
        pass
    with (
        _beating(_elsewhere(run, ended=None, job="main/4711")),
        pytest.raises(RunError, match=r"on gpu7 \(Slurm job 4711\) since 20.* UTC\. A run is"),
        hold_run(run, world, QUIET),
    ):
        pass
    assert len(history(run.lease_path)) == 1


def test_a_silent_holder_on_another_host_is_replaced_after_its_seconds(
    run: RunDirectory, world: World
) -> None:
    with hold_run(run, world, QUIET):
        pass
    _elsewhere(run, ended=None, seconds=1.5)
    begun, console = time.monotonic(), Console(record=True, quiet=False, width=500)
    with hold_run(run, world, console):
        assert time.monotonic() - begun > 1.5
    assert "is held by process" in console.export_text()
    assert [each["ended"] for each in history(run.lease_path)] == [None, "ended"]


@pytest.mark.parametrize(
    ("variable", "value", "field", "kept"),
    [
        (LAUNCH_VARIABLE, "0123456789abcdef", "launch", "0123456789abcdef"),
        ("SLURM_JOB_ID", "4711", "job", "main/4711"),
    ],
)
def test_a_rank_0_of_the_same_launch_or_job_inherits_at_once_on_any_host(
    variable: str,
    value: str,
    field: str,
    kept: str,
    run: RunDirectory,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hold_run(run, world, QUIET):
        pass
    path = _elsewhere(run, ended=None, seconds=3600, **{field: kept})
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "main")
    monkeypatch.setenv(variable, value)
    with _beating(path), hold_run(run, world, QUIET):
        newest = history(run.lease_path)[-1]
    assert newest[field] == kept
    assert newest["pid"] == os.getpid()


def test_a_launch_that_is_refused_before_the_run_begins_leaves_nothing(
    tmp_path: Path, world: World
) -> None:
    run = RunDirectory(tmp_path / "new")
    with pytest.raises(RunError), hold_run(run, world, QUIET):
        raise RunError("no such catalog")
    assert not run.lease_path.exists()


def test_a_holder_that_was_suspended_and_replaced_ends(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Leases(60, {"token": "a"}).take(run.lease_path)
    assert lease is not None
    refuse_lost(lease)
    lease.end("x")
    assert Leases(60, {"token": "b"}).take(run.lease_path) is not None
    monkeypatch.setattr(longtake.lease, "boot_seconds", lambda: time.monotonic() + 1e9)
    with pytest.raises(
        RunError, match=r"silent for more than 60 s, and process \d+ on .* has taken"
    ):
        refuse_lost(lease)


def test_a_run_says_whether_it_is_running_stalled_dead_or_finished(
    small_recipe: MakeRecipe,
) -> None:
    recipe = small_recipe("training.steps=2")
    run = RunDirectory(recipe.out)
    train(recipe, QUIET)
    assert state(run).kind == "finished"
    path = run.lease_path / "0.json"
    record = {**json.loads(path.read_text()), "ended": None}
    path.write_text(json.dumps(record))
    assert state(run).kind == "running"  # this process holds it
    node = NodeDirectory(run, "vm")
    node.append_event("stalled", token="t", step=2, sentence="it hangs")
    assert state(run).kind == "stalled"
    node.append_event("stall_cleared", token="t", step=2)
    assert state(run).kind == "running"
    path.write_text(json.dumps({**record, "started": 1}))  # a process with this pid that is gone
    assert state(run).kind == "dead"
    _elsewhere(run)
    assert state(run).kind == "running"  # its files are young
    for file in (run.metrics_path, run.events_path, path, node.events_path):
        os.utime(file, (time.time() - 600, time.time() - 600))
    found = state(run)
    assert found.kind == "dead"
    assert found.silent_seconds is not None
    assert found.silent_seconds > 500


def test_audit_finds_that_two_launches_trained_at_the_same_time(small_recipe: MakeRecipe) -> None:
    recipe = small_recipe("training.steps=3")
    run = RunDirectory(recipe.out)
    train(recipe, QUIET)
    assert audit(run).ok
    first = run.metric_lines()[-1]
    append_json(run.metrics_path, {**first, "launch": "another", "step": 2})
    append_json(run.metrics_path, {**first, "step": 4})
    found = audit(run)
    assert not found.ok
    assert found.two_writers == (
        f"step 4 of launch {first['launch']} was written after step 2 of launch another",
    )
