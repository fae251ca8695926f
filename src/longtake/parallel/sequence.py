"""Ranks that share the tokens of a clip: how tokens are cut, exchanged for heads, and gathered.

Between attentions each rank works on its own tokens. In attention every token looks at every
other, but every head only at itself: so ranks exchange tokens for heads, each attends with its
share of the heads to all tokens, and they exchange back (Jacobs et al., "DeepSpeed Ulysses", 2023,
arXiv 2309.14509).

All of it is made of one collective of torch, all-to-all with unequal parts, which has its true
derivative: the gradients that come out are those of the sum of all ranks' losses. No token is
padded and so none has to be masked.

Legend: B clips, T tokens, t this rank's, S tensors at once (3 for query, key and value), H heads, h
one rank's, d width of a head.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.overrides import TorchFunctionMode


def shares(total: int, size: int) -> list[int]:
    """How many of `total` tokens each of `size` ranks has: some of the first have one more."""
    return [total // size + (rank < total % size) for rank in range(size)]


class TokenSharing:
    """Shares tokens with the ranks of a group.

    A model tells it by `begin` how many there are, once in each forward pass, whose backward pass
    comes before the next one's `begin`: blocks that are recomputed ask for the numbers again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._rows: list[list[int]] = []
        self._counts: list[int] = []

    def begin(self, *totals: int) -> None:
        """A forward pass begins.

        Args:
            totals: tokens of each row that is cut by itself, such as the text's and the
                picture's; all attend to each other.
        """
        self._rows = [shares(total, self.size) for total in totals]
        self._counts = [sum(each) for each in zip(*self._rows, strict=True)]

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of one row of tokens along a dimension; it shares the memory."""
        counts = shares(tensor.shape[dim], self.size)
        return tensor.narrow(dim, sum(counts[: self.rank]), counts[self.rank])

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All of the last row of tokens, of which each rank has a part along a dimension."""
        counts, mine = self._rows[-1], part.movedim(dim, 0)
        for_each = mine.expand(self.size, *mine.shape).flatten(0, 1)
        whole = self._exchange(for_each, [len(mine)] * self.size, counts)
        return whole.movedim(0, dim)

    def to_heads(self, tensors: Tensor) -> Tensor:
        """[S, B, h, T, d] of this rank's heads from [S, B, H, t, d] of its tokens.

        The tokens stand in the ranks' order. Heads must divide by the number of ranks.
        """
        num, clips, heads, mine, width = tensors.shape
        by_rank = tensors.reshape(num, clips, self.size, heads // self.size, mine, width)
        to_send = by_rank.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
        received = self._exchange(to_send, [mine] * self.size, self._counts)  # [T, S, B, h, d]
        return received.permute(1, 2, 3, 0, 4)

    def to_tokens(self, tensors: Tensor) -> Tensor:
        """[S, B, H, t, d] of this rank's tokens from [S, B, h, T, d] of its heads."""
        to_send = tensors.permute(3, 0, 1, 2, 4)
        mine = self._counts[self.rank]
        received = self._exchange(to_send, self._counts, [mine] * self.size)
        by_rank = received.reshape(self.size, mine, *received.shape[1:])  # [ranks, t, S, B, h, d]
        return by_rank.permute(2, 3, 0, 4, 1, 5).flatten(2, 3)

    def _exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send parts of the first dimension to the ranks, in their order, and receive theirs."""
        given = tensor.contiguous()
        there = all_to_all_single_autograd(given, received, sent, self._group)
        exchanged: Tensor = wait_tensor(there)  # type: ignore[no-untyped-call]
        return exchanged


class SharedAttention(TorchFunctionMode):
    """Within it, `scaled_dot_product_attention` is that of all ranks' tokens.

    It is for self-attention: query, key and value [B, H, t, d] are of the same tokens.
    """

    def __init__(self, sharing: TokenSharing) -> None:
        super().__init__()
        self._sharing = sharing
        self.num_calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Passes all else on."""
        given = kwargs or {}
        if func is Tensor.unflatten:  # the compiler follows it as a method, not as a function
            return args[0].unflatten(*args[1:], **given)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        self.num_calls += 1
        return self._attend(*args, **given)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        assert how.get("attn_mask") is None, "a mask would have to be exchanged too"
        tensors = torch.stack([_as_computed(each) for each in (query, key, value)])
        query, key, value = self._sharing.to_heads(tensors).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, **how)
        return self._sharing.to_tokens(mixed[None])[0]


def _as_computed(tensor: Tensor) -> Tensor:
    """In what autocast would make of it, so that no more is sent than is used."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
