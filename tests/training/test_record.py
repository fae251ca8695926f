"""What a run records of its steps, and the lease under which one launch writes it."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.build import QUIET, MakeRecipe, events, wait_until

import longtake.lease
from longtake.config import Bucket
from longtake.data.audit import audit
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.loader import Batch
from longtake.data.stages import StagePosition
from longtake.errors import DataError, RunError
from longtake.fsio import append_json, read_json_lines
from longtake.lease import Leases, history
from longtake.node_dir import NodeDirectory, state
from longtake.parallel.mesh import World, join
from longtake.process import environment, program
from longtake.run_dir import LAUNCH_VARIABLE, Metrics, RunDirectory
from longtake.training import record
from longtake.training.record import hold_run, keep_recorder
from longtake.training.session import Session
from longtake.training.state import save_checkpoint
from longtake.training.train import train


def test_a_step_has_one_row_of_numbers(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "take_peak", lambda device: 7)  # as if it were a GPU
    recipe = small_recipe(
        "training.steps=20", "training.global_batch_size=8", "checkpoint.every=100",
        "training.precision=auto",
    )  # fmt: skip
    began = time.time()
    outcome = train(recipe, QUIET)
    run = RunDirectory(recipe.out)
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, 21))
    of_stores = {"store_bytes", "store_seconds", "store_retries"}  # of clips that lie in them
    expected = Metrics.__annotations__.keys() - {"verdict", "mfu"} - of_stores
    assert all(row.keys() | {"peak_memory_bytes"} == expected for row in rows)
    assert [row["step"] for row in rows if "peak_memory_bytes" in row] == [1, 11]
    assert [row["num_samples"] for row in rows] == [8] * 20
    seconds = [row["step_seconds"] for row in rows]
    assert sum(seconds[1:]) == pytest.approx(rows[-1]["time"] - rows[0]["time"], abs=0.1)
    assert sum(seconds) <= outcome.training_seconds  # the last save comes after the last row
    assert all(0 <= row["data_seconds"] < row["step_seconds"] for row in rows)
    assert began < rows[0]["time"] < rows[-1]["time"] < time.time()
    flops = [row["tflops_per_second"] * row["step_seconds"] * 1e12 for row in rows]
    assert flops == pytest.approx([flops[0]] * 20, rel=0.05)
    parameters_and_tokens = 2 * 48 * 192 * 128 * 8  # only the first layer, once forward
    assert flops[0] > 3 * parameters_and_tokens
    (launch,) = run.record()["launches"]
    facts: Any = launch
    assert (launch["start_step"], launch["world_size"], launch["device"]) == (0, 1, "cpu")
    trainer = json.loads((run.checkpoint_path(20) / "trainer.json").read_text())
    assert trainer["precision"] == facts["precision"] in ("bf16", "fp32")


def test_tensorboard_says_the_same_after_a_resume(small_recipe: MakeRecipe) -> None:
    changes = ("training.steps=8", "checkpoint.every=3", "tracking.tensorboard=true")
    recipe = small_recipe(*changes)
    train(recipe, QUIET)
    run = RunDirectory(recipe.out)
    for step in (6, 8):
        shutil.rmtree(run.checkpoint_path(step))
    train(recipe, QUIET)
    events = EventAccumulator(str(run.tensorboard_path), size_guidance={"scalars": 0}).Reload()
    rows: list[Any] = list(run.metrics())
    assert len(list(read_json_lines(run.metrics_path))) == 8 + 5
    for name in ("loss", "grad_norm", "learning_rate", "step_seconds", "tflops_per_second"):
        found = events.Scalars(f"train/{name}")
        assert [event.step for event in found] == list(range(1, 9))
        assert [event.value for event in found] == pytest.approx([r[name] for r in rows], rel=1e-6)


def test_a_save_is_no_wait_for_data(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_slowly(*arguments: Any) -> None:
        save_checkpoint(*arguments)
        time.sleep(0.3)

    monkeypatch.setattr("longtake.training.loop.save_checkpoint", save_slowly)
    recipe = small_recipe("training.steps=3", "checkpoint.every=1")
    train(recipe, QUIET)
    for row in RunDirectory(recipe.out).metrics()[1:]:
        assert row["step_seconds"] > 0.3 + row["data_seconds"]


def test_epochs_stages_and_checkpoints_are_events(small_recipe: MakeRecipe) -> None:
    """64 clips in batches of 32 make an epoch of two steps; each stage counts its own."""
    stages = "[{name='a', epochs=1}, {name='b', steps=1}, {name='c'}]"
    recipe = small_recipe(
        "training.global_batch_size=32", "training.steps=6", "checkpoint.every=2",
        f"data.stages={stages}",
    )  # fmt: skip
    train(recipe, QUIET)
    found = [(e["stage"], e["source"], e["step"]) for e in events(recipe, "stage")]
    assert found == [("a", "catalog", 0), ("b", "catalog", 2), ("c", "catalog", 3)]
    epochs = [(e["stage"], e["epoch"], e["step"]) for e in events(recipe, "epoch")]
    assert epochs == [("a", 0, 0), ("b", 0, 2), ("c", 0, 3), ("c", 1, 5)]
    assert [e["step"] for e in events(recipe, "checkpoint")] == [2, 4, 6]
    assert [e["step"] for e in events(recipe, "finished")] == [6]


@pytest.fixture
def clips(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of clips of which three are gone since it was written."""
    shutil.copytree(shapes_catalog.parent, tmp_path / "shapes")
    folder, out = tmp_path / "shapes" / "clips", tmp_path / "shapes" / "catalog.parquet"
    index([folder], captions=folder / "captions.jsonl", out=out)
    for path in sorted(folder.glob("*.mp4"))[5:8]:
        path.unlink()
    return out


def test_clips_that_are_gone_are_named_once(small_recipe: MakeRecipe, clips: Path) -> None:
    """Training goes on without them, over epochs; each has one event with its reason."""
    recipe = small_recipe(
        f"data.catalog={clips}",
        "training.global_batch_size=32",
        "training.steps=6",
        "data.frame_cache_gib=0",
    )
    outcome = train(recipe, QUIET)
    assert outcome.end_step == 6
    rejected = events(recipe, "sample_rejected")
    gone = {str(clips.parent / "clips" / f"shapes_0_{n:05d}.mp4") for n in (5, 6, 7)}
    paths = {clip.identity: clip.path for clip in Catalog.load(clips).clips()}
    assert sorted(paths[event["identity"]] for event in rejected) == sorted(gone)
    for event in rejected:
        assert paths[event["identity"]] in event["reason"]
        assert "No such file" in event["reason"]
        assert event["rank"] == 0
        assert 0 <= event["step"] < 2  # of the first epoch
    found = audit(RunDirectory(recipe.out))
    assert found.ok
    assert [(each.seen, each.rejected) for each in found.epochs] == [(61, 3)] * 3


def test_a_step_of_which_nothing_can_be_decoded_is_counted_and_learns_nothing(
    small_recipe: MakeRecipe, clips: Path
) -> None:
    lost = sorted((clips.parent / "clips").glob("*.mp4"))[1:12]
    for path in lost:
        path.unlink()
    recipe = small_recipe(
        f"data.catalog={clips}", "training.global_batch_size=1", "training.steps=64"
    )
    train(recipe, QUIET)
    run = RunDirectory(recipe.out)
    assert len(run.metrics()) == 64 - 14
    (epoch,) = audit(run).epochs
    assert (epoch.seen, epoch.rejected, epoch.is_exact) == (50, 14, True)


def test_too_many_of_them_are_found_before_the_first_step(
    small_recipe: MakeRecipe, clips: Path
) -> None:
    recipe = small_recipe(f"data.catalog={clips}", "data.max_quarantined_clips=2")
    message = r"3 of the catalog's 64 files are gone, such as .*\.mp4.*At most 2 \(data\.max_quar"
    with pytest.raises(DataError, match=message):
        train(recipe, QUIET)
    assert RunDirectory(recipe.out).metrics() == []


def test_too_many_damaged_clips_end_the_run(small_recipe: MakeRecipe, clips: Path) -> None:
    for path in sorted((clips.parent / "clips").glob("*.mp4"))[:3]:
        path.write_bytes(path.read_bytes()[:200])
    changes = (
        "training.global_batch_size=32",
        "data.max_quarantined_clips=5",
        "data.frame_cache_gib=0",
    )
    recipe = small_recipe(f"data.catalog={clips}", *changes)
    with pytest.raises(DataError, match=r"data\.max_quarantined_clips = 5"):
        train(recipe, QUIET)


def test_the_share_of_the_gpus_peak_is_recorded(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.training.train.peak_flops", lambda device, dtype: 1e12)
    counted = []
    for kind in ("full", "lora"):
        targets = ['trainable.targets=["to_qkv"]'] if kind == "lora" else []
        out = f"out={small_recipe().out}-{kind}"
        recipe = small_recipe("training.steps=1", f"trainable.kind={kind}", out, *targets)
        train(recipe, QUIET)
        (row,) = RunDirectory(recipe.out).metrics()
        assert row["mfu"] == pytest.approx(row["tflops_per_second"], rel=1e-3, abs=1e-6)
        counted.append(row["tflops_per_second"] * row["step_seconds"])
    # A LoRA leaves out the gradients of frozen weights: a third of what linear layers take, and
    # nothing of attention's products of two activations.
    assert 0.68 < counted[1] / counted[0] < 0.8


# --- Memory that a step takes -----------------------------------------------------------------

_LARGE, _SMALL = (Bucket(num_frames=1, height=size, width=size) for size in (64, 32))


@pytest.fixture
def world(small_recipe: MakeRecipe) -> Iterator[World]:
    """This process alone."""
    with join("cpu", small_recipe().parallel, None) as alone:
        yield alone


def _batch(bucket: Bucket) -> Batch:
    none, no, at = torch.empty(0), (), StagePosition("all", 0)
    return Batch(0, "all", "catalog", 0, False, bucket, none, no, no, no, no, none, no, 1, at, at)


@pytest.mark.parametrize(
    ("predicted", "steps", "errors"),
    [
        (6600, [(_LARGE, 1000), (_LARGE, 1500), (_LARGE, 2000)], [0.1]),  # not the first step
        (5400, [(_SMALL, 1), (_SMALL, 2), (_LARGE, 1500), (_LARGE, 4)], [-0.1]),  # of this shape
        (100, [(_LARGE, 0), (_LARGE, 0)], [99]),  # a rank may have no sample of a last batch
        (None, [(_LARGE, 10), (_LARGE, 10)], []),
    ],
)
def test_memory_of_one_step_is_compared_with_the_prediction(
    predicted: int | None,
    steps: list[tuple[Bucket, int]],
    errors: list[float],
    small_recipe: MakeRecipe,
    world: World,
) -> None:
    recipe = small_recipe()
    recipe.out.mkdir()
    session = Session(recipe, RunDirectory(recipe.out), world, QUIET, "fp32")
    expected = None if predicted is None else (predicted, _LARGE)
    with keep_recorder(session, None, 0, {}, None, expected) as recorder:
        for bucket, size in steps:
            # Where nothing is measured a profiler may be at work, which refuses a second one.
            unmeasured = torch.autograd.profiler.profile() if predicted is None else nullcontext()
            with unmeasured, recorder.measured(_batch(bucket)):
                torch.ones(size)
    assert [each["error"] for each in events(recipe, "memory_measured")] == errors


# --- The lease --------------------------------------------------------------------------------


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
    run: RunDirectory, world: World, small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Leases(60, {"token": "a"}).take(run.lease_path)
    assert lease is not None
    with keep_recorder(Session(small_recipe(), run, world, QUIET, "fp32"), lease, 0, {}) as own:
        own.refuse_lost_lease()
        lease.end("x")
        assert Leases(60, {"token": "b"}).take(run.lease_path) is not None
        monkeypatch.setattr(longtake.lease, "boot_seconds", lambda: time.monotonic() + 1e9)
        message = r"silent for more than 60 s, and process \d+ on .* has taken"
        with pytest.raises(RunError, match=message):
            own.refuse_lost_lease()


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
