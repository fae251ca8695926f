"""Fills batches with pixels: decoded by a supervised pool, or remembered."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection
from longtake.data.clip import Clip
from longtake.data.decode_worker import DecodePool
from longtake.data.references import Reference, references_of, without_reference
from longtake.data.sample import is_only_window
from longtake.data.window import Window
from longtake.data.workers import WorkerIncident
from longtake.errors import ClipError
from longtake.heartbeat import HeartbeatDir

Pixels = NDArray[np.uint8]


@dataclass
class Memory:
    """Decoded pictures of which each epoch wants the same, kept while there is room."""

    room_bytes: float
    pictures: dict[Window | Reference, Pixels] = field(default_factory=dict)

    def keep(self, wanted: Window | Reference, pixels: Pixels) -> None:
        """Keep a copy: the pixels are those of a batch, which is not ours for long."""
        if wanted not in self.pictures and pixels.nbytes <= self.room_bytes:
            self.room_bytes -= pixels.nbytes
            self.pictures[wanted] = pixels.copy()


class Decoding:
    """Decodes clips and their further pictures.

    Args:
        data: the recipe's section.
        workers: processes that decode; 0: threads.
        memory: what is known already.
        hearts: where the workers say what they do; None: nowhere.
    """

    def __init__(
        self, data: DataSection, workers: int, memory: Memory, hearts: HeartbeatDir | None = None
    ) -> None:
        self.data = data
        self.memory = memory
        limit = data.sample_timeout_seconds
        self.pool = DecodePool(workers, limit, memory_gib=data.sample_memory_gib, heartbeats=hearts)

    def places(self, shape: Bucket, num_places: int) -> "PixelPlaces":
        """The empty places of one batch."""
        return PixelPlaces(self, shape, num_places)

    def incidents(self) -> list[WorkerIncident]:
        """What befell the pool's workers since this was last asked."""
        return self.pool.incidents()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.pool.close()


@dataclass(frozen=True)
class _Begun:
    """Pictures of one place that are on their way."""

    window: Window
    is_kept: bool
    """Whether they are to be remembered."""
    asked: dict[str, tuple[Window | Reference, Future[Pixels]]]
    """The clip itself by the name "", its further pictures by theirs."""


class PixelPlaces:
    """The pixels of one batch; each sample's are written to its place when they are there."""

    def __init__(self, feed: Decoding, shape: Bucket, num_places: int) -> None:
        self._feed = feed
        self._shape = shape
        height, width, frames = shape.height, shape.width, shape.num_frames
        self._videos = np.empty((num_places, 3, frames, height, width), np.uint8)
        self._references = {
            name: np.empty((num_places, 3, 1, height, width), np.uint8)
            for name in feed.data.references
        }
        self._begun: dict[int, _Begun] = {}

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        """Start to decode a window and the further pictures of its clip."""
        data = self._feed.data
        asked = {"": self._ask(window, self._videos[place])}
        for name, reference in references_of(window, data.references).items():
            asked[name] = self._ask(reference, self._references[name][place])
        is_kept = is_only_window(clip, self._shape, data)
        self._begun[place] = _Begun(window, is_kept, asked)

    def _ask(
        self, wanted: Window | Reference, out: Pixels
    ) -> tuple[Window | Reference, Future[Pixels]]:
        if (remembered := self._feed.memory.pictures.get(wanted)) is None:
            return wanted, self._feed.pool.submit(wanted, out)
        out[...] = remembered
        pixels: Future[Pixels] = Future()
        pixels.set_result(out)
        return wanted, pixels

    def wait(self, place: int) -> None:
        """Return when all pictures of a place are decoded, or will never be.

        Raises:
            ClipError: one of them cannot be; names it.
        """
        begun = self._begun[place]
        errors = []
        for name, (wanted, future) in begun.asked.items():  # all: each may be written until then
            try:
                pixels = future.result()
            except ClipError as error:
                errors.append(without_reference(begun.window, name, error) if name else error)
            else:
                if begun.is_kept:
                    self._feed.memory.keep(wanted, pixels)
        if errors:
            raise errors[0]

    def copy(self, source: int, place: int) -> None:
        """Fill a place like another one, which is filled."""
        for pixels in (self._videos, *self._references.values()):
            pixels[place] = pixels[source]

    def fields(self) -> dict[str, Any]:
        """`videos`, and `references` by name."""
        references = {name: torch.from_numpy(each) for name, each in self._references.items()}
        return {"videos": torch.from_numpy(self._videos), "references": references}
