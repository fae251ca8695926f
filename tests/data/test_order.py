"""The order of the data is a pure function that consumes every clip once per epoch."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from longtake.data.order import BatchIndex, EpochSpan, derive, permuted


@st.composite
def _with_batches(draw: st.DrawFn, span: st.SearchStrategy[EpochSpan]) -> EpochSpan:
    """With batches of one size, or of each bucket's own."""
    drawn = draw(span)
    sizes = st.tuples(*(st.integers(1, 9) for _ in drawn.sizes))
    return replace(drawn, batch_sizes=draw(st.just(()) | sizes))


_spans = st.builds(
    EpochSpan,
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any).map(tuple),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
    name=st.sampled_from(["", "first/catalog"]),
    first_epoch=st.integers(0, 3),
    num_epochs=st.integers(1, 5),
).flatmap(lambda span: _with_batches(st.just(span)))
_Sample = tuple[int, int, int]
"""(bucket, epoch, position)"""


def _endless(span: EpochSpan) -> EpochSpan:
    return replace(span, num_epochs=None)


def _samples(slots: BatchIndex) -> list[_Sample]:
    pairs = zip(slots.epochs.tolist(), slots.positions.tolist(), strict=True)
    return [(slots.bucket, epoch, position) for epoch, position in pairs]


def _all(span: EpochSpan, epochs: range) -> Counter[_Sample]:
    """Every clip of some epochs, once."""
    return Counter(
        (bucket, epoch, position)
        for bucket, size in enumerate(span.sizes)
        for epoch in epochs
        for position in range(size)
    )


def _same(one: BatchIndex, other: BatchIndex) -> bool:
    facts = [(slots.epoch, slots.number, _samples(slots)) for slots in (one, other)]
    return facts[0] == facts[1]


@settings(max_examples=80, deadline=None)
@given(span=_spans)
def test_every_clip_is_consumed_once_per_epoch(span: EpochSpan) -> None:
    assert span.num_batches is not None
    assert span.num_epochs is not None
    found = Counter(
        sample for index in range(span.num_batches) for sample in _samples(span.batch(index))
    )
    assert found == _all(span, range(span.first_epoch, span.first_epoch + span.num_epochs))


@settings(max_examples=60, deadline=None)
@given(span=_spans)
def test_only_the_last_batch_of_a_bucket_is_smaller(span: EpochSpan) -> None:
    assert span.num_batches is not None
    assert span.num_epochs is not None
    batches = [span.batch(index) for index in range(span.num_batches)]
    shorter = [e for e in batches if len(e.positions) != span.batch_size_of(e.bucket)]
    small = {each.bucket: each for each in shorter}
    assert len(shorter) == len(small)
    rests = {b: span.num_epochs * n % span.batch_size_of(b) for b, n in enumerate(span.sizes)}
    assert {bucket: len(each.positions) for bucket, each in small.items()} == {
        bucket: rest for bucket, rest in rests.items() if rest
    }
    assert {each.epoch for each in small.values()} <= {span.first_epoch + span.num_epochs - 1}


@settings(max_examples=60, deadline=None)
@given(span=_spans, indices=st.lists(st.integers(0, 200), min_size=1, max_size=12))
def test_a_batch_depends_on_nothing_but_its_number(span: EpochSpan, indices: list[int]) -> None:
    endless = _endless(span)
    asked = {index: endless.batch(index) for index in indices}
    for index in sorted(indices):
        assert len(asked[index].positions) == span.batch_size_of(asked[index].bucket)
        assert _same(endless.batch(index), asked[index])
        assert _same(_endless(span).batch(index), asked[index])


@settings(max_examples=60, deadline=None)
@given(span=_spans)
def test_a_span_that_ends_begins_like_an_endless_one(span: EpochSpan) -> None:
    assert span.num_epochs is not None
    for index in range(span.epoch_start(span.first_epoch + span.num_epochs - 1)):
        assert _same(span.batch(index), _endless(span).batch(index))


@settings(max_examples=80, deadline=None)
@given(span=_spans, index=st.integers(0, 10**6), is_endless=st.booleans())
def test_batches_and_epochs_agree(span: EpochSpan, index: int, is_endless: bool) -> None:
    span = _endless(span) if is_endless else span
    if span.num_batches is not None:
        assert span.num_epochs is not None
        assert span.epoch_of(span.num_batches) == span.first_epoch + span.num_epochs
        index %= span.num_batches
    epoch = span.epoch_of(index)
    assert span.epoch_start(epoch) <= index < span.epoch_start(epoch + 1)
    slots = span.batch(index)
    assert (slots.epoch, slots.number) == (epoch, index - span.epoch_start(epoch))


@settings(max_examples=80, deadline=None)
@given(span=_spans, data=st.data(), is_endless=st.booleans())
def test_what_is_left_is_what_was_not_consumed(
    span: EpochSpan, data: st.DataObject, is_endless: bool
) -> None:
    assert span.num_batches is not None
    index = data.draw(st.integers(0, span.num_batches))
    span = _endless(span) if is_endless else span
    found = Counter(sample for number in range(index) for sample in _samples(span.batch(number)))
    consumed_epochs = {epoch for _, epoch, _ in found}
    left = span.left_at(index)
    for epoch, buckets in left.items():
        assert any(map(len, buckets))
        found.update(
            (bucket, epoch, position)
            for bucket, positions in enumerate(buckets)
            for position in positions.tolist()
        )
    has_ended = span.num_batches is not None and index == span.num_batches
    last = span.epoch_of(index) - has_ended
    assert max(consumed_epochs | left.keys()) >= last
    # A batch of a bucket that is smaller than it may reach over several epochs.
    assert Counter({key: n for key, n in found.items() if key[1] <= last}) == _all(
        span, range(span.first_epoch, last + 1)
    )
    assert max(found.values()) == 1


def _epoch(number: int, seed: int = 0, name: str = "") -> list[BatchIndex]:
    span = EpochSpan((64, 32), 8, seed, name)
    return [span.batch(i) for i in range(span.epoch_start(number), span.epoch_start(number + 1))]


def test_another_seed_name_or_epoch_is_another_order() -> None:
    plans = [_epoch(0), _epoch(0, seed=1), _epoch(0, name="b"), _epoch(1)]
    assert len({tuple(batch.bucket for batch in plan) for plan in plans}) == 4
    for bucket in (0, 1):
        positions = {
            tuple(
                position for batch in plan if batch.bucket == bucket for position in batch.positions
            )
            for plan in plans
        }
        assert len(positions) == 4


def test_the_order_itself_is_pinned() -> None:
    """These numbers may never change: a run that is resumed would repeat clips and miss others."""
    span = EpochSpan((5, 0, 3), 2, seed=7, name="all/catalog", first_epoch=1, num_epochs=3)
    assert span.num_batches == 13
    batches = map(span.batch, range(13))
    assert [
        (e.epoch, e.number, e.bucket, *map(list, (e.positions, e.epochs))) for e in batches
    ] == [
        (1, 0, 0, [0, 4], [1, 1]),
        (1, 1, 0, [2, 3], [1, 1]),
        (1, 2, 2, [1, 0], [1, 1]),
        (2, 0, 2, [2, 2], [1, 2]),
        (2, 1, 0, [3, 2], [2, 2]),
        (2, 2, 0, [1, 4], [2, 2]),
        (2, 3, 2, [0, 1], [2, 2]),
        (2, 4, 0, [1, 0], [1, 2]),
        (3, 0, 0, [0, 4], [3, 3]),
        (3, 1, 0, [1, 3], [3, 3]),
        (3, 2, 0, [2], [3]),
        (3, 3, 2, [2, 1], [3, 3]),
        (3, 4, 2, [0], [3]),
    ]
    late = EpochSpan((5, 0, 3), 2, 7).batch(10**6)
    assert (late.bucket, late.positions.tolist()) == (0, [0, 2])
    assert permuted(np.arange(8), 8, 7, "clips", 0, 0).tolist() == [5, 3, 6, 4, 1, 0, 2, 7]
    assert derive(7, "sample", 3, "0123abcd") == 7305486378570158286


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_a_permutation_is_one(seed: int) -> None:
    for size in range(301):
        assert sorted(permuted(np.arange(size), size, seed, "x").tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 10**12), data=st.data(), seed=st.integers(0, 9))
def test_part_of_a_permutation_is_that_part(size: int, data: st.DataObject, seed: int) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    together = permuted(np.array(indices), size, seed)
    assert [
        permuted(np.array([index]), size, seed).item() for index in indices
    ] == together.tolist()
    assert len(set(together.tolist())) == len(indices)
    assert 0 <= together.min() <= together.max() < size


@pytest.mark.parametrize(
    ("size", "expected", "limit"), [(3, 300, 20.5), (4, 100, 49.7), (5, 25, 172.7)]
)
def test_all_orders_are_equally_likely(size: int, expected: int, limit: float) -> None:
    keys = range(expected * factorial(size))
    counts = Counter(tuple(permuted(np.arange(size), size, key).tolist()) for key in keys)
    observed = np.array([counts[order] for order in permutations(range(size))])
    assert observed.sum() == len(keys)
    assert ((observed - expected) ** 2 / expected).sum() < limit


_MANY = 10**6


@pytest.fixture(scope="module", params=[0, 1, 2])
def shuffled(request: pytest.FixtureRequest) -> NDArray[np.int64]:
    """A permutation of a million."""
    return permuted(np.arange(_MANY), _MANY, request.param, "independence")


def _variance_ratio(values: NDArray[np.int64], batch_size: int) -> float:
    """Of the batches' means, to what independent draws without replacement would have."""
    whole = len(values) // batch_size * batch_size
    means = values[:whole].reshape(-1, batch_size).mean(axis=1)
    return float(means.var() * batch_size / values.var())


def _chi_square(values: NDArray[np.int64], num_bins: int) -> float:
    """Of successive pairs over num_bins x num_bins cells, per degree of freedom."""
    bins = values * num_bins // _MANY
    counts = np.bincount(bins[:-1] * num_bins + bins[1:], minlength=num_bins**2)
    expected = (_MANY - 1) / num_bins**2
    return float(((counts - expected) ** 2 / expected).sum() / (num_bins - 1) ** 2)


def test_mini_batches_are_independent(shuffled: NDArray[np.int64]) -> None:
    for batch_size in (16, 64, 256):
        assert 0.9 < _variance_ratio(shuffled, batch_size) < 1.1
    for num_bins in (16, 32, 64):
        assert _chi_square(shuffled, num_bins) < 1.2


@pytest.mark.parametrize(
    "weak",
    [
        lambda n: (n * 620_233 + 12_345) % _MANY,  # a linear congruential generator
        lambda n: n // 1000 + n % 1000 * 1000,  # a transposition
    ],
)
def test_the_measure_of_independence_finds_weak_shuffles(
    weak: Callable[[NDArray[np.int64]], NDArray[np.int64]],
) -> None:
    values = weak(np.arange(_MANY))
    assert sorted(values[:3]) != [0, 1, 2]
    assert _chi_square(values, 64) > 2 or not 0.9 < _variance_ratio(values, 64) < 1.1


def test_the_order_of_batches_mixes_buckets() -> None:
    span = EpochSpan((60_000, 40_000), batch_size=10, seed=0)
    buckets = np.array([span.batch(index).bucket for index in range(0, 10_000, 10)])
    runs = 1 + np.count_nonzero(np.diff(buckets))
    share = buckets.mean()
    assert share == pytest.approx(0.4, abs=0.04)
    assert runs == pytest.approx(2 * len(buckets) * share * (1 - share), rel=0.1)


def test_a_hundred_million_clips_cost_nothing() -> None:
    span = EpochSpan((10**8 - 12_345, 12_345), batch_size=64, seed=0, num_epochs=50)
    assert span.num_batches is not None
    span.batch(0)
    tracemalloc.start()
    late = span.batch(span.num_batches - 2)
    epoch = span.epoch_of(span.num_batches // 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert epoch in (24, 25)
    assert (len(late.positions), late.epoch) == (64, 49)
    assert peak < 100_000


@settings(max_examples=50, deadline=None)
@given(key=st.lists(st.integers() | st.text("ab"), max_size=4))
def test_a_derived_number_fits_every_generator(key: list[int | str]) -> None:
    """63 bits: never negative as a signed 64-bit seed."""
    assert 0 <= derive(*key) < 2**63


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_an_order_of_no_clips_is_a_defect(sizes: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="no clips"):
        EpochSpan(sizes, 1, 0)
