"""Run by two ranks: each kind of model with its tokens shared, compared with one process.

`write` keeps what the ranks need; they read it, and write down how far they are off.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.families.tiny import Tiny, loss_and_gradients
from torch import Tensor

from longtake.config import ParallelSection
from longtake.fsio import append_json
from longtake.models.base import family
from longtake.models.components import Components
from longtake.parallel.context_parallel import TokenExchange
from longtake.parallel.mesh import World, arranged, join


def write(tiny: Tiny, folder: Path) -> None:
    """The model, a batch, and the velocity, the loss and the gradients of one process."""
    parts = tiny.training(tiny.recipe().trainable)
    found = _velocity_and_gradients(parts, batch := tiny.batch())
    kept = {"family": tiny.row.family, "model": parts.model, "batch": batch, "alone": found}
    kept["defaults"] = parts.defaults
    torch.save(kept, folder / f"{tiny.row.kind}.pt")


def _velocity_and_gradients(parts: Components, batch: Any) -> dict[str, Tensor]:
    """As one vector each; without a gradient there are zeros."""
    with torch.no_grad():
        given = (batch.noise, batch.sigmas, batch.conditioning)
        if batch.audio:
            both = parts.predict_streams(batch.noise, batch.audio["noise"], *given[1:])
            velocity = torch.cat([each.flatten(1) for each in both], dim=1)
        else:
            velocity = parts.predict_velocity(*given)
    found = loss_and_gradients(parts, batch)
    loss = found.pop("")
    trained = {name: each for name, each in parts.model.named_parameters() if each.requires_grad}
    gradients = [found.get(name, torch.zeros_like(each)) for name, each in trained.items()]
    joined = torch.cat([each.flatten() for each in gradients])
    return {"velocity": velocity, "loss": loss, "gradients": joined}


def _compare(file: Path, world: World) -> dict[str, float]:
    kept = torch.load(file, weights_only=False)
    chosen, model, batch = family(kept["family"]), kept["model"], kept["batch"]
    chosen.block.share_tokens(model, TokenExchange(world, chosen.block.num_heads(model)))
    nothing: Any = None
    parts = Components(chosen, model, nothing, nothing, kept["defaults"])
    found = _velocity_and_gradients(parts, batch)
    dist.all_reduce(found["gradients"], dist.ReduceOp.AVG)
    return {
        name: float((each - kept["alone"][name]).norm() / kept["alone"][name].norm())
        for name, each in found.items()
    }


def main(folder: Path) -> None:
    """Of all kinds, one after the other."""
    section = ParallelSection(context=2)
    with join("cpu", ParallelSection()) as joined:
        world = arranged(joined, section)
        for file in sorted(folder.glob("*.pt")):
            off = _compare(file, world)
            if world.is_first:
                append_json(folder / "deviations.jsonl", {"kind": file.stem, **off})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
