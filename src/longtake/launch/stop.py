"""A signal to the launcher: passed on to the ranks once, which then save and end by themselves."""

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from torch.distributed.elastic.multiprocessing import SignalException

from longtake.launch.ranks import tell

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECONDS_TO_SAVE: Final = 600.0
"""After a signal; a scheduler that gives less time ends all by force anyway."""


class Stop:
    """Whether somebody wants the launch to end, and whom that has to be told.

    Attributes:
        wanted: the signal that asked for it.
        is_urgent: whether nothing is to be saved any more.
    """

    def __init__(self) -> None:
        self.wanted: signal.Signals | None = None
        self.is_urgent = False
        self._at = 0.0
        self._ranks: list[int] = []
        self._is_held = False

    @property
    def is_overdue(self) -> bool:
        """Whether the ranks have had their time."""
        return self.wanted is not None and time.monotonic() > self._at + SECONDS_TO_SAVE

    def hold(self) -> None:
        """Ranks are about to be started: what comes now is for them."""
        self._is_held = True

    def begin(self, pids: Iterable[int]) -> None:
        """These ranks run now."""
        self._ranks = list(pids)
        if self.wanted is not None:
            self._tell(self.wanted)

    def end(self) -> None:
        """No rank runs any more."""
        self._ranks, self._is_held = [], False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Heed signals in the block.

        Raises:
            SignalException: one came while no rank ran, say while other nodes were waited for.
        """
        before = {number: signal.signal(number, self._heed) for number in SIGNALS}
        try:
            yield
        finally:
            for number, was in before.items():
                signal.signal(number, was)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if self.wanted is None:
            self.wanted, self._at = signal.Signals(number), time.monotonic()
            if not self._is_held:
                raise SignalException("nothing runs yet", self.wanted)
            self._tell(self.wanted)
        elif number == signal.SIGINT:  # a person does not want to wait; others repeat themselves
            self.is_urgent = True
            self._tell(signal.SIGKILL)

    def _tell(self, number: signal.Signals) -> None:
        tell(self._ranks, number)
