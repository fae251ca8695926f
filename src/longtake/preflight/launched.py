"""A command that was started on another node: what it says is read while it runs."""

import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

_SECONDS_TO_END = 8.0


@dataclass(frozen=True)
class Said:
    """What became of a command.

    Attributes:
        status: its exit status; None: it had to be ended.
        out: its stdout.
        error: its stderr.
    """

    status: int | None
    out: str
    error: str

    @property
    def last_line(self) -> str:
        """The last thing that it said on stderr; rather longtake itself than torchrun."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        own = [line for line in lines if "longtake: " in line]
        last = (own or lines or [f"exit status {self.status}, without a word"])[-1]
        return last.rpartition("longtake: ")[2] if own else last


class Launched:
    """A running command; nobody has to wait for it.

    Args:
        process: with pipes of text at its three ends.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._told: dict[str, list[str]] = {"out": [], "error": []}
        pipes = {"out": process.stdout, "error": process.stderr}
        self._readers = [
            threading.Thread(target=_read, args=(pipe, self._told[name]), daemon=True)
            for name, pipe in pipes.items()
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended as it should not."""
        return self._process.poll() not in (None, 0)

    def end(self) -> Said:
        """What it has said; one that still runs is told to end by the end of its stdin."""
        status = self._process.poll()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(1.0)
        return Said(status, "".join(self._told["out"]), "".join(self._told["error"]))


def _read(pipe: IO[str], told: list[str]) -> None:
    with pipe:
        for line in pipe:
            told.append(line)
