"""Updates in the computer's memory; skipped where there is no GPU."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from longtake.optim import master_weights
from longtake.optim.master_weights import MasterAdamW
from longtake.planner.profiler import measured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_CARD = torch.device("cuda", 0)


def _network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers: Sequence[nn.Module] = [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)]
    return nn.Sequential(*layers).to(_CARD, dtype)


def _train(network: nn.Sequential, optimizer: MasterAdamW, num_steps: int) -> None:
    for step in range(num_steps):
        torch.manual_seed(step)
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_elements", [2**26, 1000])
def test_offloaded_updates_are_those_of_the_gpu(
    dtype: torch.dtype, most_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_weights, "MAX_BATCH_ELEMENTS", most_elements)
    networks = [_network(dtype), _network(dtype)]
    for network, offload in zip(networks, (False, True), strict=True):
        optimizer = MasterAdamW(network.parameters(), 1e-3, weight_decay=0.1, offload=offload)
        _train(network, optimizer, 10)
    torch.cuda.synchronize()
    for one, other in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(one, other)


def test_offloaded_states_take_nothing_on_the_gpu() -> None:
    network = _network(torch.bfloat16)
    _train(network, MasterAdamW(network.parameters(), 1e-3), 1)
    optimizer = MasterAdamW(network.parameters(), 1e-3, offload=True)
    with measured(_CARD) as memory:
        optimizer.step()
    assert memory.end_bytes == 0
    optimizer.load_state_dict(optimizer.state_dict())
    for state in optimizer.state.values():
        assert {value.device.type for value in state.values()} == {"cpu"}
        assert {value.dtype for value in state.values()} == {torch.float32}
