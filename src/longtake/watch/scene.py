"""All that the nodes' dumps show of a stall, arranged for whoever has to judge it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longtake.node_dir import NodeDump
from longtake.stacks.trace import Trace, traces
from longtake.watch.verdict import Suspect, Waiting
from longtake.watch.waiting import WORDS
from longtake.watch.witness import Witness, witness_of

_ON_DEVICE = ("forward", "backward", "collective", "optimizer")
_MOST_LOOKED_AT = 1000  # to say whether a process has moved, all its stacks have to be read


@dataclass(frozen=True, eq=False)
class Scene:
    """A stall.

    Attributes:
        ranks: one witness of each rank that is alive.
        decoding: decoding processes that have something to do, by the rank that they belong to.
        lost: ranks whose process is gone, as suspects.
        rounds: how often all were dumped.
        world_size: how many ranks there are; 0: nobody said.
    """

    ranks: Sequence[Witness]
    decoding: Mapping[int, Sequence[Trace]]
    lost: Sequence[Suspect]
    rounds: int
    world_size: int

    @property
    def absent(self) -> list[int]:
        """Ranks of which there is no sign."""
        seen = {each.rank for each in self.ranks} | {each.rank for each in self.lost}
        return [rank for rank in range(self.world_size) if rank not in seen]

    def busiest(self, ranks: Iterable[int]) -> Iterator[Trace]:
        """Decoding processes of some ranks, those first that have been at their clip longest."""
        found = (each for rank in ranks for each in self.decoding.get(rank, ()))
        yield from sorted(found, key=_seconds, reverse=True)[:_MOST_LOOKED_AT]

    def waiting(self, suspects: Sequence[Suspect]) -> tuple[Waiting, ...]:
        """Whoever only waits, by what for; the largest group first."""
        blamed = {(each.host, each.pid) for each in suspects}
        groups: dict[str, list[Witness]] = defaultdict(list)
        for each in self.ranks:
            if each.wait != "nothing" and (each.trace.host, each.trace.pid) not in blamed:
                groups[WORDS[each.wait]].append(each)
        found = [
            Waiting(
                doing,
                tuple(sorted(each.rank for each in group)),
                len({each.trace.host for each in group}),
            )
            for doing, group in groups.items()
        ]
        return tuple(sorted(found, key=lambda each: -len(each.ranks)))


def scene_of(dumps: Sequence[NodeDump], stalled: frozenset[int]) -> Scene:
    """Arrange what the nodes have seen.

    Args:
        dumps: of all nodes that answered.
        stalled: ranks that, by the flight recorder, are in a collective that is not done.
    """
    last = {dump["host"]: _last_seconds(dump) for dump in dumps}
    ranks: list[Witness] = []
    decoding: dict[int, list[Trace]] = defaultdict(list)
    lost = [_of_heart(heart, dump["host"]) for dump in dumps for heart in dump["missing"]]
    for trace in traces(dumps):
        is_there = trace.seconds[-1] >= last[trace.host] and trace.last["state"] not in ("", "X")
        if trace.role == "rank" and is_there:
            ranks.append(witness_of(trace))
        elif trace.role == "rank":
            lost.append(replace(witness_of(trace).suspect(), state=""))
        elif trace.role == "decode" and is_there and _is_busy(trace):
            decoding[-1 if trace.rank is None else trace.rank].append(trace)
    hearts = [each.trace.heart for each in ranks if each.trace.heart]
    return Scene(
        ranks=_on_device(ranks, stalled),
        decoding=decoding,
        lost=_once([each for each in lost if each.role == "rank"]),
        rounds=max((len(dump["rounds"]) for dump in dumps), default=0),
        world_size=max((int(each.get("world_size", 0)) for each in hearts), default=0),
    )


def _last_seconds(dump: NodeDump) -> float:
    return dump["rounds"][-1]["seconds"] if dump["rounds"] else 0.0


def _is_busy(trace: Trace) -> bool:
    return trace.heart is not None and trace.heart["phase"] not in ("idle", "ended")


def _seconds(trace: Trace) -> float:
    return float((trace.heart or {}).get("seconds", 0.0))


def _on_device(ranks: Sequence[Witness], stalled: frozenset[int]) -> list[Witness]:
    """Say of ranks that wait for their card that they do, which their Python calls do not tell.

    It is so where a rank does not move, and the flight recorder says that a collective of its card
    is not done; or where most ranks stand at the same line.
    """
    meant = {each for each in ranks if _may_wait_for_device(each)}
    places = Counter((each.position, each.place) for each in meant)
    place, count = next(iter(places.most_common(1)), (None, 0))
    most = place if 2 * count > max(2, len(ranks)) else None
    return [
        replace(each, wait="device")
        if each in meant and (each.rank in stalled or (each.position, each.place) == most)
        else each
        for each in ranks
    ]


def _may_wait_for_device(each: Witness) -> bool:
    phase = str((each.trace.heart or {}).get("phase"))
    return each.wait == "nothing" and phase in _ON_DEVICE and not each.has_moved


def _of_heart(heart: Mapping[str, Any], host: str) -> Suspect:
    """A process that has left only its record."""
    is_rank = heart["role"] == "rank"
    return Suspect(
        host=host,
        pid=int(heart["pid"]),
        role="rank" if is_rank else "decode",
        rank=int(heart["rank"]),
        doing=str(heart["phase"]),
        step=int(heart["step"]),
        seconds=round(float(heart["seconds"]), 2),
        clip="" if is_rank else str(heart["detail"]),
        clip_path=str(heart["path_of_clip"]),
    )


def _once(lost: Sequence[Suspect]) -> list[Suspect]:
    """Each process once: it may have gone while the rounds were read."""
    found = {(each.host, each.pid): each for each in lost}
    return sorted(found.values(), key=lambda each: -each.seconds)
