"""Batches by global step, decoded ahead of the training by a few threads.

The loader has no position: `batches(start)` is the same sequence whoever asks, whenever. PyAV
releases Python's lock while it decodes, so threads are enough to keep a step fed.
"""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from longtake.config import Bucket, Recipe
from longtake.data.buckets import Buckets, crop, span
from longtake.data.catalog import Clip
from longtake.data.decode import read_frames
from longtake.data.order import DataOrder, PlannedBatch, derive
from longtake.errors import ClipError, DataError

_REMEDY = "Are the files still where they were indexed? Run longtake data index again."


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch. Shapes: B local batch, F frames, H height, W width."""

    step: int
    epoch: int
    begins_epoch: bool
    """Whether this is the first step that is counted in the epoch."""
    bucket: Bucket
    """The shape of its clips."""
    videos: Tensor
    """[B, 3, F, H, W] uint8."""
    captions: tuple[str, ...]
    """[B]"""
    seeds: tuple[int, ...]
    """[B] seeds of all that is random about a sample (noise, sigma, caption dropout), made from
    the run's seed, the sample's epoch and the clip's identity: the same on any world size."""
    identities: tuple[str, ...]
    """[B]"""


@dataclass
class _Memory:
    """Decoded clips that are one window long, by (identity, bucket), kept while there is room."""

    room_bytes: float
    windows: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def keep(self, key: tuple[str, int], window: Tensor) -> None:
        if key not in self.windows and window.nbytes <= self.room_bytes:
            self.room_bytes -= window.nbytes
            self.windows[key] = window


class Loader:
    """Decodes the batches of an order, this rank's slice of each.

    Args:
        buckets: the clips by shape.
        recipe: its `data` section, seed and batch size.
        rank: this process's data-parallel index.
        world_size: how many share each global batch; must divide it.
    """

    def __init__(
        self, buckets: Buckets, recipe: Recipe, rank: int = 0, world_size: int = 1
    ) -> None:
        assert recipe.training.batch_size % world_size == 0
        self._buckets = buckets
        self._data = recipe.data
        self._seed = recipe.seed
        self._rank = rank
        self._local_size = recipe.training.batch_size // world_size
        self._memory = _Memory(recipe.data.memory_gib * 2**30)
        self._failures: dict[str, ClipError] = {}
        self._lock = threading.Lock()
        sizes = [len(clips) for clips in buckets.clips]
        self.order = DataOrder(sizes, recipe.training.batch_size, recipe.seed)

    @property
    def failures(self) -> dict[str, ClipError]:
        """Clips that could not be decoded while training, by identity; each was replaced."""
        with self._lock:
            return dict(self._failures)

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """The batches of steps start_step .. end_step - 1, decoded ahead.

        Raises:
            DataError: more clips failed than `data.max_failed_clips` allows.
        """
        waiting: deque[Future[Batch]] = deque()
        ahead = max(self._data.prefetch_batches, self._data.decode_threads)  # no thread idles
        with ThreadPoolExecutor(self._data.decode_threads, thread_name_prefix="decode") as pool:
            try:
                for step in range(start_step, end_step):
                    waiting.append(pool.submit(self.load, step))
                    if len(waiting) > ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def load(self, step: int) -> Batch:
        """This rank's share of the batch of a global step."""
        planned = self.order.batch(step)
        mine = range(self._rank * self._local_size, (self._rank + 1) * self._local_size)
        samples = [self._sample(planned, index) for index in mine]
        clips, windows, seeds = zip(*samples, strict=True)
        return Batch(
            step=step,
            epoch=planned.epoch,
            begins_epoch=step == self.order.epoch_start(planned.epoch),
            bucket=self._buckets.shapes[planned.bucket],
            videos=torch.from_numpy(np.stack([window.numpy() for window in windows])),
            captions=tuple(clip.caption for clip in clips),
            seeds=seeds,
            identities=tuple(clip.identity for clip in clips),
        )

    def _sample(self, planned: PlannedBatch, index: int) -> tuple[Clip, Tensor, int]:
        """A planned clip and its pixels; if it cannot be decoded, the next one of its bucket."""
        clips = self._buckets.clips[planned.bucket]
        position, epoch = planned.positions[index], planned.epochs[index]
        for offset in range(len(clips)):
            clip = clips[(position + offset) % len(clips)]
            if clip.identity in self._failures:
                continue
            seed = derive(self._seed, "sample", epoch, clip.identity)
            try:
                return clip, self._window(clip, planned.bucket, seed), seed
            except ClipError as error:
                self._reject(clip, error)
        first = self.failures[clips[position].identity]
        raise DataError(
            f"None of the {len(clips)} clips in the bucket of "
            f"{self._buckets.shapes[planned.bucket]} could be decoded. The first that was tried: "
            f"{first}. {_REMEDY}"
        )

    def _reject(self, clip: Clip, error: ClipError) -> None:
        with self._lock:
            self._failures[clip.identity] = error
            failed = len(self._failures)
        if failed > self._data.max_failed_clips:
            raise DataError(
                f"{failed} clips could not be decoded while training, more than "
                f"data.max_failed_clips = {self._data.max_failed_clips} allows. The last: {error}. "
                f"{_REMEDY}"
            )

    def _window(self, clip: Clip, bucket: int, seed: int) -> Tensor:
        """[3, F, H, W] uint8: a window of the clip, chosen by its seed, in its bucket's size."""
        shape = self._buckets.shapes[bucket]
        starts = clip.num_frames - span(shape, self._data.frame_stride) + 1
        start = seed % starts
        key = (clip.identity, bucket)
        if (window := self._memory.windows.get(key)) is None:
            window = read_window(clip, shape, start, self._data.frame_stride)
            if starts == 1:  # of a longer clip another window will be wanted next time
                with self._lock:
                    self._memory.keep(key, window)
        return window


def read_window(clip: Clip, shape: Bucket, start: int, stride: int) -> Tensor:
    """Decode a window of a clip, scaled and cropped to a bucket's size.

    Returns:
        [3, F, H, W] uint8.

    Raises:
        ClipError: the file is gone, damaged, or not what its record says.
    """
    frames = read_frames(
        Path(clip.path),
        stream_index=clip.stream_index,
        start=start,
        num_frames=shape.num_frames,
        stride=stride,
        rotation=clip.rotation,
    )
    height, width = frames.shape[1:3]
    if (height, width) != (clip.height, clip.width):
        indexed = f"{clip.width}x{clip.height}"
        raise ClipError(clip.path, f"has {width}x{height} pixels, was indexed with {indexed}")
    cut = crop(clip, shape)
    rows = slice(cut.top, cut.top + shape.height)
    columns = slice(cut.left, cut.left + shape.width)
    scaled = _scale(frames, cut.scaled_height, cut.scaled_width)[:, rows, columns]
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(3, 0, 1, 2)))


def _scale(frames: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """[F, height, width, 3], bicubic and antialiased.

    By Pillow, not torch: torch would start a team of threads for each decoding thread, and all of
    them would fight the training step for the cores.
    """
    if frames.shape[1:3] == (height, width):
        return frames
    size, method = (width, height), Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, method)) for frame in frames])
