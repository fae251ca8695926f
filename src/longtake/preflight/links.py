"""Are the links between nodes as fast as each other: neighbours in a ring, and all together.

Each node sends to its neighbour and back. A link that is slow in a ring has two ends; a node that
is slow has two slow links, and is named.
"""

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from longtake.config import Recipe
from longtake.preflight.compare import far_below, middle
from longtake.preflight.finding import Finding, Judged, Measure
from longtake.preflight.setting import Facts, Setting

NAME = "links"

_MIB = 2**20
_BURSTS, _BURST_SECONDS, _MOST_TIMES = 3, 0.15, 64
_SLOW, _VERY_SLOW = 0.7, 0.3
_ALL_TIMES = 4
_BETWEEN = " to "
_ADVICE = (
    "Look at the cards, cables and switch port between them: ethtool, ibstat, iperf3, ib_write_bw."
)


def measure(setting: Setting) -> Facts:
    """MB/s to the neighbours, all-reduce bandwidth of all, and within this node."""
    if not _has_nccl():
        return _measure(setting)
    with torch.cuda.device(setting.place.local_rank):  # the current device is each thread's own
        return _measure(setting)


def _measure(setting: Setting) -> Facts:
    facts: Facts = {"to": {}, "all": _all_reduce(None), "within": _within_node(setting)}
    if setting.place.rank not in setting.peers:
        return facts
    own = setting.peers.index(setting.place.rank)
    for pair in (pair for each in rounds(len(setting.peers)) for pair in each if own in pair):
        facts["to"] |= _both_ways(pair, own, setting)
    return facts


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Which link is far below the median, or which node with all its links."""
    judged = Judged()
    speeds: dict[str, float] = {}
    for node, each in facts.items():
        speeds |= {f"{node}{_BETWEEN}{other}": speed for other, speed in each["to"].items()}
    if speeds:
        slow = far_below(speeds, _SLOW)
        judged.measures.append(Measure("sending between nodes", "MB/s", speeds, slow))
        judged.findings += _tell(speeds, slow)
    for name, title in (("all", "all-reduce over all"), ("within", "all-reduce within the node")):
        rates = {node: each[name] for node, each in facts.items() if each.get(name)}
        if not rates:
            continue
        slow = far_below(rates, _SLOW) if name == "within" else ()
        judged.measures.append(Measure(title, "MB/s", rates, slow))
        if slow:
            what = f"all-reduce within the node runs at {rates[slow[0]]:.0f} MB/s"
            usual = f"at least {_SLOW:.0%} of the median, {middle(rates.values()):.0f} MB/s"
            advice = "Look at nvidia-smi topo -m and nvidia-smi nvlink --status on that node."
            judged.findings.append(Finding("warning", NAME, slow, what, usual, advice))
    return judged


def _tell(speeds: dict[str, float], slow: Sequence[str]) -> list[Finding]:
    usual = middle(speeds.values())
    expected = f"at least {_SLOW:.0%} of the median, {usual:.0f} MB/s"
    findings, told = [], set()
    for node in _slow_at_all_ends(speeds, slow):
        own = [link for link in slow if node in link.split(_BETWEEN)]
        told |= set(own)
        what = f"all links of {node} are slow: {_in_words(speeds, own)}"
        findings.append(_finding(speeds, own, usual, (node,), what, expected))
    for link in (link for link in slow if link not in told):
        ends = tuple(link.split(_BETWEEN))
        what = f"the link from {link} is slow: {speeds[link]:.0f} MB/s"
        findings.append(_finding(speeds, [link], usual, ends, what, expected))
    return findings


def _finding(
    speeds: dict[str, float],
    links: Sequence[str],
    usual: float,
    nodes: tuple[str, ...],
    what: str,
    expected: str,
) -> Finding:
    is_bad = min(speeds[link] for link in links) < _VERY_SLOW * usual
    return Finding("error" if is_bad else "warning", NAME, nodes, what, expected, _ADVICE)


def _in_words(speeds: dict[str, float], links: Sequence[str]) -> str:
    said = [f"{speeds[link]:.0f} MB/s from {link}" for link in links[:4]]
    return ", ".join(said)


def _slow_at_all_ends(speeds: dict[str, float], slow: Sequence[str]) -> list[str]:
    """Nodes with several neighbours that can neither send to nor receive from any of them well."""
    found = []
    for node in dict.fromkeys(end for link in slow for end in link.split(_BETWEEN)):
        sending = [link for link in speeds if link.startswith(f"{node}{_BETWEEN}")]
        hearing = [link for link in speeds if link.endswith(f"{_BETWEEN}{node}")]
        ways = [each for each in (sending, hearing) if len(each) > 1]
        if any(all(link in slow for link in each) for each in ways):
            found.append(node)
    return found


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """The neighbours of a ring of `count`, in rounds in which nobody has two at once."""
    if count < 2:
        return
    pairs = [(each, (each + 1) % count) for each in range(count if count > 2 else 1)]
    last = [pairs.pop()] if count > 2 and count % 2 else []
    yield pairs[0::2]
    yield from (each for each in (pairs[1::2], last) if each)


def _both_ways(pair: tuple[int, int], own: int, setting: Setting) -> dict[str, float]:
    """MB/s of what this node sends to the other of a pair; first the one, then the other sends."""
    first, second = pair
    other = second if own == first else first
    peer, host = setting.peers[other], setting.hosts[other]
    found = {}
    for sender in pair:
        if sender == own:
            found[host] = _send(peer)
        else:
            _receive(peer)
    return found


def _send(peer: int) -> float:
    """MB/s of the best of some bursts: a bad link is bad in all of them, a busy node not."""
    load = torch.zeros(_size(), dtype=torch.uint8, device=_device())
    word = torch.zeros(1, device=load.device)
    _burst(load, word, peer, 1)  # connections are made with the first
    times = int(min(_MOST_TIMES, max(1, _BURST_SECONDS // _burst(load, word, peer, 1))))
    dist.send(torch.tensor([float(times)], device=load.device), peer)
    seconds = min(_burst(load, word, peer, times) for _ in range(_BURSTS))
    return len(load) * times / 1e6 / seconds


def _receive(peer: int) -> None:
    load = torch.zeros(_size(), dtype=torch.uint8, device=_device())
    word, times = torch.zeros(1, device=load.device), torch.zeros(1, device=load.device)
    for _ in range(2):
        _hear(load, word, peer, 1)
    dist.recv(times, peer)
    for _ in range(_BURSTS):
        _hear(load, word, peer, int(times.item()))


def _burst(load: torch.Tensor, word: torch.Tensor, peer: int, times: int) -> float:
    """Seconds until a peer has so many loads, and has said so."""
    begun = time.perf_counter()
    for _ in range(times):
        dist.send(load, peer)
    dist.recv(word, peer)
    word.item()  # a card's queue is done, too
    return time.perf_counter() - begun


def _hear(load: torch.Tensor, word: torch.Tensor, peer: int, times: int) -> None:
    for _ in range(times):
        dist.recv(load, peer)
    dist.send(word, peer)


def _all_reduce(group: dist.ProcessGroup | None) -> float:
    """Bus bandwidth in MB/s: 2 (n - 1) / n of the bytes go over each process's link."""
    load, size = torch.zeros(_size() // 4, device=_device()), dist.get_world_size(group)
    dist.all_reduce(load, group=group)
    _settle(load)
    begun = time.perf_counter()
    for _ in range(_ALL_TIMES):
        dist.all_reduce(load, group=group)
    _settle(load)
    seconds = (time.perf_counter() - begun) / _ALL_TIMES
    return 2 * (size - 1) / size * 4 * len(load) / 1e6 / seconds


def _within_node(setting: Setting) -> float | None:
    """All-reduce bandwidth of the processes of this node; None: it has but one."""
    found = None
    for ranks in setting.ranks if setting.place.size > len(setting.hosts) else ():
        group = dist.new_group(list(ranks))  # which all processes have to make
        if setting.place.rank in ranks and len(ranks) > 1:
            found = _all_reduce(group)
    return found


def _settle(load: torch.Tensor) -> None:
    if load.is_cuda:
        torch.cuda.synchronize(load.device)


def _device() -> torch.device:
    """The GPU of this process where NCCL is used."""
    if _has_nccl():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _has_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config())


def _size() -> int:
    return (256 if _device().type == "cuda" else 8) * _MIB
