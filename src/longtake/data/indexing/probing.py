"""Probes many files at once, in processes of their own, so that no file can stop the rest.

A decoder may hang in one file or crash on it, and no thread can be stopped from outside. So each
worker is a process that looks at one file at a time; it gives a sign whenever it has read or
decoded something. One that is silent for a minute is killed, one that dies is replaced, and its
file is rejected with that reason. Workers have a command line of their own (`python -m
longtake.data.indexing.probing`), so nothing of the caller's main module runs in them; they speak
JSON lines.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, NoReturn

from longtake.data.clip import Kind, Media, Timing
from longtake.data.image import probe_image
from longtake.data.indexing.item import Item
from longtake.data.indexing.probe import Probe, probe
from longtake.errors import ClipError, DataError

_SILENCE_SECONDS = 60.0
_SECONDS_BETWEEN_SIGNS = 0.5
_SIGN = b"."


@dataclass(frozen=True)
class Outcome:
    """What came of one item.

    Attributes:
        item: what was looked at.
        found: what is in it, or why it cannot be trained on.
        is_lasting: whether another look at the same bytes must end the same.
    """

    item: Item
    found: Probe | ClipError
    is_lasting: bool = True


def probe_all(
    items: Iterable[Item], workers: int, silence_seconds: float = _SILENCE_SECONDS
) -> Generator[Outcome]:
    """Probe every item and yield what came of each, in the order in which they finish.

    Args:
        items: what to look at.
        workers: processes; 0: this process looks itself, at one item after the other, and a file
            that hangs or crashes it is not survived.
        silence_seconds: a worker that gives no sign for so long is killed.

    Raises:
        DataError: no worker can be started.
    """
    if workers == 0:
        yield from (Outcome(item, _probe(item.media, item.kind)) for item in items)
        return
    waiting = iter(items)
    crew: list[_Worker] = []
    try:
        crew.extend(_Worker(item) for item in islice(waiting, workers))
        while crew:
            ready = wait([worker.ear for worker in crew], timeout=1.0)
            for worker in list(crew):
                is_ready = worker.ear in ready
                outcome = worker.listen() if is_ready else worker.judge(silence_seconds)
                if outcome is not None:
                    yield outcome
                    _go_on(crew, worker, next(waiting, None))
    finally:
        for worker in crew:
            worker.kill()


def to_json(found: Probe | ClipError) -> dict[str, Any]:
    """What came of an item, as JSON can hold it."""
    return {"reason": found.reason} if isinstance(found, ClipError) else {"probe": asdict(found)}


def from_json(media: Media, entry: dict[str, Any]) -> Probe | ClipError:
    """What `to_json` was given.

    Raises:
        KeyError, TypeError: it was not made by `to_json` of this version.
    """
    if "reason" in entry:
        return ClipError(str(media), entry["reason"])
    fields = dict(entry["probe"])
    if timing := fields["timing"]:
        fields["timing"] = Timing(timing["first"], timing["step"], tuple(timing["listed"]))
    return Probe(**fields | {"keyframes": tuple(fields["keyframes"])})


class _Worker:
    """A process that looks at one item at a time."""

    def __init__(self, item: Item) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "longtake.data.indexing.probing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the one who started it
        )
        assert self._process.stdout is not None
        self.ear = self._process.stdout.fileno()
        self._has_started = False
        self._said = b""
        self.give(item)

    @property
    def is_dead(self) -> bool:
        return self._process.returncode is not None

    def give(self, item: Item) -> None:
        """Let it look at one more item."""
        self._item, self._last_sign = item, time.monotonic()
        media = item.media
        order = [item.kind, media.path, media.member, media.offset, media.num_bytes]
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead; whoever listens will find out
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def listen(self) -> Outcome | None:
        """Take in what it says; return what came of its item, once that is known."""
        heard = os.read(self.ear, 2**16)
        if not heard:
            return self._died()
        self._has_started, self._last_sign = True, time.monotonic()
        *lines, self._said = (self._said + heard).split(b"\n")
        answers = [line for line in lines if line != _SIGN]
        if not answers:
            return None
        return Outcome(self._item, from_json(self._item.media, json.loads(answers[0])))

    def judge(self, silence_seconds: float) -> Outcome | None:
        """Kill it if it has been silent for too long."""
        limit = silence_seconds if self._has_started else _SILENCE_SECONDS
        if time.monotonic() - self._last_sign < limit:
            return None
        self.kill()
        reason = f"decoding made no progress for {limit:g} s and was stopped"
        return Outcome(self._item, ClipError(str(self._item.media), reason), is_lasting=False)

    def _died(self) -> Outcome:
        code = self._process.wait()
        self._errors.seek(0)
        last_words = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        what = ": ".join((how, *last_words))
        if not self._has_started:
            raise DataError(f"A process that decodes could not be started ({what}).")
        self.kill()
        reason = f"decoding it ended the process ({what})"
        return Outcome(self._item, ClipError(str(self._item.media), reason), is_lasting=False)

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what it was not told any more
                assert pipe is not None
                pipe.close()


def _go_on(crew: list[_Worker], worker: _Worker, item: Item | None) -> None:
    """Give the next item to a worker, or to its successor if it is dead."""
    if item is not None and not worker.is_dead:
        worker.give(item)
        return
    crew.remove(worker)
    worker.kill()
    if item is not None:
        crew.append(_Worker(item))


def _nothing() -> None:
    """Nobody listens."""


def _probe(media: Media, kind: Kind, alive: Callable[[], object] = _nothing) -> Probe | ClipError:
    try:
        str(media).encode()  # what is no text cannot be written into a catalog
        return probe_image(media) if kind == "image" else probe(media, alive)
    except UnicodeEncodeError:
        return ClipError(str(media), "its name is not valid UTF-8; rename it")
    except ClipError as error:
        return error


class _Mouth:
    """What a worker says, and its signs of life."""

    def __init__(self) -> None:
        self._pipe = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # whatever a library prints is no answer
        self._last = 0.0

    def say(self, line: bytes) -> None:
        self._pipe.write(line + b"\n")
        self._pipe.flush()
        self._last = time.monotonic()

    def give_sign(self) -> None:
        if time.monotonic() - self._last > _SECONDS_BETWEEN_SIGNS:
            self.say(_SIGN)


def _take_orders(orders: "queue.Queue[list[Any]]") -> NoReturn:
    """Pass orders on; when the one who gives them is gone, so is this process, at once."""
    for line in sys.stdin.buffer:
        orders.put(json.loads(line))
    os._exit(0)


def _work() -> NoReturn:
    mouth, orders = _Mouth(), queue.Queue[list[Any]]()
    threading.Thread(target=_take_orders, args=(orders,), daemon=True).start()
    mouth.say(_SIGN)
    while True:
        kind, *media = orders.get()
        found = _probe(Media(*media), kind, mouth.give_sign)
        mouth.say(json.dumps(to_json(found)).encode())


if __name__ == "__main__":
    _work()
