"""Two processes run one plan. Run by torchrun, this file is one of two ranks."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.build import Recipes, events, losses, train_by

from longtake import config
from longtake.config import ParallelSection
from longtake.errors import LongtakeError, PlanError, RecipeError
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World, join
from longtake.planner import plan as plan_module
from longtake.planner.plan import make_plan
from longtake.planner.record import newest_plan

_SMALL = ("training.steps=6", "training.global_batch_size=32")
_WITHIN = (  # 16 samples a process fit with some recompute
    "recompute.memory=24MiB",
    "recompute.reserve=0",
    "parallel.strategy=shard",
)
_TRAP = "checkpoint(self.change, given, use_reentrant=True)"


@pytest.mark.slow
def test_two_processes_recompute_with_the_losses_of_one(
    small_recipe: Recipes, on_two_processes: list[str]
) -> None:
    alone = small_recipe.trained(*_SMALL, name="alone")
    together = small_recipe(*_SMALL, *_WITHIN)
    train_by(on_two_processes, together)
    assert len(losses(together)) == 6
    assert losses(together) == pytest.approx(losses(alone), rel=1e-6, abs=1e-6)
    plan = newest_plan(events(together, "memory_planned"))
    assert plan is not None
    assert plan.policy == "best"
    assert len(plan.per_block()) > 1
    assert plan.memory is not None
    assert plan.memory.fits


def test_what_rank_0_finds_all_ranks_do(
    small_recipe: Recipes,
    own_module: Callable[[str], str],
    run_on_two_ranks: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Its plan, or its refusal in the same words: a trap, or a recipe that cannot be."""
    module = f"trainable.modules.own.module={own_module(_TRAP)}"
    size = ("data.buckets=[{num_frames=8, height=30, width=32}]",)
    for name, changes in {"plan": _WITHIN, "trap": (module,), "mistake": size}.items():
        (tmp_path / f"{name}.toml").write_text(config.dump(small_recipe(*_SMALL, *changes)))
    run_on_two_ranks(__file__, str(tmp_path))


def _check(folder: Path, world: World) -> None:
    os.chdir(folder)
    if not world.is_first:  # only rank 0 looks
        plan_module._try_to_plan = None  # type: ignore[assignment]
    plan = make_plan(config.load(folder / "plan.toml"), "fp32", world)
    assert plan.policy == "best"
    assert len(set(plan.options.values())) > 1
    _assert_same(plan, world)
    _assert_same(_refusal(folder / "trap.toml", PlanError, world), world)
    said = _refusal(folder / "mistake.toml", RecipeError, world)
    assert "do not divide into tubes" in said
    _assert_same(said, world)


def _refusal(path: Path, kind: type[LongtakeError], world: World) -> str:
    with pytest.raises(kind) as refused:
        make_plan(config.load(path), "fp32", world)
    return str(refused.value)


def _assert_same(mine: Any, world: World) -> None:
    first, second = gather_objects(mine, world)
    assert first == second


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as world:
        _check(Path(sys.argv[1]), world)
