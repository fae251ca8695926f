"""Reads a Python process's stacks with py-spy, within a time limit."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from longtake.stacks.frames import Frame, Thread

_KILL_SECONDS = 1.0  # py-spy may itself wait for the device that the process waits for


def by_py_spy(pid: int, options: Sequence[str], seconds: float) -> tuple[Thread, ...] | None:
    """A process's threads, the main thread first; empty: they could not be read; None: in time.

    Args:
        pid: the process.
        options: `--nonblocking`: it is not paused, and what is read while it runs may not fit
            together; `--native`: with calls of C; it is paused, for a tenth of a second or more.
            Not both.
        seconds: how long it may take.
    """
    if not (program := _program(sys.executable)):
        return ()
    command = [program, "dump", "--json", *options, "--pid", str(pid)]
    try:
        found = json.loads(_said(command, seconds))
        found.sort(key=lambda each: each["os_thread_id"] != pid)
        threads = tuple(map(_thread, found))
    except subprocess.TimeoutExpired:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return ()
    return threads if any(thread.frames for thread in threads) else ()


def _said(command: Sequence[str], seconds: float) -> bytes:
    # Not subprocess.run: when the time is over it waits for the killed process without end.
    process = subprocess.Popen(  # noqa: S603 - py-spy, by its path
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except BaseException:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
        raise
    finally:
        if process.stdout:
            process.stdout.close()
    return said if process.returncode == 0 else b""


@cache
def _program(python: str) -> str | None:
    beside = Path(python).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _thread(found: dict[str, Any]) -> Thread:
    frames = [Frame(call["name"], call["filename"], call["line"]) for call in found["frames"]]
    is_main = found["os_thread_id"] == found["pid"]
    name = found["thread_name"] or ("MainThread" if is_main else f"0x{found['thread_id']:x}")
    return Thread(name, found["active"], found["owns_gil"], tuple(frames))
