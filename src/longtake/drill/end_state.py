"""What a run has come to, as its newest checkpoint has it, compared with another run's."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from longtake.checkpoint.reading import Reader
from longtake.checkpoint.store import load_parts
from longtake.run_dir import RunDirectory

_OF_THE_SAVE = {".metadata", "COMMITTED", "trainer.json"}
"""Files that differ though what was saved does not: some have a number of their own."""
_FACTS = ("global_step", "data", "guard", "last_update")


def differences(run: RunDirectory, other: RunDirectory) -> list[str]:
    """What of two runs' newest checkpoints differs by even a bit, by name.

    Weights, averages and the optimizer's states are compared as the bytes of their files, which
    follow from them for as many processes; what the next step needs besides, as JSON.
    """
    if not run.checkpoint_steps() or not other.checkpoint_steps():
        return ["all of it: one of them has no checkpoint"]
    paths = [each.checkpoint_path(each.checkpoint_steps()[-1]) for each in (run, other)]
    files, facts = map(_files, paths), map(_facts, paths)
    return [*_unequal(*files), *_unequal(*facts)]


def largest_distance(run: RunDirectory, other: RunDirectory) -> float:
    """How far weights and averages of two runs' newest checkpoints are apart.

    Returns:
        Of the tensor that is furthest: the norm of the difference, by that of the other run's.
    """
    paths = [each.checkpoint_path(each.checkpoint_steps()[-1]) for each in (run, other)]
    ours, theirs = map(_tensors, paths)
    if ours.keys() != theirs.keys():
        return math.inf
    return max(_distance(ours[name], theirs[name]) for name in ours)


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = one.double(), other.double()
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))


def _tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Weights and averages, whole, whoever saved how much of each."""
    parts = {"model", *(f"ema/{path.name}" for path in (checkpoint / "ema").iterdir())}
    states: dict[str, dict[str, Any]] = {}
    for part in parts:
        saved = Reader(checkpoint / part).read_metadata().state_dict_metadata
        sizes = {n: s.size for n, s in saved.items() if isinstance(s, TensorStorageMetadata)}
        states[part] = {name: torch.empty(size) for name, size in sizes.items()}
    load_parts(checkpoint, states)
    return {
        f"{part}/{name}": each for part, state in states.items() for name, each in state.items()
    }


def _unequal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or one[name] != other.get(name)]


def _files(checkpoint: Path) -> dict[str, bytes]:
    paths = (path for path in checkpoint.rglob("*") if path.is_file())
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in paths
        if path.name not in _OF_THE_SAVE
    }


def _facts(checkpoint: Path) -> dict[str, Any]:
    trainer = json.loads((checkpoint / "trainer.json").read_bytes())
    return {name: trainer[name] for name in _FACTS}
