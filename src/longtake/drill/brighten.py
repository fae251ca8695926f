"""Checkpoints whose averages grow brighter, and whose weights do not."""

import torch

from longtake.checkpoint import store
from longtake.checkpoint.writing import Company, write
from longtake.evaluation.sampling.studio import load_sampler
from longtake.models.trainable import trained_state
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

_BIAS = "tube_out.bias"


def brighten(run: RunDirectory, times: int, brighter: float, apart: int) -> list[int]:
    """Save further checkpoints, each a little brighter than the one before; returns their steps.

    Args:
        run: whose newest checkpoint is the first one's predecessor; a tubelet's.
        times: how many.
        brighter: by how much, in latents, from -1 to 1.
        apart: steps between them.
    """
    sampler = load_sampler(run.path, device="cpu")
    newest = run.checkpoint_path(sampler.step)
    trainer = store.load_trainer(newest, store.Trainer)
    raw = load_sampler(run.path, ema=False, device="cpu").components.model
    averages = sampler.components.model
    steps = [sampler.step + apart * (number + 1) for number in range(times)]
    for step in steps:
        with torch.no_grad():
            averages.get_parameter(_BIAS).add_(brighter)
        parts = {"model": _state(raw), sampler.weights: _state(averages)}
        alone = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), mesh=None)
        write(run, step, parts, {**trainer, "global_step": step}, Company(alone, None))
    return steps


def _state(model: torch.nn.Module) -> store.State:
    """What a checkpoint holds of a model; one that samples has no weights that are trained."""
    model.requires_grad_(True)
    return dict(trained_state(model))
