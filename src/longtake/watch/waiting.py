"""What a thread waits for, by the calls that it is in.

The calls tell more than the phase that a rank has said: a rank in the phase `collective` may sleep
in a hook, and one in `forward` may gather weights. Only where no calls could be read, the phase has
to do.
"""

import linecache
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Literal

import longtake
from longtake.stacks.frames import Call, Stack

Wait = Literal["collective", "data", "device", "checkpoint", "lock", "nothing"]
"""`lock`: another thread or process of the same node; `nothing`: it computes, or hangs by
itself."""

WORDS: dict[Wait, str] = {
    "collective": "a collective",
    "data": "data",
    "device": "the device",
    "checkpoint": "a checkpoint",
    "lock": "a lock",
    "nothing": "nothing",
}

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD = re.compile(r".*/lib(?:64)?/python3(?:\.\d+)?t?/|.*/python3\d*\.zip/|(?=<frozen )")
_MACHINERY = ("torch/", "torchgen/", "functorch/", "triton/", "numpy/")
"""Packages whose own lines say less than the line that called them."""

_COLLECTIVE = re.compile(
    r"/torch/distributed/(?:distributed_c10d|_functional_collectives|rendezvous|c10d_logger|"
    r"utils|nn/functional|device_mesh|fsdp/|tensor/|_composable/|algorithms/|_tools/|"
    r"checkpoint/utils|checkpoint/_nested_dict)"
)
_OF_US = re.compile(r"/longtake/parallel/collectives\.py$")
_THREADS = re.compile(
    r"/(?:threading|queue|subprocess|selectors|concurrent/futures/\w+|multiprocessing/\w+)\.py$"
)
_WAITS = {
    *("wait", "_wait_for_tstate_lock", "acquire", "__enter__", "join", "get", "put", "select"),
    *("result", "exception", "poll", "_poll", "recv", "recv_bytes", "_recv", "_recv_bytes"),
    *("_try_wait", "_wait", "communicate", "_communicate"),
}
_DEVICE = re.compile(r"/torch/(?:cuda|accelerator)/\w+\.py$")
_READS_DEVICE = re.compile(r"\.(?:tolist|item|cpu|to)\(")
_PACKAGE = Path(longtake.__file__).parent
_DRIVER = re.compile(r"^(?:cuda|cu|hip)\w*Synchronize|^cu(?:da)?Memcpy|^cuEventQuery")

_BY_PHASE: dict[str, Wait] = {
    "collective": "collective",
    "rendezvous": "collective",
    "data": "data",
    "checkpoint": "checkpoint",
    "save": "checkpoint",
}


def awaited(calls: Stack, phase: str, native: Stack = ()) -> Wait:
    """What a thread waits for.

    Args:
        calls: its Python calls, the innermost first; empty: they could not be read.
        phase: what its rank's heart says.
        native: the calls of C below them, where they are known.
    """
    if not calls:
        return _BY_PHASE.get(phase, "nothing")
    below, own = _below(calls), own_call(calls)
    if any(_COLLECTIVE.search(file) for _, file, _ in below):
        return "collective"
    if own is not None and _OF_US.search(own[1]):
        return "collective"
    if any(_DRIVER.search(name) for name, _, _ in native) or _synchronises(below):
        return "device"
    if not native and _reads_device(calls[0]):
        return "device"
    if not any(_is_wait(name) and _THREADS.search(file) for name, file, _ in below):
        return "nothing"
    if own is not None and own[1].endswith("/longtake/checkpoint/saver.py"):
        return "checkpoint"
    return "data" if phase in ("data", "cache") else "lock"


def own_call(calls: Stack) -> Call | None:
    """The innermost call that is neither Python's own nor of a library like torch.

    That is the line to look at: of a sleep, a lock or a collective, the one that called it.
    """
    return next((call for call in calls if not is_machinery(call[1])), None)


def is_machinery(file: str) -> bool:
    """Whether a file is the standard library's, or of a package whose lines say little."""
    if packages := _PACKAGES.match(file):
        return file[packages.end() :].startswith(_MACHINERY)
    return _STANDARD.match(file) is not None


def short_file(file: str) -> str:
    """A file as people call it: from its package on, or as it is."""
    if found := _PACKAGES.match(file) or _STANDARD.match(file):
        return file[found.end() :]
    _, ours, rest = file.rpartition("/longtake/")
    return f"longtake/{rest}" if ours else file


def _below(calls: Stack) -> tuple[Call, ...]:
    """The machinery that the innermost call of our own has led to."""
    return tuple(takewhile(lambda call: is_machinery(call[1]), calls))


def _is_wait(name: str) -> bool:
    """py-spy says `Condition.wait` where Python knows qualified names, and `wait` elsewhere."""
    return name.rpartition(".")[2] in _WAITS


def _synchronises(below: Stack) -> bool:
    names: Iterator[str] = (name for name, file, _ in below if _DEVICE.search(file))
    return any("synchronize" in name for name in names)


def _reads_device(call: Call) -> bool:
    """Whether a line of training takes values from the device, which shows no call of torch's.

    The line is read in this process's own package: the file of another process may be anything.
    """
    _, file, line = call
    _, ours, name = file.rpartition("/longtake/training/")
    if not ours or "/" in name:
        return False
    return (
        _READS_DEVICE.search(linecache.getline(str(_PACKAGE / "training" / name), line)) is not None
    )
