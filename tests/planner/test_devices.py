"""Speed and memory of GPUs, by name or by numbers."""

from types import SimpleNamespace

import pytest
import torch
from tests.build import not_none

from longtake.errors import RecipeError
from longtake.planner.devices import (
    CPU,
    DEVICES,
    _of_label,
    device_for,
    device_named,
    peak_flops,
)


@pytest.mark.parametrize("name", DEVICES)
def test_known_gpus_are_found_by_name(name: str) -> None:
    gpu = device_named(f" {name.upper()} ")
    assert gpu is DEVICES[name]
    assert gpu.target == "cuda"
    assert gpu.flops(torch.bfloat16) > 1.9 * gpu.flops(torch.float32) > gpu.bandwidth
    assert not_none(gpu.total_bytes) >= 7 * 2**30


@pytest.mark.parametrize(
    ("name", "memory_gib", "flops", "bandwidth"),
    [
        ("24GiB,165TFLOPS", 24, 165e12, 165e12 / 200),
        ("1008GB/s, 165.2 TFLOPS, 24gib", 24, 165.2e12, 1008e9),
        ("2.25PFLOPS,8TB/s", None, 2.25e15, 8e12),
    ],
)
def test_any_gpu_is_given_by_its_figures(
    name: str, memory_gib: int | None, flops: float, bandwidth: float
) -> None:
    device = device_named(name)
    assert device.total_bytes == (None if memory_gib is None else memory_gib * 2**30)
    assert device.flops(torch.bfloat16) == pytest.approx(flops)
    assert device.bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx5070-ti"),
        ("NVIDIA GeForce RTX 5070", "rtx5070"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx4080-super"),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("Quadro RTX 6000", None),
    ],
)
def test_the_gpu_at_hand_is_known_by_its_drivers_label(label: str, name: str | None) -> None:
    assert _of_label(label) is (None if name is None else DEVICES[name])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("h10", "h100"), ("a600", "a6000"), ("rtx409", "rtx4090"), ("cpus", "cpu"), ("", None)],
)
def test_unknown_ones_are_refused_with_the_nearest(name: str, nearest: str | None) -> None:
    with pytest.raises(RecipeError) as raised:
        device_named(name)
    said = str(raised.value)
    assert repr(name) in said
    assert all(known in said for known in (*DEVICES, "cpu", "24GiB,165TFLOPS"))
    assert (f"Did you mean {nearest}?" in said) == (nearest is not None)


@pytest.mark.parametrize(
    "name",
    [
        "1e12",
        "24GiB",
        "0TFLOPS,24GiB",
        "24GiB,1GiB,9TFLOPS",
        "infTFLOPS",
        "1TFLOPS,0GB/s",
        "312e12,2.0e12",
    ],
)
def test_figures_have_units_and_are_positive(name: str) -> None:
    with pytest.raises(RecipeError, match="is not known"):
        device_named(name)


def test_recipes_without_a_gpu_in_their_name() -> None:
    assert device_for("cpu") is device_named("cpu") is CPU
    assert (CPU.target, CPU.total_bytes) == ("cpu", None)
    at_hand = device_for("auto")
    if not torch.cuda.is_available():
        assert at_hand is CPU
    else:
        assert at_hand.target == "cuda"
        assert at_hand.total_bytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU at hand is taken")
@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (None, "rtx4090"),
        (24, "rtx4090"),
        (48, "a6000"),
        (80, "h100"),
        (141, "h200"),
        (999, "b300"),
        (16, "rtx5080"),
        (12, "rtx5070"),
    ],
)
def test_a_gpu_that_is_not_here_is_the_smallest_with_the_memory(gib: int | None, name: str) -> None:
    assert device_for("cuda", None if gib is None else gib * 2**30) is DEVICES[name]


def test_the_peak_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ["NVIDIA H100 80GB HBM3"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name[0])
    )
    gpu = torch.device("cuda", 1)
    assert peak_flops(gpu, torch.bfloat16) == 989.4e12
    assert peak_flops(gpu, torch.float32) == 66.9e12
    assert peak_flops(gpu, torch.float8_e4m3fn) == 2 * 989.4e12
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    name[0] = "NVIDIA GeForce GTX 1080"
    assert peak_flops(gpu, torch.bfloat16) is None
