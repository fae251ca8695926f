"""What ranks tell each other; alone, each is the identity."""

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from longtake.parallel.mesh import World

T = TypeVar("T")


def sum_over_ranks(numbers: Mapping[str, float], world: World) -> dict[str, float]:
    """Sum every number over all ranks, in one collective of float64."""
    if world.mesh is None:
        return dict(numbers)
    packed = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(packed)  # on the CPU: these numbers are there already
    return dict(zip(numbers, packed.tolist(), strict=True))


def gather_objects(thing: T, world: World) -> list[T]:
    """Every rank's object, by rank, on every rank."""
    if world.mesh is None:
        return [thing]
    gathered: list[T] = [thing] * world.size
    dist.all_gather_object(gathered, thing)
    return gathered


def from_first(thing: T, world: World) -> T:
    """Rank 0's object, on every rank."""
    if world.mesh is None:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def wait_for_all(world: World) -> None:
    """Return when every rank has come here."""
    if world.mesh is not None:
        dist.barrier()
