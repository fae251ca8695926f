"""Provides training samples by decoding clips and their conditioning inputs in worker processes."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longtake.config import AUDIO, AudioFormat, Bucket, DataSection
from longtake.data import buckets, input_files
from longtake.data.audio import audio_of
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Indexed
from longtake.data.conditioning import (
    Wanted,
    as_bytes,
    conditioning_error,
    conditioning_of,
    empty_conditioning,
)
from longtake.data.decode_worker import DecodePool
from longtake.data.window import Window
from longtake.errors import ClipError
from longtake.heartbeat import HeartbeatDir

Pixels = NDArray[np.uint8]


@dataclass
class FrameCache:
    """Decoded pixels and numbers that every epoch uses again, in memory while there is room."""

    room_bytes: float
    contents: dict[Wanted, Pixels] = field(default_factory=dict)

    def keep(self, wanted: Wanted, pixels: Pixels) -> None:
        """Keep a copy of decoded pixels or numbers, if there is room."""
        if wanted not in self.contents and pixels.nbytes <= self.room_bytes:
            self.room_bytes -= pixels.nbytes
            # A view would keep the whole batch in memory.
            self.contents[wanted] = pixels.copy()


class DecodingSource:
    """Decodes clips and their conditioning inputs to samples, as `CachedSource` reads a cache.

    `known_inputs` is the content of the inputs' files when the run first used them. With
    `audio`, each sample has the sound of its window too.
    """

    def __init__(
        self,
        data: DataSection,
        catalogs: Mapping[str, Catalog],
        cache: FrameCache,
        heartbeats: HeartbeatDir | None,
        known_inputs: Mapping[str, Indexed],
        audio: AudioFormat | None = None,
    ) -> None:
        self.data, self.audio = data, audio
        self.cache = cache
        self.known_inputs = known_inputs
        # Objects that should exist in each store, to tell a missing clip from a store that is down.
        examples = [
            catalog.clip(row).media
            for catalog in catalogs.values()
            for row in sorted({0, len(catalog) // 2, len(catalog) - 1})
            if len(catalog)
        ]
        self.pool = DecodePool.of_recipe(data, heartbeats, examples)
        self.incidents, self.close = self.pool.incidents, self.pool.close
        self.take_fetched = self.pool.take_fetched

    def buffer(self, shape: Bucket, num_places: int) -> "PixelBuffer":
        return PixelBuffer(self, shape, num_places)


class _PendingPixels(NamedTuple):
    """The window and inputs of one sample of a batch, while worker processes decode them."""

    window: Window
    is_kept: bool  # whether the frame cache keeps the result
    # Requests by name; "" is the clip itself, and others are its further inputs.
    requested: dict[str, tuple[Wanted, Future[Pixels]]]


class PixelBuffer:
    """Pixels of one batch; each sample is decoded into its place in the arrays."""

    def __init__(self, source: DecodingSource, shape: Bucket, num_places: int) -> None:
        self.source = source
        self._shape = shape
        height, width, frames = shape.height, shape.width, shape.num_frames
        self._videos = np.empty((num_places, 3, frames, height, width), np.uint8)
        self._inputs = {
            name: empty_conditioning(section, shape, num_places)
            for name, section in source.data.conditioning.items()
        }
        if (audio := source.audio) is not None:
            size = num_places, audio.channels + 1, audio.num_samples(frames)
            self._inputs[AUDIO] = np.empty(size, np.float32)
        self._pending: dict[int, _PendingPixels] = {}

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        """Start to decode a clip and its conditioning inputs into a place of the batch."""
        data = self.source.data
        requested = {"": self._request(window, self._videos[place])}
        for name, wanted in conditioning_of(clip, window, data.conditioning).items():
            wanted = input_files.with_known(wanted, self.source.known_inputs)
            requested[name] = self._request(wanted, as_bytes(self._inputs[name][place]))
        if (audio := self.source.audio) is not None:
            sound, out = audio_of(clip, window, audio), as_bytes(self._inputs[AUDIO][place])
            requested[AUDIO] = self._request(sound, out)
        is_kept = buckets.is_only_window(clip, self._shape, data)
        self._pending[place] = _PendingPixels(window, is_kept, requested)

    def _request(self, wanted: Wanted, out: Pixels) -> tuple[Wanted, Future[Pixels]]:
        if (cached := self.source.cache.contents.get(wanted)) is None:
            return wanted, self.source.pool.submit(wanted, out)
        out[...] = cached
        pixels: Future[Pixels] = Future()
        pixels.set_result(out)
        return wanted, pixels

    def is_decoded(self, place: int) -> bool:
        """Return true if the sample of a place is decoded, without an error."""
        futures = (future for _, future in self._pending[place].requested.values())
        return all(each.done() and each.exception() is None for each in futures)

    def wait(self, place: int) -> None:
        """Wait for the sample of a place; raise ClipError if the clip or an input is unreadable."""
        window, is_kept, requested = self._pending[place]
        errors = []
        for name, (wanted, future) in requested.items():  # all: a worker may still write to each
            try:
                pixels = future.result()
            except ClipError as error:
                errors.append(conditioning_error(window, name, error) if name else error)
            else:
                if is_kept:
                    self.source.cache.keep(wanted, pixels)
        if errors:
            raise errors[0]

    def copy(self, source: int, place: int) -> None:
        """Fill a place of the batch with a copy of the sample of another place."""
        for pixels in (self._videos, *self._inputs.values()):
            pixels[place] = pixels[source]

    def fields(self) -> dict[str, Any]:
        """Return the fields of `Batch` that hold tensors; every place must be filled."""
        inputs = {name: torch.from_numpy(each) for name, each in self._inputs.items()}
        return {"videos": torch.from_numpy(self._videos), "inputs": inputs}
