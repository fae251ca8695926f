"""Weights that are copied while the GPU computes; skipped where there is no GPU."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtake.config import Quantization
from longtake.models.quantized import quantize_linears
from longtake.models.streamed import NUM_BUFFERS, StreamedBlocks, streamed_bytes
from longtake.planner.profiler import measured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_CARD = torch.device("cuda", 0)
_WIDTH, _NUM_BLOCKS = 2048, 8
_RUN: Mapping[str, Callable[..., Any]] = {
    "keep": lambda block, tokens: block(tokens),
    "recompute": lambda block, tokens: checkpoint(block, tokens, use_reentrant=False),
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((_WIDTH,), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.nn.functional.gelu(self.up(tokens * self.scale)))
        return tokens + hidden


def _blocks(quantize: Quantization | None) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = nn.ModuleList(_Block() for _ in range(_NUM_BLOCKS)).bfloat16()
    if quantize is not None:
        quantize_linears(blocks, quantize)
    return blocks


def _steps(blocks: nn.ModuleList, run: Callable[..., Any]) -> list[Tensor]:
    """Outputs and gradients; the GPU is far behind the processor that issues the copies."""
    found = list[Tensor]()
    for step in range(4):
        torch.manual_seed(step)
        tokens = torch.randn(8192, _WIDTH, device=_CARD, dtype=torch.bfloat16)
        for block in blocks:
            tokens = run(block, tokens)
        loss: Any = tokens.float().square().mean()
        loss.backward()
        found.append(tokens.detach())
    return [*found, *(p.grad for p in blocks.parameters() if p.grad is not None)]


@pytest.mark.parametrize("quantize", [None, "fp8", "int8", "nf4"])
@pytest.mark.parametrize("run", _RUN)
def test_streamed_steps_are_bitwise_those_of_weights_on_the_gpu(
    run: str, quantize: Quantization | None
) -> None:
    plain = _blocks(quantize).to(_CARD)
    expected = _steps(plain, _RUN[run])
    blocks = _blocks(quantize)
    StreamedBlocks(list(blocks), _CARD)
    blocks.to(_CARD)
    found = _steps(blocks, _RUN[run])
    torch.cuda.synchronize()
    assert len(found) == len(expected) == 4 + _NUM_BLOCKS
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_two_blocks_weights_are_on_the_gpu() -> None:
    blocks = _blocks(None)
    most = max(map(streamed_bytes, blocks))
    with measured(_CARD) as memory:
        StreamedBlocks(list(blocks), _CARD)
        blocks.to(_CARD)
    assert memory.end_bytes < 1.01 * NUM_BUFFERS * most
