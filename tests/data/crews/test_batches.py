"""How many items go to a worker at a time, and what becomes of those that come back."""

from collections.abc import Iterator

from longtake.data.crews.batches import TRIES, Batches


def _sizes(batches: Batches[int], count: int, seconds: float) -> list[int]:
    found = []
    for _ in range(count):
        batch = batches.take()
        assert batch is not None
        found.append(len(batch.numbered))
        batches.learn(seconds)
    return found


def test_batches_grow_to_some_seconds_of_work() -> None:
    """By doubling, and never beyond a thousand; long items go alone."""
    assert _sizes(Batches(range(10_000)), 6, 0.5) == [1, 2, 4, 8, 16, 20]
    assert _sizes(Batches(range(10_000)), 3, 60.0) == [1, 1, 1]
    assert _sizes(Batches(range(10_000)), 12, 0.0)[-2:] == [1000, 1000]


def test_items_are_taken_as_they_are_needed() -> None:
    """A million clips are not all in memory."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    batches = Batches(items())
    assert batches.ahead(4) == 4
    assert batches.take() is not None
    assert len(taken) <= 5


def test_what_comes_back_goes_out_alone_and_is_given_up_in_the_end() -> None:
    """Nobody is to blame in a batch of several; one that is lost again and again is."""
    batches = Batches("abc")
    batches.learn(1e-9)
    first = batches.take()
    assert first is not None
    assert first.numbered == [(0, "a"), (1, "b")]
    assert batches.put_back(first) == []
    for _ in range(TRIES - 1):
        again = batches.take()
        assert again is not None
        assert again.numbered == [(0, "a")] or again.numbered == [(1, "b")]
        while again.numbered != [(0, "a")]:
            batches.put_back(again)
            again = batches.take()
            assert again is not None
        given_up = batches.put_back(again)
    assert given_up == []
