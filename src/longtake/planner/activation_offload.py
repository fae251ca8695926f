"""Keeps tensors that blocks save for the backward pass in host memory while other blocks run.

On CUDA a side stream copies them: out while the next block runs forward, and back while the next
block runs backward. Thus while one block runs, its neighbour's tensors are on the device too.
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
"""Key of an offloaded tensor storage: its address, its version (which in-place changes increase),
and a dtype."""


class SavedTensor(NamedTuple):
    """A reference into a storage offloaded to the host, held by autograd in place of a tensor."""

    key: Key
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Runs the blocks of a model one after another, offloading the saved tensors of some."""

    def __init__(self) -> None:
        self._copies: CopyStream | None = None
        self._last: OffloadedBlock | None = None
        self._given: set[int] = set()  # storages of the arguments of the block before

    def call(self, run: Callable[..., Any], block: nn.Module, *args: Any, offloads: bool) -> Any:
        """Return `run(block, *args)`; with `offloads`, the tensors that it saves go to the host."""
        before, self._last = self._last, None
        tensors = [each for each in args if isinstance(each, Tensor)]
        given = set(_storages(tensors))
        shared, self._given = given & self._given, given  # these stay: others keep them
        is_recorded = offloads and torch.is_grad_enabled()
        if is_recorded and any(each.requires_grad for each in (*tensors, *block.parameters())):
            saved = self._last = OffloadedBlock(self, block, shared)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                output = run(block, *args)
            saved.sent()
        else:
            output = run(block, *args)
        if before is not None:
            before.release()
            # When this block's output gets its gradient, the block before is next to run backward.
            for tensor in output if isinstance(output, tuple | list) else [output]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: before.fetch())  # type: ignore[no-untyped-call]
        return output

    def begin(self) -> None:
        """Start a new forward pass: forget the last block of the pass before."""
        self._last, self._given = None, set()

    def last_bytes(self, *, on_cpu: bool) -> tuple[int, int]:
        """Return the bytes of the last block's offloaded tensors, and the host memory they take.

        For CUDA, torch rounds the size of pinned host memory up.
        """
        if self._last is None:
            return 0, 0
        return self._last.num_bytes, self._last.num_bytes if on_cpu else self._last.pinned_bytes

    def to_host(self, tensor: Tensor) -> Any:
        """Start to copy a tensor to host memory; the copy is complete after `wait`."""
        copy = host_like(tensor)
        self._copies = self._copies or CopyStream(tensor.device)
        self._copies.copy(copy, tensor)
        return copy

    def to_device(self, copy: Any, device: torch.device) -> Tensor:
        """Start to copy a tensor from host memory to the device; it may be read after `wait`."""
        back: Tensor = torch.empty_like(copy, device=device)
        assert self._copies is not None
        self._copies.copy(back, copy)
        return back

    def mark(self) -> Any:
        """Return a mark behind all copies between host and device started so far, for `wait`."""
        return None if self._copies is None else self._copies.mark()

    def wait(self, mark: Any) -> None:
        if self._copies is not None:
            self._copies.wait(mark)


class OffloadedBlock:
    """Tensors that one run of a block saved for its backward pass; each storage is copied once."""

    def __init__(self, offload: ActivationOffload, block: nn.Module, shared: set[int]) -> None:
        self._offload = offload
        self._shared = shared  # storages that stay on the device
        self._block = block
        self._weights: set[int] | None = None
        self._here: dict[Key, Tensor] = {}  # whole storages on the device
        self._away: dict[Key, Any] = {}  # their copies on the host
        self._uses: Counter[Key] = Counter()  # tensors by storage that are still to unpack
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
        # DTensors and quantised tensors wrap others, and have no storage of their own.
        if not _has_storage(tensor):
            return tensor
        if self._weights is None:  # sharded weights have been gathered by now
            held = _storages((*self._block.parameters(), *self._block.buffers()))
            self._weights = self._shared.union(held)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version, tensor.dtype
        if storage._cdata in self._weights or not storage.nbytes():
            return tensor
        # Several views of a storage are saved by many operations; it is copied whole, and once.
        if key not in self._away:
            whole = storage.nbytes() // tensor.itemsize
            with torch.no_grad():
                self._device = tensor.device
                self._here[key] = tensor.detach().as_strided((whole,), (1,), 0)
                self._away[key] = self._offload.to_host(self._here[key])
        self._uses[key] += 1
        return SavedTensor(key, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def sent(self) -> None:
        """Mark the end of this block's copies to the host, after its last `pack`."""
        self._copied = self._offload.mark()

    def release(self) -> None:
        """Free the saved tensors on the device once they are copied to the host.

        It is called after the next block has run.
        """
        self._wait()
        self._here.clear()

    def fetch(self) -> None:
        """Start to copy this block's saved tensors from the host back to the device."""
        if not self._is_fetched:
            self._is_fetched = True
            for key in self._away:
                self._bring(key)
            self._copied = self._offload.mark()

    def unpack(self, saved: SavedTensor | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.fetch()
        if saved.key not in self._here:  # unpacked once more, after it was dropped
            self._bring(saved.key)
            self._copied = self._offload.mark()
        self._wait()
        whole = self._here[saved.key]
        # Its last use frees the storage, unless the graph is kept for another backward pass.
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


def _storages(tensors: Iterable[Tensor]) -> Iterable[int]:
    return (each.untyped_storage()._cdata for each in tensors if _has_storage(each))


def _has_storage(tensor: Any) -> bool:
    return not is_traceable_wrapper_subclass(tensor)
