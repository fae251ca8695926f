"""Ranks that share tokens compute what one computes. Run by three ranks, this file is one."""

import os
import subprocess
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.config import ParallelSection
from longtake.parallel.context_parallel import SharedAttention, TokenSharing, shares
from longtake.parallel.mesh import World, join

_TOTALS = [(12,), (13,), (7, 3), (5, 2)]
"""Tokens of one row, or of two; also fewer than there are ranks."""


@pytest.mark.parametrize(("total", "size"), [(12, 4), (13, 4), (3, 4), (0, 2), (7, 1)])
def test_shares_are_even_but_for_one_token(total: int, size: int) -> None:
    counts = shares(total, size)
    assert sum(counts) == total
    assert len(counts) == size
    assert max(counts) - min(counts) <= 1


def test_three_ranks_attend_as_one(on_processes: Callable[[int], list[str]]) -> None:
    ended = subprocess.run(
        [*on_processes(3), __file__],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ,
    )
    assert ended.returncode == 0, ended.stderr


def _drawn(*shape: int, seed: int) -> Tensor:
    """Random numbers, the same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attend(tokens: Tensor) -> Tensor:
    """[B, T, 12] attended to by 6 heads."""
    heads = tokens.reshape(*tokens.shape[:2], 6, 2).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads.sin(), heads.cos(), heads)
    return mixed.transpose(1, 2).flatten(2)


def _check(world: World, sharing: TokenSharing, totals: Sequence[int]) -> None:
    """Each rank weighs the output differently, so that a lost part of the gradient is seen."""
    rows = [_drawn(2, total, 12, seed=total).requires_grad_() for total in totals]
    kept = [row.detach().clone().requires_grad_() for row in rows]
    weights = [_drawn(2, totals[-1], 12, seed=100 + rank) for rank in range(world.size)]
    whole = _attend(torch.cat(kept, dim=1))[:, -totals[-1] :]
    (whole * sum(weights)).sum().backward()  # type: ignore[no-untyped-call]

    sharing.begin(*totals)
    parts = [sharing.cut(row, 1) for row in rows]
    with SharedAttention(sharing) as shared:
        mixed = _attend(torch.cat(parts, dim=1))
    assert shared.num_calls == 1
    found = sharing.gather(mixed[:, mixed.shape[1] - parts[-1].shape[1] :], 1)
    torch.testing.assert_close(found, whole)
    (found * weights[world.rank]).sum().backward()  # type: ignore[no-untyped-call]
    for row, one in zip(rows, kept, strict=True):
        assert row.grad is not None
        torch.distributed.all_reduce(row.grad)  # every rank has the gradient of its own tokens
        torch.testing.assert_close(row.grad, one.grad)


def _check_that_no_more_is_sent_than_used(sharing: TokenSharing) -> None:
    """Under autocast attention takes bf16, so tokens travel in it."""
    sharing.begin(9)
    sent = []
    exchange = sharing._exchange

    def seen(tensor: Tensor, *counts: list[int]) -> Tensor:
        sent.append(tensor.dtype)
        return exchange(tensor, *counts)

    sharing._exchange = seen  # type: ignore[method-assign, assignment]
    with torch.autocast("cpu", torch.bfloat16), SharedAttention(sharing):
        _attend(sharing.cut(_drawn(1, 9, 12, seed=1), 1))
    assert sent == [torch.bfloat16] * 2  # there and back


if __name__ == "__main__":
    with join("cpu", ParallelSection(context=3)) as entered:
        assert entered.sequence_group is not None
        for each in _TOTALS:
            _check(entered, TokenSharing(entered.sequence_group), each)
        _check_that_no_more_is_sent_than_used(TokenSharing(entered.sequence_group))
