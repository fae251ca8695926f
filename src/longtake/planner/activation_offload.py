"""Keeps what blocks save for the backward pass in the computer's memory while others run.

On CUDA a side stream copies: out while the next block runs forward, and back while the next block
runs backward. So beside a block at work, its neighbour's tensors are on the device too.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from longtake.parallel.transfer import CopyStream, host_like, pinned_bytes

Key = tuple[int, int, torch.dtype]
"""A storage, its version (what was changed in place is another content), and a type."""


class SavedTensor(NamedTuple):
    """A reference that autograd holds instead of a tensor, into a storage that is away."""

    key: Key
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Runs blocks of a model one after another, some of them with what they save offloaded."""

    def __init__(self) -> None:
        self._copies: CopyStream | None = None
        self._last: OffloadedBlock | None = None
        self._given: set[int] = set()  # storages that the block before was given

    def call(self, run: Callable[..., Any], block: nn.Module, *args: Any, offloads: bool) -> Any:
        """The output of `run(block, *args)`; with `offloads`, what it saves goes to the host."""
        before, self._last = self._last, None
        given = set(_storages(each for each in args if isinstance(each, Tensor)))
        shared, self._given = given & self._given, given  # these stay: others keep them
        if offloads and torch.is_grad_enabled() and _has_backward(block, args):
            saved = self._last = OffloadedBlock(self, block, shared)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                output = run(block, *args)
            saved.sent()
        else:
            output = run(block, *args)
        if before is not None:
            before.release()
            for tensor in output if isinstance(output, tuple | list) else [output]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: before.fetch())  # type: ignore[no-untyped-call]
        return output

    def begin(self) -> None:
        """A new forward pass: its first block does not follow the last one of the pass before."""
        self._last, self._given = None, set()

    @property
    def last_bytes(self) -> int:
        """Bytes that the block which ran last has on the host."""
        return 0 if self._last is None else self._last.num_bytes

    def last_host_bytes(self, *, on_cpu: bool) -> int:
        """The memory that these take; for CUDA, torch rounds page-locked tensors up."""
        if self._last is None or on_cpu:
            return self.last_bytes
        return self._last.pinned_bytes

    def to_host(self, tensor: Tensor) -> Any:
        """A copy, which is whole after `wait`."""
        copy = host_like(tensor)
        self._copies = self._copies or CopyStream(tensor.device)
        self._copies.copy(copy, tensor)
        return copy

    def to_device(self, copy: Any, device: torch.device) -> Tensor:
        """Back; not to be read before `wait`."""
        back: Tensor = torch.empty_like(copy, device=device)
        assert self._copies is not None
        self._copies.copy(back, copy)
        return back

    def mark(self) -> Any:
        """The end of what is being copied, for `wait`."""
        return None if self._copies is None else self._copies.mark()

    def wait(self, mark: Any) -> None:
        if self._copies is not None:
            self._copies.wait(mark)


class OffloadedBlock:
    """The tensors that one call of a block has saved, each storage of them once."""

    def __init__(self, offload: ActivationOffload, block: nn.Module, shared: set[int]) -> None:
        self._offload = offload
        self._shared = shared  # storages that stay
        self._block = block
        self._weights: set[int] | None = None
        self._here: dict[Key, Tensor] = {}  # whole storages
        self._away: dict[Key, Any] = {}
        self._uses: Counter[Key] = Counter()  # tensors of each that are not unpacked yet
        self._copied: Any = None
        self._is_fetched = False
        self._device = torch.device("cpu")

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._away.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(pinned_bytes(copy.nbytes) for copy in self._away.values())

    def pack(self, tensor: Tensor) -> SavedTensor | Tensor:
        if not _has_storage(tensor):
            return tensor
        if self._weights is None:  # by now they are gathered, where ranks share them
            held = _storages((*self._block.parameters(), *self._block.buffers()))
            self._weights = self._shared.union(held)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version, tensor.dtype
        if storage._cdata in self._weights or not storage.nbytes():
            return tensor
        if key not in self._away:
            whole = storage.nbytes() // tensor.itemsize
            with torch.no_grad():
                self._device = tensor.device
                self._here[key] = tensor.detach().as_strided((whole,), (1,), 0)
                self._away[key] = self._offload.to_host(self._here[key])
        self._uses[key] += 1
        return SavedTensor(key, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def sent(self) -> None:
        """All is packed."""
        self._copied = self._offload.mark()

    def release(self) -> None:
        """Drop what is on the device, once it is copied; the next block has run."""
        self._wait()
        self._here.clear()

    def fetch(self) -> None:
        """Begin to copy back what is not on the device."""
        if not self._is_fetched:
            self._is_fetched = True
            for key in self._away:
                self._bring(key)
            self._copied = self._offload.mark()

    def unpack(self, saved: SavedTensor | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.fetch()
        if saved.key not in self._here:  # asked for again
            self._bring(saved.key)
            self._copied = self._offload.mark()
        self._wait()
        whole = self._here[saved.key]
        self._uses[saved.key] -= 1
        if self._uses[saved.key] <= 0:
            del self._here[saved.key]
        return whole.as_strided(saved.shape, saved.stride, saved.offset)

    def _bring(self, key: Key) -> None:
        if key not in self._here:
            self._here[key] = self._offload.to_device(self._away[key], self._device)

    def _wait(self) -> None:
        self._offload.wait(self._copied)
        self._copied = None


def _has_backward(block: nn.Module, args: Iterable[Any]) -> bool:
    given = (each for each in args if isinstance(each, Tensor))
    return any(each.requires_grad for each in (*given, *block.parameters()))


def _storages(tensors: Iterable[Tensor]) -> Iterable[int]:
    return (each.untyped_storage()._cdata for each in tensors if _has_storage(each))


def _has_storage(tensor: Any) -> bool:
    return not is_traceable_wrapper_subclass(tensor)
