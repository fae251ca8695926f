"""A run with two checkpoints, and how they are made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.checkpoint.store import State, keep_saver
from longtake.config import CheckpointSection
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

Save = Callable[..., Path]


@pytest.fixture
def alone() -> World:
    """The world of a single process."""
    return World(0, 0, 1, torch.device("cpu"), None)


@pytest.fixture
def make_parts() -> Callable[[float], dict[str, State]]:
    """Makes a small state, all of whose numbers follow from one."""

    def make(value: float = 0.0) -> dict[str, State]:
        return {
            "model": {"weight": torch.full((64, 64), value), "bias": torch.full((3,), value)},
            "ema/main": {"weight": torch.full((64, 64), value + 1)},
            "optimizer": {"state.weight.step": torch.tensor(value), "lr": value, "betas": (0, 1)},
        }

    return make


@pytest.fixture
def save(alone: World, make_parts: Callable[[float], dict[str, State]]) -> Save:
    """Saves a step as a launch of its own: `save(run, 30, start=20, keep=2)`."""

    def save(
        run: RunDirectory, step: int, *, start: int | None = None, reach: int = 0, **rules: Any
    ) -> Path:
        steps = [each for each in run.checkpoint_steps() if each < step]
        begun = max(steps, default=0) if start is None else start
        section = CheckpointSection(**rules)
        with keep_saver(run, alone, section, start=begun, reach=reach) as saver:
            saver.save(step, make_parts(float(step)), {"global_step": step})
        return run.checkpoint_path(step)

    return save


@pytest.fixture
def run(tmp_path: Path, save: Save) -> RunDirectory:
    """A run directory with checkpoints of the steps 10 and 20."""
    run = RunDirectory(tmp_path / "run")
    for step in (10, 20):
        save(run, step)
    return run
