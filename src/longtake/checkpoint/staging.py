"""Copies a state into the computer's memory, so that training can go on changing it.

torch's own stagers are not used: `BlockingAsyncStager` cannot keep its room where there is no
card, and `DefaultStager` cannot copy the 8-bit states of an optimizer.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor


class Staging:
    """Room for one copy of a state, which is used again for the next.

    It stays as large as the largest state (of this rank: its shards) that was copied. Where the
    state lies on a card the room is page-locked, which is the fastest to copy to.
    """

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of nested dicts of tensors and other things; the one before is overwritten."""
        copied: dict[str, Any] = self._copied(parts, "")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # copies from a card are only on their way
        return copied

    def _copied(self, thing: Any, place: str) -> Any:
        if isinstance(thing, Mapping):
            return {key: self._copied(value, f"{place}/{key}") for key, value in thing.items()}
        if isinstance(thing, Tensor):
            return self._copied_tensor(thing.detach(), place)
        return copy.deepcopy(thing)

    def _copied_tensor(self, tensor: Tensor, place: str) -> Tensor:
        """Tensors made of tensors (DTensors, 8-bit states) are taken apart and put together."""
        if not hasattr(tensor, "__tensor_flatten__"):
            return self._buffer(tensor, place).copy_(tensor, non_blocking=True)
        made = cast("Any", tensor)
        names, context = made.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}  # among them a DTensor's mesh
        for name, each in inner.items():
            if isinstance(each, Tensor):
                inner[name] = self._copied_tensor(each, f"{place}/{name}")
        whole: Tensor = type(made).__tensor_unflatten__(
            inner, context, tensor.shape, tensor.stride()
        )
        return whole

    def _buffer(self, tensor: Tensor, place: str) -> Tensor:
        room = self._room.get(place)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._room[place] = room
        return room
