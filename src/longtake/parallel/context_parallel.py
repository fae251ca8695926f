"""Context parallelism (Ulysses): ranks share the tokens of a clip and exchange them for heads."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.overrides import TorchFunctionMode

# Outside of attention each rank works on its own tokens. For attention, ranks exchange tokens for
# heads, each attends with its heads to all tokens, and they exchange back (Jacobs et al.,
# "DeepSpeed Ulysses", 2023, arXiv 2309.14509). The one collective is all-to-all with unequal sizes,
# whose derivative is exact: gradients are those of the sum of all ranks' losses. No token is padded
# or masked.
#
# Legend: B clips, T tokens, t this rank's, S stacked tensors (3 for query, key and value), H heads,
# h this rank's, d width of a head.


def shares(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


class TokenSharing:
    """Exchanges tokens and heads with the ranks of a group.

    A model calls `begin` once in each forward pass, after the backward pass of the one before:
    recomputed blocks read the numbers again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._rows: list[list[int]] = []
        self._counts: list[int] = []

    def begin(self, *totals: int) -> None:
        """Set the number of tokens of a forward pass.

        Args:
            totals: tokens of each row that is cut separately, such as the text's and the
                image's; all attend to each other.
        """
        self._rows = [shares(total, self.size) for total in totals]
        self._counts = [sum(each) for each in zip(*self._rows, strict=True)]

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
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


class AttentionMode(TorchFunctionMode):
    """A context in which `attend` does what `scaled_dot_product_attention` would do."""

    def __init__(self) -> None:
        super().__init__()
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
        return self.attend(*args, **given)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """[B, H, T, d] of such a query; `how` are the function's other arguments."""
        raise NotImplementedError


class SharedAttention(AttentionMode):
    """A context in which `scaled_dot_product_attention` attends to the tokens of all ranks.

    For self-attention only: query, key and value [B, H, t, d] are of the same tokens.
    """

    def __init__(self, sharing: TokenSharing) -> None:
        super().__init__()
        self._sharing = sharing

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        assert how.get("attn_mask") is None, "a mask would have to be exchanged too"
        tensors = torch.stack([_as_computed(each) for each in (query, key, value)])
        query, key, value = self._sharing.to_heads(tensors).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, **how)
        return self._sharing.to_tokens(mixed[None])[0]


def _as_computed(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
