"""Ranks train what one process trains, and fail as promptly. Each test starts real processes."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.build import (
    QUIET,
    Recipes,
    copy_clips,
    events,
    forget_after,
    losses,
    saved,
    start_training,
    train_by,
    wait_until,
)
from tests.families import release_wan
from tests.models.gguf_files import write_as_gguf

from longtake.data.audit import audit
from longtake.models.wan import original_name
from longtake.run_dir import RunDirectory
from longtake.training.train import train

_ROOT = Path(__file__).resolve().parents[2]
_ADAPTERS = (
    "trainable.kind=lora",
    "trainable.rank=2",
    "trainable.modules.style.module=examples.modules.style_residual:StyleResidual",
    "trainable.modules.style.options.rank=2",
)


@pytest.mark.slow
def test_two_processes_train_the_adapters_that_one_trains(
    small_recipe: Recipes, on_two_processes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_ROOT)  # where the module is found
    changes = (*_ADAPTERS, "model.dtype=bf16")
    alone = small_recipe.trained(*changes, name="alone")
    together = small_recipe(*changes, "parallel.strategy=shard")
    assert "Warning" not in train_by(on_two_processes, together)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-2, abs=1e-2)
    for name in ("model", "ema/main", "optimizer"):
        assert saved(together, 12, name).keys() == saved(alone, 12, name).keys()
    averages = saved(together, 12, "ema/main")
    assert all("lora_" in each or "added_modules." in each for each in averages)
    torch.testing.assert_close(averages, saved(alone, 12, "ema/main"), rtol=0.1, atol=1)

    forget_after(together, 6)
    RunDirectory(together.out).metrics_path.unlink()
    assert train(together, QUIET).start_step == 6
    assert losses(together) == pytest.approx(losses(alone)[6:], rel=1e-2, abs=1e-2)


@pytest.mark.drill
def test_two_processes_read_their_shares_of_one_file(
    small_recipe: Recipes, on_two_processes: list[str], tmp_path: Path
) -> None:
    """After a step of no length they hold what the file has, as one process would."""
    release, file = tmp_path / "release", tmp_path / "model.gguf"
    release_wan.make(release)
    (weights,) = (release / "transformer").glob("*.safetensors")
    names = {name: original_name(name) for name in load_file(weights)}
    exact = write_as_gguf(file, {names[n]: value for n, value in load_file(weights).items()})
    recipe = small_recipe(
        "data.buckets=[{num_frames=5, height=32, width=32}]",
        f"model={{family='wan', pretrained='{file}', config_from='{release}', config={{}}}}",
        f"codec={{kind='autoencoder', pretrained='{release}'}}",
        f"text={{kind='transformers', pretrained='{release}', max_tokens=32}}",
        "trainable.kind=full",
        "optimizer.learning_rate=1e-30",
        "training.steps=1",
        "parallel.strategy=shard",
    )
    train_by(on_two_processes, recipe)
    expected = {name: exact[original] for name, original in names.items()}
    torch.testing.assert_close(saved(recipe, 1, "model"), expected, rtol=0, atol=1e-29)


@pytest.fixture
def clips(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of clips that a test may delete."""
    return copy_clips(shapes_catalog, tmp_path / "shapes")


def _lose(catalog: Path, count: int) -> list[str]:
    """Delete some clips; returns their paths."""
    lost = sorted((catalog.parent / "clips").glob("*.mp4"))[:count]
    for path in lost:
        path.unlink()
    return [str(path) for path in lost]


def test_lost_clips_are_named_once_and_a_signal_saves(
    small_recipe: Recipes, torchrun: list[str], clips: Path
) -> None:
    lost = _lose(clips, 6)
    recipe = small_recipe(
        f"data.catalog={clips}",
        "training.global_batch_size=32",
        "training.steps=1000",
        "checkpoint.every=1000",
        "data.frame_cache_gib=0",
    )
    run, process = RunDirectory(recipe.out), start_training(torchrun, recipe)
    wait_until(
        lambda: (
            process.poll() is not None or (run.metrics_path.exists() and len(run.metrics()) >= 10)
        )
    )
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    (step,) = run.checkpoint_steps()
    assert f"Stopped by SIGINT after step {step}, which is saved." in output
    assert len(run.metrics()) == step
    rejected = events(recipe, "sample_rejected")
    reasons = sorted(event["reason"] for event in rejected)
    for path, reason in zip(lost, reasons, strict=True):
        assert path in reason
        assert "No such file" in reason
    assert {event["rank"] for event in rejected} <= {0, 1}
    found = audit(run)
    assert found.ok
    assert found.end_step == step
    assert found.epochs[0].seen == 58


@pytest.mark.slow
def test_stand_ins_weigh_nothing_on_two_processes(
    small_recipe: Recipes, on_two_processes: list[str], clips: Path
) -> None:
    _lose(clips, 5)
    changes = (
        f"data.catalog={clips}",
        "data.stages=[{name='a', epochs=1}, {name='b', epochs=1}]",
        "training.global_batch_size=20",  # 64 = 3 x 20 + 4, all on the first rank
        "training.steps=8",
    )
    alone = small_recipe.trained(*changes, name="alone")
    together = small_recipe(*changes, "data.workers=2")
    train_by(on_two_processes, together)
    assert len(losses(together)) == 8
    assert losses(together) == pytest.approx(losses(alone), rel=1e-6, abs=1e-6)
    for recipe in (alone, together):
        found = audit(RunDirectory(recipe.out))
        assert found.ok
        assert [(each.seen, each.rejected) for each in found.epochs] == [(59, 5)] * 2


def test_one_rank_that_fails_ends_both(
    small_recipe: Recipes, on_two_processes: list[str], clips: Path
) -> None:
    """The rank that meets a damaged clip says so; the other does not wait until a timeout."""
    lost = min((clips.parent / "clips").glob("*.mp4"))
    lost.write_bytes(lost.read_bytes()[:200])
    recipe = small_recipe(
        f"data.catalog={clips}", "training.steps=1000", "data.max_quarantined_clips=0"
    )
    output = train_by(on_two_processes, recipe, fails=True)
    assert f"data.max_quarantined_clips = 0 allows. One of them: {lost}" in output
    assert "longtake/training/loop.py" not in output  # no traceback buries that sentence


def test_a_mistake_that_the_first_finds_ends_both(
    small_recipe: Recipes, on_two_processes: list[str]
) -> None:
    recipe = small_recipe.trained("training.steps=1")
    metrics = RunDirectory(recipe.out).metrics_path.read_bytes()
    output = train_by(on_two_processes, small_recipe("training.steps=1", "seed=9"), fails=True)
    assert "longtake: " in output
    assert "seed: 0 there, 9 now" in output
    assert RunDirectory(recipe.out).metrics_path.read_bytes() == metrics


def test_a_batch_that_cannot_be_shared_is_refused(
    small_recipe: Recipes, on_two_processes: list[str]
) -> None:
    output = train_by(on_two_processes, small_recipe("training.global_batch_size=1"), fails=True)
    assert "training.global_batch_size 1 cannot be shared by 2 processes" in output
    assert "parallel.context" in output


def test_ranks_save_together_when_minutes_have_passed(
    small_recipe: Recipes, on_two_processes: list[str]
) -> None:
    recipe = small_recipe("checkpoint.every=8", "checkpoint.minutes=1e-5")
    train_by(on_two_processes, recipe)
    assert [each["step"] for each in events(recipe, "checkpoint")] == list(range(1, 13))
