"""The order of the data: a pure function of (bucket sizes, batch size, seed, step); numpy only.

Each bucket is an endless stream of its clips, epoch after epoch, every epoch in its own keyed
permutation, cut into batches of one size. A batch may reach over an epoch's edge: a tail is carried
into the next epoch, never dropped and never repeated. Hence bucket b of n_b clips completes
floor((e + 1) n_b / B) - floor(e n_b / B) batches in epoch e, and the step at which an epoch begins
has a closed form. No state is kept: to resume is to ask for the batch of another step.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlannedBatch:
    """Which clips one optimizer step trains on, over all ranks."""

    step: int
    epoch: int
    """The epoch that this step is counted in."""
    bucket: int
    positions: tuple[int, ...]
    """[B] positions in the bucket's list of clips."""
    epochs: tuple[int, ...]
    """[B] each sample's own epoch: at an epoch's edge one batch holds samples of two."""


class DataOrder:
    """Maps a global step to its batch.

    Args:
        bucket_sizes: clips of each bucket; buckets without clips are never visited.
        batch_size: samples per step over all ranks.
        seed: of the run; another seed is another order.
    """

    def __init__(self, bucket_sizes: Sequence[int], batch_size: int, seed: int) -> None:
        assert batch_size > 0
        assert any(bucket_sizes), "an order of no clips has no batches"
        self._sizes = tuple(bucket_sizes)
        self._batch_size = batch_size
        self._seed = seed
        self._batches_of_epoch = lru_cache(2)(self._shuffle_batches)
        self._clips_of_epoch = lru_cache(4 * len(self._sizes))(self._shuffle_clips)

    def epoch_start(self, epoch: int) -> int:
        """The first global step that is counted in an epoch."""
        return sum(epoch * size // self._batch_size for size in self._sizes)

    def epoch_of(self, step: int) -> int:
        """The epoch that a global step is counted in."""
        assert step >= 0
        total = sum(self._sizes)
        epoch = step * self._batch_size // total  # a lower bound: floors only take batches away
        while self.epoch_start(epoch + 1) <= step:
            epoch += 1
        return epoch

    def batch(self, step: int) -> PlannedBatch:
        """The batch that a global step trains on."""
        epoch = self.epoch_of(step)
        bucket, number = self._batches_of_epoch(epoch)[step - self.epoch_start(epoch)]
        in_stream = np.arange(number * self._batch_size, (number + 1) * self._batch_size)
        epochs, within = np.divmod(in_stream, self._sizes[bucket])
        positions = [
            int(self._clips_of_epoch(int(e), bucket)[i])
            for e, i in zip(epochs, within, strict=True)
        ]
        return PlannedBatch(step, epoch, bucket, tuple(positions), tuple(epochs.tolist()))

    def _shuffle_batches(self, epoch: int) -> list[tuple[int, int]]:
        """The (bucket, number in the bucket's stream) pairs of an epoch, in training order."""
        size = self._batch_size
        batches = [
            (bucket, number)
            for bucket, clips in enumerate(self._sizes)
            for number in range(epoch * clips // size, (epoch + 1) * clips // size)
        ]
        order = permutation(len(batches), self._seed, "batches", epoch)
        return [batches[index] for index in order]

    def _shuffle_clips(self, epoch: int, bucket: int) -> NDArray[np.int64]:
        return permutation(self._sizes[bucket], self._seed, "clips", epoch, bucket)


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """A keyed permutation of 0..size-1.

    Sorts the raw output of Philox, whose stream numpy guarantees (NEP 19), rather than calling
    `Generator.permutation`, which may change between numpy's versions and would move every batch.
    """
    raw = np.random.Philox(key=derive(*key)).random_raw(size)
    return np.argsort(raw, kind="stable")


def derive(*key: int | str) -> int:
    """A 63-bit number from a key: the seed of everything random that belongs to that key."""
    text = "/".join(str(part) for part in key).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
