"""Batches that are left out for good: the others stay what they are, wherever one resumes."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtake.config import DataSection
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.loader import Loader
from longtake.data.skipped import Skipped
from longtake.errors import DataError

_SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))),
    max_size=5,
)
_BATCH_SIZE, _STEPS = 4, 18
_STAGES = [{"name": "only", "epochs": 3}]  # of six batches each


def _numbers(spans: Sequence[tuple[int, int]]) -> set[int]:
    return {number for first, end in spans for number in range(first, end)}


@given(spans=_SPANS)
def test_spans_are_merged(spans: list[tuple[int, int]]) -> None:
    """The same numbers, ascending, with a gap between any two spans."""
    skipped = Skipped.of(spans)
    assert _numbers(skipped.spans) == _numbers(spans)
    assert len(skipped) == len(_numbers(spans))
    edges = [edge for span in skipped.spans for edge in span]
    assert edges == sorted(set(edges))
    assert all((number in skipped) == (number in _numbers(spans)) for number in range(45))


@given(spans=_SPANS, number=st.integers(0, 40), count=st.integers(0, 12))
def test_positions_go_round_spans(spans: list[tuple[int, int]], number: int, count: int) -> None:
    """As one finds by walking from number to number."""
    skipped, gone = Skipped.of(spans), _numbers(spans)
    position = number
    while position in gone:
        position += 1
    assert skipped.past(number) == position
    for _ in range(count):
        position += 1
        while position in gone:
            position += 1
    assert skipped.after(number, count) == position
    position = number
    while position - 1 in gone:
        position -= 1
    assert skipped.before(number) == position


@given(spans=_SPANS, more=_SPANS, since=st.integers(0, 40))
def test_what_is_past_cannot_be_skipped_any_more(
    spans: list[tuple[int, int]], more: list[tuple[int, int]], since: int
) -> None:
    """Of further spans only the numbers from there on are taken."""
    later = {number for number in _numbers(more) if number >= since}
    assert _numbers(Skipped.of(spans).with_(more, since).spans) == _numbers(spans) | later


@pytest.mark.parametrize("span", [(3, 2), (-1, 2)])
def test_spans_that_are_none_are_refused(span: tuple[int, int]) -> None:
    """With both numbers."""
    with pytest.raises(DataError, match=rf"Batches {span[0]} to 2 cannot be skipped: expected"):
        Skipped.of([(5, 6), span])


def _section(path: Path, **values: Any) -> DataSection:
    shape = {"num_frames": 1, "height": 16, "width": 16}
    where = {} if "catalogs" in values else {"catalog": path}
    standard = {"buckets": [shape], "workers": 0, "stages": _STAGES, "prefetch_batches": 3}
    return DataSection.model_validate({**where, **standard, **values})


def _loader(path: Path, kept: Path | None = None, **values: Any) -> Loader:
    return Loader(_section(path, **values), batch_size=_BATCH_SIZE, seed=3, kept=kept)


def _told(batch: Batch) -> tuple[Any, ...]:
    """All of a batch but whether it begins an epoch."""
    return (
        *(batch.step, batch.stage, batch.epoch, batch.identities, batch.epochs, batch.seeds),
        *(batch.captions, batch.weights.tolist(), batch.videos.sum(dim=(1, 2, 3, 4)).tolist()),
    )


@pytest.fixture(scope="module")
def expected(stills: Path) -> list[Batch]:
    """All batches of three epochs, none skipped."""
    return list(_loader(stills))


def _assert_are(
    batches: Sequence[Batch], expected: Sequence[Batch], numbers: Sequence[int]
) -> None:
    assert list(map(_told, batches)) == [_told(expected[number]) for number in numbers]


def test_skipped_batches_are_gone_round(stills: Path, expected: list[Batch]) -> None:
    """However far is decoded ahead, all others are what they would have been."""
    kept = [number for number in range(len(expected)) if number not in (3, 4, 5, 9)]
    for ahead in (1, 3, 8):
        loader = _loader(stills, prefetch_batches=ahead)
        loader.skip(4, 6)
        loader.skip(9, 10)
        loader.skip(3, 4)
        assert (loader.skipped, loader.step) == (((3, 6), (9, 10)), 0)
        _assert_are(list(loader), expected, kept)
        assert loader.step == len(expected)


def test_a_span_at_the_present_position_is_past_at_once(stills: Path) -> None:
    """Also where the position lies within it; the batches before it stay trained."""
    loader = _loader(stills)
    list(loader.batches(5))
    loader.skip(2, 8)
    assert (loader.step, loader.skipped) == (8, ((5, 8),))
    loader.skip(8, 8)
    assert (loader.step, loader.skipped) == (8, ((5, 8),))
    assert next(iter(loader)).step == 8


@pytest.mark.parametrize(("count", "end"), [(0, 2), (1, 3), (2, 9), (3, 10), (4, 13), (5, 14)])
def test_an_end_is_counted_in_batches(stills: Path, count: int, end: int) -> None:
    """`end_after` is where one stands after so many batches, and an end that gives so many."""
    loader = _loader(stills)
    for span in [(0, 2), (5, 9), (11, 13), (4, 5)]:
        loader.skip(*span)
    assert loader.end_after(count) == end
    assert len(list(loader.batches(end))) == count
    assert loader.step == loader.end_after(0) == end


def test_an_end_is_not_after_the_last_batch(stills: Path, expected: list[Batch]) -> None:
    """Where there are fewer batches than one asks for, it is where one stands after all of them."""
    loader = _loader(stills)
    loader.skip(2, 5)
    assert loader.end_after(len(expected) - 4) == len(expected) - 1
    assert {loader.end_after(count) for count in (len(expected) - 3, 99)} == {len(expected)}
    assert len(list(loader.batches(loader.end_after(99)))) == len(expected) - 3
    assert loader.step == len(expected)


@pytest.mark.parametrize(("first", "end"), [(7, 9), (8, 12), (6, 7), (9, 40)])
def test_batches_that_are_under_way_can_be_skipped(
    stills: Path, expected: list[Batch], first: int, end: int
) -> None:
    """Said after a batch, it holds from the next one on, though later ones are decoded already."""
    loader, batches = _loader(stills, prefetch_batches=6), []
    for batch in loader:
        batches.append(batch)
        if batch.step == 5:
            loader.skip(first, end)
    numbers = [number for number in range(len(expected)) if number not in range(first, end)]
    _assert_are(batches, expected, numbers)


def test_what_is_skipped_is_not_decoded(stills: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor begun: only batches that are handed out keep decoders busy."""
    begun, begin = [], Loader._begin

    def watched(self: Loader, step: int, feed: Any) -> Any:
        begun.append(step)
        return begin(self, step, feed)

    monkeypatch.setattr(Loader, "_begin", watched)
    loader = _loader(stills, prefetch_batches=5)
    loader.skip(3, 6)
    list(loader.batches(10))
    assert begun == [0, 1, 2, 6, 7, 8, 9]


def test_a_state_holds_what_is_skipped(stills: Path, expected: list[Batch]) -> None:
    """Small and JSON; one that was taken before anything could be skipped has none."""
    loader = _loader(stills)
    for span in [(12, 14), (2, 4), (4, 6)]:
        loader.skip(*span)
    list(loader.batches(8))
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["global_step"], state["skipped"]) == (8, [[2, 6], [12, 14]])
    again = _loader(stills)
    again.load_state_dict(state)
    assert again.skipped == ((2, 6), (12, 14))
    _assert_are(list(again), expected, [*range(8, 12), *range(14, len(expected))])
    del state["skipped"]
    old = _loader(stills)
    old.load_state_dict(state)
    assert old.skipped == ()
    _assert_are(list(old), expected, range(8, len(expected)))


@pytest.mark.parametrize("told_first", [True, False])
def test_what_was_told_holds_for_states_of_before(
    stills: Path, expected: list[Batch], told_first: bool
) -> None:
    """Put back, a loader skips what it was told; a new one is the same, in whichever order.

    What a state's run had trained of a span by then stays trained.
    """
    states = {}
    whole = _loader(stills)
    for batch in whole.batches(12):
        states[batch.step + 1] = json.loads(json.dumps(whole.state_dict()))
    whole.load_state_dict(states[7])
    whole.skip(5, 10)
    assert (whole.step, whole.skipped) == (10, ((7, 10),))
    whole.load_state_dict(states[2])
    assert (whole.step, whole.skipped) == (2, ((5, 10),))
    resumed = _loader(stills)
    for act in sorted((False, True), reverse=told_first):
        if act:
            resumed.skip(5, 10)
        else:
            resumed.load_state_dict(states[2])
    assert resumed.state_dict() == whole.state_dict()
    numbers = [2, 3, 4, *range(10, len(expected))]
    _assert_are(list(whole), expected, numbers)
    _assert_are(list(resumed), expected, numbers)


def _borders(batches: Sequence[Batch]) -> list[int]:
    return [batch.step for batch in batches if batch.begins_epoch]


def test_an_epoch_begins_with_its_first_batch_that_is_not_skipped(
    stills: Path, expected: list[Batch]
) -> None:
    """Whoever waits for an epoch's beginning sees each once, also when resumed within the span."""
    second = _borders(expected)[1]
    for first, end, begin in [
        (second, second + 2, second + 2),
        (second - 2, second + 1, second + 1),
        (second + 1, second + 3, second),
        (second - 3, second, second),
    ]:
        loader = _loader(stills)
        loader.skip(first, end)
        begun = list(loader.batches(second - 3))
        again = _loader(stills)
        again.load_state_dict(loader.state_dict())
        borders = _borders([*begun, *again])
        assert borders == [0, begin, _borders(expected)[2]]
        assert again.load(begin).begins_epoch


def test_an_epoch_that_is_skipped_as_a_whole_does_not_begin(
    stills: Path, expected: list[Batch]
) -> None:
    """Nor does the next one begin twice."""
    _, second, third = _borders(expected)
    loader = _loader(stills)
    loader.skip(second, third)
    assert _borders(list(loader)) == [0, third]


def test_epochs_of_several_catalogs_begin_each(stills: Path) -> None:
    """Each catalog's next batch is looked for among those of the others."""
    both = {"a": stills, "b": stills}
    stages = [{"name": "only", "steps": 24}]
    values: dict[str, Any] = {"catalogs": both, "weights": {"a": 3.0, "b": 1.0}, "stages": stages}
    loader = _loader(stills, **values)
    loader.skip(0, 3)
    loader.skip(7, 12)
    first: dict[tuple[str, int], int] = {}
    batches = list(loader)
    for batch in batches:
        first.setdefault((batch.source, batch.epoch), batch.step)
    assert {source for source, _ in first} == {"a", "b"}
    assert _borders(batches) == sorted(first.values())


@pytest.mark.parametrize("past", [1, 5])
def test_a_span_may_reach_over_the_end(stills: Path, expected: list[Batch], past: int) -> None:
    """The run is over then; its state can be loaded, and trained on when a stage is made longer."""
    end = len(expected)
    loader = _loader(stills)
    loader.skip(end - 2, end + past)
    assert loader.end_after(end - 3) == end - 3
    assert {loader.end_after(count) for count in (end - 2, end - 1, end, 99)} == {end + past}
    _assert_are(list(loader), expected, range(end - 2))
    assert loader.step == loader.end_after(0) == loader.end_after(1) == end + past
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["global_step"], state["stage"]) == (end + past, None)
    again = _loader(stills)
    again.load_state_dict(state)
    assert list(again) == []
    longer = _loader(stills, stages=[{"name": "only", "epochs": 4}], on_change="merge")
    longer.load_state_dict(state)
    batches = list(longer)
    assert [batch.step for batch in batches] == list(range(end + past, end + past + len(batches)))
    clips = [clip for batch in batches for clip in _consumed(batch)]
    assert sorted(clips) == sorted((3, clip.identity) for clip in Catalog.load(stills).clips())


def _consumed(batch: Batch) -> Iterator[tuple[int, str]]:
    samples = zip(batch.epochs, batch.identities, batch.weights.tolist(), strict=True)
    return ((epoch, identity) for epoch, identity, weight in samples if weight)


@pytest.mark.parametrize("policy", ["merge", "finish", "restart"])
@pytest.mark.parametrize(("position", "span"), [(5, (5, 7)), (4, (1, 4)), (7, (5, 8)), (3, (3, 8))])
def test_skipped_batches_are_consumed_where_the_data_changes(
    stills: Path,
    tmp_path: Path,
    oracle_of: Callable[[Catalog, int], Any],
    policy: str,
    position: int,
    span: tuple[int, int],
) -> None:
    """Nothing is repeated, none of them comes back, and the epochs after that are whole."""
    catalog = Catalog.load(stills)
    oracle = oracle_of(catalog, 3)
    loader = _loader(stills, tmp_path / "kept")
    loader.keep_catalogs()
    if span[0] < position:
        loader.skip(*span)
    for batch in loader.batches(position):
        for sample in _consumed(batch):
            oracle.consume(*sample)
    state = json.loads(json.dumps(loader.state_dict()))
    for number in range(*span):
        for sample in _consumed(loader.load(number)):
            oracle.consume(*sample)
    changed = tmp_path / "changed.parquet"
    Catalog.of(list(catalog.clips())[3:]).save(changed)
    going = _loader(changed, tmp_path / "kept", on_change=policy)
    going.skip(*span)
    counted = _counted(loader, max(position, span[1]))
    oracle.change(policy, {clip.identity for clip in Catalog.load(changed).clips()}, counted)
    going.load_state_dict(state)
    assert going.step == max(position, span[1])
    for batch in going:
        for sample in _consumed(batch):
            oracle.consume(*sample)
    oracle.check()


def _counted(loader: Loader, step: int) -> int:
    """The epoch that a batch is counted in."""
    return loader.course.batch(step).epoch
