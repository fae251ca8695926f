"""Records that a tracker cannot take, however often it is tried: they are passed over in the end.

One of them would keep all that come after it waiting for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from longtake.tracking.log import say
from longtake.tracking.news import Record

_MOST_TIMES = 5


class Refusals:
    """What one tracker has refused.

    Args:
        name: the tracker's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._given_up: set[str] = set()
        self._last = ("", "")
        self._times = 0

    def is_given_up(self, record: Record) -> bool:
        """Whether it was refused so often that it is to be passed over."""
        return bool(self._given_up) and repr(record) in self._given_up

    @contextmanager
    def noted(self, record: Record) -> Iterator[None]:
        """Note when the block, which tells a tracker of a record, fails; raises what it raises.

        Not what the system says, such as that a disk is full: another record would fare no better.
        """
        try:
            yield
        except Exception as error:
            if not (isinstance(error, OSError) and error.errno is not None):
                self._note(record, f"{type(error).__name__}: {error}")
            raise

    def _note(self, record: Record, reason: str) -> None:
        refused = repr(record), reason
        self._times = self._times + 1 if refused == self._last else 1
        self._last = refused
        if self._times == _MOST_TIMES:
            self._given_up.add(refused[0])
            say(f"{self._name}: passed over, as it cannot be told ({reason}): {refused[0][:300]}")
