"""Measures the memory of tensors on a device, by a CPU profiler or by CUDA's allocator."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_MARK = "longtake mark: "


@dataclass
class MeasuredMemory:
    """Measured bytes of tensors above those at the start; complete when the measured block ends.

    On CUDA these are the caching allocator's bytes of tensors, rounded to 512; the cache beyond
    them, the CUDA context and workspaces of libraries are not included. On a CPU they are the bytes
    that torch's allocator was asked for. A CPU tensor that is older than the measurement is never
    included, even if it is freed.
    """

    peak_bytes: int = 0  # highest total
    end_bytes: int = 0  # total at the end
    at: dict[str, int] = field(default_factory=dict)  # total at each mark
    peaks: dict[str, int] = field(default_factory=dict)  # the highest total since the mark before

    def mark(self, name: str) -> None:
        raise NotImplementedError

    def _passed(self, name: str, total: int, peak: int) -> None:
        self.at[name], self.peaks[name] = total, peak
        self.peak_bytes = max(self.peak_bytes, peak)


class _CpuMemory(MeasuredMemory):
    def mark(self, name: str) -> None:
        # An event without duration, which `fold` finds among the allocations.
        with torch.profiler.record_function(_MARK + name):
            pass

    def fold(self, events: list[Any]) -> None:
        """Add up the allocations and releases that torch's profiler recorded on the CPU."""
        sizes: dict[int, int] = {}
        total = peak = 0
        # The profiler has a tree of events per thread.
        for event in sorted(events, key=lambda event: event.start_time_ns):
            if event.name.startswith(_MARK):
                self._passed(event.name.removeprefix(_MARK), total, peak)
                peak = total
                continue
            block = event.extra_fields
            if block.alloc_size > 0:
                sizes[block.ptr] = block.alloc_size
                total += block.alloc_size
            else:  # blocks of an earlier measurement are reported too
                total -= sizes.pop(block.ptr, 0)
            peak = max(peak, total)
        self.end_bytes, self.peak_bytes = total, max(self.peak_bytes, peak)


class _CudaMemory(MeasuredMemory):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._start = torch.cuda.memory_allocated(device)

    def mark(self, name: str) -> None:
        self._passed(name, *self._now())

    def finish(self) -> None:
        self.end_bytes, peak = self._now()
        self.peak_bytes = max(self.peak_bytes, peak)

    def _now(self) -> tuple[int, int]:
        """Return the GPU's allocated bytes since the start, and their peak since the last call."""
        total = torch.cuda.memory_allocated(self._device) - self._start
        return total, (take_peak(self._device) or 0) - self._start


def take_peak(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on a GPU since the last reset, and reset the peak.

    The host does not wait for the GPU. None if the device is not a CUDA device.
    """
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


@contextmanager
def measured(device: torch.device) -> Iterator[MeasuredMemory]:
    """Measure the memory of tensors on `device` inside the context.

    On a CPU, torch's profiler watches its allocator for all threads; it slows small operations
    down, and no other profiler may run meanwhile. Memory that libraries allocate themselves, such
    as oneDNN's scratchpads, is not included. On CUDA the peak statistics are reset.

    Yields:
        A record to `mark` along the way; its numbers are complete after the block.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    if device.type == "cuda":
        on_gpu = _CudaMemory(device)
        yield on_gpu
        on_gpu.finish()
        return
    if device.type != "cpu":
        raise ValueError(f"Memory can be measured on cpu and cuda, not on {device}.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints a greeting on stderr
    memory = _CpuMemory()
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        yield memory
    assert profiler.kineto_results is not None
    events, waiting = [], list[Any](profiler.kineto_results.experimental_event_tree())
    while waiting:  # CPU allocations and marks, anywhere in the profiler's trees
        event = waiting.pop()
        waiting.extend(event.children)
        is_block = event.name == "[memory]" and event.extra_fields.device.type == "cpu"
        if is_block or event.name.startswith(_MARK):
            events.append(event)
    memory.fold(events)
