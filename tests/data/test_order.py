"""The order of the data is a pure function that consumes every clip once per epoch."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.data.order import DataOrder, PlannedBatch, derive, permutation

_sizes = st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any)
_batch_size = st.integers(1, 9)
_seed = st.integers(0, 2**63 - 1)


def _streams(batches: Sequence[PlannedBatch], num_buckets: int) -> list[list[tuple[int, int]]]:
    """For each bucket the (epoch, position) pairs of its samples, sorted."""
    streams: list[list[tuple[int, int]]] = [[] for _ in range(num_buckets)]
    for batch in batches:
        streams[batch.bucket] += zip(batch.epochs, batch.positions, strict=True)
    return [sorted(stream) for stream in streams]


@settings(max_examples=100, deadline=None)
@given(sizes=_sizes, batch_size=_batch_size, seed=_seed, num_epochs=st.integers(1, 5))
def test_every_clip_is_consumed_once_per_epoch(
    sizes: list[int], batch_size: int, seed: int, num_epochs: int
) -> None:
    """No repeats and no gaps: all that a bucket leaves open is the tail of less than a batch."""
    order = DataOrder(sizes, batch_size, seed)
    end = order.epoch_start(num_epochs)
    batches = [order.batch(step) for step in range(end)]
    for size, stream in zip(sizes, _streams(batches, len(sizes)), strict=True):
        assert len(stream) == num_epochs * size // batch_size * batch_size
        assert max(Counter(stream).values(), default=1) == 1
        full, tail = divmod(len(stream), size) if size else (0, 0)
        whole = {(epoch, position) for epoch in range(full) for position in range(size)}
        assert whole <= set(stream)
        rest = set(stream) - whole
        assert len(rest) == tail
        assert {epoch for epoch, _ in rest} <= {full}


@settings(max_examples=100, deadline=None)
@given(sizes=_sizes, batch_size=_batch_size, seed=_seed, steps=st.integers(1, 60))
def test_every_batch_is_whole_and_of_one_bucket(
    sizes: list[int], batch_size: int, seed: int, steps: int
) -> None:
    """Exactly batch_size positions, all of them clips of a bucket that has some."""
    order = DataOrder(sizes, batch_size, seed)
    for step in range(steps):
        batch = order.batch(step)
        assert batch.step == step
        assert len(batch.positions) == len(batch.epochs) == batch_size
        assert all(0 <= position < sizes[batch.bucket] for position in batch.positions)


@settings(max_examples=60, deadline=None)
@given(
    sizes=_sizes,
    batch_size=_batch_size,
    seed=_seed,
    steps=st.lists(st.integers(0, 200), min_size=1, max_size=12),
)
def test_a_batch_depends_on_nothing_but_its_step(
    sizes: list[int], batch_size: int, seed: int, steps: list[int]
) -> None:
    """In any order of asking, and from a fresh object, the answer is the same."""
    order = DataOrder(sizes, batch_size, seed)
    asked = {step: order.batch(step) for step in steps}
    for step in sorted(steps):
        assert order.batch(step) == asked[step]
        assert DataOrder(tuple(sizes), batch_size, seed).batch(step) == asked[step]


@settings(max_examples=100, deadline=None)
@given(sizes=_sizes, batch_size=_batch_size, step=st.integers(0, 10**6))
def test_steps_and_epochs_agree(sizes: list[int], batch_size: int, step: int) -> None:
    """A step lies between the start of its epoch and the start of the next."""
    order = DataOrder(sizes, batch_size, seed=0)
    epoch = order.epoch_of(step)
    assert order.epoch_start(epoch) <= step < order.epoch_start(epoch + 1)
    assert order.batch(step).epoch == epoch


def test_a_batch_may_hold_samples_of_many_epochs() -> None:
    """A bucket of two clips fills a batch of seven with three and a half epochs."""
    order = DataOrder([2], batch_size=7, seed=0)
    first, second = order.batch(0), order.batch(1)
    assert first.epochs == (0, 0, 1, 1, 2, 2, 3)
    assert second.epochs == (3, 4, 4, 5, 5, 6, 6)
    assert {first.positions[6], second.positions[0]} == {0, 1}


def test_another_seed_or_epoch_is_another_order() -> None:
    """Neither clips nor batches keep their places, in any bucket."""
    sizes, batch_size = [64, 32], 8

    def epoch(seed: int, number: int) -> list[PlannedBatch]:
        order = DataOrder(sizes, batch_size, seed)
        steps = range(order.epoch_start(number), order.epoch_start(number + 1))
        return [order.batch(step) for step in steps]

    plans = [epoch(0, 0), epoch(1, 0), epoch(0, 1)]
    assert len({tuple(batch.bucket for batch in plan) for plan in plans}) == 3
    for bucket in (0, 1):
        positions = {
            tuple(batch.positions for batch in plan if batch.bucket == bucket) for plan in plans
        }
        assert len(positions) == 3


def test_the_order_itself_is_pinned() -> None:
    """These numbers may never change: a run that is resumed would repeat clips and miss others."""
    order = DataOrder([5, 0, 3], batch_size=2, seed=7)
    plan = [
        (batch.epoch, batch.bucket, batch.positions, batch.epochs)
        for batch in map(order.batch, range(8))
    ]
    assert plan == [
        (0, 2, (2, 0), (0, 0)),
        (0, 0, (4, 2), (0, 0)),
        (0, 0, (3, 0), (0, 0)),
        (1, 0, (1, 3), (0, 1)),
        (1, 0, (2, 0), (1, 1)),
        (1, 0, (4, 1), (1, 1)),
        (1, 2, (1, 2), (0, 1)),
        (1, 2, (0, 1), (1, 1)),
    ]
    assert order.batch(10**6).positions == (1, 4)
    assert permutation(8, 7, "clips", 0, 0).tolist() == [4, 7, 2, 6, 3, 0, 5, 1]
    assert derive(7, "sample", 3, "0123abcd") == 7305486378570158286


def test_the_order_is_the_same_in_another_process() -> None:
    """Python's salted hashes play no part."""
    code = (
        "from longtake.data.order import DataOrder\n"
        "order = DataOrder([5, 0, 3], 2, 7)\n"
        "print([order.batch(step).positions for step in range(9)])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    order = DataOrder([5, 0, 3], 2, 7)
    assert found.stdout.strip() == str([order.batch(step).positions for step in range(9)])


@settings(max_examples=50, deadline=None)
@given(size=st.integers(0, 300), seed=_seed)
def test_a_permutation_is_one(size: int, seed: int) -> None:
    """Every number once, and none of nothing."""
    assert sorted(permutation(size, seed, "x").tolist()) == list(range(size))


def test_permutations_are_uniform() -> None:
    """Of 6000 keys each of the six orders of three gets its share (chi-squared, p > 0.001)."""
    counts = Counter(tuple(permutation(3, key).tolist()) for key in range(6000))
    observed = np.array(list(counts.values()))
    assert len(observed) == 6
    assert ((observed - 1000) ** 2 / 1000).sum() < 20.5


@settings(max_examples=50, deadline=None)
@given(key=st.lists(st.integers() | st.text("ab"), max_size=4))
def test_a_derived_number_fits_every_generator(key: list[int | str]) -> None:
    """63 bits: never negative as a signed 64-bit seed."""
    assert 0 <= derive(*key) < 2**63


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_an_order_of_no_clips_is_a_defect(sizes: list[int]) -> None:
    """Whoever sorts clips into buckets refuses that before."""
    with pytest.raises(AssertionError, match="no clips"):
        DataOrder(sizes, 1, 0)
