"""Each of CUDA's kernels around a ring, whose ranks are threads; skipped where there is no GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from longtake.parallel.attention import ScoreTerms
from longtake.parallel.ring import Exchange, Ring, choose_kernel, ring_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
_COUNTS = (167, 167, 166)  # tokens of each rank; none is a multiple of what kernels pad to
_DEVICE = "cuda"


def _exchange(rank: int, queues: Sequence["SimpleQueue[Tensor]"]) -> Exchange:
    def exchange(tensor: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
        queues[(rank + 1) % len(queues)].put(tensor.clone())
        return queues[rank].get

    return exchange


@pytest.mark.parametrize("backend", _KERNELS)
def test_a_ring_attends_as_one(backend: SDPBackend) -> None:
    generator = torch.Generator(_DEVICE).manual_seed(0)
    drawn = torch.randn(4, 2, 3, 500, 64, generator=generator, device=_DEVICE)
    *inputs, gradient = drawn.bfloat16()
    whole = [each.float().requires_grad_() for each in inputs]
    expected = F.scaled_dot_product_attention(*whole)
    expected.backward(gradient.float())  # type: ignore[no-untyped-call]
    queues: list[SimpleQueue[Tensor]] = [SimpleQueue() for _ in _COUNTS]
    parts = list(zip(*(each.split(_COUNTS, 2) for each in (*inputs, gradient)), strict=True))
    with sdpa_kernel(backend):
        query, key, value, _ = parts[0]
        kernel = choose_kernel(query, key, value, {})

    def attend(rank: int) -> list[Tensor]:
        around = ring_kernel(kernel, Ring(rank, _COUNTS, _exchange(rank, queues)))
        query, key, value, own = parts[rank]
        scores = ScoreTerms(None, False, None)
        made = around.forward(query, key, value, scores)
        return [made[0], *around.backward(own, (query, key, value), made, scores)]

    with ThreadPoolExecutor(len(_COUNTS)) as ranks:
        found = list(ranks.map(attend, range(len(_COUNTS))))
    joined = [torch.cat(each, 2).float() for each in zip(*found, strict=True)]
    for one, other in zip(joined, [expected, *(each.grad for each in whole)], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
