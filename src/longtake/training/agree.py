"""Ranks that share the tokens of the same clips, but have decoded them each for itself."""

from dataclasses import replace

import torch

from longtake.data.batch import Batch
from longtake.parallel.collectives import gather_in_group
from longtake.parallel.mesh import World


def agreed(batch: Batch, world: World) -> Batch:
    """The batch without what any of the ranks could not decode that train on the same clips.

    Where each rank has clips to itself, it is what it was. All ranks call it.
    """
    if world.sequence_group is None:
        return batch
    everyone = gather_in_group((batch.weights.tolist(), batch.rejected), world.sequence_group)
    weights = [min(of_one_place) for of_one_place in zip(*(w for w, _ in everyone), strict=True)]
    rejected = dict.fromkeys(sample for _, samples in everyone for sample in samples)
    return replace(batch, weights=torch.tensor(weights), rejected=tuple(rejected))
