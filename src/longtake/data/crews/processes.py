"""Does errands in processes of this machine, so that no item can stop the rest."""

import pickle
from collections.abc import Generator, Iterable, Iterator
from typing import cast

from longtake.data.crews.errand import Errand, Item, Result
from longtake.data.crews.hand import Answer
from longtake.data.crews.hands import Hands, Loss, Order


class Processes:
    """A crew of this machine.

    Args:
        count: processes; 0: this process does everything itself, one item after the other, and an
            item that hangs or crashes it is not survived.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def work(
        self, errand: Errand[Item, Result], items: Iterable[Item]
    ) -> Generator[tuple[int, Result]]:
        """See `longtake.data.crews.errand.Crew`.

        Raises:
            DataError: no process can be started.
            LongtakeError: the errand raised it.
        """
        if self._count == 0:
            for number, item in enumerate(items):
                yield number, errand.do(item, _nothing)
            return
        given: dict[int, Item] = {}
        with Hands(Order.of(errand), self._count) as hands:
            for number, answer in hands.work(_pickled(items, given)):
                yield number, result_of(errand, given.pop(number), answer)


def _pickled(items: Iterable[Item], given: dict[int, Item]) -> Iterator[bytes]:
    """Items as processes take them; they are noted, by number."""
    for number, item in enumerate(items):
        given[number] = item
        yield pickle.dumps(item)


def result_of(errand: Errand[Item, Result], item: Item, answer: bytes | Loss) -> Result:
    """What came of an item, from what its process said.

    Raises:
        LongtakeError: the errand raised it.
    """
    if isinstance(answer, Loss):
        return errand.lost(item, answer.reason)
    how, value = cast("Answer", pickle.loads(answer))  # noqa: S301 - of our own process
    if how == "refused":
        raise value
    result: Result = value
    return result


def _nothing() -> None:
    """Nobody watches."""
