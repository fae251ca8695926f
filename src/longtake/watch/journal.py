"""health.jsonl: written in a thread of its own, and never more than a disk can hold.

A line has some 40 bytes a number: 2 KiB of a node without GPUs, 6 KiB of one with eight and as many
InfiniBand ports; at one each ten seconds that is 20 to 50 MiB a day. Above 64 MiB every second
line is left out, so that the newest hours stay whole and the oldest become sparse.
"""

import queue
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtake.fsio import append_json, atomic_write

_MOST_BYTES = 64 * 2**20
_MOST_WAITING = 60


class Journal:
    """Appends records to a file.

    Args:
        path: of the file.
        most_bytes: above it the file is thinned out.
    """

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._write, name="health journal", daemon=True)
        self._thread.start()

    def put(self, record: dict[str, Any]) -> None:
        """Have a record written; it is lost where the disk has hung for `_MOST_WAITING` records."""
        with suppress(queue.Full):
            self._waiting.put_nowait(record)

    def close(self, patience_seconds: float = 0.3) -> None:
        """Write what waits; give up on a disk that hangs."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(patience_seconds)

    def _write(self) -> None:
        while (record := self._waiting.get()) is not None:
            with suppress(OSError):  # a full disk, which is told of elsewhere
                self._path.parent.mkdir(parents=True, exist_ok=True)
                append_json(self._path, record)
                if self._path.stat().st_size > self._most_bytes:
                    thin_out(self._path)


def thin_out(path: Path) -> None:
    """Leave out every second line of a file, but keep the last.

    Raises:
        OSError: it cannot be written anew.
    """
    with path.open("rb") as file:
        number_of_lines = sum(1 for _ in file)
    with atomic_write(path) as aside, path.open("rb") as file, aside.open("xb") as thin:
        thin.writelines(
            line for number, line in enumerate(file) if (number_of_lines - number) % 2 == 1
        )
