"""Collectives of numbers and objects; in a world of one, each is the identity."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from longtake.errors import JointWorkError, LongtakeError
from longtake.parallel.mesh import World, tells_of_a_lost_peer

T = TypeVar("T")

_joint_world: World | None = None
"""State of `joint_work` while it is under way."""


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


def first_does(work: Callable[[], object], world: World) -> None:
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


@contextmanager
def joint_work(world: World) -> Iterator[None]:
    """A context that an error of one rank ends on all of them; all ranks enter it.

    The rank that fails raises its own error, and the others a `JointWorkError`. Before each
    collective inside, `refuse_failed_peers` is called: no rank then waits for one that has failed.
    The collectives of sharded weights and shared tokens call it.
    """
    global _joint_world
    if world.mesh is None:
        yield
        return
    _joint_world = world
    try:
        yield
        refuse_failed_peers()
    except JointWorkError:
        raise
    except Exception as error:
        if not tells_of_a_lost_peer(error):
            _exchange_failures(f"{type(error).__name__}: {error}", world)
        raise
    finally:
        _joint_world = None


def refuse_failed_peers() -> None:
    """Within `joint_work`, and on all ranks, raise the error of a rank that has failed in it."""
    if _joint_world is not None:
        failures = _exchange_failures(None, _joint_world)
        if failures:
            raise JointWorkError("; ".join(failures))


def _exchange_failures(mine: str | None, world: World) -> list[str]:
    failed = torch.tensor(float(mine is not None))
    dist.all_reduce(failed, group=world.patient_group)
    if not failed:
        return []
    everyone = gather_objects(mine, world, patiently=True)
    return [f"rank {rank}: {each}" for rank, each in enumerate(everyone) if each is not None]


def wait_for_all(world: World) -> None:
    if world.mesh is not None:
        dist.all_reduce(torch.zeros(1))
