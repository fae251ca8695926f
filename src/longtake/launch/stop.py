"""A signal to the launcher is passed on once to the ranks, which then save and end."""

import signal
from collections.abc import Iterable
from typing import Final

from torch.distributed.elastic.multiprocessing import SignalException

from longtake.launch.ranks import tell
from longtake.process import STOP_SIGNALS, StopSignal

SECONDS_TO_SAVE: Final = 600.0
"""After a signal; a scheduler that gives less time ends all by force anyway."""


class LaunchStop(StopSignal):
    """A request to stop this launch; while it is entered, signals are passed on to the ranks.

    A signal that comes while no rank runs, as while other nodes are awaited, raises
    `SignalException`.

    Attributes:
        is_urgent: a second Ctrl-C came: the ranks are killed, and nothing is saved any more.
    """

    def __init__(self) -> None:
        super().__init__(STOP_SIGNALS, on_signal=self._pass_on, keeps_ignored=False)
        self.is_urgent = False
        self._ranks: list[int] = []
        self._is_held = False

    @property
    def first_signal(self) -> signal.Signals | None:
        return None if self.reason is None else signal.Signals[self.reason]

    @property
    def is_overdue(self) -> bool:
        return self.requested_seconds > SECONDS_TO_SAVE

    def hold(self) -> None:
        self._is_held = True

    def begin(self, pids: Iterable[int]) -> None:
        self._ranks = list(pids)
        if self.first_signal is not None:
            tell(self._ranks, self.first_signal)

    def end(self) -> None:
        self._ranks, self._is_held = [], False

    def _pass_on(self, received: signal.Signals, is_first: bool) -> None:
        if is_first and not self._is_held:
            raise SignalException("nothing runs yet", received)
        if is_first:
            tell(self._ranks, received)
        elif received == signal.SIGINT:  # a person does not wait; schedulers repeat themselves
            self.is_urgent = True
            tell(self._ranks, signal.SIGKILL)
