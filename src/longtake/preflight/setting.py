"""What each check knows when it begins, and how long it may take."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from longtake.config import Recipe
from longtake.preflight.finding import Judged
from longtake.preflight.place import Place


@dataclass(frozen=True)
class Setting:
    """One process's view of what is to be checked.

    Attributes:
        place: its place among all.
        recipe: as this node reads it; None: there is none, or it cannot be read.
        recipe_path: what was asked for; None: no recipe was.
        recipe_problem: why it cannot be read; empty if it can.
        token: the same on all processes, and another each time.
        seconds: how long a check may take.
        hosts: names of the nodes.
        ranks: of each node, in the same order, its processes; the first speaks for it.
    """

    place: Place
    recipe: Recipe | None = None
    recipe_path: Path | None = None
    recipe_problem: str = ""
    token: str = ""
    seconds: float = 120.0
    hosts: Sequence[str] = ()
    ranks: Sequence[Sequence[int]] = ((0,),)

    @property
    def peers(self) -> list[int]:
        """Ranks that speak for their nodes, in the order of the hosts."""
        return [each[0] for each in self.ranks]

    def node_of(self, rank: int) -> str:
        """The name of the node that a process is on."""
        places = zip(self.hosts, self.ranks, strict=True)
        return next(host for host, ranks in places if rank in ranks)

    def label(self, rank: int) -> str:
        """A process's name: its node's, with a number where that has several."""
        ranks = next(list(each) for each in self.ranks if rank in each)
        return self.node_of(rank) + (f":{ranks.index(rank)}" if len(ranks) > 1 else "")


Facts = dict[str, Any]
"""What a process or node tells of itself: what JSON can hold."""


class Check(Protocol):
    """One of this package's modules."""

    NAME: str

    def measure(self, setting: Setting) -> Facts:
        """Look at this node, or at this process."""
        ...

    def judge(self, facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
        """Say what is wrong; `facts` are by node, or by process."""
        ...


def within(seconds: float, check: Check, setting: Setting) -> Facts:
    """What a check measures; `{"failed": why}` if it cannot, or does not come back in time.

    It runs in a thread that is left behind where it hangs, as on a disk that does not answer.
    """
    box: list[Facts] = []
    thread = threading.Thread(
        target=_measure_into, args=(box, check, setting), name=check.NAME, daemon=True
    )
    thread.start()
    thread.join(seconds)
    return box[0] if box else {"failed": f"it took longer than {seconds:.3g} s", "hangs": True}


def _measure_into(box: list[Facts], check: Check, setting: Setting) -> None:
    try:
        box.append(check.measure(setting))
    except Exception as error:  # what one check meets must not hide the others
        said = (str(error).strip().splitlines() or [""])[0]
        box.append({"failed": f"{type(error).__name__}: {said}" if said else type(error).__name__})
