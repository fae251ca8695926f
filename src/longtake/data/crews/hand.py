"""A process that does an errand to one item after the other.

    python -m longtake.data.crews.hand PARENT CONNECTION

`longtake.data.crews.processes` starts it so; the numbers are its parent's process id and an
inherited file descriptor. The errand comes first, then items. It ends when its parent does.
"""

import os
import pickle
import queue
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

from longtake.data.crews.errand import Errand
from longtake.data.limits import memory_limited
from longtake.errors import LongtakeError
from longtake.process import end_with

SIGN = b""
"""A sign of life; any other message is a pickled `Answer`."""
Answer = tuple[Literal["done", "refused"], Any]
"""What came of an item, or an error that ends the work."""

_SECONDS_BETWEEN_SIGNS = 0.5


class _Mouth:
    """What a process says, and its signs of life."""

    def __init__(self, connection: "Connection[bytes, bytes]") -> None:
        self._connection = connection
        self._last = 0.0

    def say(self, message: bytes) -> None:
        self._connection.send_bytes(message)
        self._last = time.monotonic()

    def give_sign(self) -> None:
        if time.monotonic() - self._last > _SECONDS_BETWEEN_SIGNS:
            self.say(SIGN)


def main() -> NoReturn:
    """Do the errand to one item after the other until the parent closes the connection."""
    if len(sys.argv) != 3:
        raise SystemExit("This is a part of longtake's crews, which start it themselves.")
    end_with(int(sys.argv[1]))
    connection: Connection[bytes, bytes] = Connection(int(sys.argv[2]))
    errand: Errand[Any, Any] = pickle.loads(connection.recv_bytes())  # noqa: S301 - our parent's
    mouth, items = _Mouth(connection), queue.SimpleQueue[Any]()
    threading.Thread(target=_take, args=(connection, items), daemon=True).start()
    mouth.say(SIGN)
    while True:
        mouth.say(pickle.dumps(_answer(errand, items.get(), mouth)))


def _take(connection: "Connection[bytes, bytes]", items: "queue.SimpleQueue[Any]") -> NoReturn:
    """Pass items on; when the one who gives them is gone, so is this process, at once."""
    while True:
        try:
            item = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        items.put(pickle.loads(item))  # noqa: S301 - our parent's


def _answer(errand: Errand[Any, Any], item: Any, mouth: _Mouth) -> Answer:
    limit = errand.memory_gib
    try:
        with nullcontext() if limit is None else memory_limited(limit):
            return "done", errand.do(item, mouth.give_sign)
    except LongtakeError as error:
        return "refused", error


if __name__ == "__main__":
    main()
