"""Two processes train what one trains, and fail as promptly. Each test starts real processes."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config
from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.data.index import index
from longtake.fsio import read_json_lines
from longtake.run_dir import RunDirectory
from longtake.training.run import train

_QUIET = Console(quiet=True)

Launch = Callable[[Recipe], subprocess.Popen[str]]


@pytest.fixture
def launch(on_two_processes: list[str]) -> Launch:
    """Starts `longtake train` on two processes."""
    return lambda recipe: _start(on_two_processes, recipe)


@pytest.fixture
def launch_by_torchrun(torchrun: list[str]) -> Launch:
    """Likewise, where it matters how torchrun passes signals on and ends the other rank."""
    return lambda recipe: _start(torchrun, recipe)


def _start(command: list[str], recipe: Recipe) -> subprocess.Popen[str]:
    path = Path(f"{recipe.out}.toml")
    path.write_text(config.dump(recipe))
    train = [*command, "-m", "longtake", "train", str(path)]
    return subprocess.Popen(
        train, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )


def _curve(recipe: Recipe) -> list[float]:
    return RunDirectory(recipe.out).losses()


def _averages(recipe: Recipe, step: int) -> dict[str, Any]:
    file = recipe.out / "ema.pt"
    dcp_to_torch_save(RunDirectory(recipe.out).checkpoint_path(step) / "ema" / "main", file)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_two_processes_have_the_losses_of_one(
    small_recipe: Callable[..., Recipe], launch: Launch, tmp_path: Path, strategy: str
) -> None:
    """Muon's and AdamW's steps, the averages, and what one process makes of two's checkpoint."""
    changes = "optimizer.kind=muon", "optimizer.muon_learning_rate=0.005"
    alone = small_recipe(*changes, f"out={tmp_path / 'alone'}")
    train(alone, _QUIET)
    together = small_recipe(
        *changes, f"parallel.strategy={strategy}", "training.micro_batch_size=1"
    )
    said, _ = (process := launch(together)).communicate(timeout=120)
    assert process.returncode == 0, said
    assert len(_curve(together)) == 12
    assert _curve(together) == pytest.approx(_curve(alone), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(_averages(together, 12), _averages(alone, 12), rtol=1e-4, atol=1e-5)

    run = RunDirectory(together.out)
    shutil.rmtree(run.checkpoint_path(12))
    run.metrics_path.unlink()
    rest = train(together, _QUIET)
    assert rest.start_step == 6
    assert _curve(together) == pytest.approx(_curve(alone)[6:], rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "strategy", "policy", "near"),
    [
        ("fp32", "shard", "none", 1e-6),
        ("bf16", "shard", "none", 1e-2),
        ("bf16", "replicate", "save-attention", 1e-2),
    ],
)
def test_two_processes_have_the_losses_of_one_on_wan(
    small_recipe: Callable[..., Recipe],
    launch: Launch,
    tmp_path: Path,
    dtype: str,
    strategy: str,
    policy: str,
    near: float,
) -> None:
    """So do a Wan, its autoencoder and its text encoder; and nothing warns the user.

    In bf16 a few of its weights stay in fp32: FSDP2 then has several units inside of each block.
    """
    changes = (
        "data.buckets=[{num_frames=5, height=32, width=32}]",
        "model.family=wan",
        "model.config={num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
        "codec.kind=autoencoder",
        "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
        "temperal_downsample=[true]}",
        "text.kind=transformers",
        "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
        "training.steps=6",
        f"model.dtype={dtype}",
    )
    alone = small_recipe(*changes, f"out={tmp_path / 'alone'}")
    train(alone, _QUIET)
    how = f"parallel.strategy={strategy}", f"recompute.policy={policy}"
    together = small_recipe(*changes, *how)
    said, _ = (process := launch(together)).communicate(timeout=120)
    assert process.returncode == 0, said
    assert "Warning" not in said, said
    assert _curve(together) == pytest.approx(_curve(alone), rel=near, abs=near)
    if dtype == "fp32":
        averages = _averages(together, 6)
        torch.testing.assert_close(averages, _averages(alone, 6), rtol=1e-4, atol=1e-5)


@pytest.fixture
def clips(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of clips that a test may delete."""
    folder, out = tmp_path / "shapes" / "clips", tmp_path / "shapes" / "catalog.parquet"
    shutil.copytree(shapes_catalog.parent, tmp_path / "shapes")
    index([folder], captions=folder / "captions.jsonl", out=out)
    return out


def _lose(catalog: Path, count: int) -> list[str]:
    """Delete some clips; returns their paths."""
    lost = sorted((catalog.parent / "clips").glob("*.mp4"))[:count]
    for path in lost:
        path.unlink()
    return [str(path) for path in lost]


def test_lost_clips_are_named_once_and_a_signal_saves(
    small_recipe: Callable[..., Recipe], launch_by_torchrun: Launch, clips: Path
) -> None:
    """Whichever ranks meet a lost clip it has one event; Ctrl-C ends both ranks with a save."""
    lost = _lose(clips, 6)
    recipe = small_recipe(
        f"data.catalog={clips}",
        "training.batch_size=32",
        "training.steps=1000",
        "checkpoint.every=1000",
        "data.memory_gib=0",
    )
    process = launch_by_torchrun(recipe)
    run, deadline = RunDirectory(recipe.out), time.monotonic() + 100
    while not run.metrics_path.exists() or len(run.metrics()) < 10:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=400)
    (step,) = run.checkpoint_steps()
    assert f"Stopped by SIGINT after step {step}, which is saved." in said
    assert len(run.metrics()) == step
    events = [e for e in read_json_lines(run.events_path) if e["event"] == "sample_rejected"]
    reasons = sorted(event["reason"] for event in events)
    for path, reason in zip(lost, reasons, strict=True):
        assert path in reason
        assert "No such file" in reason
    assert {event["rank"] for event in events} <= {0, 1}
    found = audit(run)
    assert found.ok
    assert found.end_step == step
    assert found.epochs[0].seen == 58


@pytest.mark.slow
def test_stand_ins_weigh_nothing_on_two_processes(
    small_recipe: Callable[..., Recipe], launch: Launch, clips: Path, tmp_path: Path
) -> None:
    """Lost clips, and a last batch in which one rank has nothing: the losses of one process."""
    _lose(clips, 5)
    changes = (
        f"data.catalog={clips}",
        "data.stages=[{name='a', epochs=1}, {name='b', epochs=1}]",
        "training.batch_size=20",  # 64 = 3 x 20 + 4, all on the first rank
        "training.steps=8",
    )
    alone = small_recipe(*changes, f"out={tmp_path / 'alone'}")
    train(alone, _QUIET)
    together = small_recipe(*changes, "data.workers=2")
    said, _ = (process := launch(together)).communicate(timeout=120)
    assert process.returncode == 0, said
    assert len(_curve(together)) == 8
    assert _curve(together) == pytest.approx(_curve(alone), rel=1e-6, abs=1e-6)
    for recipe in (alone, together):
        found = audit(RunDirectory(recipe.out))
        assert found.ok
        assert [(each.seen, each.rejected) for each in found.epochs] == [(59, 5)] * 2


def test_one_rank_that_fails_ends_both(
    small_recipe: Callable[..., Recipe], launch_by_torchrun: Launch, clips: Path
) -> None:
    """The rank that meets a damaged clip says so; the other does not wait until a time-out."""
    lost = min((clips.parent / "clips").glob("*.mp4"))
    lost.write_bytes(lost.read_bytes()[:200])
    recipe = small_recipe(
        f"data.catalog={clips}", "training.steps=1000", "data.max_quarantined_clips=0"
    )
    process = launch_by_torchrun(recipe)
    said, _ = process.communicate(timeout=400)
    assert process.returncode != 0
    assert f"data.max_quarantined_clips = 0 allows. One of them: {lost}" in said
    assert "longtake/training/loop.py" not in said  # no traceback buries that sentence


def test_a_mistake_that_the_first_finds_ends_both(
    small_recipe: Callable[..., Recipe], launch: Launch
) -> None:
    """A folder that holds another run is refused by all ranks, and left as it is."""
    recipe = small_recipe("training.steps=1")
    train(recipe, _QUIET)
    metrics = RunDirectory(recipe.out).metrics_path.read_bytes()
    process = launch(small_recipe("training.steps=1", "seed=9"))
    said, _ = process.communicate(timeout=400)
    assert process.returncode != 0
    assert "longtake: " in said
    assert "seed: 0 there, 9 now" in said
    assert RunDirectory(recipe.out).metrics_path.read_bytes() == metrics


def test_a_batch_that_cannot_be_shared_is_refused(
    small_recipe: Callable[..., Recipe], launch: Launch
) -> None:
    """One clip for two processes: the message has both numbers and what to change."""
    process = launch(small_recipe("training.batch_size=1"))
    said, _ = process.communicate(timeout=400)
    assert process.returncode != 0
    assert "training.batch_size 1 cannot be shared by 2 processes" in said
    assert "parallel.sequence" in said


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [1e-5, 60])
def test_ranks_save_together_when_minutes_have_passed(
    small_recipe: Callable[..., Recipe], launch: Launch, minutes: float
) -> None:
    """Rank 0's clock decides for both; `every` holds beside it."""
    recipe = small_recipe("checkpoint.every=8", f"checkpoint.minutes={minutes}")
    said, _ = (process := launch(recipe)).communicate(timeout=120)
    assert process.returncode == 0, said
    events = RunDirectory(recipe.out).events()
    saved = [each["step"] for each in events if each["event"] == "checkpoint"]
    assert saved == (list(range(1, 13)) if minutes < 1 else [8, 12])
