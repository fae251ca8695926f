"""Ring attention: each rank's queries meet all keys and values, which go around a ring."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.distributed_c10d import GroupName

from longtake.errors import ModelError
from longtake.parallel import attention
from longtake.parallel.attention import AttentionKernel, ScoreTerms

# Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023, arXiv 2310.01889.
# While a rank attends to one block of keys and values, it passes that block on and receives the
# next. Of two blocks, outputs a and b with logsumexps of scores m and n merge to a + (b - a)
# sigmoid(n - m), with logsumexp log(e^m + e^n), in fp32 (Milakov and Gimelshein, "Online normalizer
# calculation for softmax", 2018, arXiv 1805.02867). From the merged output and logsumexp a kernel's
# derivative is exact for each block alone; gradients of keys and values go around with them, in
# fp32, and once more, to where they belong.
#
# Legend: B clips, h heads, t tokens of a block, d width of a head.

Exchange = Callable[[Tensor, list[int], list[int]], Callable[[], Tensor]]
"""Function that begins to send parts of a tensor's first dimension to the ranks of a ring, in their
order, and returns a function that waits for theirs. Neither has a derivative.
"""


_ROWS_ALIGNMENT = 32  # rows of a logsumexp, if a kernel pads it, as the memory-efficient one does
_FEW_TOKENS = _ROWS_ALIGNMENT + 1


@dataclass(frozen=True)
class Ring:
    """A ring of ranks, each of which owns a block of a clip's tokens, for ring attention."""

    rank: int
    counts: Sequence[int]  # tokens of each rank's block
    exchange: Exchange

    def pass_on(self, block: Tensor, owner: int) -> Callable[[], Tensor]:
        """Send `owner`'s block of tokens to the next rank, and receive one from the rank before.

        Returns a function that waits for the received block.
        """
        size = len(self.counts)
        sent, received = [0] * size, [0] * size
        sent[(self.rank + 1) % size] = self.counts[owner]
        received[self.rank - 1] = self.counts[owner - 1]
        return self.exchange(block.contiguous(), sent, received)

    def owners(self) -> list[int]:
        """Return the ranks whose blocks of tokens are here in turn, beginning with this rank's."""
        size = len(self.counts)
        return [(self.rank - step) % size for step in range(size)]


def ring_kernel(kernel: AttentionKernel, ring: Ring) -> AttentionKernel:
    """Make an attention kernel for all blocks of a ring from a kernel for a single block."""

    def forward(query: Tensor, key: Tensor, value: Tensor, scores: ScoreTerms) -> Sequence[Tensor]:
        block = _by_token(key, value)
        output = logsumexp = query  # replaced by those of the first block, then of all so far
        for step, owner in enumerate(ring.owners()):
            is_last = step == len(ring.counts) - 1
            # Begun before the kernel, so that the transfer hides behind the computation.
            arriving = None if is_last else ring.pass_on(block, owner)
            output_of_block, rows = kernel.forward(query, *_by_clip(block), scores)[:2]
            rows = rows.flatten(2)[..., : query.shape[-2]]  # some kernels pad them
            if step == 0:
                output, logsumexp = output_of_block.float(), rows
            else:
                output.lerp_(output_of_block.float(), torch.sigmoid(rows - logsumexp)[..., None])
                logsumexp = torch.logaddexp(logsumexp, rows)
            if arriving is not None:
                block = arriving()
        return output.to(query.dtype), logsumexp

    def backward(
        gradient: Tensor, inputs: Sequence[Tensor], made: Sequence[Any], scores: ScoreTerms
    ) -> Sequence[Tensor]:
        query, key, value = inputs
        block, made = _by_token(key, value), _as_made_by(kernel, inputs, made, scores)
        of_query = torch.zeros_like(query, dtype=torch.float32)
        arriving: Callable[[], Tensor] | None = None
        for step, owner in enumerate(ring.owners()):
            is_last = step == len(ring.counts) - 1
            arriving_block = None if is_last else ring.pass_on(block, owner)
            gradients = kernel.backward(gradient, (query, *_by_clip(block)), made, scores)
            of_query += gradients[0]
            of_block = _by_token(*gradients[1:]).float()
            if arriving is not None:  # gradients of this block from the ranks before
                of_block += arriving()
            arriving = ring.pass_on(of_block, owner)
            if arriving_block is not None:
                block = arriving_block()
        assert arriving is not None
        mine = _by_clip(arriving().to(key.dtype))
        return of_query.to(query.dtype), *mine

    return AttentionKernel(forward, backward)


def _by_token(key: Tensor, value: Tensor) -> Tensor:
    """Join keys and values [B, h, t, d] to a block [t, 2, B, h, d], contiguous for the exchange."""
    return torch.stack([key, value]).permute(3, 0, 1, 2, 4).contiguous()


def _by_clip(block: Tensor) -> tuple[Tensor, Tensor]:
    """Split a block [t, 2, B, h, d] into keys and values [B, h, t, d]."""
    key, value = block.permute(1, 2, 3, 0, 4).unbind()
    return key, value


def _as_made_by(
    kernel: AttentionKernel, inputs: Sequence[Tensor], made: Sequence[Tensor], scores: ScoreTerms
) -> list[Any]:
    """Complete the output and logsumexp of a whole ring to all results of a kernel.

    The other results (states of random numbers, the logsumexp's layout) come from a few tokens.
    """
    output, rows = made
    query, key, value = (each[:, :, :_FEW_TOKENS] for each in inputs)
    _, few, *others = kernel.forward(query, key, value, scores)
    if few.dim() == 4:
        return [output, rows[..., None], *others]
    padding = -rows.shape[2] % _ROWS_ALIGNMENT if few.shape[2] != query.shape[2] else 0
    # Padded rows get a logsumexp of infinity: their weights exp(score - infinity) are 0.
    return [output, F.pad(rows, (0, padding), value=torch.inf), *others]


def choose_kernel(
    query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]
) -> AttentionKernel:
    """Return torch's kernel for attention to single blocks of a ring.

    Raises:
        ModelError: torch has none that returns a logsumexp, or a mask or dropout is asked for.
    """
    asked = {name: given for name, given in how.items() if given is not None and name != "scale"}
    asked = {name: given for name, given in asked.items() if given}
    kernel = None if asked else attention.choose_kernel(query, key, value, None, {})
    if kernel is None:
        options = "".join(f", {name} = {given}" for name, given in asked.items())
        raise ModelError(
            f"No attention kernel of torch for {list(query.shape)} in {query.dtype} on "
            f"{query.device.type}{options} returns its logsumexp, which attention to the tokens of "
            "a ring of ranks needs. Set a parallel.context that divides the model's heads and the "
            "GPUs of a node."
        )
    return kernel


def exchange_in(group: str) -> Exchange:
    """Return the function that exchanges tensors between the ranks of a named process group."""

    def exchange(tensor: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
        there = all_to_all_single(tensor, received, sent, GroupName(group))
        return lambda: wait_tensor(there)  # type: ignore[no-untyped-call]

    return exchange


# The compiler sees ring attention as two operations, and nothing of the exchange in them.


@torch.library.custom_op("longtake::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    rank: int,
    counts: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor]:
    """Compute a rank's output [B, h, t, d] and logsumexp [B, h, t] of attention in a ring."""
    kernel = _kernel_in(group, rank, counts, query, key, value)
    output, rows = kernel.forward(query, key, value, ScoreTerms(None, False, scale))
    return _heads_last(output), rows.contiguous()


@torch.library.custom_op("longtake::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    rows: Tensor,
    scale: float | None,
    rank: int,
    counts: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _kernel_in(group, rank, counts, query, key, value)
    scores = ScoreTerms(None, False, scale)
    gradients = kernel.backward(gradient, (query, key, value), (output, rows), scores)
    of_query, of_key, of_value = (_heads_last(each) for each in gradients)
    return of_query, of_key, of_value


def _kernel_in(
    group: str, rank: int, counts: Sequence[int], query: Tensor, key: Tensor, value: Tensor
) -> AttentionKernel:
    kernel = choose_kernel(query, key, value, {})
    return ring_kernel(kernel, Ring(rank, counts, exchange_in(group)))


def _heads_last(tensor: Tensor) -> Tensor:
    """Copy a tensor [B, h, t, d] to memory in the order [B, t, h, d], not as a view."""
    # torch forbids custom operations to return views of their inputs, and the compiler relies on
    # the strides that the registered shape functions state.
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


@ring_attention.register_fake
def _ring_attention_shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _heads_last(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@_ring_attention_backward.register_fake
def _ring_attention_backward_shapes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _heads_last(query), _heads_last(key), _heads_last(value)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _ring_attention_backward(gradient, *ctx.saved_tensors, *ctx.how)
    return *gradients, None, None, None, None


ring_attention.register_autograd(_backward, setup_context=_save_for_backward)
RING_ATTENTION = torch.ops.longtake.ring_attention.default
