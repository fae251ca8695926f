"""What runs on a worker of a Ray cluster: a process of its own that does the errand, watched there.

So an item that hangs or crashes a decoder costs itself, with the same words as on one machine, and
the Ray worker around it goes on.
"""

import pickle
import platform
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from longtake.data.crews.errand import Errand, Sign
from longtake.data.crews.hands import Hands, Loss, Order
from longtake.errors import DataError
from longtake.process import code_digest

# What comes of a clip depends on them.
_PACKAGES = ("longtake", "av", "numpy", "pillow", "HanTa", "torch", "diffusers", "transformers")


class Sent(NamedTuple):
    """What a worker is told at first; pickled.

    Attributes:
        order: what it is to do.
        signs: files that lie where is written; they are there if the folders are the same ones.
        folder: where relative paths begin.
    """

    order: Order
    signs: Sequence[Path]
    folder: Path

    @classmethod
    def to_do(cls, errand: Errand[Any, Any], signs: Sequence[Path]) -> "Sent":
        """What is sent for an errand."""
        return cls(Order.of(Looking(errand)), signs, Path.cwd())


class Done(NamedTuple):
    """What was said of some items, in their order; pickled.

    Attributes:
        answers: see `longtake.data.crews.processes.Hands.work`; each result comes with whether the
            item's file is not there.
        seconds: that all of them took.
    """

    answers: list[bytes | Loss]
    seconds: float


def versions() -> dict[str, str]:
    """What must be the same on every machine, by name."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]  # of torch, cpu and cu130 are alike
    return {**found, "longtake's files": code_digest("data", "models")}


class Far:
    """Does an errand on one worker, until it is let go.

    Args:
        told: a pickled `Sent`.

    Raises:
        DataError: a folder is not the same one here.
    """

    def __init__(self, told: bytes) -> None:
        sent: Sent = pickle.loads(told)  # noqa: S301 - of the one who started this
        for sign in sent.signs:
            if not sign.exists():
                raise DataError(
                    f"{sign.parent} on {socket.gethostname()} is another folder than where this "
                    "was started, or cannot be seen there. Put it on a disk that all nodes share, "
                    "mounted at the same place."
                )
        self._hands = Hands(sent.order, 1, sent.folder if sent.folder.is_dir() else None)

    def work(self, items: list[bytes]) -> bytes:
        """What was said of pickled items: `Done`, pickled.

        Raises:
            DataError: no process can be started.
        """
        begun = time.perf_counter()
        answers = [answer for _, answer in self._hands.work(items)]
        return pickle.dumps(Done(answers, time.perf_counter() - begun))


class Looking(Errand[Any, tuple[Any, bool]]):
    """An errand that also says whether an item's file is not there."""

    def __init__(self, errand: Errand[Any, Any]) -> None:
        self._errand = errand
        self.doing, self.silence_seconds = errand.doing, errand.silence_seconds
        self.memory_gib = errand.memory_gib

    def do(self, item: Any, alive: Sign) -> tuple[Any, bool]:
        """What came of it, and whether its file is not there."""
        path = self._errand.reads(item)
        is_missing = bool(path) and not Path(path).exists()
        return self._errand.do(item, alive), is_missing

    def lost(self, item: Any, reason: str) -> tuple[Any, bool]:
        """What becomes of it; of its file nothing is known."""
        return self._errand.lost(item, reason), False
