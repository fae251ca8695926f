"""Collective operations on numbers and objects; with a single rank, each returns its argument."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from longtake.errors import JointWorkError, LongtakeError
from longtake.parallel.mesh import World, tells_of_a_lost_peer

T = TypeVar("T")

_joint_world: World | None = None
"""Ranks of the `joint_work` context that is active, or None."""


def sum_over_ranks(numbers: Mapping[str, float], world: World) -> dict[str, float]:
    """Sum every number over all ranks, in one collective of float64."""
    if world.mesh is None:
        return dict(numbers)
    packed = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(packed)  # on the CPU: these numbers are there already
    return dict(zip(numbers, packed.tolist(), strict=True))


def gather_objects(thing: T, world: World, *, patiently: bool = False) -> list[T]:
    """Gather every rank's object on every rank, in order; `patiently` with the long timeout."""
    if world.mesh is None:
        return [thing]
    gathered: list[T] = [thing] * world.size
    dist.all_gather_object(gathered, thing, world.patient_group if patiently else None)
    return gathered


def gather_to_first(thing: T, world: World) -> list[T]:
    """Gather every rank's object on rank 0 with the long timeout; other ranks get an empty list."""
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
    """Broadcast rank 0's object to every rank; `group` must contain all ranks."""
    if world.mesh is None:
        return thing
    # torch replaces the list's items on the ranks that receive.
    box = [thing]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def first_does(work: Callable[[], object], world: World) -> None:
    """Run `work` on rank 0 while the other ranks wait; a user's error in it is raised on all.

    Raises:
        LongtakeError: what `work` raised on rank 0.
    """
    error: LongtakeError | None = None
    if world.is_first:
        try:
            work()
        except LongtakeError as raised:
            error = raised
    # Also after success: this is what the other ranks wait for.
    message = from_first(None if error is None else str(error), world, world.patient_group)
    if message is not None:
        raise error or LongtakeError(message)


@contextmanager
def joint_work(world: World) -> Iterator[None]:
    """Context in which an error of one rank ends the work of all; all ranks enter it.

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
        # An error of a lost peer is not exchanged: that peer takes part in no collective.
        if not tells_of_a_lost_peer(error):
            _exchange_failures(f"{type(error).__name__}: {error}", world)
        raise
    finally:
        _joint_world = None


def refuse_failed_peers() -> None:
    """Within `joint_work`, raise the error of a failed rank; all ranks call it together."""
    if _joint_world is not None:
        failures = _exchange_failures(None, _joint_world)
        if failures:
            raise JointWorkError("; ".join(failures))


def _exchange_failures(mine: str | None, world: World) -> list[str]:
    # One number first: the texts are gathered only after a failure.
    failed = torch.tensor(float(mine is not None))
    dist.all_reduce(failed, group=world.patient_group)
    if not failed:
        return []
    everyone = gather_objects(mine, world, patiently=True)
    return [f"rank {rank}: {each}" for rank, each in enumerate(everyone) if each is not None]
