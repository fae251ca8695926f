"""One process over all rounds of a dump: what it was doing, and whether that changed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from longtake.node_dir import NodeDump, ProcessDump
from longtake.stacks.frames import Stack, stack_of, unmoved

ROLES = ("rank", "decode", "agent", "helper")


@dataclass(frozen=True, eq=False)
class Trace:
    """A process as it was seen in each round in which it was.

    Attributes:
        host: its node.
        rounds: what was seen.
        seconds: when, since its node's first round.
    """

    host: str
    rounds: tuple[ProcessDump, ...]
    seconds: tuple[float, ...]

    @property
    def last(self) -> ProcessDump:
        """What was seen in its last round."""
        return self.rounds[-1]

    @property
    def pid(self) -> int:
        """The process."""
        return self.last["pid"]

    @property
    def role(self) -> Literal["rank", "decode", "agent", "helper"]:
        """What it is."""
        return self.last["role"]

    @property
    def rank(self) -> int | None:
        """Its rank, or that of the rank that it belongs to."""
        return self.last["rank"]

    @property
    def heart(self) -> dict[str, Any] | None:
        """What it said of itself last; None: it says nothing."""
        return self.last["heart"]

    @property
    def threads(self) -> list[dict[str, Any]]:
        """Those of the last round in which any were read, the main thread first."""
        return next((each["threads"] for each in reversed(self.rounds) if each["threads"]), [])

    @cached_property
    def stacks(self) -> list[Stack]:
        """The main thread's, of each round in which it could be read."""
        return [stack_of(each["threads"][0]) for each in self.rounds if each["threads"]]

    @property
    def stack(self) -> Stack:
        """The main thread's, as it was read last; empty: it could not be."""
        return stack_of(self.threads[0]) if self.threads else ()

    @property
    def unmoved(self) -> Stack:
        """The main thread's calls that were the same in all rounds, from the outermost on."""
        return unmoved(self.stacks)

    @property
    def has_moved(self) -> bool:
        """Whether its main thread's stack or what it says of itself changed between rounds."""
        main = [each["threads"][0] for each in self.rounds if each["threads"]]
        if any(not _is_at(*pair) for pair in pairwise(main)):
            return True
        seen = zip(self.rounds, self.seconds, strict=True)
        hearts = [(each["heart"], seconds) for each, seconds in seen if each["heart"]]
        return any(_went_on(*one, *other) for one, other in pairwise(hearts))

    @property
    def cpu_share(self) -> float:
        """How many processors it kept busy between its first round and its last one."""
        seconds = self.seconds[-1] - self.seconds[0]
        used = self.last["cpu_seconds"] - self.rounds[0]["cpu_seconds"]
        return used / seconds if seconds > 0 else 0.0

    def stacks_of(self, name: str) -> list[Stack]:
        """Those of the first thread of a name, of each round in which there was one."""
        of_name = (
            [each for each in seen["threads"] if each["name"] == name] for seen in self.rounds
        )
        return [stack_of(each[0]) for each in of_name if each]


def traces(dumps: Iterable[NodeDump]) -> list[Trace]:
    """All processes of all nodes, in the order in which they were seen first."""
    found: list[Trace] = []
    for dump in dumps:
        seen: dict[int, list[tuple[ProcessDump, float]]] = defaultdict(list)
        for each in dump["rounds"]:
            for process in each["processes"]:
                seen[process["pid"]].append((process, each["seconds"]))
        for rounds in seen.values():
            processes, seconds = zip(*rounds, strict=True)
            found.append(Trace(dump["host"], processes, seconds))
    return found


def _is_at(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["frames"] == other["frames"] or stack_of(one) == stack_of(other)


def _went_on(before: Mapping[str, Any], at: float, after: Mapping[str, Any], then: float) -> bool:
    """Whether a heart is elsewhere, or has come back to where it was."""
    same = all(before[name] == after[name] for name in ("phase", "step", "steps_done", "detail"))
    return not same or bool(after["seconds"] < before["seconds"] + (then - at) / 2)
