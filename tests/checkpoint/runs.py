"""A small state, how it is saved, what servers need of it, and how it is damaged."""

from pathlib import Path
from typing import Any

import torch
from tests.build import ALONE

from longtake.checkpoint.store import State, keep_saver
from longtake.config import CheckpointSection
from longtake.evaluation_dir import ServerDirectory
from longtake.run_dir import RunDirectory


def make_parts(value: float = 0.0) -> dict[str, State]:
    """A state all of whose numbers follow from one."""
    return {
        "model": {"weight": torch.full((64, 64), value), "bias": torch.full((3,), value)},
        "ema/main": {"weight": torch.full((64, 64), value + 1)},
        "optimizer": {"state.weight.step": torch.tensor(value), "lr": value, "betas": (0, 1)},
    }


def save(
    run: RunDirectory, step: int, *, start: int | None = None, reach: int = 0, **rules: Any
) -> Path:
    """Save a step as a launch of its own: `save(run, 30, start=20, keep=2)`."""
    steps = [each for each in run.checkpoint_steps() if each < step]
    begun = max(steps, default=0) if start is None else start
    section = CheckpointSection(**rules)
    with keep_saver(run, ALONE, section, start=begun, reach=reach) as saver:
        saver.save(step, make_parts(float(step)), {"global_step": step})
    return run.checkpoint_path(step)


def need(run: RunDirectory, *steps: int, server: str = "server-1") -> Path:
    """Write the heartbeat of an evaluation server that needs these steps alone."""
    directory = ServerDirectory(run, server)
    directory.write_heartbeat({"server": server, "time": "2026-01-01", "needs": list(steps)})
    return directory.heartbeat_path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
