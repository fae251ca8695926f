"""What is to be done to each of many items, and the seam between that and whoever does it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Sign = Callable[[], object]
"""Is called whenever there is progress, so that whoever watches can tell slow from stuck."""

SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Needs:
    """What one worker takes of a cluster.

    Attributes:
        cpus: cores that it computes on.
        takes_gpu: whether it gets a card of its own, if the cluster has any.
    """

    cpus: int = 1
    takes_gpu: bool = False


class Errand(ABC, Generic[Item, Result]):
    """What is done to each item, in whichever process: it can be pickled, and so can its results.

    What takes long to make (a model) is made at the first item and kept (`cached_property`): a
    process does one errand.

    Attributes:
        doing: what the work is called where it is said how it failed.
        silence_seconds: a process that gives no sign for so long is stuck.
        memory_gib: what a process may allocate for one item beyond what it has; None: no limit.
        needs: what one worker takes of a cluster.
    """

    doing: str = "decoding"
    silence_seconds: float = SILENCE_SECONDS
    memory_gib: float | None = None
    needs: Needs = Needs()

    def __getstate__(self) -> dict[str, Any]:
        """All but what was made here (`cached_property`): each process makes its own."""
        of_class = {name: getattr(type(self), name, None) for name in vars(self)}
        made = {name for name, value in of_class.items() if isinstance(value, cached_property)}
        return {name: value for name, value in vars(self).items() if name not in made}

    @abstractmethod
    def do(self, item: Item, alive: Sign) -> Result:
        """Do it.

        Raises:
            LongtakeError: no item can be done; all of the work ends with it.
        """

    @abstractmethod
    def lost(self, item: Item, reason: str) -> Result:
        """What becomes of an item that its process hung over or died of.

        Raises:
            LongtakeError: the work cannot go on without it.
        """

    def reads(self, item: Item) -> str:
        """The file that an item is read from, which every machine must see; empty: none."""
        return ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that are written to, which must be the same ones on every machine."""
        return ()


class Crew(Protocol):
    """Whoever does an errand. What comes of an item does not depend on it."""

    def work(
        self, errand: Errand[Item, Result], items: Iterable[Item]
    ) -> Generator[tuple[int, Result]]:
        """Do an errand to each item.

        Items are taken as they are needed. Close the generator to stop before the end.

        Yields:
            The number of an item, counted from 0, and what came of it, in the order in which they
            are finished.

        Raises:
            DataError: the crew cannot work.
            LongtakeError: the errand raised it.
        """
        ...


def in_order(results: Generator[tuple[int, Result]]) -> Generator[Result]:
    """What `Crew.work` yields, in the order of the items and without their numbers."""
    early: dict[int, Result] = {}
    following = 0
    with closing(results):
        for number, result in results:
            early[number] = result
            while following in early:
                yield early.pop(following)
                following += 1
