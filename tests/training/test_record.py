"""What a run records of its steps."""

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.build import QUIET, TINY_WAN, Recipes, copy_clips, events, forget_after

from longtake.config import Bucket
from longtake.data.audit import audit
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.stages import StagePosition
from longtake.errors import DataError
from longtake.fsio import read_json_lines
from longtake.metrics import Metrics
from longtake.parallel.mesh import World, join
from longtake.planner.batch_sizes import bucket_tokens
from longtake.run_dir import RunDirectory
from longtake.training import record
from longtake.training.compiled import FAULTS
from longtake.training.record import Recorder
from longtake.training.saving import save_checkpoint
from longtake.training.session import Session
from longtake.training.train import train


def test_a_step_has_one_row_of_numbers(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
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
    tokens = [row["tokens_per_second"] * row["step_seconds"] for row in rows]
    (of_a_clip,) = bucket_tokens(recipe).values()
    assert tokens == pytest.approx([8 * of_a_clip] * 20, rel=1e-3)
    (launch,) = run.record()["launches"]
    facts: Any = launch
    assert (launch["start_step"], launch["world_size"], launch["device"]) == (0, 1, "cpu")
    trainer = json.loads((run.checkpoint_path(20) / "trainer.json").read_text())
    assert trainer["precision"] == facts["precision"] in ("bf16", "fp32")


def test_each_step_has_the_bucket_of_its_clips_and_their_tokens(small_recipe: Recipes) -> None:
    """Clips of two shapes; stand-ins of a bucket's last batch count as no tokens."""
    recipe = small_recipe.trained(
        *TINY_WAN,
        "data.buckets=[{num_frames=5, height=32, width=32}, {num_frames=1, height=32, width=32, "
        "share=0.5}]",
        "data.stages=[{name='a', epochs=1}, {name='b'}]",
        "data.stills_from_videos=true",
        "training.global_batch_size=12",
        "training.steps=6",
    )
    tokens: dict[tuple[int, ...], int] = {
        (shape.num_frames, shape.height, shape.width): count
        for shape, count in bucket_tokens(recipe).items()
    }
    rows = RunDirectory(recipe.out).metrics()
    assert {tuple(row["bucket"]) for row in rows} == tokens.keys()
    assert {row["num_samples"] for row in rows} > {12}
    for row in rows:
        count = row["num_samples"] * tokens[tuple(row["bucket"])]
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(count, rel=1e-3)


def test_tensorboard_says_the_same_after_a_resume(small_recipe: Recipes) -> None:
    changes = ("training.steps=8", "checkpoint.every=3", "tracking.tensorboard=true")
    recipe = small_recipe.trained(*changes)
    forget_after(recipe, 3)
    train(recipe, QUIET)
    run = RunDirectory(recipe.out)
    events = EventAccumulator(str(run.tensorboard_path), size_guidance={"scalars": 0}).Reload()
    rows: list[Any] = list(run.metrics())
    assert len(list(read_json_lines(run.metrics_path))) == 8 + 5
    for name in ("loss", "grad_norm", "learning_rate", "step_seconds", "tflops_per_second"):
        found = events.Scalars(f"train/{name}")
        assert [event.step for event in found] == list(range(1, 9))
        assert [event.value for event in found] == pytest.approx([r[name] for r in rows], rel=1e-6)


def test_a_save_is_no_wait_for_data(small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_slowly(*arguments: Any) -> None:
        save_checkpoint(*arguments)
        time.sleep(0.3)

    monkeypatch.setattr("longtake.training.saving.save_checkpoint", save_slowly)
    recipe = small_recipe.trained("training.steps=3", "checkpoint.every=1")
    for row in RunDirectory(recipe.out).metrics()[1:]:
        assert row["step_seconds"] > 0.3 + row["data_seconds"]


def test_epochs_stages_and_checkpoints_are_events(small_recipe: Recipes) -> None:
    """64 clips in batches of 32 make an epoch of two steps; each stage counts its own."""
    stages = "[{name='a', epochs=1}, {name='b', steps=1}, {name='c'}]"
    recipe = small_recipe.trained(
        "training.global_batch_size=32",
        "training.steps=6",
        "checkpoint.every=2",
        f"data.stages={stages}",
    )
    found = [(e["stage"], e["source"], e["step"]) for e in events(recipe, "stage")]
    assert found == [("a", "catalog", 0), ("b", "catalog", 2), ("c", "catalog", 3)]
    epochs = [(e["stage"], e["epoch"], e["step"]) for e in events(recipe, "epoch")]
    assert epochs == [("a", 0, 0), ("b", 0, 2), ("c", 0, 3), ("c", 1, 5)]
    assert [e["step"] for e in events(recipe, "checkpoint")] == [2, 4, 6]
    assert [e["step"] for e in events(recipe, "finished")] == [6]


def test_what_runs_uncompiled_is_an_event(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FAULTS, "new", ["torch.compile cannot follow a line"])
    recipe = small_recipe.trained("training.steps=2")
    found = [(each["step"], each["message"]) for each in events(recipe, "uncompiled")]
    assert found == [(0, "torch.compile cannot follow a line")]


@pytest.fixture
def clips(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of clips of which three are gone since it was written."""
    catalog = copy_clips(shapes_catalog, tmp_path / "shapes")
    for path in sorted((catalog.parent / "clips").glob("*.mp4"))[5:8]:
        path.unlink()
    return catalog


def test_clips_that_are_gone_are_named_once(small_recipe: Recipes, clips: Path) -> None:
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
    small_recipe: Recipes, clips: Path
) -> None:
    for path in sorted((clips.parent / "clips").glob("*.mp4"))[1:12]:
        path.unlink()
    recipe = small_recipe.trained(
        f"data.catalog={clips}", "training.global_batch_size=1", "training.steps=64"
    )
    run = RunDirectory(recipe.out)
    assert len(run.metrics()) == 64 - 14
    (epoch,) = audit(run).epochs
    assert (epoch.seen, epoch.rejected, epoch.is_exact) == (50, 14, True)


def test_too_many_of_them_are_found_before_the_first_step(
    small_recipe: Recipes, clips: Path
) -> None:
    recipe = small_recipe(f"data.catalog={clips}", "data.max_quarantined_clips=2")
    message = r"3 of the catalog's 64 files are gone, such as .*\.mp4.*At most 2 \(data\.max_quar"
    with pytest.raises(DataError, match=message):
        train(recipe, QUIET)
    assert RunDirectory(recipe.out).metrics() == []


def test_too_many_damaged_clips_end_the_run(small_recipe: Recipes, clips: Path) -> None:
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
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.training.train.peak_flops", lambda device, dtype: 1e12)
    counted = []
    for kind in ("full", "lora"):
        targets = ['trainable.targets=["to_qkv"]'] if kind == "lora" else []
        changes = ("training.steps=1", f"trainable.kind={kind}", *targets)
        recipe = small_recipe.trained(*changes, name=kind)
        (row,) = RunDirectory(recipe.out).metrics()
        assert row["mfu"] == pytest.approx(row["tflops_per_second"], rel=1e-3, abs=1e-6)
        counted.append(row["tflops_per_second"] * row["step_seconds"])
    # A LoRA leaves out the gradients of frozen weights: a third of what linear layers take, and
    # nothing of attention's products of two activations.
    assert 0.68 < counted[1] / counted[0] < 0.8


# --- Memory that a step takes -----------------------------------------------------------------

_LARGE, _SMALL = (Bucket(num_frames=1, height=size, width=size) for size in (64, 32))


@pytest.fixture
def world(small_recipe: Recipes) -> Iterator[World]:
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
    small_recipe: Recipes,
    world: World,
) -> None:
    recipe = small_recipe()
    recipe.out.mkdir()
    session = Session(recipe, RunDirectory(recipe.out), world, QUIET, "fp32")
    expected = None if predicted is None else (predicted, _LARGE)
    with Recorder(session, None, 0, {}, None, expected) as recorder:
        for bucket, size in steps:
            # Where nothing is measured a profiler may be at work, which refuses a second one.
            unmeasured = torch.autograd.profiler.profile() if predicted is None else nullcontext()
            with unmeasured, recorder.measured_memory(_batch(bucket)):
                torch.ones(size)
    assert [each["error"] for each in events(recipe, "memory_measured")] == errors
