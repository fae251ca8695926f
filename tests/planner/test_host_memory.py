"""How much memory can be page-locked, by tries that stand in for those on a GPU."""

from collections.abc import Callable

import pytest
import torch

from longtake.config import Recipe
from longtake.health.system import CgroupMemory
from longtake.planner import devices
from longtake.planner.devices import device_budget
from longtake.planner.host_memory import lockable

_GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "granted", "host_gib"),
    [((), 64, 3), ((), 4, 2), (("recompute.host_memory=7GiB",), 4, 7)],
)
def test_a_plan_takes_what_the_container_has_and_what_can_be_locked(
    small_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    granted: int,
    host_gib: int,
) -> None:
    """60 % of a container's 10 GiB, between two ranks, unless the recipe says how much it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    limit = {"cgroup_memory_limit_bytes": 10.0 * _GIB}
    monkeypatch.setattr(CgroupMemory, "sample", lambda _: limit)
    monkeypatch.setattr(devices, "lockable_bytes", lambda wanted: min(wanted, granted * _GIB))
    recipe = small_recipe("recompute.device=rtx4090", *settings)
    found = device_budget(recipe, "cuda", world_size=2).host_bytes
    assert found == pytest.approx(host_gib * _GIB, abs=2)


@pytest.mark.parametrize(
    ("limit", "really", "found", "tried"),
    [
        (None, 0, 40, []),  # nothing is in the way, so nothing is tried
        (64, 0, 40, []),
        (8, 99, 40, [8]),  # a limit that CUDA does not know
        (8, 8, 8, [8]),
        (0, 0, 0, [0]),
    ],
)
def test_a_limit_of_locked_memory_counts_if_it_is_felt(
    limit: int | None, really: int, found: int, tried: list[int]
) -> None:
    sizes = list[int]()

    def can_lock(num_bytes: int) -> bool:
        sizes.append(num_bytes // _GIB)
        return num_bytes <= really * _GIB

    in_bytes = None if limit is None else limit * _GIB
    assert lockable(40 * _GIB, in_bytes, False, can_lock) == found * _GIB
    assert sizes == tried


@pytest.mark.parametrize("really", [0.0, 0.3, 11.9, 20.0, 39.9, 40.0, 64.0])
def test_what_windows_grants_is_found_to_a_quarter_of_a_gib(really: float) -> None:
    tries = list[int]()

    def can_lock(num_bytes: int) -> bool:
        tries.append(num_bytes)
        return num_bytes <= really * _GIB

    found = lockable(40 * _GIB, None, True, can_lock) / _GIB
    assert found <= really
    assert found >= min(40, really) - 0.5
    assert len(tries) < 10
