"""Collectives of numbers and objects; in a world of one, each is the identity."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from longtake.errors import LongtakeError
from longtake.parallel.mesh import World

T = TypeVar("T")


def sum_over_ranks(numbers: Mapping[str, float], world: World) -> dict[str, float]:
    """Sum every number over all ranks, in one collective of float64."""
    if world.mesh is None:
        return dict(numbers)
    packed = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(packed)  # on the CPU: these numbers are there already
    return dict(zip(numbers, packed.tolist(), strict=True))


def gather_objects(thing: T, world: World, *, patiently: bool = False) -> list[T]:
    """Every rank's object, by rank, on every rank; `patiently`: with the long timeout."""
    if world.mesh is None:
        return [thing]
    gathered: list[T] = [thing] * world.size
    dist.all_gather_object(gathered, thing, world.patient_group if patiently else None)
    return gathered


def gather_to_first(thing: T, world: World) -> list[T]:
    """Every rank's object, by rank, on rank 0, and nothing on the others; with the long timeout."""
    if world.mesh is None:
        return [thing]
    gathered: list[T] | None = [thing] * world.size if world.is_first else None
    dist.gather_object(thing, gathered, 0, world.patient_group)
    return gathered or []


def gather_in_group(thing: T, group: dist.ProcessGroup) -> list[T]:
    gathered: list[T] = [thing] * dist.get_world_size(group)
    dist.all_gather_object(gathered, thing, group)
    return gathered


def from_first(thing: T, world: World, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's object, on every rank; `group` must contain all ranks."""
    if world.mesh is None:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def first_does(work: Callable[[], None], world: World) -> None:
    """Let rank 0 do something while the others wait; a user's error there is raised on all.

    Raises:
        LongtakeError: what `work` raised on rank 0.
    """
    error: LongtakeError | None = None
    if world.is_first:
        try:
            work()
        except LongtakeError as raised:
            error = raised
    message = from_first(None if error is None else str(error), world, world.patient_group)
    if message is not None:
        raise error or LongtakeError(message)


def wait_for_all(world: World) -> None:
    if world.mesh is not None:
        dist.all_reduce(torch.zeros(1))
