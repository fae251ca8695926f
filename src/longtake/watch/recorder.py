"""What each rank's flight recorder says, in terms that are the same on all ranks; pure."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
MESSAGE = -1
"""The number of all messages: two ranks count theirs differently, so only the oldest that is not
done can be matched with the other's."""


@dataclass(frozen=True, eq=False)
class Group:
    """A process group, of which there is one object.

    Two groups may have the same name if nobody is in both.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """One collective, the same on all ranks; or one message between two."""

    group: Group
    number: int
    ends: tuple[int, int] | None = None
    """Of a message: sender and receiver, where they are known."""

    @property
    def parties(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.ends or self.group.ranks


@dataclass(frozen=True)
class Recorder:
    """What one rank has written down."""

    pending: Mapping[Op, Mapping[str, Any]]
    """What is not done, in the order in which it was enqueued."""
    enqueued: Mapping[Group, int]
    """The last collective of each group."""

    @cached_property
    def first(self) -> Op | None:
        """Where the rank waits; None: nothing is under way."""
        return next(iter(self.pending), None)


def recorders_of(dumps: Mapping[int, Mapping[str, Any]]) -> dict[int, Recorder]:
    """What was recorded, by rank, of dumps as `flight_files.read` has read them."""
    groups = _members(dumps)
    messages = {
        str(entry["process_group"][0])
        for dump in dumps.values()
        for entry in dump["entries"]
        if entry["is_p2p"]
    }
    return {rank: _recorder(rank, dump, groups, messages) for rank, dump in dumps.items()}


def _recorder(
    rank: int, dump: Mapping[str, Any], groups: Mapping[tuple[int, str], Group], messages: set[str]
) -> Recorder:
    pending: dict[Op, Mapping[str, Any]] = {}
    enqueued: dict[Group, int] = {}
    for place, name in _numbers(dump).items():
        status = dump.get("pg_status", {}).get(place)
        if status and name not in messages:  # else it counts messages too
            enqueued[groups[rank, name]] = int(status["last_enqueued_collective"])
    for entry in sorted(dump["entries"], key=lambda each: int(each["record_id"])):
        group = groups[rank, str(entry["process_group"][0])]
        number = int(entry["collective_seq_id"])
        if entry["is_p2p"]:
            number = MESSAGE
        else:
            enqueued[group] = max(enqueued.get(group, -1), number)
        if entry["state"] != "completed" and not entry["retired"]:
            pending.setdefault(Op(group, number, _ends(entry, group)), entry)
    return Recorder(pending, enqueued)


def _ends(entry: Mapping[str, Any], group: Group) -> tuple[int, int] | None:
    """A message's sender and receiver, as ranks of the run."""
    found = _PEERS.search(str(entry["profiling_name"])) if entry["is_p2p"] else None
    if found is None:
        return None
    places = [int(each) for each in found.groups()[1:]]
    if max(places) >= len(group.ranks):
        return None
    mine, other = (group.ranks[place] for place in places)
    return (mine, other) if found[1] == "send" else (other, mine)


def _numbers(dump: Mapping[str, Any]) -> dict[str, str]:
    """Names of groups by the numbers that a rank's own status has for them.

    Entries tell both; a rank without any has numbered its groups in the order of their creation,
    like their names.
    """
    told = {str(each["pg_id"]): str(each["process_group"][0]) for each in dump["entries"]}
    numbers, names = dump.get("pg_status", {}), dump.get("pg_config", {})
    if len(numbers) != len(names) or not all(map(str.isdecimal, chain(numbers, names))):
        return told
    return dict(zip(sorted(numbers, key=int), sorted(names, key=int), strict=True)) | told


def _members(dumps: Mapping[int, Mapping[str, Any]]) -> dict[tuple[int, str], Group]:
    """Each rank's groups, by its rank and the group's name.

    Where a recorder does not tell its groups' ranks (gloo's), those that have used it are known,
    and that all are in the first one.
    """
    users: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for name, description in {tuple(each["process_group"]) for each in dump["entries"]}:
            users[str(name)].update({rank}, dumps if description == "default_pg" else ())
        for name in _numbers(dump).values():
            users[name].add(rank)
    guessed = {name: Group(name, tuple(sorted(ranks))) for name, ranks in users.items()}
    told = _told(dumps)
    return {
        (rank, name): told.get((rank, name), group)
        for name, group in guessed.items()
        for rank in group.ranks
    }


def _told(dumps: Mapping[int, Mapping[str, Any]]) -> dict[tuple[int, str], Group]:
    """The groups whose ranks are written down."""
    groups: dict[tuple[str, str], Group] = {}
    found = {}
    for rank, dump in dumps.items():
        for name, config in dump.get("pg_config", {}).items():
            key = str(name), str(config["ranks"])
            if key not in groups:
                ranks = tuple(int(each) for each in re.findall(r"\d+", key[1]))
                groups[key] = Group(key[0], ranks)
            if groups[key].ranks:
                found[rank, key[0]] = groups[key]
    return found
