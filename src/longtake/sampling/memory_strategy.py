"""Strategies that sample videos in the memory that there is: in parts, in two passes, in tiles."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from longtake.config import Bucket
from longtake.errors import PlanError
from longtake.models import numerics

T = TypeVar("T")

_USE_LESS = "Sample fewer frames or a smaller size, or use a GPU with more memory."


@dataclass(frozen=True)
class MemoryStrategy:
    """Ways to save memory in sampling videos of one size: two passes, few at a time, tiles."""

    two_passes: bool = False
    at_once: int | None = None
    tiles: bool = False

    def __str__(self) -> str:
        parts = [
            "guidance in two passes" if self.two_passes else "",
            f"{self.at_once} at a time" if self.at_once else "",
            "decoded in tiles" if self.tiles else "",
        ]
        return ", ".join(filter(None, parts)) or "all at once"

    def next_cheaper(self, count: int, bucket: Bucket, *, may_split: bool) -> "MemoryStrategy":
        """Return the strategy with less memory, after this one did not fit `count` videos.

        Raises:
            PlanError: a single video does not fit.
        """
        if may_split and not self.two_passes:
            return replace(self, two_passes=True)
        if count > 1:
            return replace(self, at_once=(count + 1) // 2)
        raise PlanError(f"One video of {bucket} does not fit the memory ({self}). {_USE_LESS}")


ONE_BY_ONE = MemoryStrategy(two_passes=True, at_once=1)
"""Memory strategy of ranks that share a model: they cannot try another one if one rank runs out."""


@dataclass
class MemoryFallback:
    """Finds a memory strategy of sampling by trial, and keeps it for videos of the same size.

    The first strategy samples everything at once. When memory runs out, guidance takes two passes,
    then half of the videos are sampled at a time, and so on; decoding falls back to tiles. No
    finished work is repeated.
    """

    strategies: dict[Bucket, MemoryStrategy] = field(default_factory=dict)
    first: MemoryStrategy = MemoryStrategy()
    """Memory strategy to try first for videos of a new size."""

    def denoise(
        self,
        denoise: Callable[[slice, bool], Tensor],
        count: int,
        bucket: Bucket,
        *,
        uses_guidance: bool,
    ) -> Tensor:
        """Denoise all videos in parts that fit the memory, and return their latents.

        Raises:
            PlanError: a single video does not fit.
        """
        strategy = self.strategies.get(bucket, self.first)
        done: list[Tensor] = []
        start = 0
        while start < count:
            end = min(count, start + (strategy.at_once or count))
            latents = try_within_memory(denoise, slice(start, end), strategy.two_passes)
            if latents is None:
                strategy = strategy.next_cheaper(end - start, bucket, may_split=uses_guidance)
                continue
            done.append(latents)
            start = end
        self.strategies[bucket] = strategy
        return torch.cat(done)

    def decode(self, decode: Callable[[bool], T], bucket: Bucket, *, decoding: str) -> T:
        """Decode a video by calling `decode(in_tiles)`, in tiles if it does not fit otherwise.

        Raises:
            PlanError: the video does not fit, even in tiles if these are allowed.
        """
        strategy = self.strategies.get(bucket, self.first)
        if decoding != "auto":
            strategy = replace(strategy, tiles=decoding == "tiles")
        decoded = try_within_memory(decode, strategy.tiles)
        if decoded is None and decoding == "auto" and not strategy.tiles:
            strategy = replace(strategy, tiles=True)
            decoded = try_within_memory(decode, True)
        if decoded is None:
            in_tiles = ", even in tiles" if strategy.tiles else ' (decoding = "whole")'
            raise PlanError(f"Decoding {bucket} does not fit the memory{in_tiles}. {_USE_LESS}")
        self.strategies[bucket] = strategy
        return decoded


def try_within_memory(work: Callable[..., T], *arguments: object) -> T | None:
    """Call a function and return its result; if memory runs out, free it and return None."""
    try:
        return work(*arguments)
    except (MemoryError, RuntimeError) as error:
        if not numerics.is_out_of_memory(error):
            raise
    # Outside of the except clause, in which the traceback references every tensor of its frames.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
