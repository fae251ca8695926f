"""Predicted memory of optimizers, against the memory that they allocate."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.planner.build import make_tiny
from torch import Tensor, nn

from longtake.config import EmaSection, OptimizerSection
from longtake.errors import PlanError
from longtake.models.numerics import Precision
from longtake.optim import master_weights
from longtake.optim.build import build_optimizers
from longtake.parallel.fsdp import accumulate_in_fp32
from longtake.planner.devices import CPU, device_named, rounded
from longtake.planner.memory import foreach_bytes, optimizer_bytes, pinned_beside_bytes
from longtake.planner.profiler import measured

_CPU = torch.device("cpu")


def _network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(48, 64), nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 8)
    )
    network[0].requires_grad_(False)
    return network.to(dtype)


def _blocks(network: nn.Sequential) -> list[nn.Module]:
    return list(network)[1:3]


def _section(**values: Any) -> OptimizerSection:
    return OptimizerSection.model_validate(values)


def _fill_gradients(network: nn.Module) -> None:
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("kind", ["adamw", "muon", "prodigy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_those_of_the_real_optimizer(
    kind: str, dtype: torch.dtype, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_weights, "MAX_BATCH_ELEMENTS", 10_000)
    network = _network(dtype)
    section = _section(kind=kind)
    predicted = optimizer_bytes(network, _blocks(network), section, precision, "cpu")
    optimizers = build_optimizers(network, _blocks(network), section, precision)
    _fill_gradients(network)
    with measured(_CPU) as first:
        for optimizer in optimizers:
            optimizer.step()
    assert predicted.device == first.end_bytes
    assert predicted.host == 0
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with measured(_CPU) as later:
        for optimizer in optimizers:
            optimizer.step()
    assert later.end_bytes == 0
    assert later.peak_bytes == pytest.approx(predicted.step, rel=0.01, abs=64)


@pytest.mark.parametrize(("dtype", "per_number"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_offloaded_states_are_in_the_computers_memory(dtype: torch.dtype, per_number: int) -> None:
    network = _network(dtype)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    numbers, steps = sum(parameter.numel() for parameter in trained), 4 * len(trained)
    kept = optimizer_bytes(network, [], _section(), "bf16")
    away = optimizer_bytes(network, [], _section(offload=True), "bf16")
    assert (kept.device, kept.host) == (per_number * numbers + steps, 0)
    assert (away.device, away.host) == (0, 12 * numbers + steps)
    assert optimizer_bytes(network, [], _section(offload=True), "bf16", "cpu") == kept


def test_tensors_are_rounded_up_as_on_a_gpu() -> None:
    """CUDA's allocator gives each tensor a multiple of 512 bytes."""
    network = nn.Linear(100, 1)  # 400 and 4 bytes
    held = partial(rounded, multiple=512)
    assert optimizer_bytes(network, [], _section(), "fp32", held=held).device == 6 * 512


@pytest.mark.parametrize("offload", [False, True])
def test_checkpoints_and_gradients_on_their_way_are_page_locked(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor in the next power of 2; what is in the computer's memory anyway is not."""
    monkeypatch.setattr(master_weights, "MAX_BATCH_ELEMENTS", 3)
    model = nn.Linear(100, 3).bfloat16()  # 300 and 3 numbers
    accumulate_in_fp32(model)
    parts: Any = SimpleNamespace(model=model, family=SimpleNamespace(blocks=lambda _: []))
    ema = EmaSection(decay=0.9)
    recipe: Any = SimpleNamespace(optimizer=_section(offload=offload), ema=ema)
    device = device_named("h100")
    found = pinned_beside_bytes(parts, recipe, "bf16", device, 1)
    weights, averages = 1024 + 8, 2048 + 16
    if offload:  # gradients in fp32, in two batches
        assert found == weights + averages + 2048 + 16
    else:  # two running averages, masters and the number of steps
        assert found == weights + averages + 3 * (2048 + 16) + 2 * 4
    assert pinned_beside_bytes(parts, recipe, "bf16", CPU, 1) == 0


def test_eight_bit_states_take_a_byte_per_number_and_their_scales() -> None:
    network = _network()
    predicted = optimizer_bytes(network, [], _section(kind="adamw8bit"), "bf16")
    eight_bit = 64 * 64 + 64 * 256
    small = 64 + 256 + 8 * 256 + 8
    assert predicted.device == 2 * (eight_bit + eight_bit // 256 * 4 + 2 * 1024) + 8 * small + 16
    assert predicted.step == 8 * 64 * 256


def test_torchs_default_would_take_another_copy_in_each_step() -> None:
    network = _network()
    trained: list[Tensor] = [each for each in network.parameters() if each.requires_grad]
    peaks = {}
    for way in ("foreach", "fused"):
        optimizer = torch.optim.AdamW(trained, foreach=way == "foreach", fused=way == "fused")
        _fill_gradients(network)
        optimizer.step()
        with measured(_CPU) as memory:
            optimizer.step()
        peaks[way] = memory.peak_bytes
    assert peaks["foreach"] == pytest.approx(foreach_bytes(network), rel=0.01)
    assert peaks["fused"] < 100


def test_products_in_fp8_are_refused_for_a_gpu_without_them() -> None:
    further = ["model.quantize=fp8_dynamic"]
    with pytest.raises(PlanError, match=r'which a6000 cannot.* Set it to "int8_dynamic"'):
        make_tiny("wan", device=device_named("a6000"), further=further)
    make_tiny("wan", device=device_named("l4"), further=further)
