"""Two ranks that are stopped and resumed, or go back, end as two that were not: to the bit."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config
from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.run_dir import RunDirectory

_STEPS = 12
_ADAPTERS = (
    "trainable.kind=lora",
    'trainable.targets=["to_qkv", "to_out"]',
    "trainable.rank=4",
)


def _launch(command: list[str], recipe: Recipe, *program: str) -> subprocess.CompletedProcess[str]:
    path = Path(f"{recipe.out}.toml")
    path.write_text(config.dump(recipe))
    return subprocess.run(
        [*command, *program, "train", str(path)],
        capture_output=True,
        text=True,
        env=os.environ,
        cwd=path.parent,  # where it leaves what it has to tell
        timeout=150,
        check=False,
    )


def _saved(recipe: Recipe, step: int) -> dict[str, Any]:
    path, saved = RunDirectory(recipe.out).checkpoint_path(step), {}
    for name in ("model", "ema/main", "optimizer"):
        dcp_to_torch_save(path / name, recipe.out / "saved.pt")
        saved[name] = torch.load(recipe.out / "saved.pt", weights_only=False)
    return saved


def _rows(recipe: Recipe) -> list[list[Any]]:
    rows: list[Any] = RunDirectory(recipe.out).metrics()
    keys = ("step", "batch", "loss", "grad_norm", "weight_norm", "update_ratio")
    return [[row[key] for key in keys] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("shard", "full"), ("shard", "lora"), ("replicate", "module")],
)
def test_resumed_they_are_the_same(
    small_recipe: Callable[..., Recipe],
    own_module: Callable[[str], str],
    on_two_processes: list[str],
    tmp_path: Path,
    strategy: str,
    kind: str,
) -> None:
    """Metrics, weights, averages and optimizer, of all weights, LoRA and an added module."""
    module = own_module("tokens + self.change(given)")
    what = {"full": (), "lora": _ADAPTERS, "module": (f"trainable.module={module}",)}[kind]
    changes = (*what, f"training.steps={_STEPS}", f"parallel.strategy={strategy}")
    straight = small_recipe(*changes, f"out={tmp_path / 'straight'}")
    ended = _launch(on_two_processes, straight, "-m", "longtake")
    assert ended.returncode == 0, ended.stderr
    stopped = small_recipe(*changes)
    shutil.copytree(straight.out, stopped.out)
    run = RunDirectory(stopped.out)
    shutil.rmtree(run.checkpoint_path(_STEPS))  # as if it had been killed after step 6
    run.recipe_path.write_text(config.dump(stopped))
    ended = _launch(on_two_processes, stopped, "-m", "longtake")
    assert ended.returncode == 0, ended.stderr
    assert "6 steps since the checkpoint of step 6" in " ".join(ended.stderr.split())
    assert _rows(stopped) == _rows(straight)
    torch.testing.assert_close(_saved(stopped, _STEPS), _saved(straight, _STEPS), rtol=0, atol=0)


@pytest.mark.slow
def test_they_go_back_together(
    small_recipe: Callable[..., Recipe], on_two_processes: list[str], tmp_path: Path
) -> None:
    """To the same checkpoint, round the same batches; killed after that, it ends the same."""
    changes = (
        "parallel.strategy=shard",
        "guard.max_skips=0",
        "guard.warmup_steps=16",
        "guard.window=32",
        "checkpoint.every=10",
        "training.steps=50",
    )
    recipe = small_recipe(*changes)
    harm = ("-m", "longtake.faults.inject", "poison", "36")
    ended = _launch(on_two_processes, recipe, *harm)
    assert ended.returncode == 0, ended.stderr
    run = RunDirectory(recipe.out)
    (record,) = run.rollbacks()
    first, end = record["skipped"]
    assert (record["to_step"], first, end) == (30, 30, 45)
    assert [row["step"] for row in run.metrics()] == list(range(1, 51))
    audited = audit(run)
    assert audited.ok
    assert audited.num_skipped == end - first
    rows, saved = _rows(recipe), _saved(recipe, 50)
    for step in (40, 50):  # as if it had been killed right after it went back
        shutil.rmtree(run.checkpoint_path(step))
    ended = _launch(on_two_processes, recipe, *harm)
    assert ended.returncode == 0, ended.stderr
    assert len(run.rollbacks()) == 1
    assert _rows(recipe) == rows
    torch.testing.assert_close(_saved(recipe, 50), saved, rtol=0, atol=0)
