"""Texts about processes and their stacks for `longtake stacks` and the board."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from longtake.formatting import number_ranges, printable

ROLES = {
    "rank": ("rank", "ranks"),
    "decode": ("decoding process", "decoding processes"),
    "agent": ("process of torchrun", "processes of torchrun"),
    "helper": ("other process", "other processes"),
}
_DOING = {
    "start": "starting",
    "rendezvous": "meeting the other ranks",
    "open": "opening data and run directory",
    "plan": "planning the memory",
    "build": "building the model",
    "load": "loading its state",
    "cache": "filling the cache",
    "data": "at data",
    "forward": "in forward",
    "backward": "in backward",
    "collective": "in a collective",
    "optimizer": "in the optimizer",
    "checkpoint": "saving a checkpoint",
    "save": "waiting for a checkpoint",
    "sampling": "sampling presets",
    "rollback": "going back",
    "idle": "idle",
    "decode": "decoding",
    "ended": "at its end",
}
_HALTED = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waits for a disk or a device",
    "Z": "dead",
}
_WRAPPERS = ("_call_impl", "_wrapped_call_impl", "wrapper", "inner", "_fn", "decorate_context")
"""Unqualified names of functions that only call another one; shown stacks leave them out."""
_STARTERS = (
    "<frozen runpy>",
    "<frozen importlib",
    "/runpy.py",
    "/site-packages/typer/",
    "/site-packages/click/",
    "/longtake/cli/",
    "/longtake/__main__.py",
    "/threading.py",
)
"""Parts of the file paths of a program's or thread's outermost calls, left out of shown stacks."""
_MOST_LIBRARY_CALLS = 6
_MOST_CLIPS = 2
_MOST_RANGES = 6
_LONGEST_NAME = 70
_WORTH_SAYING_SECONDS = 0.5


def who(role: str, members: Sequence[Mapping[str, Any]]) -> str:
    """Name the processes of one role in words, such as `ranks 0-2 (on gpu01)`."""
    ranks = sorted({each["rank"] for each in members if each["rank"] is not None})
    of_ranks = ""
    if ranks:
        noun = "rank" if len(ranks) == 1 else "ranks"
        of_ranks = f"{noun} {number_ranges(ranks, _MOST_RANGES)}"
    if role == "decode":
        of_ranks = f"{len(members)} of {of_ranks}" if len(members) > 1 else f"of {of_ranks}"
    elif role != "rank" and of_ranks:
        of_ranks = f"of {of_ranks}"
    hosts = {each["host"] for each in members}
    where = f"on {next(iter(hosts))}" if len(hosts) == 1 else f"on {len(hosts)} nodes"
    if len(members) == 1:
        where = f"process {members[0]['pid']} {where}"
    if of_ranks:
        return f"{of_ranks} ({where})"
    return where if len(members) == 1 else f"{len(members)} {where}"


def doing(members: Sequence[Mapping[str, Any]]) -> str:
    """Describe the phase of processes and its duration; without heartbeats, their command line."""
    if members[0]["phase"] is None:
        program, space, arguments = str(members[0]["command"]).partition(" ")
        name = Path(program).name if program.startswith("/") else program
        return _shortened(f"{name}{space}{arguments}", _LONGEST_NAME)
    phases = sorted({str(each["phase"]) for each in members})
    words = " or ".join(_DOING.get(phase, phase) for phase in phases)
    clips = list(dict.fromkeys(each["path_of_clip"] for each in members if each["path_of_clip"]))
    if clips and "decode" in phases:
        more = f" and {len(clips) - _MOST_CLIPS} more" if len(clips) > _MOST_CLIPS else ""
        words += f" {', '.join(map(place, clips[:_MOST_CLIPS]))}{more}"
    if max(each["seconds"] for each in members) >= _WORTH_SAYING_SECONDS:
        words += f" for {_span([each['seconds'] for each in members], '.1f')} s"
    has_steps = members[0]["role"] == "rank" and any(each["step"] for each in members)
    return f"{words}, step {_span([each['step'] for each in members], 'd')}" if has_steps else words


def state_of(members: Sequence[Mapping[str, Any]]) -> str:
    """Describe in words if processes are stopped, moving or computing; empty for idle ones."""
    first = members[0]
    if first["state"] in _HALTED:
        return _HALTED[str(first["state"])]
    if first["has_moved"] is None or first["phase"] in (None, "idle"):
        return ""
    moved = sum(bool(each["has_moved"]) for each in members)
    if moved:
        return "moving" if moved == len(members) else f"{moved} of {len(members)} moving"
    shares = [each["cpu_share"] for each in members]
    busy = f"busy with {_span(shares, '.1f')} processors" if max(shares) >= 0.1 else "not computing"
    return f"not moving, {busy}"


def is_halted(members: Sequence[Mapping[str, Any]]) -> bool:
    return members[0]["state"] in _HALTED


def unread(member: Mapping[str, Any]) -> str:
    """Describe a process whose stacks could not be read, by its place in the kernel or state."""
    waits = re.search(r"^wchan: (\w*[a-z]\w*)", member["raw"], re.MULTILINE)
    where = f"in the kernel's {waits[1]}" if waits else f"state {member['state']}"
    return f"its stacks could not be read; it is {where}"


def own_call(stack: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a stack's innermost call outside of the standard library, or its innermost call."""
    own = (c for c in stack if not is_library(c) or "/site-packages/" in c["file"])
    return next(own, stack[0])


def worth_showing(stack: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Shorten a stack for display: drop wrappers, the program's start and most library calls.

    The innermost call, the library calls directly around it and all calls of other code are kept.
    """
    begun = list(stack)
    # Outermost calls are last; all processes have these in common.
    while len(begun) > 1 and any(name in begun[-1]["file"] for name in _STARTERS):
        begun.pop()
    calls = [
        call
        for call in begun[1:]
        if not (is_library(call) and call["function"].rpartition(".")[2] in _WRAPPERS)
    ]
    inner = list(takewhile(is_library, calls))
    outer = [call for call in calls[len(inner) :] if not is_library(call)]
    if len(inner) > _MOST_LIBRARY_CALLS:
        inner = [*inner[: _MOST_LIBRARY_CALLS - 1], inner[-1]]
    return [*begun[:1], *inner, *outer]


def is_library(call: Mapping[str, Any]) -> bool:
    file = call["file"]
    is_installed = "/site-packages/" in file or "/lib/python3." in file or file.startswith("<")
    return is_installed and "/longtake/" not in file


def spelled(call: Mapping[str, Any]) -> str:
    """Format a call of a stack as `function (file:line)`."""
    line = f":{call['line']}" if call["line"] else ""
    return f"{_shortened(call['function'], _LONGEST_NAME)} ({place(call['file'])}{line})"


def place(file: str) -> str:
    """Shorten a source file's path to its package or the working directory; libraries to a name."""
    file = printable(file)
    if ".so" in Path(file).suffixes:
        return Path(file).name
    for mark in ("/site-packages/", "/src/longtake/", "/lib/python3."):
        if mark in file:
            below = file.rpartition(mark)[2]
            if mark == "/lib/python3.":
                return below.partition("/")[2]
            return f"longtake/{below}" if mark == "/src/longtake/" else below
    here = f"{Path.cwd()}/"
    return file.removeprefix(here) if len(here) > 2 else file


def _span(values: Sequence[float], form: str) -> str:
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def _shortened(text: str, length: int) -> str:
    text = printable(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"
