"""Joining the other processes: one world, one device, one mesh.

A process that torchrun started finds its place in the environment; any other is alone. Alone there
is no process group at all, so that a laptop pays nothing for what only a cluster needs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longtake.errors import RecipeError

Device = Literal["auto", "cpu", "cuda"]
Strategy = Literal["replicate", "shard"]


@dataclass(frozen=True)
class World:
    """This process's place among all processes of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """None where the process is alone."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that writes the run directory."""
        return self.rank == 0


@contextmanager
def join(device: Device, strategy: Strategy) -> Iterator[World]:
    """Enter the world that torchrun made, or one of a single process; leave it at the end.

    Raises:
        RecipeError: CUDA is asked for where there is none, or too few cards for the processes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    place = pick_device(device, local_rank)
    if "RANK" not in os.environ or size == 1:
        yield World(0, 0, 1, place, None)
        return
    _share_cores()
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10), device_id=_card(place))
    try:
        yield World(rank, local_rank, size, place, _mesh(place.type, size, strategy))
    finally:
        dist.destroy_process_group()


def pick_device(wanted: Device, local_rank: int = 0) -> torch.device:
    """The device a process runs on: `auto` takes CUDA where there is a card.

    Raises:
        RecipeError: CUDA is asked for where there is none, or has no card for this process.
    """
    cards = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not cards):
        return torch.device("cpu")
    if local_rank >= cards:
        raise RecipeError(
            f"training.device = {wanted!r} and local rank {local_rank}, but this machine has "
            f"{cards} CUDA cards. Start at most one process per card, or --set training.device=cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _mesh(device_type: str, size: int, strategy: Strategy) -> DeviceMesh:
    """FSDP2 replicates over a mesh's first dimension and shards over its last."""
    if strategy == "shard":
        return init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (size, 1), mesh_dim_names=("replicate", "shard"))


def _share_cores() -> None:
    """Give each local process its share of the cores; torchrun leaves each only one."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def _card(place: torch.device) -> torch.device | None:
    return place if place.type == "cuda" else None
