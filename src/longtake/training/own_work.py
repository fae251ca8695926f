"""How long a rank works on its own: what tells a slow one from those that wait for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OwnWork:
    """Adds up the time of what is counted, as the device takes it.

    Counted is the forward pass with all that it needs. All other parts of a step end in waiting for
    other ranks; where the model is sharded the forward pass does too, and tells less.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block."""
        begun = time.perf_counter()
        if self._is_cuda:
            self._events.append((_event(), _event()))
            self._events[-1][0].record()
        yield
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - begun

    def seconds(self) -> float:
        """The sum; on a card, call it when the device has been waited for."""
        milliseconds = sum(float(begin.elapsed_time(end)) for begin, end in self._events)
        return self._seconds + milliseconds / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
