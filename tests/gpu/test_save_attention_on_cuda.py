"""Attention is kept for each of CUDA's kernels; skipped where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from longtake.planner.activation_checkpointing import run_block
from longtake.planner.record import Activations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_KERNELS = {
    SDPBackend.FLASH_ATTENTION: "aten::_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "aten::_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "aten::_scaled_dot_product_cudnn_attention",
}


class _Block(nn.Module):
    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)
        self.mask = mask

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.mix(tokens)
        attended = F.scaled_dot_product_attention(mixed, mixed.sin(), mixed, attn_mask=self.mask)
        mixed_again: Tensor = self.mix(attended)
        return mixed_again + tokens


@pytest.mark.parametrize(
    ("backend", "masked"),
    [*((each, False) for each in _KERNELS), (SDPBackend.EFFICIENT_ATTENTION, True)],
)
def test_each_kernel_runs_once(backend: SDPBackend, masked: bool) -> None:
    outcomes: dict[str, tuple[list[Tensor], int]] = {}
    options: tuple[Activations, ...] = ("keep", "save-attention")
    mask = (torch.rand(500, 500, device="cuda") > 0.1) if masked else None
    for option in options:
        torch.manual_seed(0)
        block = _Block(mask).to("cuda", torch.bfloat16)
        tokens = torch.randn(2, 4, 500, 64, device="cuda", dtype=torch.bfloat16)
        tokens.requires_grad_()
        with sdpa_kernel(backend), profile(activities=[ProfilerActivity.CPU]) as seen:
            output = run_block(option, block, tokens)
            output.float().square().sum().backward()
        counts = {each.key: each.count for each in seen.key_averages()}
        found = [output, tokens.grad, *(each.grad for each in block.parameters())]
        tensors = [each.detach() for each in found if each is not None]
        outcomes[option] = tensors, counts[_KERNELS[backend]]
    (kept, once), (saved, again) = outcomes.values()
    assert (once, again) == (1, 1)
    assert torch.equal(kept[0], saved[0])
    for one, other in zip(kept, saved, strict=True):  # sums of the backward pass may differ
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)
