"""Finds out how videos can be sampled in the memory there is, and remembers it.

Text encoder, model and codec take turns on a GPU, so each of them has all of its memory. Within
that everything is tried at once first. Where memory runs out, what takes less is tried: guidance in
two passes, then half of the videos at a time, and half of those; for decoding, tiles. Nothing that
was done is done again, and the next call begins with what has worked.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from longtake.config import Bucket
from longtake.errors import PlanError
from longtake.formatting import format_size
from longtake.models.build import Components
from longtake.models.numerics import is_out_of_memory
from longtake.parallel.mesh import pick_device

T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """How videos of one size are sampled.

    Attributes:
        two_passes: guidance is computed in two passes.
        at_once: videos that are denoised together; None: all of a batch.
        tiles: pictures are decoded in overlapping tiles.
    """

    two_passes: bool = False
    at_once: int | None = None
    tiles: bool = False

    def __str__(self) -> str:
        """In words, for a person."""
        words = [
            "guidance in two passes" if self.two_passes else "",
            f"{self.at_once} at a time" if self.at_once else "",
            "decoded in tiles" if self.tiles else "",
        ]
        return ", ".join(filter(None, words)) or "all at once"


@dataclass
class Memory:
    """What has been found to fit, by the size of the videos."""

    ways: dict[Bucket, Way] = field(default_factory=dict)

    def denoise(
        self,
        denoise: Callable[[slice, bool], Tensor],
        count: int,
        bucket: Bucket,
        *,
        guidance: str,
        has_two_halves: bool,
    ) -> Tensor:
        """Latents of all videos, denoised in parts that fit.

        Args:
            denoise: makes the latents of some of the videos; told whether in two passes.
            count: of the videos.
            bucket: their size.
            guidance: `auto`, `batched` or `two_passes`.
            has_two_halves: whether two passes would take less.

        Raises:
            PlanError: not even one video fits.
        """
        may_part = has_two_halves and guidance == "auto"
        way = self._way(bucket, two_passes=guidance == "two_passes" or None)
        if guidance == "batched":
            way = replace(way, two_passes=False)
        done: list[Tensor] = []
        start = 0
        while start < count:
            end = min(count, start + (way.at_once or count))
            latents = attempt(denoise, slice(start, end), way.two_passes)
            if latents is None:
                way = _thriftier(way, end - start, may_part, bucket)
                continue
            done.append(latents)
            start = end
        self.ways[bucket] = way
        return torch.cat(done)

    def decode(self, decode: Callable[[bool], T], bucket: Bucket, *, decoding: str) -> T:
        """What a function makes that is told whether to decode in tiles.

        Raises:
            PlanError: it does not fit in any way that is allowed.
        """
        way = self._way(bucket, tiles=decoding == "tiles" or None)
        if decoding == "whole":
            way = replace(way, tiles=False)
        decoded = attempt(decode, way.tiles)
        if decoded is None and decoding == "auto" and not way.tiles:
            way = replace(way, tiles=True)
            decoded = attempt(decode, True)
        if decoded is None:
            in_tiles = ", even in tiles" if way.tiles else ' (decoding = "whole")'
            raise PlanError(f"Decoding {bucket} does not fit the memory{in_tiles}. {_LESS}")
        self.ways[bucket] = way
        return decoded

    def _way(self, bucket: Bucket, **fixed: bool | None) -> Way:
        """What worked last, with whatever is not None as it is asked for."""
        asked = {name: value for name, value in fixed.items() if value is not None}
        return replace(self.ways.get(bucket, Way()), **asked)


def refuse_too_large_parts(parts: Components, device: torch.device) -> None:
    """Refuse a GPU whose memory does not hold the weights of the largest part.

    Raises:
        PlanError: names the part, and what would make it smaller.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    part, num_bytes = max(parts.part_bytes().items(), key=lambda each: each[1])
    if num_bytes >= total:
        raise PlanError(
            f"The weights of the {_NAMES[part]} take {format_size(num_bytes)}, but {device} has "
            f'{format_size(total)}. Set {part}.dtype = "bf16", if it is not, or sample on a GPU '
            "with more memory."
        )


def device_with_room(wanted: str, parts: Components) -> tuple[torch.device, str]:
    """The device to sample on, and in a sentence why `auto` has chosen it.

    `auto` is the GPU with most free memory if that is enough for the largest part and some
    activations, else the CPU: another process may train on the GPU.

    Raises:
        RecipeError: there is no such device.
    """
    if wanted != "auto" or not torch.cuda.device_count():
        return pick_device(wanted), ""
    needed = max(parts.part_bytes().values()) + _ACTIVATION_BYTES
    free = [_free_bytes(index) for index in range(torch.cuda.device_count())]
    most = max(range(len(free)), key=lambda index: free[index])
    if free[most] >= needed:
        return pick_device(
            f"cuda:{most}"
        ), f"samples on cuda:{most}, {format_size(free[most])} free"
    return pick_device("cpu"), (
        f"samples on the CPU: it needs {format_size(needed)} on a GPU, and cuda:{most}, which has "
        f"most, has {format_size(free[most])} free; --device cuda:{most} takes it all the same"
    )


def _free_bytes(index: int) -> int:
    """By NVML, as CUDA would first take memory for itself on each GPU that it is asked about."""
    total = torch.cuda.get_device_properties(index).total_memory
    return total - torch.cuda.device_memory_used(index)


_ACTIVATION_BYTES = 2 * 2**30
_NAMES = {"text": "text encoder", "model": "model", "codec": "codec"}
_LESS = "Take fewer frames or a smaller size, or a card with more memory."


def attempt(work: Callable[..., T], *given: object) -> T | None:
    """What a function makes, or None if the memory was not enough for it; then all is freed."""
    try:
        return work(*given)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here: as long as an error is handled, its traceback keeps every tensor of its frames.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _thriftier(way: Way, count: int, may_part: bool, bucket: Bucket) -> Way:
    """What takes less memory than a way that did not fit `count` videos."""
    if may_part and not way.two_passes:
        return replace(way, two_passes=True)
    if count > 1:
        return replace(way, at_once=(count + 1) // 2)
    raise PlanError(f"One video of {bucket} does not fit the memory ({way}). {_LESS}")
