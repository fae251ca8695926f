"""Messages between ranks. Run by torchrun, this file is one of two ranks."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.build import ALONE

from longtake.config import ParallelSection
from longtake.errors import LongtakeError, LostPeerError, RecipeError
from longtake.parallel.collectives import (
    first_does,
    from_first,
    gather_objects,
    sum_over_ranks,
)
from longtake.parallel.mesh import World, arranged, join, new_group, pick_device


def test_alone_each_is_the_identity() -> None:
    with join("cpu", ParallelSection(strategy="replicate")) as world:
        assert world == ALONE
    assert sum_over_ranks({"loss": 0.1}, world) == {"loss": 0.1}
    assert gather_objects({"a": 1}, world) == [{"a": 1}]
    assert from_first("thing", world) == "thing"


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    rank = torch.cuda.device_count()
    with pytest.raises(RecipeError, match=rf"has {rank} CUDA GPUs.*training\.device=cpu"):
        pick_device("cuda", local_rank=rank)


def test_two_ranks_agree(run_on_two_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_on_two_ranks(__file__, str(tmp_path))


_SECTION = ParallelSection(strategy="shard", timeout_seconds=700, long_timeout_seconds=7000)


def _check_as_one_of_two(folder: Path) -> None:
    """The second rank stops at last, and the first learns what it waited for."""
    ended = folder / "ended"
    message = (
        r"Rank 0 has waited 1 s in all_reduce of the process group default, and one of the 2 "
        r"processes has not come.* raise parallel\.timeout_seconds"
    )
    is_first = os.environ["RANK"] == "0"
    expected = pytest.raises(LostPeerError, match=message) if is_first else nullcontext()
    with expected, join("cpu", _SECTION) as world:
        _check_all(world)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        while not (world.is_first or ended.exists()):
            time.sleep(0.05)
        if world.is_first:
            sum_over_ranks({"loss": 0.1}, world)
    ended.touch()


def _check_all(world: World) -> None:
    rank = world.rank
    assert world.size == 2
    assert world.is_first == (rank == 0)
    sums = sum_over_ranks({"loss": 0.1 + rank, "samples": 3}, world)
    assert sums == {"loss": 0.1 + 1.1, "samples": 6}
    assert gather_objects({"of": rank}, world) == [{"of": 0}, {"of": 1}]
    assert from_first(f"of {rank}", world) == "of 0"

    done = []
    first_does(lambda: done.append(rank), world)
    assert done == ([0] if world.is_first else [])
    _check_that_a_mistake_reaches_all(world)
    _check_that_slow_work_is_waited_for(world)
    _check_that_no_descriptors_are_left_open(world)
    _check_that_groups_have_the_timeout_of_all(world)
    gather_objects(None, world)
    # A rank outside the group would wait for ever; alone, nobody waits.
    assert gather_objects(rank, replace(world, mesh=None)) == [rank]


def _check_that_slow_work_is_waited_for(world: World) -> None:
    """A download takes longer than any collective may."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    first_does(lambda: time.sleep(3), world)
    dist.distributed_c10d._set_pg_timeout(world.timeout)


def _check_that_no_descriptors_are_left_open(world: World) -> None:
    """A launch makes about ten such calls, and each rollback two more, on hundreds of ranks."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        first_does(lambda: None, world)
        gather_objects(world.rank, world, patiently=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _check_that_groups_have_the_timeout_of_all(world: World) -> None:
    assert arranged(world, ParallelSection(context=2)).sequence_group is not None
    new_group(world, "checkpoint")
    found = {
        group.group_desc: group._get_backend(world.device).options._timeout.total_seconds()
        for group in dist.distributed_c10d._world.pg_map
    }
    assert found == {"default_pg": 700, "patient": 7000, "mesh_data": 700, "checkpoint": 700}


def _check_that_a_mistake_reaches_all(world: World) -> None:
    def work() -> None:
        raise RecipeError("no such thing")

    with pytest.raises(LongtakeError, match="no such thing"):
        first_does(work, world)


if __name__ == "__main__":
    _check_as_one_of_two(Path(sys.argv[1]))
