"""A run goes on with other ranks that share in another way, as one process would have."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config
from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.run_dir import RunDirectory
from longtake.training.run import train

_STEPS, _EVERY = 9, 3
_CHANGES = (
    "model.config={hidden_size=48, num_blocks=2, num_heads=4}",
    f"training.steps={_STEPS}",
    f"checkpoint.every={_EVERY}",
    "checkpoint.keep=9",
    "training.micro_batch_size=1",
)
_LAUNCHES = (
    (4, "hybrid of 2", ('parallel.strategy="hybrid"', "parallel.shard_size=2")),
    (4, "sequence of 2, shard", ('parallel.strategy="shard"', "parallel.sequence=2")),
    (2, "sequence of 2", ("parallel.sequence=2", 'recompute.policy="all"')),
)
"""Each goes on where the one before was killed, and one process where the last was."""


@pytest.mark.slow
def test_a_run_goes_on_however_it_is_shared(
    small_recipe: Callable[..., Recipe], on_processes: Callable[[int], list[str]], tmp_path: Path
) -> None:
    """Metrics and averages are those of one process all the way, and no clip is lost or twice."""
    alone = small_recipe(*_CHANGES, f"out={tmp_path / 'alone'}")
    train(alone, Console(quiet=True))
    wanted = _rows(alone)
    for number, (count, _, changes) in enumerate(_LAUNCHES):
        shared = small_recipe(*_CHANGES, *changes)
        _launch(shared, on_processes(count))
        assert _rows(shared) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert audit(RunDirectory(shared.out)).ok
        _forget(shared, after=_EVERY * min(number + 1, 2))
    outcome = train(small_recipe(*_CHANGES), Console(quiet=True))
    assert outcome.start_step == 2 * _EVERY
    assert _rows(shared) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    found = audit(RunDirectory(shared.out))
    assert found.ok
    assert found.end_step == _STEPS
    torch.testing.assert_close(_averages(shared), _averages(alone), rtol=1e-4, atol=1e-5)


def _launch(recipe: Recipe, command: list[str]) -> None:
    path = Path(f"{recipe.out}.toml")
    path.write_text(config.dump(recipe))
    ended = subprocess.run(
        [*command, "-m", "longtake", "train", str(path)],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def _forget(recipe: Recipe, after: int) -> None:
    """As if the run had been killed after a step."""
    run = RunDirectory(recipe.out)
    for step in run.checkpoint_steps():
        if step > after:
            shutil.rmtree(run.checkpoint_path(step))


def _rows(recipe: Recipe) -> list[float | None]:
    """Losses and norms of every step, one after the other."""
    rows = {row["step"]: row for row in RunDirectory(recipe.out).metrics()}
    by_step = (rows[step] for step in range(1, _STEPS + 1))
    return [each for row in by_step for each in (row["loss"], row["grad_norm"], row["weight_norm"])]


def _averages(recipe: Recipe) -> dict[str, torch.Tensor]:
    file = recipe.out / "ema.pt"
    dcp_to_torch_save(RunDirectory(recipe.out).checkpoint_path(_STEPS) / "ema" / "main", file)
    averages: dict[str, torch.Tensor] = torch.load(file)
    return averages
