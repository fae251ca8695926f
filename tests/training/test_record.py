"""What a run writes down about its steps."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.errors import DataError
from longtake.fsio import read_json_lines
from longtake.run_dir import Metrics, RunDirectory
from longtake.training.state import save_checkpoint
from longtake.training.train import train

_QUIET = Console(quiet=True)


def _events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    events = read_json_lines(RunDirectory(recipe.out).events_path)
    return [event for event in events if event["event"] == kind]


def test_a_step_has_one_row_of_numbers(small_recipe: Callable[..., Recipe]) -> None:
    """The documented keys; times that add up to the wall's; as many FLOPs in every step."""
    recipe = small_recipe(
        "training.steps=20", "training.global_batch_size=8", "checkpoint.every=100"
    )
    began = time.time()
    outcome = train(recipe, _QUIET)
    run = RunDirectory(recipe.out)
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(row.keys() == Metrics.__annotations__.keys() - {"verdict", "mfu"} for row in rows)
    seconds = [row["step_seconds"] for row in rows]
    assert sum(seconds[1:]) == pytest.approx(rows[-1]["time"] - rows[0]["time"], abs=0.1)
    assert sum(seconds) <= outcome.training_seconds  # the last save comes after the last row
    assert all(0 <= row["data_seconds"] < row["step_seconds"] for row in rows)
    assert began < rows[0]["time"] < rows[-1]["time"] < time.time()
    flops = [row["tflops_per_second"] * row["step_seconds"] * 1e12 for row in rows]
    assert flops == pytest.approx([flops[0]] * 20, rel=0.05)
    parameters_and_tokens = 2 * 48 * 192 * 128 * 8  # only the first layer, once forward
    assert flops[0] > 3 * parameters_and_tokens


def test_tensorboard_says_the_same_after_a_resume(small_recipe: Callable[..., Recipe]) -> None:
    """A launch that goes on from an earlier checkpoint replaces the steps it runs again."""
    changes = ("training.steps=8", "checkpoint.every=3", "tracking.tensorboard=true")
    recipe = small_recipe(*changes)
    train(recipe, _QUIET)
    run = RunDirectory(recipe.out)
    for step in (6, 8):
        shutil.rmtree(run.checkpoint_path(step))
    train(recipe, _QUIET)
    events = EventAccumulator(str(run.tensorboard_path), size_guidance={"scalars": 0}).Reload()
    rows: list[Any] = list(run.metrics())
    assert len(list(read_json_lines(run.metrics_path))) == 8 + 5
    for name in ("loss", "grad_norm", "learning_rate", "step_seconds", "tflops_per_second"):
        found = events.Scalars(f"train/{name}")
        assert [event.step for event in found] == list(range(1, 9))
        assert [event.value for event in found] == pytest.approx([r[name] for r in rows], rel=1e-6)


def test_a_save_is_no_wait_for_data(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a checkpoint takes belongs to the next step, but not to its data."""

    def save_slowly(*arguments: Any) -> None:
        save_checkpoint(*arguments)
        time.sleep(0.3)

    monkeypatch.setattr("longtake.training.loop.save_checkpoint", save_slowly)
    recipe = small_recipe("training.steps=3", "checkpoint.every=1", "data.prefetch_batches=3")
    train(recipe, _QUIET)
    for row in RunDirectory(recipe.out).metrics()[1:]:
        assert row["step_seconds"] > 0.3
        assert row["data_seconds"] < 0.2


def test_epochs_and_checkpoints_are_events(small_recipe: Callable[..., Recipe]) -> None:
    """64 clips in batches of 32 make an epoch of two steps; without a curriculum one stage."""
    recipe = small_recipe("training.global_batch_size=32", "training.steps=5", "checkpoint.every=2")
    train(recipe, _QUIET)
    assert [(e["epoch"], e["step"]) for e in _events(recipe, "epoch")] == [(0, 0), (1, 2), (2, 4)]
    assert [(e["stage"], e["step"]) for e in _events(recipe, "stage")] == [("all", 0)]
    assert [e["step"] for e in _events(recipe, "checkpoint")] == [2, 4, 5]
    assert [e["step"] for e in _events(recipe, "finished")] == [5]


def test_stages_are_events(small_recipe: Callable[..., Recipe]) -> None:
    """Each where its first step is, with its catalog; epochs are counted in each anew."""
    stages = "[{name='a', epochs=1}, {name='b', steps=1}, {name='c'}]"
    recipe = small_recipe(
        "training.global_batch_size=32", "training.steps=5", f"data.stages={stages}"
    )
    train(recipe, _QUIET)
    found = [(e["stage"], e["source"], e["step"]) for e in _events(recipe, "stage")]
    assert found == [("a", "catalog", 0), ("b", "catalog", 2), ("c", "catalog", 3)]
    epochs = [(e["stage"], e["epoch"], e["step"]) for e in _events(recipe, "epoch")]
    assert epochs == [("a", 0, 0), ("b", 0, 2), ("c", 0, 3)]


@pytest.fixture
def clips(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of clips of which three are gone since it was written."""
    shutil.copytree(shapes_catalog.parent, tmp_path / "shapes")
    folder, out = tmp_path / "shapes" / "clips", tmp_path / "shapes" / "catalog.parquet"
    index([folder], captions=folder / "captions.jsonl", out=out)
    for path in sorted(folder.glob("*.mp4"))[5:8]:
        path.unlink()
    return out


def test_clips_that_are_gone_are_named_once(
    small_recipe: Callable[..., Recipe], clips: Path
) -> None:
    """Training goes on without them, over epochs; each has one event with its reason."""
    recipe = small_recipe(
        f"data.catalog={clips}",
        "training.global_batch_size=32",
        "training.steps=6",
        "data.frame_cache_gib=0",
    )
    outcome = train(recipe, _QUIET)
    assert outcome.end_step == 6
    rejected = _events(recipe, "sample_rejected")
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
    small_recipe: Callable[..., Recipe], clips: Path
) -> None:
    """It has no row of numbers; the ledger has its clips as rejected."""
    lost = sorted((clips.parent / "clips").glob("*.mp4"))[1:12]
    for path in lost:
        path.unlink()
    recipe = small_recipe(
        f"data.catalog={clips}", "training.global_batch_size=1", "training.steps=64"
    )
    train(recipe, _QUIET)
    run = RunDirectory(recipe.out)
    assert len(run.metrics()) == 64 - 14
    (epoch,) = audit(run).epochs
    assert (epoch.seen, epoch.rejected, epoch.is_exact) == (50, 14, True)


def test_too_many_of_them_are_found_before_the_first_step(
    small_recipe: Callable[..., Recipe], clips: Path
) -> None:
    """With their number and some names."""
    recipe = small_recipe(f"data.catalog={clips}", "data.max_quarantined_clips=2")
    message = r"3 of the catalog's 64 files are gone, such as .*\.mp4.*At most 2 \(data\.max_quar"
    with pytest.raises(DataError, match=message):
        train(recipe, _QUIET)
    assert RunDirectory(recipe.out).metrics() == []


def test_too_many_damaged_clips_end_the_run(
    small_recipe: Callable[..., Recipe], clips: Path
) -> None:
    """The recipe's limit is kept, and the message names it."""
    for path in sorted((clips.parent / "clips").glob("*.mp4"))[:3]:
        path.write_bytes(path.read_bytes()[:200])
    changes = (
        "training.global_batch_size=32",
        "data.max_quarantined_clips=5",
        "data.frame_cache_gib=0",
    )
    recipe = small_recipe(f"data.catalog={clips}", *changes)
    with pytest.raises(DataError, match=r"data\.max_quarantined_clips = 5"):
        train(recipe, _QUIET)


def test_the_launch_is_recorded(small_recipe: Callable[..., Recipe]) -> None:
    """run.json says on what the run was computed; `auto` is written down as what it became."""
    recipe = small_recipe("training.steps=1", "training.precision=auto")
    train(recipe, _QUIET)
    run = RunDirectory(recipe.out)
    (launch,) = json.loads(run.record_path.read_text())["launches"]
    assert (launch["start_step"], launch["world_size"], launch["device"]) == (0, 1, "cpu")
    assert launch["precision"] in ("bf16", "fp32")
    trainer = json.loads((run.checkpoint_path(1) / "trainer.json").read_text())
    assert trainer["precision"] == launch["precision"]


def test_the_share_of_the_gpus_peak_is_recorded(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA costs two forward passes a step and not three; MFU follows from the data sheet."""
    monkeypatch.setattr("longtake.training.train.peak_flops", lambda device, dtype: 1e12)
    counted = []
    for kind in ("full", "lora"):
        targets = ['trainable.targets=["to_qkv"]'] if kind == "lora" else []
        out = f"out={small_recipe().out}-{kind}"
        recipe = small_recipe("training.steps=1", f"trainable.kind={kind}", out, *targets)
        train(recipe, _QUIET)
        (row,) = RunDirectory(recipe.out).metrics()
        assert row["mfu"] == pytest.approx(row["tflops_per_second"], rel=1e-3, abs=1e-6)
        counted.append(row["tflops_per_second"] * row["step_seconds"])
    assert counted[1] / counted[0] == pytest.approx(2 / 3, rel=0.1)
