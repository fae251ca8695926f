"""The order in which clips are trained: functions of (sizes, batch sizes, seed, batch number).

Each bucket of an `EpochSpan` is a stream of its clips, epoch after epoch, each epoch in its own
keyed permutation, cut into batches; an incomplete batch is filled from the next epoch. A bucket b
of n_b clips with B_b per batch completes floor((e + 1) n_b / B_b) - floor(e n_b / B_b) batches in
epoch e, so any batch is found in O(1).
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_NUM_ROUNDS = 12


@dataclass(frozen=True)
class BatchIndex:
    """The clips of one batch of an `EpochSpan`, as positions in their bucket (clip shape)."""

    epoch: int  # epoch in which this batch is counted
    number: int  # number of earlier batches of that epoch
    bucket: int
    # [B] positions in the bucket's list of clips; fewer in the last batch of a bucket.
    positions: Indices
    # [B] epoch of each sample: at the edge of an epoch, a batch holds samples of two.
    epochs: Indices


@dataclass(frozen=True)
class EpochSpan:
    """Whole epochs of fixed buckets (clip shapes), as a list of batches that is never stored."""

    sizes: tuple[int, ...]  # number of clips of each bucket; empty buckets are never visited
    batch_size: int  # samples per batch over all ranks, unless `batch_sizes` is set
    seed: int  # the run's seed; it decides the order
    name: str = ""  # spans of different names have different permutations
    first_epoch: int = 0  # number of its first epoch
    num_epochs: int | None = None  # None for an endless span
    batch_sizes: tuple[int, ...] = ()  # one for each bucket; empty: `batch_size` for all

    def __post_init__(self) -> None:
        assert self.batch_size > 0
        assert all(size > 0 for size in self.batch_sizes)
        assert len(self.batch_sizes) in (0, len(self.sizes))
        assert any(self.sizes), "an order of no clips has no batches"
        assert self.num_epochs is None or self.num_epochs > 0

    @cached_property
    def num_batches(self) -> int | None:
        """Number of batches of all epochs together; None if there is no last epoch."""
        return None if self.num_epochs is None else self._begin(self.num_epochs)

    def batch_size_of(self, bucket: int) -> int:
        return self.batch_sizes[bucket] if self.batch_sizes else self.batch_size

    @cached_property
    def batches_per_epoch(self) -> Fraction:
        """Mean number of batches per epoch; an incomplete batch is filled from the next epoch."""
        return sum((Fraction(size, batch) for size, batch in self._pairs), Fraction(0))

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """For each bucket, the number of its clips in an epoch and of samples in its batches."""
        return [(size, self.batch_size_of(bucket)) for bucket, size in enumerate(self.sizes)]

    def epoch_start(self, epoch: int) -> int:
        """Return the number of an epoch's first batch."""
        return self._begin(epoch - self.first_epoch)

    def epoch_of(self, index: int) -> int:
        """Return the epoch in which a batch is counted; the next epoch after the last batch."""
        assert index >= 0
        if self.num_batches is not None and index >= self.num_batches:
            assert self.num_epochs is not None
            return self.first_epoch + self.num_epochs
        epoch = index // self.batches_per_epoch  # a lower bound, as the floors only reduce it
        if self.num_epochs is not None:
            epoch = min(epoch, self.num_epochs - 1)  # the ceilings of the last epoch add batches
        while self._begin(epoch + 1) <= index:
            epoch += 1
        return self.first_epoch + epoch

    def batch(self, index: int) -> BatchIndex:
        """Return the clips of a batch by the batch's number, as positions in their bucket."""
        assert self.num_batches is None or index < self.num_batches
        epoch = self.epoch_of(index)
        number = index - self.epoch_start(epoch)
        buckets, in_bucket = self._shuffled(epoch, np.array([number]))
        bucket, batch = int(buckets[0]), int(in_bucket[0])
        size = self.batch_size_of(bucket)
        stream = np.arange(batch * size, (batch + 1) * size)
        return BatchIndex(epoch, number, bucket, *self._samples(bucket, stream))

    def left_at(self, index: int) -> dict[int, list[Indices]]:
        """Return the clips that no batch before `index` has, as positions by epoch and bucket."""
        ended = self.num_batches is not None and index >= self.num_batches
        epoch = self.epoch_of(index) - int(ended)
        done = index - self.epoch_start(epoch)
        buckets, in_bucket = self._shuffled(epoch, np.arange(done))
        left: dict[int, list[Indices]] = {}
        for bucket, size in enumerate(self.sizes):
            batches = in_bucket[buckets == bucket]
            for own, positions in self._left_of_bucket(bucket, epoch, batches):
                empty = [np.empty(0, np.int64) for _ in self.sizes]
                left.setdefault(own, empty)[bucket] = positions
            assert size or not len(batches)
        return left

    def _left_of_bucket(
        self, bucket: int, epoch: int, done: Indices
    ) -> Iterator[tuple[int, Indices]]:
        """Yield (epoch, positions) of a bucket's clips up to an epoch's end that no batch has yet.

        `done` are the batches of that epoch, counted within the bucket, that are trained.
        """
        size, local = self.sizes[bucket], epoch - self.first_epoch
        batch_size = self.batch_size_of(bucket)
        # The bucket's first batch of this epoch, which may hold samples of the epoch before.
        first = local * size // batch_size
        stream = np.arange(first * batch_size, (local + 1) * size)
        is_left = ~np.isin(stream // batch_size, done)
        positions, epochs = self._samples(bucket, stream[is_left])
        for own in _ascending(epochs):
            yield own, positions[epochs == own]

    def _begin(self, local_epoch: int) -> int:
        """Return the number of all batches before an epoch; `local_epoch` counts from 0."""
        whole = sum(local_epoch * size // batch for size, batch in self._pairs)
        if local_epoch != self.num_epochs:
            return whole
        # The span's end has no next epoch, so each bucket's incomplete batch counts as one more.
        return whole + sum(local_epoch * size % batch > 0 for size, batch in self._pairs)

    def _shuffled(self, epoch: int, numbers: Indices) -> tuple[Indices, Indices]:
        """Map batch numbers in an epoch's mixed order to (buckets, numbers within the buckets)."""
        firsts, counts = self._batches_of(epoch)
        ends = np.cumsum(counts)
        # The batches of all buckets are numbered in a row and permuted, so that buckets are mixed.
        flat = permuted(numbers, int(ends[-1]), self.seed, self.name, "batches", epoch)
        buckets = np.searchsorted(ends, flat, side="right")
        return buckets, flat - (ends - counts)[buckets] + firsts[buckets]

    def _batches_of(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the first batch of each bucket in an epoch, and how many batches it has there."""
        local = epoch - self.first_epoch
        is_last = self.num_epochs is not None and local == self.num_epochs - 1
        firsts = np.array([local * n // size for n, size in self._pairs], np.int64)
        ends = np.array(
            [
                -(-(local + 1) * n // size) if is_last else (local + 1) * n // size
                for n, size in self._pairs
            ],
            np.int64,
        )
        return firsts, ends - firsts

    def _samples(self, bucket: int, stream: Indices) -> tuple[Indices, Indices]:
        """Map places in a bucket's sequence of samples, over all epochs, to (clips, epochs)."""
        size = self.sizes[bucket]
        if self.num_epochs is not None:
            stream = stream[stream < self.num_epochs * size]
        local, within = np.divmod(stream, max(size, 1))
        epochs = local + self.first_epoch
        positions = np.empty_like(within)
        for epoch in _ascending(epochs):
            mine = epochs == epoch
            key = (self.seed, self.name, "clips", epoch, bucket)
            positions[mine] = permuted(within[mine], size, *key)
        return positions, epochs


def _ascending(epochs: Indices) -> list[int]:
    """Return the distinct values of an ascending array of epochs; faster than np.unique."""
    if not len(epochs):
        return []
    borders = np.flatnonzero(np.diff(epochs)) + 1
    return [int(epochs[place]) for place in (0, *borders)]


def permuted(indices: Indices, size: int, *key: int | str) -> Indices:
    """Return where a keyed permutation of 0..size-1 puts each index, without storing it.

    A Feistel network over pairs (left, right) of mixed radix a x b >= size, with a and b near the
    square root (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Rounds add a
    hash of one half to the other, and a result outside 0..size-1 is permuted again ("cycle
    walking"), which is rare. Twelve rounds, because successive batches are measurably correlated
    with four, and not all orders of five clips are equally likely with eight. One radix is even,
    because otherwise only even permutations of a x b things could result.
    """
    assert size < 2**62
    if not len(indices):
        return indices
    rows = 2 * math.ceil(math.sqrt(size) / 2)
    columns = -(-size // rows)
    keys = _round_keys(key)
    placed = _feistel(indices.astype(np.uint64), rows, columns, keys)
    while (outside := placed >= size).any():
        placed[outside] = _feistel(placed[outside], rows, columns, keys)
    return placed.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    a, b = np.uint64(rows), np.uint64(columns)
    left, right = np.divmod(values, b)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _hash_below(right ^ even, a)) % a
        right = (right + _hash_below(left ^ odd, b)) % b
    return left * b + right


def _hash_below(values: NDArray[np.uint64], bound: np.uint64) -> NDArray[np.uint64]:
    """Return a hash in 0..bound-1 by the finaliser of splitmix64 (Steele, Lea, Flood, 2014)."""
    # uint64 wraps around, as the algorithm wants.
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # Multiply and shift instead of a remainder (Lemire): faster, and as uniform for small bounds.
    return ((mixed >> np.uint64(32)) * bound) >> np.uint64(32)


@lru_cache(256)
def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    # SHAKE gives a digest of any length: one 64-bit key for each round.
    digest = hashlib.shake_128(_text(key)).digest(8 * _NUM_ROUNDS)
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """Split the first `count` batches or clips among catalogs or buckets by their weights.

    The first part has round(count w); the rest is split among the others in the same way. The
    arithmetic is exact, so that the result is the same on every machine.
    """
    given = []
    if all(isinstance(each, int) for each in weights):
        rest = [Fraction(each) for each in weights]  # after their sum each part has its weight
    else:
        # Fractions, because rounding errors of floats would differ between machines.
        rest = [Fraction(each / max(weights)).limit_denominator(10**6) for each in weights]
    for position, weight in enumerate(rest):
        total = sum(rest[position:])
        part = weight / total if total else Fraction(0)
        mine = (2 * count * part.numerator + part.denominator) // (2 * part.denominator)
        given.append(mine)
        count -= mine
    return given


def derive(*key: int | str) -> int:
    """Return a number in [0, 2^63) derived from a key by BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(_text(key), digest_size=8).digest()) >> 1


def _text(key: tuple[int | str, ...]) -> bytes:
    return "/".join(str(part) for part in key).encode()
