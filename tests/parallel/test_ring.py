"""Kernels whose logsumexp has another layout, around a ring; see also test_context_parallel."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.parallel import attention
from longtake.parallel.attention import FLASH_ON_CPU, AttentionKernel, ScoreTerms
from longtake.parallel.ring import Ring, ring_kernel


def _alone(block: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
    assert sent == received == [len(block)]
    return lambda: block


def _with_rows(to: Callable[[Tensor], Tensor]) -> AttentionKernel:
    """The CPU's kernel with its logsumexp in another layout, which its derivative expects."""

    def forward(query: Tensor, key: Tensor, value: Tensor, scores: ScoreTerms) -> Sequence[Tensor]:
        output, rows = FLASH_ON_CPU.forward(query, key, value, scores)
        return output, to(rows), torch.tensor(7)

    def backward(
        gradient: Tensor, inputs: Sequence[Tensor], made: Sequence[Any], scores: ScoreTerms
    ) -> Sequence[Tensor]:
        output, laid_out, seed = made
        query, key, value = inputs
        _, rows = FLASH_ON_CPU.forward(query, key, value, scores)
        torch.testing.assert_close(laid_out, to(rows), rtol=0, atol=0)
        assert seed == 7
        return FLASH_ON_CPU.backward(gradient, inputs, (output, rows), scores)

    return AttentionKernel(forward, backward)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda rows: rows,
    "padded": lambda rows: F.pad(rows, (0, -rows.shape[2] % 32), value=torch.inf),  # efficient
    "with a column": lambda rows: rows[..., None],  # cuDNN
}


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("num_tokens", [5, 32, 33, 40, 64])
def test_a_kernel_gets_back_the_layout_that_it_makes(layout: str, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    drawn = torch.randn(3, 2, 2, num_tokens, 8, generator=generator)
    inputs, plain = ([each.clone().requires_grad_() for each in drawn] for _ in range(2))
    around = ring_kernel(_with_rows(_LAYOUTS[layout]), Ring(0, [num_tokens], _alone))
    found = attention.attend(around, ScoreTerms(None, False, 0.5), *inputs)
    expected = F.scaled_dot_product_attention(*plain, scale=0.5)  # type: ignore[misc]
    torch.testing.assert_close(found, expected)
    for attended in (found, expected):
        attended.square().sum().backward()  # type: ignore[no-untyped-call]
    for one, other in zip(inputs, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
