"""Copies between host memory and a device while the device computes something else."""

from typing import Any

import torch
from torch import Tensor


def pinned_bytes(num_bytes: int) -> int:
    """Return the page-locked bytes that torch takes for a tensor of this size: a power of 2."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def host_like(tensor: Tensor) -> Tensor:
    """Allocate host memory for a tensor's values, page-locked if the tensor is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class CopyStream:
    """Copies between host and device: on a GPU in a CUDA stream of their own, on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy one tensor to another, after all that was computed before.

        Both tensors must be kept as they are until `wait` is called with a later mark.
        """
        if self._stream is None:
            target.copy_(source)
            return
        # Earlier computation may still write the source or read the target.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """Return a mark (CUDA event) behind all copies that have begun, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Make later computation wait for all copies before a mark; None stands for no copies."""
        if mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)
