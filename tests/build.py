"""Launches, and readers of runs, that tests of several packages share."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config
from longtake.config import Recipe
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

MakeRecipe = Callable[..., Recipe]
"""Of the fixture `small_recipe`, and others: overrides of a recipe give that recipe."""
QUIET = Console(quiet=True)
ALONE = World(0, 0, 1, torch.device("cpu"), None)
TINY_T5 = (
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
)
TINY_WAN = (
    *TINY_T5,
    "data.buckets=[{num_frames=5, height=32, width=32}]",
    "model.family=wan",
    "model.config={num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
    "codec.kind=autoencoder",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
    "temperal_downsample=[true]}",
)


def wait_until(found: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What `found` returns as soon as it is true; fails after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError(f"still not true after {seconds} s")


def start_training(
    command: Sequence[str],
    recipe: Recipe,
    program: Sequence[str] = ("-m", "longtake"),
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    """Start `longtake train` with a recipe, by a command that starts ranks, in a folder."""
    path = Path(f"{recipe.out}.toml")
    path.write_text(config.dump(recipe))
    return subprocess.Popen(
        [*command, *program, "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
        cwd=folder,
    )


def train_by(
    command: Sequence[str],
    recipe: Recipe,
    *,
    program: Sequence[str] = ("-m", "longtake"),
    folder: Path | None = None,
    fails: bool = False,
) -> str:
    """Train to the end, and return what was printed."""
    process = start_training(command, recipe, program, folder)
    output, _ = process.communicate(timeout=240)
    assert (process.returncode != 0) is fails, output
    return output


def losses(recipe: Recipe) -> list[float]:
    """The loss of every step that metrics.jsonl has."""
    return RunDirectory(recipe.out).losses()


def rows(recipe: Recipe, *keys: str) -> list[list[Any]]:
    """Of every step that metrics.jsonl has, the values of some keys."""
    found: list[Any] = RunDirectory(recipe.out).metrics()
    return [[row[key] for key in keys] for row in found]


def saved(recipe: Recipe, step: int, name: str) -> dict[str, Any]:
    """The tensors of a part of a checkpoint: `model`, `ema/main`, `optimizer`."""
    file = recipe.out / "saved.pt"
    dcp_to_torch_save(RunDirectory(recipe.out).checkpoint_path(step) / name, file)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    """The run's events of a kind."""
    return [each for each in RunDirectory(recipe.out).events() if each["event"] == kind]
