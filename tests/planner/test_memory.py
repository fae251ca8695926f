"""The optimizer's bytes are known before there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.config import OptimizerSection
from longtake.errors import RecipeError
from longtake.models.numerics import Precision
from longtake.optim import master_weights
from longtake.optim.build import build_optimizers
from longtake.planner.memory import foreach_bytes, measured, optimizer_bytes, refuse_idle_ranks

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


@pytest.mark.parametrize("kind", ["adamw", "muon"])
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


def test_a_model_without_values_will_do() -> None:
    """The plan of a large model is made on the meta device."""
    section = _section(kind="muon")
    networks = [_network(torch.bfloat16), _network(torch.bfloat16).to("meta")]
    one, other = (optimizer_bytes(each, _blocks(each), section, "bf16") for each in networks)
    assert one == other


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
    assert optimizer_bytes(network, [], _section(), "fp32", granule=512).device == 6 * 512


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


def test_more_ranks_than_clips_are_refused() -> None:
    refuse_idle_ranks(4, 4)
    with pytest.raises(RecipeError, match=r"batch_size 4 cannot be shared by 5 .*parallel.contex"):
        refuse_idle_ranks(4, 5)
