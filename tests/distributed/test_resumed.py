"""Ranks that are killed and resumed, or roll back, end as if they had not been."""

from collections.abc import Callable

import pytest
import torch
from tests.build import QUIET, Recipes, all_saved, forget_after, rows, saved, train_by

from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.run_dir import RunDirectory
from longtake.training.train import train

_KEYS = ("step", "batch", "loss", "grad_norm", "weight_norm", "update_ratio")
_STEPS, _EVERY = 9, 3
_CHANGES = (
    "model.config={hidden_size=48, num_blocks=2, num_heads=4}",
    f"training.steps={_STEPS}",
    f"checkpoint.every={_EVERY}",
    "checkpoint.keep=9",
    "training.micro_batch_size=1",
)
_LAUNCHES = (
    (4, ('parallel.strategy="hybrid"', "parallel.shard_size=2")),
    (2, ('parallel.strategy="shard"', "parallel.context=2", 'recompute.policy="all"')),
)
"""Each resumes where the one before was killed, and one process where the last was."""


@pytest.mark.slow
def test_they_roll_back_together(small_recipe: Recipes, on_two_processes: list[str]) -> None:
    """To the same checkpoint, without the same batches; killed after that, it ends the same."""
    recipe = small_recipe(
        "parallel.strategy=shard",
        "guard.warmup_steps=16",
        "guard.window=32",
        "checkpoint.every=10",
        "training.steps=50",
    )
    poison = ("-m", "longtake.faults.inject", "--guard", '{"max_skips": 0}', "poison", "36")
    train_by(on_two_processes, recipe, program=poison, folder=recipe.out.parent)
    run = RunDirectory(recipe.out)
    (record,) = run.rollbacks()
    first, end = record["skipped"]
    assert (record["to_step"], first, end) == (30, 30, 45)
    assert [row["step"] for row in run.metrics()] == list(range(1, 51))
    audited = audit(run)
    assert audited.ok
    assert audited.num_skipped == end - first
    found, weights = rows(recipe, *_KEYS), all_saved(recipe, 50)
    forget_after(recipe, 30)  # as if it had been killed right after the rollback
    output = train_by(on_two_processes, recipe, program=poison, folder=recipe.out.parent)
    assert "20 steps since the checkpoint of step 30" in " ".join(output.split())
    assert len(run.rollbacks()) == 1
    assert rows(recipe, *_KEYS) == found
    torch.testing.assert_close(all_saved(recipe, 50), weights, rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_resumes_however_it_is_shared(
    small_recipe: Recipes, on_processes: Callable[[int], list[str]]
) -> None:
    alone = small_recipe.trained(*_CHANGES, name="alone")
    wanted = _numbers(alone)
    for number, (count, changes) in enumerate(_LAUNCHES):
        shared = small_recipe(*_CHANGES, *changes)
        train_by(on_processes(count), shared)
        assert _numbers(shared) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert audit(RunDirectory(shared.out)).ok
        forget_after(shared, _EVERY * (number + 1))
    assert train(small_recipe(*_CHANGES), QUIET).start_step == 2 * _EVERY
    assert _numbers(shared) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    found = audit(RunDirectory(shared.out))
    assert found.ok
    assert found.end_step == _STEPS
    averages = saved(shared, _STEPS, "ema/main"), saved(alone, _STEPS, "ema/main")
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-5)


def _numbers(recipe: Recipe) -> list[float]:
    found = rows(recipe, "step", "loss", "grad_norm", "weight_norm")
    assert [row[0] for row in found] == list(range(1, _STEPS + 1))
    return [number for row in found for number in row]
