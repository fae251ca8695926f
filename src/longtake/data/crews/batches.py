"""Items in batches of some seconds of work, as a message to another machine costs a millisecond."""

import pickle
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Generic

from longtake.data.crews.errand import Item

_BATCH_SECONDS = 10.0
_MOST_IN_BATCH = 1000
TRIES = 3
"""How often an item is begun whose worker is lost."""


@dataclass(frozen=True)
class Batch(Generic[Item]):
    """Items with their numbers.

    Attributes:
        numbered: (number, item) of each.
    """

    numbered: list[tuple[int, Item]]

    def pickled(self) -> list[bytes]:
        """The items as they are sent."""
        return [pickle.dumps(item) for _, item in self.numbered]


class Batches(Generic[Item]):
    """Items in batches, each of as many as take some seconds; those that came back go first.

    Args:
        items: taken as they are needed.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._waiting = enumerate(items)
        self._ahead: deque[tuple[int, Item]] = deque()
        self._back: deque[tuple[int, Item]] = deque()
        self._losses = Counter[int]()
        self._size = 1

    def ahead(self, count: int) -> int:
        """How many items there still are; at most `count` or a few more."""
        self._ahead.extend(islice(self._waiting, max(0, count - len(self._ahead))))
        return len(self._ahead) + len(self._back)

    def take(self) -> Batch[Item] | None:
        """The next ones; None: there are none."""
        if self._back:
            return Batch([self._back.popleft()])
        if not self.ahead(self._size):
            return None
        return Batch([self._ahead.popleft() for _ in range(min(self._size, len(self._ahead)))])

    def learn(self, seconds: float) -> None:
        """Take in how long an item took."""
        wanted = int(_BATCH_SECONDS / max(seconds, 1e-6))
        self._size = max(1, min(wanted, 2 * self._size, _MOST_IN_BATCH))

    def put_back(self, batch: Batch[Item]) -> list[tuple[int, Item]]:
        """Take back what was not done; returns what was tried often enough."""
        given_up: list[tuple[int, Item]] = []
        for number, item in batch.numbered:
            # In a batch of several nobody knows which of them it was.
            self._losses[number] += len(batch.numbered) == 1
            is_over = self._losses[number] >= TRIES
            (given_up if is_over else self._back).append((number, item))
        return given_up
