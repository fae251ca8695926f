"""How this node's ranks reach those of other nodes: which link is slow, who does not answer.

A collective is slow for all of its ranks alike, whoever's link it is. The kernel tells them apart:
on a connection over the slow link something is always on its way, and the other ones wait for it.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from longtake import heartbeat
from longtake.health.check import Numbers
from longtake.health.tcp import Connection, connections_of

BUSY = "peer_busy_share"
RATE = "peer_send_bytes_per_second"
SLOW = "peer_send_share"
UNANSWERED = "peer_unanswered_seconds"

_RETRIES = 4
"""Three seconds, on a quick network, in which nothing came back; healthy ones lose no such row."""
_USED = 0.25
"""Of what the peer is sent that is sent most: to others there is no comparable traffic."""
_LEAST_BYTES = 2**16
_WAITED_FOR = 0.5
"""Of the time: a link that is busy for less is not what a run waits for most."""
_WELL = 0.5
"""Of the usual: a link that takes less, and is waited for, is no measure for its own future."""
_ENOUGH_PAST, _MOST_PAST = 3, 30
_Key = tuple[int, str]


class Reach:
    """Compares the ranks' TCP connections with what they were at the last sample.

    What goes over InfiniBand is not among them: `infiniband.py` counts it.

    Args:
        folder: that of `heartbeat.folder_of`.
    """

    name = "reach"
    numbers: Mapping[str, str] = {
        BUSY: "How much of the time something was on its way to that node, over ranks' TCP",
        RATE: "What that took of the time in which something was on its way",
        UNANSWERED: "For how long that node has confirmed nothing, after four retries; 0: it does",
    }

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hosts: Mapping[str, str] = {}
        self._before: dict[_Key, Connection] = {}
        self._sampled_at = time.monotonic()
        self.addresses: list[str] = []
        """This node's, as its ranks use them."""

    def learn(self, hosts: Mapping[str, str]) -> None:
        """Call nodes by their names from now on, by their addresses."""
        self._hosts = hosts

    def sample(self) -> Numbers:
        """The numbers since the last sample, with the other node behind a colon."""
        ranks = [each for each in heartbeat.read_all(self._folder) if each.role == "rank"]
        found = connections_of([each.pid for each in ranks if each.phase != "ended"])
        before, self._before = self._before, {(each.inode, each.peer): each for each in found}
        then, self._sampled_at = self._sampled_at, time.monotonic()
        self.addresses = sorted({each.own for each in found})
        pairs = [(before[key], each) for key, each in self._before.items() if key in before]
        unanswered = _unanswered(found, self._hosts)
        return _flow(pairs, self._sampled_at - then, self._hosts) | unanswered

    def close(self) -> None:
        """Nothing is held."""


def _flow(
    pairs: Iterable[tuple[Connection, Connection]], seconds: float, hosts: Mapping[str, str]
) -> Numbers:
    """What went over connections to each node, by what they were and are; that of busy ones."""
    sent: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for before, after in pairs:
        host = hosts.get(after.peer, after.peer)
        sent[host] += after.acked_bytes - before.acked_bytes
        busy[host] = max(busy[host], after.busy_seconds - before.busy_seconds)
    most = max(sent.values(), default=0)
    found: Numbers = {}
    for host in (each for each, count in sent.items() if count >= max(_USED * most, _LEAST_BYTES)):
        found[f"{BUSY}:{host}"] = round(min(1.0, busy[host] / max(seconds, 1e-9)), 4)
        if busy[host]:
            found[f"{RATE}:{host}"] = round(sent[host] / busy[host])
    return found


def _unanswered(found: Iterable[Connection], hosts: Mapping[str, str]) -> Numbers:
    """By node, how long it has confirmed nothing; 0 of one that does."""
    seconds: Numbers = {}
    for each in found:
        name = f"{UNANSWERED}:{hosts.get(each.peer, each.peer)}"
        waits = each.answered_seconds if each.retries >= _RETRIES else 0.0
        seconds[name] = max(seconds.get(name, 0.0), round(waits, 3))
    return seconds


class SlowLinks:
    """Tells links that a run waits for, and that are slower than links usually are."""

    numbers: Mapping[str, str] = {
        SLOW: "What the link to that node takes as a share of the usual, if the run waits for it"
    }

    def __init__(self) -> None:
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_PAST))

    def judge(self, own: Numbers, others: Mapping[str, Numbers]) -> Numbers:
        """What each that is waited for takes, of the usual, with the other node behind a colon.

        Usual is the median of what other nodes' links take now, and this one took before.

        Args:
            own: the node's numbers.
            others: likewise, by node, those of other nodes.
        """
        there = [rate for each in others.values() for rate in _by_host(each, RATE).values()]
        found: Numbers = {}
        for host, rate in _by_host(own, RATE).items():
            past = self._past[host]
            known = there + ([median(past)] if len(past) >= _ENOUGH_PAST else [])
            share = rate / max(median(known), 1.0) if known else 1.0
            is_waited_for = own.get(f"{BUSY}:{host}", 0.0) >= _WAITED_FOR
            if known and is_waited_for:
                found[f"{SLOW}:{host}"] = round(share, 4)
            if share > _WELL or not is_waited_for:
                past.append(rate)
        return found


def _by_host(numbers: Numbers, name: str) -> dict[str, float]:
    pairs = (key.partition(":") for key in numbers)
    return {host: numbers[f"{name}:{host}"] for found, _, host in pairs if found == name}
