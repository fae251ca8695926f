"""Runs that are trained elsewhere, mirrored into a folder here.

    with open_source("me@cluster:/runs", Path("mirror"), "vm-4711") as source:
        for run in source.look():
            steps = run.index.checkpoint_steps()   # what there is; which of them are wanted?
            source.pull(run, steps)
            source.push(run)
            source.prune(run.mirror, needed=[])

All that is known is in the mirror and in its hidden folder .source, so that whoever is killed here
goes on where it was. Calls wait for the network, a pull for hours if need be: they belong in a
thread of their own.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from longtake.evaluation.sync import selection
from longtake.evaluation.sync.address import Address, parse
from longtake.evaluation.sync.arrival import (
    arriving,
    bytes_in,
    forget_arriving,
    has_arrived,
    show,
    what_is_missing,
)
from longtake.evaluation.sync.by_fsspec import Filesystem
from longtake.evaluation.sync.by_rsync import Rsync, is_installed
from longtake.evaluation.sync.mirror import Mirror
from longtake.evaluation.sync.prune import prune
from longtake.evaluation.sync.remote import Pulled, RemoteRun
from longtake.evaluation.sync.results import Pushed, needed
from longtake.evaluation.sync.transport import GoneError, Transport
from longtake.run_dir import RunDirectory


def open_source(text: str, into: Path, name: str) -> "Source":
    """A source that can be looked at; nothing is asked of it yet.

    Args:
        text: what was given after --source.
        into: the folder that becomes the mirror: a run directory where the source is a run, else
            a folder of them.
        name: of the server, by which it needs checkpoints.

    Raises:
        RunError: the text names no source, what reaches it is not installed here, or the folder
            holds something else.
    """
    address = parse(text)
    mirror = Mirror.at(into, address)
    return Source(_transport(address), mirror, name)


class Source:
    """Runs elsewhere, and their mirrors here.

    Args:
        transport: to them.
        mirror: what holds the mirrors.
        name: of the server.
    """

    def __init__(self, transport: Transport, mirror: Mirror, name: str) -> None:
        self._transport, self._mirror, self._name = transport, mirror, name
        self._pushed: dict[str, Pushed] = {}
        self._stack = ExitStack()
        self._stack.callback(transport.close)

    def look(self) -> list[RemoteRun]:
        """Mirror what is small, and see what checkpoints there are.

        Returns:
            The runs, by name; none while another server mirrors into the same folder.

        Raises:
            RunError: the source cannot be read, or the mirror not be written; to be tried again.
        """
        if not self._mirror.take(self._stack):
            return []
        with self._mirror.writing():
            self._transport.fetch("", self._mirror.index, selection.signs(), exactly=True)
            runs = self._mirror.runs()
            if runs:
                rules = selection.records([(run.name, run.mirror) for run in runs])
                self._transport.fetch("", self._mirror.path, rules)
            for run in runs:
                self._mirror.show_signs(run)
                forget_arriving(run)
        return runs

    def pull(self, run: RemoteRun, steps: Iterable[int]) -> list[Pulled]:
        """Bring checkpoints here, in this order; without the optimizer's state.

        Those that are here already, or are gone at the source, are passed over. Another that was
        saved anew there waits while a server needs what is here.

        Returns:
            Those that have arrived now.

        Raises:
            RunError: one could not be brought; what has come of it stays for the next time.
        """
        there = set(run.index.checkpoint_steps())
        wanted = [step for step in steps if step in there and not has_arrived(run, step)]
        if not wanted:
            return []
        with self._mirror.writing(), needed(self._transport, run, wanted, self._name):
            found = [self._pull(run, step) for step in wanted]
        return [each for each in found if each is not None]

    def push(self, run: RemoteRun) -> None:
        """Bring results back: of each, scores.json last. Nothing is sent when nothing is new.

        Raises:
            RunError: they could not be brought; to be tried again.
        """
        with self._mirror.writing():
            pushed = self._pushed.setdefault(run.name, Pushed(run, self._name))
            pushed.bring(self._transport)

    def prune(self, mirror: RunDirectory, needed: Collection[int]) -> list[int]:
        """Delete checkpoints of a mirror: see `prune.prune`.

        Raises:
            RunError: the mirror cannot be written.
        """
        with self._mirror.writing():
            return prune(mirror, needed)

    def interrupt(self) -> None:
        """End what another thread waits for: it gets a RunError, and so does who fetches later."""
        self._transport.interrupt()

    def close(self) -> None:
        """Leave the mirror to others."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pull(self, run: RemoteRun, step: int) -> Pulled | None:
        begun = time.monotonic()
        folder = arriving(run.mirror, step)
        try:
            there = run.below(f"checkpoints/{folder.name}")
            self._transport.fetch(there, folder, selection.CHECKPOINT, exactly=True)
        except GoneError:
            return None
        if what_is_missing(folder) is not None or not show(run.mirror, step):
            return None  # it was deleted or saved anew just now: the next look will tell
        place = run.mirror.checkpoint_path(step)
        return Pulled(step, bytes_in(place), time.monotonic() - begun)


def _transport(address: Address) -> Transport:
    # rsync is quicker and keeps less in mind; without it a folder here is a store like others.
    if address.is_url or not (address.host or is_installed()):
        return Filesystem(address)
    return Rsync(address)
