"""LoRA and an added module on two processes: the losses of one, and checkpoints of what trains."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config
from longtake.config import Recipe
from longtake.run_dir import RunDirectory
from longtake.training.run import train

_QUIET = Console(quiet=True)
_STYLE = "examples.modules.style_residual:StyleResidual"
_ADAPTERS = (
    "trainable.kind=lora",
    "trainable.rank=2",
    f"trainable.module={_STYLE}",
    "trainable.options.rank=2",
)


def _curve(recipe: Recipe) -> list[float]:
    return RunDirectory(recipe.out).losses()


def _saved(recipe: Recipe, name: str) -> dict[str, Any]:
    file = recipe.out / "saved.pt"
    dcp_to_torch_save(RunDirectory(recipe.out).checkpoint_path(12) / name, file)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "dtype", "near"),
    [("replicate", "fp32", 1e-6), ("shard", "fp32", 1e-6), ("shard", "bf16", 1e-2)],
)
def test_two_processes_train_the_adapters_that_one_trains(
    small_recipe: Callable[..., Recipe],
    on_two_processes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    strategy: str,
    dtype: str,
    near: float,
) -> None:
    """Frozen weights are spread too, but not saved; one process goes on from two's checkpoint."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    changes = (*_ADAPTERS, f"model.dtype={dtype}")
    alone = small_recipe(*changes, f"out={tmp_path / 'alone'}")
    train(alone, _QUIET)
    together = small_recipe(*changes, f"parallel.strategy={strategy}")
    path = tmp_path / "launched.toml"
    path.write_text(config.dump(together))
    ended = subprocess.run(
        [*on_two_processes, "-m", "longtake", "train", str(path)],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr
    assert _curve(together) == pytest.approx(_curve(alone), rel=near, abs=near)
    for name in ("model", "ema/main", "optimizer"):
        assert _saved(together, name).keys() == _saved(alone, name).keys()
    averages = _saved(together, "ema/main")
    assert all("lora_" in each or "added_module." in each for each in averages)
    torch.testing.assert_close(averages, _saved(alone, "ema/main"), rtol=0.1, atol=100 * near)

    run = RunDirectory(together.out)
    shutil.rmtree(run.checkpoint_path(12))
    run.metrics_path.unlink()
    assert train(together, _QUIET).start_step == 6
    assert _curve(together) == pytest.approx(_curve(alone)[6:], rel=near, abs=near)
