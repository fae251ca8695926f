"""Preflight with several GPUs in a node, as torchrun starts it: each process measures its own.

A CPU build has no CUDA: `torch.cuda` is replaced by one whose current device is each thread's own,
which starts as device 0, as in CUDA.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longtake.preflight import compute, links
from longtake.preflight.place import Place
from longtake.preflight.setting import Setting, within

_GPU = 3


class _Cuda:
    """What was asked of which device."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.events: set[int] = set()
        self.tensors: set[int | None] = set()

    def current_device(self) -> int:
        return getattr(self._current, "index", 0)

    @contextmanager
    def device(self, wanted: Any) -> Iterator[None]:
        before, index = self.current_device(), torch.device("cuda", 0).index
        self._current.index = wanted if isinstance(wanted, int) else wanted.index or index
        yield
        self._current.index = before

    def event(self, **_: Any) -> "_Cuda":
        self.events.add(self.current_device())
        return self

    def record(self) -> None:
        """Of an event."""

    def synchronize(self) -> None:
        """Of an event."""

    def elapsed_time(self, _: Any) -> float:
        return 1.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    """A node with 8 GPUs, whose tensors are small ones on the CPU."""
    fake = _Cuda()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", fake.current_device)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)

    def on_gpu(make: Any) -> Any:
        def made(*_: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
            fake.tensors.add(device.index)
            return make(8, 8, dtype=dtype).squeeze()

        return made

    monkeypatch.setattr(torch, "rand", on_gpu(torch.rand))
    monkeypatch.setattr(torch, "zeros", on_gpu(torch.zeros))
    return fake


def _setting() -> Setting:
    return Setting(Place(rank=_GPU, size=1, local_rank=_GPU), hosts=("node0",), ranks=((_GPU,),))


def test_products_are_timed_on_the_gpu_that_computes_them(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check runs in a thread of its own, whose current device is 0 at first."""
    monkeypatch.setattr(compute, "_GPU_SECONDS", 0.01)
    found = within(60, compute, _setting())
    assert found["on"] == "GPU", found
    assert (cuda.tensors, cuda.events) == ({_GPU}, {_GPU})


def test_each_process_sends_from_its_own_gpu(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL refuses all of them: they would share GPU 0."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = within(60, links, _setting())
    finally:
        dist.destroy_process_group()
    assert "failed" not in found, found
    assert cuda.tensors == {_GPU}
