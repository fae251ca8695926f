"""Preflight checks of the network: devices, addresses, connections, clocks and links of nodes."""

import ipaddress
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from longtake.cluster import topology
from longtake.cluster.findings import (
    CheckContext,
    CheckResult,
    Facts,
    FactsByNode,
    Severity,
    far_from_median,
    format_number,
    median_of,
    outliers_of,
    same_everywhere,
)
from longtake.health.network import Ethernet, InfiniBand

# --- Network devices ------------------------------------------------------------------------------

_DEVICE_ADVICE = "Look at the cable, the port of the switch, and ethtool or ibstat on that node."


def measure_devices(context: CheckContext) -> Facts:
    """Read state and speed of the node's Ethernet interfaces and InfiniBand ports."""
    return {
        "ethernet": _by_device(Ethernet().sample()),
        "infiniband": _by_device(InfiniBand().sample()),
    }


def judge_devices(facts: FactsByNode) -> CheckResult:
    result = CheckResult()
    if not any(each["infiniband"] for each in facts.values()):
        result.skip("InfiniBand", "no InfiniBand device")
    for kind in ("ethernet", "infiniband"):
        states = {
            node: {device: _describe_device(numbers) for device, numbers in each[kind].items()}
            for node, each in facts.items()
        }
        result.add(same_everywhere(kind, states, "warning", _DEVICE_ADVICE))
    for node, each in facts.items():
        down = [port for port, numbers in each["infiniband"].items() if not numbers.get("link_up")]
        if down:
            what = f"InfiniBand ports are down: {', '.join(down)}"
            result.find("warning", (node,), what, "ACTIVE", _DEVICE_ADVICE)
    return result


def _by_device(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    devices: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        number, _, device = name.partition(":")
        devices.setdefault(device, {})[number] = value
    return devices


def _describe_device(numbers: dict[str, float]) -> str:
    state = "up" if numbers.get("link_up") else "down"
    bits = numbers.get("link_speed_bits_per_second")
    return f"{state}, {bits / 1e9:g} Gbit/s" if bits else state


# --- Addresses ------------------------------------------------------------------------------------
# Gloo binds to the address of a node's own name. If /etc/hosts has `127.0.1.1 gpu07`, as some
# distributions write it, the other nodes connect to themselves, and all wait for a timeout.


def measure_addresses(context: CheckContext) -> Facts:
    """Resolve the node's own name, and read which network interface gloo is told to use."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        own = sorted({str(each[4][0]) for each in found})
    except OSError:
        own = []
    return {"own": own, "interface": os.environ.get("GLOO_SOCKET_IFNAME", "")}


def judge_addresses(facts: FactsByNode) -> CheckResult:
    """Find nodes whose own name resolves to a loopback address or not at all."""
    result = CheckResult()
    if len(facts) < 2:
        result.skip("addresses, clocks and links between nodes", "one node")
        return result
    for node, each in facts.items():
        own = [ipaddress.ip_address(address.partition("%")[0]) for address in each["own"]]
        if each["interface"] or not all(address.is_loopback for address in own):
            continue
        what = f"resolves to {', '.join(each['own'])}" if own else "does not resolve"
        what = f"its own name {what}: other nodes cannot connect to it"
        advice = (
            f"Correct the line of {node} in its /etc/hosts, or set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface to use."
        )
        expected = "an address of the network between the nodes"
        result.find("error", (node,), what, expected, advice)
    return result


# --- Connection: the process group that the next checks use ---------------------------------------


def connect(context: CheckContext, store: Any, *, use_nccl: bool) -> Facts:
    """Connect all processes of the preflight: gloo, and NCCL if each has a GPU of its own."""
    if use_nccl:
        torch.cuda.set_device(context.process.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_nccl else "gloo",
        store=dist.PrefixStore("preflight/group", store),  # type: ignore[attr-defined]
        rank=context.process.rank,
        world_size=context.process.world_size,
        timeout=timedelta(seconds=context.seconds),
    )
    dist.all_reduce(torch.zeros(1))
    return {"backend": dist.get_backend()}


# --- Clocks ---------------------------------------------------------------------------------------
# Cristian's algorithm (Probabilistic clock synchronization, 1989): the other clock's answer is
# compared with the middle between question and answer, so the error is at most half the round trip.
# Many questions are asked; the one with the shortest round trip is used.

_NUM_QUESTIONS = 40
_WARNING_SECONDS, _ERROR_SECONDS = 1e-3, 0.1
_CLOCK_ADVICE = (
    "Run chrony on every node with the same servers (`chronyc tracking`, `chronyc sources -v`); "
    "let it step once: chronyc makestep."
)


def measure_clocks(context: CheckContext) -> Facts:
    """Measure on rank 0 the seconds that each node's clock is ahead, and their uncertainty."""
    if not context.process.is_first:
        question = torch.zeros(1, dtype=torch.int64)
        for _ in range(_NUM_QUESTIONS):
            dist.recv(question, 0)
            dist.send(torch.tensor([time.time_ns()]), 0)
        return {}
    others = zip(context.leaders[1:], context.hosts[1:], strict=True)
    return {"offsets": {host: _ask_clock(leader) for leader, host in others}}


def judge_clocks(facts: FactsByNode) -> CheckResult:
    """Find clocks of nodes that deviate from the median of all; of two, from each other."""
    first = next((node for node, each in facts.items() if "offsets" in each), None)
    if first is None or not facts[first]["offsets"]:
        return CheckResult()
    found: dict[str, list[float]] = {first: [0.0, 0.0], **facts[first]["offsets"]}
    # Not rank 0's own clock, which may be the wrong one.
    usual = median(offset for offset, _ in found.values()) if len(found) > 2 else 0.0
    off = {node: (offset - usual, uncertainty) for node, (offset, uncertainty) in found.items()}
    certain = {node: abs(offset) - uncertainty for node, (offset, uncertainty) in off.items()}
    bad = [node for node, seconds in certain.items() if seconds > _WARNING_SECONDS]
    shown = {node: offset * 1000 for node, (offset, _) in off.items()}
    result = CheckResult()
    result.measure("clock ahead", "ms", shown, tuple(bad))
    of = "the median of all clocks" if len(found) > 2 else f"that of {topology.fold_hosts([first])}"
    for node in bad:
        offset, uncertainty = off[node]
        severity: Severity = "error" if certain[node] > _ERROR_SECONDS else "warning"
        side = "ahead of" if offset > 0 else "behind"
        what = f"its clock is {_seconds(abs(offset))} {side} {of} (+-{_seconds(uncertainty)})"
        result.find(severity, (node,), what, "within 1 ms", _CLOCK_ADVICE)
    return result


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1000:.3f} ms"


def _ask_clock(peer: int) -> tuple[float, float]:
    """Return the seconds that a peer's clock is ahead, and half of the shortest round trip."""
    best = (0.0, float("inf"))
    answer = torch.zeros(1, dtype=torch.int64)
    for _ in range(_NUM_QUESTIONS):
        # The round trip by a clock that is not set while it is measured.
        before = time.monotonic_ns()
        asked = time.time_ns()
        dist.send(torch.zeros(1, dtype=torch.int64), peer)
        dist.recv(answer, peer)
        round_trip = time.monotonic_ns() - before
        if round_trip / 2e9 < best[1]:
            best = ((int(answer.item()) - asked - round_trip // 2) / 1e9, round_trip / 2e9)
    return best


# --- Links: each node sends to its neighbours in a ring, and back; then all reduce together -------
# A slow link has two ends, either of which may be the cause; a slow node has two slow links, and is
# named alone.

_MIB = 2**20
_NUM_BURSTS, _BURST_SECONDS, _MAX_SENDS = 3, 0.15, 64
_LINK_FACTOR, _LINK_ERROR_FACTOR = 0.7, 0.3
_NUM_ALL_REDUCES = 4
_TO = " to "
_MAX_SHOWN = 4
_LINK_ADVICE = (
    "Look at the devices, cables and switch port between them: ethtool, ibstat, iperf3, "
    "ib_write_bw."
)
_NVLINK_ADVICE = "Look at nvidia-smi topo -m and nvidia-smi nvlink --status on that node."


def measure_links(context: CheckContext) -> Facts:
    """Measure MB/s of links to neighbour nodes, of an all-reduce over all ranks and in the node."""
    index = context.process.local_rank
    with torch.cuda.device(index) if _has_nccl() else nullcontext():  # it is per thread
        facts: Facts = {"to": {}, "all": _all_reduce(None), "within": None}
        # With one process per node there is nothing to measure within a node.
        for ranks in context.ranks if context.process.world_size > len(context.hosts) else ():
            group = dist.new_group(list(ranks))  # all processes have to make each group
            if context.process.rank in ranks and len(ranks) > 1:
                facts["within"] = _all_reduce(group)
        if context.process.rank not in context.leaders:
            return facts
        own = context.leaders.index(context.process.rank)
        for pair in (pair for each in ring_rounds(len(context.leaders)) for pair in each):
            if own in pair:
                other = pair[1] if own == pair[0] else pair[0]
                peer = context.leaders[other]
                # Both nodes go through the pair in the same order, first one sending, then the
                # other.
                both_ways = {each: _time_link(peer, is_sender=each == own) for each in pair}
                facts["to"][context.hosts[other]] = both_ways[own]
        return facts


def judge_links(facts: FactsByNode) -> CheckResult:
    """Find links between nodes far slower than the median, and nodes with slow links only."""
    result = CheckResult()
    speeds: dict[str, float] = {}
    for node, each in facts.items():
        speeds |= {f"{node}{_TO}{other}": speed for other, speed in each["to"].items()}
    if speeds:
        slow = outliers_of(speeds, "lower", _LINK_FACTOR)
        result.measure("sending between nodes", "MB/s", speeds, slow)
        _judge_slow_links(result, speeds, slow)
    if rates := {node: each["all"] for node, each in facts.items() if each.get("all")}:
        result.measure("all-reduce over all", "MB/s", rates)
    rates = {node: each["within"] for node, each in facts.items() if each.get("within")}
    name, advice = "all-reduce within the node, MB/s", _NVLINK_ADVICE
    result.add(far_from_median(name, rates, "lower", factor=_LINK_FACTOR, advice=advice))
    return result


def _judge_slow_links(result: CheckResult, speeds: dict[str, float], slow: Sequence[str]) -> None:
    usual = median_of(speeds.values())
    expected = f"at least {_LINK_FACTOR:g} times the median, {format_number(usual)} MB/s"
    named: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for node in _nodes_with_all_slow(speeds, slow):
        links = [link for link in slow if node in link.split(_TO)]
        shown = ", ".join(f"{speeds[link]:.0f} MB/s from {link}" for link in links[:_MAX_SHOWN])
        named[node,] = f"all links of {node} are slow: {shown}", links
    explained = {link for _, links in named.values() for link in links}
    for link in (link for link in slow if link not in explained):
        what = f"the link from {link} is slow: {speeds[link]:.0f} MB/s"
        named[tuple(link.split(_TO))] = what, [link]
    for nodes, (what, links) in named.items():
        is_error = min(speeds[link] for link in links) < _LINK_ERROR_FACTOR * usual
        severity: Severity = "error" if is_error else "warning"
        result.find(severity, nodes, what, expected, _LINK_ADVICE)


def _nodes_with_all_slow(speeds: dict[str, float], slow: Sequence[str]) -> list[str]:
    """Return nodes whose links to several neighbours, in one direction or both, are all slow."""
    found = []
    for node in dict.fromkeys(end for link in slow for end in link.split(_TO)):
        sending = [link for link in speeds if link.startswith(f"{node}{_TO}")]
        receiving = [link for link in speeds if link.endswith(f"{_TO}{node}")]
        ways = [each for each in (sending, receiving) if len(each) > 1]
        if any(all(link in slow for link in each) for each in ways):
            found.append(node)
    return found


def ring_rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of neighbours in a ring of nodes, each node once per round at most."""
    if count < 2:
        return
    # Every second pair forms a round; with an odd number of nodes, the last pair needs its own.
    pairs = [(each, (each + 1) % count) for each in range(count if count > 2 else 1)]
    last = [pairs.pop()] if count > 2 and count % 2 else []
    yield pairs[0::2]
    yield from (each for each in (pairs[1::2], last) if each)


def _time_link(peer: int, *, is_sender: bool) -> float:
    """Return the MB/s of the link to a peer: of the best of some bursts, as others may use it."""
    load = torch.zeros(_load_bytes(), dtype=torch.uint8, device=_device())
    reply, num_sends = torch.zeros(1, device=load.device), torch.zeros(1, device=load.device)
    forth, back = (dist.send, dist.recv) if is_sender else (dist.recv, dist.send)

    def burst(count: int) -> float:
        """Send `count` loads; return the seconds until all are received and the reply is back."""
        begun = time.perf_counter()
        for _ in range(count):
            forth(load, peer)
        back(reply, peer)
        reply.item()  # waits for the GPU
        return time.perf_counter() - begun

    burst(1)  # the first one connects
    num_sends.fill_(min(_MAX_SENDS, max(1, _BURST_SECONDS // burst(1))))
    forth(num_sends, peer)  # both ends must use the same number: the sender's
    count = int(num_sends.item())
    return len(load) * count / 1e6 / min(burst(count) for _ in range(_NUM_BURSTS))


def _all_reduce(group: dist.ProcessGroup | None) -> float:
    """Return the bus bandwidth of an all-reduce in MB/s, by the definition of nccl-tests.

    A ring all-reduce sends 2 (n - 1) / n times the bytes over each process's link.
    """
    load, size = torch.zeros(_load_bytes() // 4, device=_device()), dist.get_world_size(group)
    dist.all_reduce(load, group=group)
    # The first all-reduce connects the ranks; and CUDA runs asynchronously.
    _synchronize(load)
    begun = time.perf_counter()
    for _ in range(_NUM_ALL_REDUCES):
        dist.all_reduce(load, group=group)
    _synchronize(load)
    seconds = (time.perf_counter() - begun) / _NUM_ALL_REDUCES
    return 2 * (size - 1) / size * 4 * len(load) / 1e6 / seconds


def _synchronize(load: torch.Tensor) -> None:
    if load.is_cuda:
        torch.cuda.synchronize(load.device)


def _device() -> torch.device:
    if _has_nccl():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _has_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config())


def _load_bytes() -> int:
    # Large enough that the bandwidth counts and not the latency.
    return (256 if _device().type == "cuda" else 8) * _MIB
