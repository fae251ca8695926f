"""Names of devices, on machines with and without GPUs."""

import os
import re

import pytest
import torch

from longtake.errors import RecipeError
from longtake.parallel.mesh import pick_device


def _machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> list[int]:
    """A machine with so many GPUs, as far as torch says; returns what became the current one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_a_cpu_build_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RecipeError, match=f"PyTorch {re.escape(torch.__version__)} is a CPU build"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"),
    [
        ("cpu", 2, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 2, "cuda:0"),
        ("cuda:0", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_names_of_devices(
    wanted: str, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = _machine(monkeypatch, gpus)
    device = pick_device(wanted)
    assert str(device) == expected
    assert chosen == ([device.index] if device.type == "cuda" else [])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PYTORCH_ALLOC_CONF", None, "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", "max_split_size_mb:64"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", None),
    ],
)
def test_segments_can_grow_unless_the_user_says_otherwise(
    name: str, value: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is set before the first call of CUDA, which reads it."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is put back
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    if value is not None:
        monkeypatch.setenv(name, value)
    _machine(monkeypatch, 2)
    seen: list[str | None] = []

    def count() -> int:
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        return 2

    monkeypatch.setattr(torch.cuda, "device_count", count)
    pick_device("cuda")
    assert seen == [expected]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda:2", r"no GPU cuda:2: this machine has 2 CUDA GPUs, counted from 0"),
        ("cuda:", "'cuda:' is no device. Expected auto, cpu, cuda, or one GPU"),
        ("cuda:-1", "is no device"),
        ("auto:1", "is no device"),
        ("mps", "is no device"),
        ("", "is no device"),
    ],
)
def test_what_is_no_device(wanted: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 2)
    with pytest.raises(RecipeError, match=message):
        pick_device(wanted)
