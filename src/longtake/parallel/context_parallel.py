"""Context parallelism: ranks share a clip's tokens, exchange them for heads, and form rings."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from longtake.errors import ModelError
from longtake.parallel import attention, mesh, ring
from longtake.parallel.collectives import gather_in_group, refuse_failed_peers

# Outside of attention each rank works on its own tokens. For attention, ranks exchange tokens for
# heads, each attends with its heads to all tokens, and they exchange back (Jacobs et al.,
# "DeepSpeed Ulysses", 2023, arXiv 2309.14509). Where more ranks share a clip than can share its
# heads, neighbours do so, and attend to the tokens of the others in a ring (Fang and Zhao, "USP",
# 2024, arXiv 2405.07719). The collective is all-to-all with unequal sizes, whose derivative is
# exact: gradients are those of the sum of all ranks' losses. No token is padded or masked.
#
# Legend: B clips, T tokens, t this rank's, S stacked tensors (3 for query, key and value), H heads,
# h this rank's, d width of a head.

Ranks = Literal["all", "heads", "ring"]
"""Which ranks that share a clip exchange tensors: all, those with its other heads, or its ring."""


def shares(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


def heads_size(num_heads: int, size: int, of_node: int) -> int:
    """Count the ranks that exchange a clip's tokens for heads, of those that share the clip.

    It is the most that divide heads and ranks, and where a clip's ranks are on several nodes, the
    ranks of a node: all-to-all waits for the slowest link, and a ring hides behind the computation.

    Args:
        num_heads: number of the model's attention heads.
        size: number of ranks that share a clip.
        of_node: number of ranks of a node.
    """
    most = math.gcd(num_heads, size)
    return math.gcd(most, of_node) if size > of_node else most


class TokenSharing:
    """Divides clips' tokens, and their attention, between the ranks of a context-parallel group.

    A model calls `begin` once in each forward pass, after the backward pass of the one before:
    recomputed blocks read the numbers again.
    """

    def __init__(self, rank: int, size: int, heads_size: int) -> None:
        self.rank = rank
        self.size = size
        self.heads_size = heads_size
        self.ring_size = size // heads_size
        self._rows: list[list[int]] = []
        self._counts: list[int] = []
        self._ring = ""  # the name of its process group

    def begin(self, *totals: int) -> None:
        """Begin a forward pass with these numbers of tokens.

        Args:
            totals: tokens of each row that is cut separately, such as the text's and the image's;
                all attend to each other.
        """
        self._rows = [shares(total, self.size) for total in totals]
        self._counts = [sum(each) for each in zip(*self._rows, strict=True)]

    def total(self, row: int) -> int:
        """Return the number of tokens that all ranks together have of a row (text, image ...)."""
        return sum(self._rows[row])

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
        counts = shares(tensor.shape[dim], self.size)
        return tensor.narrow(dim, sum(counts[: self.rank]), counts[self.rank])

    def gather(self, part: Tensor, dim: int, row: int = -1) -> Tensor:
        """Gather from all ranks the parts of a row of tokens, along `dim`."""
        counts, mine = self._rows[row], part.movedim(dim, 0)
        # An all-gather by all-to-all, so that its derivative sums the gradients of all ranks.
        for_each = mine.expand(self.size, *mine.shape).flatten(0, 1)
        whole = self._exchange(for_each, [len(mine)] * self.size, counts, "all")
        return whole.movedim(0, dim)

    def to_heads(self, tensors: Tensor) -> Tensor:
        """Exchange tokens for heads: this rank's [S, B, H, t, d] become [S, B, h, T, d].

        T are the tokens of all ranks that have other heads, in the order of these ranks.
        """
        if self.heads_size == 1:
            return tensors
        num, clips, heads, mine, width = tensors.shape
        size = self.heads_size
        by_rank = tensors.reshape(num, clips, size, heads // size, mine, width)
        # The exchange cuts the first dimension: it must go by rank, then by token.
        to_send = by_rank.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
        received = self._exchange(to_send, [mine] * size, self._among_heads(), "heads")
        return received.permute(1, 2, 3, 0, 4)  # from [T, S, B, h, d]

    def to_tokens(self, tensors: Tensor) -> Tensor:
        """Exchange heads for tokens again: this rank's [S, B, h, T, d] become [S, B, H, t, d]."""
        if self.heads_size == 1:
            return tensors
        to_send, size = tensors.permute(3, 0, 1, 2, 4), self.heads_size
        mine = self._counts[self.rank]
        received = self._exchange(to_send, self._among_heads(), [mine] * size, "heads")
        by_rank = received.reshape(size, mine, *received.shape[1:])  # [ranks, t, S, B, h, d]
        return by_rank.permute(2, 3, 0, 4, 1, 5).flatten(2, 3)

    def attend_around(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """Compute attention to the tokens of all ranks of the ring, with the results of `to_heads`.

        Args:
            query: queries [B, h, T, d].
            key: keys [B, h, T, d] of the same tokens.
            value: values [B, h, T, d] of the same tokens.
            how: arguments of `scaled_dot_product_attention`; only `scale` may be set.

        Returns:
            The output of attention, [B, h, T, d].

        Raises:
            ModelError: no kernel of torch returns the logsumexp that the ring needs.
        """
        size, scale = self.heads_size, how.get("scale")
        query, key, value = (attention.as_computed(each) for each in (query, key, value))
        starts = range(0, self.size, size)
        counts = [sum(self._counts[start : start + size]) for start in starts]
        # Compiled code calls the whole ring as one operation.
        if torch.compiler.is_compiling():
            rank, group = self.rank // size, self._ring
            return ring.ring_attention(query, key, value, scale, rank, counts, group)[0]
        kernel = ring.choose_kernel(query, key, value, how)
        around = ring.Ring(self.rank // size, counts, self._begin_exchange)
        scores = attention.ScoreTerms(None, False, scale)
        return attention.attend(ring.ring_kernel(kernel, around), scores, query, key, value)

    def _among_heads(self) -> list[int]:
        first = self.rank - self.rank % self.heads_size
        return self._counts[first : first + self.heads_size]

    def _exchange(
        self, tensor: Tensor, sent: list[int], received: list[int], among: Ranks
    ) -> Tensor:
        """Send parts of a tensor's first dimension to the ranks, in order, and return theirs."""
        raise NotImplementedError

    def _begin_exchange(
        self, tensor: Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], Tensor]:
        """Begin an exchange among the ranks of a ring, without derivative; see `ring.Exchange`."""
        refuse_failed_peers()
        return ring.exchange_in(self._ring)(tensor, sent, received)


class TokenExchange(TokenSharing):
    """Token sharing that really exchanges tensors between ranks; all must construct it."""

    def __init__(self, world: mesh.World, num_heads: int) -> None:
        size, of_node = world.sequence_size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        sharing = heads_size(num_heads, size, of_node)
        super().__init__(world.rank % size, size, sharing)
        self._groups = mesh.sequence_groups(world, sharing)
        self._ring: str = self._groups["ring"].group_name

    def _exchange(
        self, tensor: Tensor, sent: list[int], received: list[int], among: Ranks
    ) -> Tensor:
        refuse_failed_peers()
        there = all_to_all_single_autograd(tensor.contiguous(), received, sent, self._groups[among])
        return wait_tensor(there)  # type: ignore[no-untyped-call]


def compute_once(
    count: int,
    compute: Callable[[int], Mapping[str, Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Tensor]:
    """Compute tensors that all ranks of a group need, each sample's on one rank; exchange them.

    All ranks call it.

    Args:
        count: number of samples; the first is computed by the first rank, and so on.
        compute: from a sample's number to its tensors, [1, ...] each and by name, on `device`.
        group: the ranks.
        device: the tensors' device.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = {number: compute(number) for number in range(rank, count, size)}
    # Shapes depend on the captions, so other ranks must learn them before they can receive.
    shapes = {
        number: {name: (each.shape, each.dtype) for name, each in tensors.items()}
        for number, tensors in mine.items()
    }
    every_shape = gather_in_group(shapes, group)
    rows = []
    for number in range(count):
        owner, row = number % size, dict[str, Tensor]()
        for name, (shape, dtype) in every_shape[owner][number].items():
            if owner == rank:
                row[name] = mine[number][name].contiguous()
            else:
                row[name] = torch.empty(shape, dtype=dtype, device=device)
            # As bytes, whatever the dtype.
            dist.broadcast(row[name].view(-1).view(torch.uint8), group=group, group_src=owner)
        rows.append(row)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


class SharedAttention(attention.AttentionMode):
    """Context in which `scaled_dot_product_attention` attends to the tokens of all ranks.

    For self-attention only: query, key and value [B, H, t, d] belong to the same tokens. A mask,
    bool [B, 1, 1, t], is true for the tokens that are attended to.
    """

    def __init__(self, sharing: TokenSharing) -> None:
        super().__init__()
        self._sharing = sharing

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        if how.get("attn_mask") is not None:
            how["attn_mask"] = self._whole_mask(how["attn_mask"])
        tensors = torch.stack([attention.as_computed(each) for each in (query, key, value)])
        query, key, value = self._sharing.to_heads(tensors).unbind()
        if self._sharing.ring_size > 1:
            mixed = self._sharing.attend_around(query, key, value, **how)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, **how)
        return self._sharing.to_tokens(mixed[None])[0]

    def _whole_mask(self, mask: Tensor) -> Tensor:
        """Gather a mask of keys [B, 1, 1, T] from [B, 1, 1, t]: each rank's heads need all."""
        size = self._sharing.heads_size
        if size < self._sharing.size:
            raise ModelError(
                f"Captions of unlike length in one batch need a mask, and the {self._sharing.size} "
                f"ranks that share a clip, of which {size} exchange heads, attend in a ring, which "
                "has none. Set training.micro_batch_size = 1, or a parallel.context that divides "
                "the model's heads and the GPUs of a node."
            )
        columns = mask.to(torch.uint8).expand(-1, size, -1, -1).transpose(2, 3)
        return self._sharing.to_heads(columns[None])[0].transpose(2, 3).bool()
