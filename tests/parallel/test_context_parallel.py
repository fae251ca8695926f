"""Ranks that share tokens compute what one computes. Run by four ranks, this file is one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.config import ParallelSection
from longtake.errors import JointWorkError, ModelError
from longtake.parallel import ring
from longtake.parallel.collectives import joint_work
from longtake.parallel.context_parallel import (
    SharedAttention,
    TokenExchange,
    heads_size,
    shares,
)
from longtake.parallel.mesh import World, join
from longtake.planner.activation_checkpointing import run_block
from longtake.planner.record import Activations

_PASSED: list[torch.Size] = []
"""Shapes of the tensors that this rank has passed on in its ring."""
_HEADS = {4: 4, 6: 2, 3: 1}
"""Ranks, of four, that exchange tokens for heads, by the number of heads; the rest is a ring."""
_TOTALS = [(12,), (13,), (7, 3), (5, 2)]
"""Tokens of one row, or of two; also fewer than there are ranks."""


@pytest.mark.parametrize(("total", "size"), [(12, 4), (13, 4), (3, 4), (0, 2), (7, 1)])
def test_shares_are_even_but_for_one_token(total: int, size: int) -> None:
    counts = shares(total, size)
    assert sum(counts) == total
    assert len(counts) == size
    assert max(counts) - min(counts) <= 1


def test_ranks_on_several_nodes_exchange_heads_within_one() -> None:
    for heads, size, of_node, expected in (
        (12, 8, 8, 4),
        (40, 8, 8, 8),
        (40, 3, 8, 1),
        (24, 6, 8, 6),
        (40, 16, 8, 8),
        (24, 12, 8, 4),
        (24, 4, 1, 1),
    ):
        assert heads_size(heads, size, of_node) == expected, (heads, size, of_node)


def test_four_ranks_attend_as_one(run_on_ranks: Callable[..., str]) -> None:
    run_on_ranks(4, __file__)


def _drawn(*shape: int, seed: int) -> Tensor:
    """Random numbers, the same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attend(tokens: Tensor, num_heads: int) -> Tensor:
    """[B, T, 48] attended to by heads."""
    heads = tokens.view(*tokens.shape[:2], num_heads, -1).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads.sin(), 2 * heads.cos(), heads, scale=0.7)
    return mixed.transpose(1, 2).flatten(2)


def _check(
    world: World,
    num_heads: int,
    totals: Sequence[int],
    activations: Activations = "keep",
    *,
    autocasts: bool = False,
    compiles: bool = False,
) -> None:
    """Each rank weighs the output differently, so that a lost part of the gradient is seen."""
    rows = [_drawn(2, total, 48, seed=total).requires_grad_() for total in totals]
    kept = [row.detach().clone().requires_grad_() for row in rows]
    weights = [_drawn(2, totals[-1], 48, seed=100 + rank) for rank in range(world.size)]
    whole = _attend(torch.cat(kept, dim=1), num_heads)[:, -totals[-1] :]
    (whole * sum(weights)).sum().backward()  # type: ignore[no-untyped-call]

    sharing = TokenExchange(world, num_heads)
    assert (sharing.heads_size, sharing.ring_size) == (_HEADS[num_heads], 4 // _HEADS[num_heads])
    sharing.begin(*totals)
    shared = SharedAttention(sharing)
    _PASSED.clear()

    def block(*parts: Tensor) -> Tensor:
        with shared:
            return _attend(torch.cat(parts, dim=1), num_heads)

    parts = [sharing.cut(row, 1) for row in rows]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        run = partial(run_block, activations, block)
        mixed = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiles else run)(
            *parts
        )
    found = sharing.gather(mixed[:, mixed.shape[1] - parts[-1].shape[1] :], 1)
    near = partial(torch.testing.assert_close, check_dtype=False)
    if autocasts:
        near = partial(near, atol=0.2, rtol=0.05)
    near(found, whole)
    (found * weights[world.rank]).sum().backward()  # type: ignore[no-untyped-call]
    num_forward = 2 if activations == "recompute" else 1
    hops = sharing.ring_size - 1
    assert len(_PASSED) == (num_forward * hops + 2 * hops + 1 if hops else 0)
    assert compiles or shared.num_calls == (1 if activations == "keep" else 2)
    for row, one in zip(rows, kept, strict=True):
        assert row.grad is not None
        torch.distributed.all_reduce(row.grad)  # every rank has the gradient of its own tokens
        near(row.grad, one.grad)


def _count_what_is_passed_on() -> None:
    exchange_in = ring.exchange_in

    def counted(group: str) -> ring.Exchange:
        exchange = exchange_in(group)

        def passed(tensor: Tensor, *counts: list[int]) -> Callable[[], Tensor]:
            _PASSED.append(tensor.shape)
            return exchange(tensor, *counts)

        return passed

    ring.exchange_in = counted


def _check_that_no_more_is_sent_than_used(world: World, num_heads: int) -> None:
    """Under autocast attention takes bf16, so tokens travel in it."""
    sharing = TokenExchange(world, num_heads)
    sharing.begin(9)
    sent = []
    exchange, begin_exchange = sharing._exchange, sharing._begin_exchange

    def seen(tensor: Tensor, *counts: Any) -> Tensor:
        sent.append(tensor.dtype)
        return exchange(tensor, *counts)

    def seen_in_ring(tensor: Tensor, *counts: Any) -> Callable[[], Tensor]:
        sent.append(tensor.dtype)
        return begin_exchange(tensor, *counts)

    sharing._exchange = seen  # type: ignore[method-assign, assignment]
    sharing._begin_exchange = seen_in_ring  # type: ignore[method-assign, assignment]
    with torch.autocast("cpu", torch.bfloat16), SharedAttention(sharing):
        _attend(sharing.cut(_drawn(1, 9, 48, seed=1), 1), num_heads)
    there_and_back = 2 * (_HEADS[num_heads] > 1)
    assert sent == [torch.bfloat16] * (there_and_back + 4 // _HEADS[num_heads] - 1)


def _check_that_no_other_attention_goes_around(world: World) -> None:
    """Causal order is by tokens, which a ring does not know."""
    sharing = TokenExchange(world, num_heads=3)
    sharing.begin(9)
    heads = sharing.cut(_drawn(1, 3, 9, 16, seed=1), 2)
    with SharedAttention(sharing), pytest.raises(ModelError, match="is_causal = True returns its"):
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def _check_that_masks_are_exchanged(world: World) -> None:
    """Masks of keys; a ring refuses any."""
    query, key, value = _drawn(3, 2, 4, 13, 12, seed=1)
    counts = _drawn(2, 1, 1, 13, seed=2) > 0
    whole = F.scaled_dot_product_attention(query, key, value, attn_mask=counts)
    for num_heads in (4, 3):
        sharing = TokenExchange(world, num_heads)
        sharing.begin(13)
        q, k, v = (sharing.cut(each, 2) for each in (query, key, value))
        mask = sharing.cut(counts, 3)
        with SharedAttention(sharing):
            if num_heads == 3:
                with pytest.raises(ModelError, match=r"need a mask, .* attend in a ring"):
                    F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                continue
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(found, sharing.cut(whole, 2))


def _check_that_an_error_of_one_ends_a_pass_on_all(world: World, num_heads: int) -> None:
    sharing, tokens = TokenExchange(world, num_heads), _drawn(1, 9, 48, seed=1)
    sharing.begin(9)

    def attend(tokens: Tensor) -> Tensor:
        if world.rank == 2:
            raise ValueError("a broken kernel")
        return _attend(tokens, num_heads)

    expected = ValueError if world.rank == 2 else JointWorkError
    broken = pytest.raises(expected, match="a broken kernel")
    with broken, joint_work(world), SharedAttention(sharing):
        attend(sharing.cut(tokens, 1))
    with joint_work(world), SharedAttention(sharing):
        mixed = _attend(sharing.cut(tokens, 1), num_heads)
    torch.testing.assert_close(mixed, sharing.cut(_attend(tokens, num_heads), 1))


if __name__ == "__main__":
    _count_what_is_passed_on()
    config: Any = torch._dynamo.config
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # as for the blocks of a model
    with join("cpu", ParallelSection(context=4)) as entered:
        for each in _HEADS:
            for tokens in _TOTALS:
                _check(entered, each, tokens)
            _check(entered, each, _TOTALS[2], "save-attention")
            _check(entered, each, _TOTALS[2], "recompute", autocasts=True)
            _check_that_no_more_is_sent_than_used(entered, each)
            _check_that_an_error_of_one_ends_a_pass_on_all(entered, each)
        _check(entered, 6, _TOTALS[2], "save-attention", compiles=True)
        _check_that_no_other_attention_goes_around(entered)
        _check_that_masks_are_exchanged(entered)
