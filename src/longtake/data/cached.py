"""Fills batches with latents and embeddings from a cache; nothing is decoded."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from longtake.config import Bucket
from longtake.data.cache import Cache
from longtake.data.clip import Clip
from longtake.data.pool import Incident
from longtake.data.window import Window
from longtake.errors import ClipError

_THREADS = 4


@dataclass(frozen=True)
class Failure:
    """Why a window is not in the cache: it, or a picture that belongs to it, cannot be decoded."""

    identity: str
    path: str
    reason: str


@dataclass(frozen=True)
class Filled:
    """A cache that was filled for a run.

    Attributes:
        cache: what was filled.
        failures: by the key of a window's latents, what could not be.
    """

    cache: Cache
    failures: Mapping[str, Failure]


@dataclass(frozen=True)
class _Content:
    """What a sample is made of: its latents [C, F', H', W'], and what the model is told of it."""

    latents: Tensor
    conditioning: dict[str, Tensor]


class CacheReading:
    """Reads samples from a cache, several at a time."""

    def __init__(self, filled: Filled) -> None:
        self.filled = filled
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="cache")

    def places(self, shape: Bucket, num_places: int) -> "CachedPlaces":
        """The empty places of one batch."""
        return CachedPlaces(self, shape, num_places)

    def incidents(self) -> list[Incident]:
        """None: there are no processes."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)

    def content(self, clip: Clip, window: Window) -> _Content:
        """Read a sample.

        Raises:
            ClipError: the clip could not be decoded when the cache was filled, or the cache is
                incomplete or damaged.
        """
        cache = self.filled.cache
        entry = cache.latents(window)
        if failure := self.filled.failures.get(entry.key):
            raise ClipError(failure.path, failure.reason)
        cache.unconditional()  # missing there, it is missing to every sample
        conditioning = cache.prompt(clip.caption).read()
        for name, reference in cache.references(window).items():
            conditioning[f"{name}_latents"] = cache.reference(name, reference).read()["latents"]
        return _Content(entry.read()["latents"], conditioning)


class CachedPlaces:
    """The samples of one batch."""

    def __init__(self, feed: CacheReading, shape: Bucket, num_places: int) -> None:
        self._feed = feed
        self._shape = shape
        self._begun: dict[int, Future[_Content]] = {}
        self._filled: list[_Content | None] = [None] * num_places

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        """Start to read a sample."""
        self._begun[place] = self._feed.threads.submit(self._feed.content, clip, window)

    def wait(self, place: int) -> None:
        """Return when a place is filled, or will never be.

        Raises:
            ClipError: it cannot be.
        """
        self._filled[place] = self._begun.pop(place).result()

    def copy(self, source: int, place: int) -> None:
        """Fill a place like another one, which is filled."""
        self._filled[place] = self._filled[source]

    def fields(self) -> dict[str, Any]:
        """`latents`, `conditioning` and `no_caption`."""
        contents = [each for each in self._filled if each is not None]
        assert len(contents) == len(self._filled)
        told = [each.conditioning for each in contents]
        no_caption = self._feed.filled.cache.unconditional()
        size = (len(contents), 3, 0, self._shape.height, self._shape.width)
        return {
            "videos": torch.empty(size, dtype=torch.uint8),
            "latents": torch.stack([each.latents for each in contents]),
            "conditioning": {name: torch.stack([each[name] for each in told]) for name in told[0]},
            "no_caption": {name: each[None] for name, each in no_caption.items()},
        }
