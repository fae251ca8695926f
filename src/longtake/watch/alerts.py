"""Runs the recipe's hook at an alert.

A hook can be slow or fail, which must not stop the watcher: a thread runs one hook after the other,
and a failure is logged.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import Any

from longtake.config import WatchSection
from longtake.watch.disk import Disk

_SECONDS = 10.0
_MOST_WAITING = 100


class Alerts:
    """Passes alerts to the recipe's hook, in the order in which they come.

    Args:
        section: the recipe's.
        disk: where what has failed is said.
    """

    def __init__(self, section: WatchSection, disk: Disk) -> None:
        self._hook, self._disk = section.hook or "", disk
        self._queue: Queue[Mapping[str, Any] | None] = Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="alerts", daemon=True)
        if section.hook:
            self._thread.start()

    def send(self, event: Mapping[str, Any]) -> None:
        """Have an event sent; returns at once."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(event)
            except Full:
                self._disk.say(f"alert dropped, {_MOST_WAITING} others wait: {event['event']}")

    def close(self, seconds: float) -> None:
        """Wait until all is sent, for so long at most."""
        if self._thread.is_alive():
            with suppress(Full):
                self._queue.put_nowait(None)
            self._thread.join(seconds)

    def _send_all(self) -> None:
        while (event := self._queue.get()) is not None:
            line = json.dumps(event, separators=(",", ":"))
            if trouble := run_hook(self._hook, line, str(event["event"])):
                self._disk.say(f"hook: {trouble}")


def run_hook(command: str, line: str, event: str, seconds: float = _SECONDS) -> str:
    """Run a shell command with a line on its stdin; returns what went wrong, or nothing.

    Args:
        command: for `sh -c`; it finds the kind of event in LONGTAKE_EVENT.
        line: one line of JSON.
        event: the kind.
        seconds: after which it is ended, with all that it has started.
    """
    try:
        hook = subprocess.Popen(
            ["/bin/sh", "-c", 'eval "$LONGTAKE_HOOK"'],  # other users can read arguments
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "LONGTAKE_EVENT": event, "LONGTAKE_HOOK": command},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        return f"it cannot be run: {error}"
    try:
        _, words = hook.communicate(f"{line}\n".encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(hook.pid, signal.SIGKILL)
        _reap(hook)
        return f"it was ended: it took longer than {seconds:g} s"
    if hook.returncode == 0:
        return ""
    said = words.decode(errors="replace").strip()[-500:]
    return f"it ended with status {hook.returncode}: {said or 'it said nothing'}"


def _reap(process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 1.0
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    for pipe in (process.stdin, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
