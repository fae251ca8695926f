"""Notes which files of longtake have functions that run within a window of time.

Python imports this module when a process starts whose PYTHONPATH holds this folder. All processes
share the window, a byte of a file: any of them opens and closes it, at an update of an optimizer or
when it creates or renames a file of a certain name. See benchmarks/structure.py.
"""

import json
import mmap
import os
import re
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

_VARIABLE, _SKIPS_FIRST = "STRUCTURE_TRACE", "STRUCTURE_SKIPS_FIRST"
_IS_FUNCTION = 0x1  # CO_OPTIMIZED: neither a module nor the body of a class
_BEFORE, _OPEN, _ENDING, _CLOSED = range(4)


class _Tracer:
    """Traces this process.

    Args:
        source: the folder whose files count.
        folder: holds the window's byte, and a file of names for each process.
        update: numbers of updates after which the window opens and closes; or none.
        path: a pattern of paths, and how many of them open and close the window; or none.
        lead_seconds: functions that ran so long before it opened count as well.
        tail_seconds: so long after the closing event it closes.
    """

    def __init__(
        self,
        source: str,
        folder: str,
        update: tuple[int, int] | None = None,
        path: tuple[str, str] | None = None,
        lead_seconds: float = 0.0,
        tail_seconds: float = 0.0,
    ) -> None:
        self._source, self._folder = source, folder
        self._update, self._path, self._lead, self._tail = update, path, lead_seconds, tail_seconds
        descriptor = os.open(f"{folder}/window", os.O_RDWR)
        self._window = mmap.mmap(descriptor, 1)
        self._codes: dict[int, tuple[CodeType, str]] = {}
        self._last: dict[str, float] = {}
        self._noted: set[str] = set()
        self._updates = 0

    def start(self) -> None:
        if self._path is not None:
            sys.addaudithook(self._audit)
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            if event == "return" and self._update and _is_update(frame.f_code):
                self._updates += 1
                self._turn(self._updates == self._update[0], self._updates == self._update[1])
            return
        for code in (frame.f_code, frame.f_back.f_code if frame.f_back else None):
            if code is not None and (name := self._name(code)):
                self._ran(name)

    def _ran(self, name: str) -> None:
        if self._window[0] in (_OPEN, _ENDING):
            self._note(name)
        elif self._lead:
            self._last[name] = time.monotonic()

    def _name(self, code: CodeType) -> str:
        """Of the code's file below the source; "" for what does not count."""
        if (known := self._codes.get(id(code))) is not None:
            return known[1]
        is_ours = code.co_flags & _IS_FUNCTION and code.co_filename.startswith(self._source)
        name = code.co_filename[len(self._source) :].lstrip("/") if is_ours else ""
        self._codes[id(code)] = (code, name)  # kept, so that its id stays its own
        return name

    def _note(self, name: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            with open(f"{self._folder}/names_{os.getpid()}", "a") as file:  # noqa: PTH123 - fast
                file.write(f"{name}\n")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.rename", "os.link") or self._path is None:
            return
        opening, closing = self._path
        is_path = isinstance(arguments[1], str | bytes | os.PathLike)
        target = os.fsdecode(arguments[1]) if is_path else ""
        is_open = self._window[0] == _OPEN
        self._turn(
            not is_open and bool(re.search(opening, target)),
            is_open and bool(re.search(closing, target)),
        )

    def _turn(self, opens: bool, closes: bool) -> None:
        if opens and self._window[0] == _BEFORE:
            self._window[0] = _OPEN
            recent = time.monotonic() - self._lead
            for name in [each for each, last in self._last.items() if last >= recent]:
                self._note(name)
        elif closes and self._window[0] == _OPEN:
            self._window[0] = _ENDING  # which it stays if all processes end before
            if self._tail:
                threading.Timer(self._tail, self._close).start()
            else:
                self._close()

    def _close(self) -> None:
        self._window[0] = _CLOSED


def _is_update(code: CodeType) -> bool:
    return code.co_name == "step" and "/torch/optim/adam" in code.co_filename


def _start() -> None:
    if os.environ.pop(_SKIPS_FIRST, None) is None and (text := os.environ.get(_VARIABLE)):
        _Tracer(**json.loads(text)).start()


_start()
