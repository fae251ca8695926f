"""Probes of a node's links (Ethernet, InfiniBand, RoCE) and of its processes' TCP connections.

Connections are read over netlink (sock_diag(7)) like by `ss -ti`, which needs no privileges. Fields
are those of `struct tcp_info` in linux/tcp.h, which only grows at its end.
"""

import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longtake.health.system import HealthProbe, Numbers, Rates, read_number, read_text

_LINK: Mapping[str, str] = {
    "link_up": "1: the link carries data",
    "link_speed_bits_per_second": "Speed on which both ends of the link have agreed",
    "link_receive_bytes_per_second": "Received over the link",
    "link_transmit_bytes_per_second": "Sent over the link",
}
_ETHERNET_COUNTS = {
    "link_receive_bytes_per_second": ("rx_bytes",),
    "link_transmit_bytes_per_second": ("tx_bytes",),
    "link_errors_per_second": ("rx_errors", "tx_errors"),
    "link_drops_per_second": ("rx_dropped", "tx_dropped"),
}


class LinkProbe(HealthProbe):
    """Base of health probes of network links; `root` is a folder of sysfs with network devices."""

    def __init__(self, root: Path) -> None:
        self._root, self._rates = root, Rates()

    def sample(self) -> Numbers:
        """Read the health numbers of all network links, as `name:device`."""
        found: Numbers = {}
        for device, folder in self.devices():
            found |= {f"{name}:{device}": each for name, each in self.read(device, folder).items()}
        return found

    def devices(self) -> Iterable[tuple[str, Path]]:
        """Find the names of the network devices, each with its folder in sysfs."""
        raise NotImplementedError

    def read(self, device: str, folder: Path) -> Numbers:
        """Read the health numbers of one network device; their names are without the device's."""
        raise NotImplementedError


class Ethernet(LinkProbe):
    """Health probe of physical network cards and bonds (Ethernet), by interface."""

    name = "ethernet"
    numbers: Mapping[str, str] = {
        **_LINK,
        "link_errors_per_second": "Damaged packets",
        "link_drops_per_second": "Dropped packets",
        "link_carrier_changes_total": "Times that the link went up or down",
    }

    def __init__(self, root: Path = Path("/sys/class/net")) -> None:
        super().__init__(root)

    def devices(self) -> Iterable[tuple[str, Path]]:
        folders = sorted(each.parent for each in self._root.glob("*/operstate"))
        real = [f for f in folders if (f / "device").exists() or (f / "bonding").exists()]
        # A container has none of these: then all interfaces but lo count.
        return [(each.name, each) for each in real or folders if each.name != "lo"]

    def read(self, device: str, folder: Path) -> Numbers:
        found: Numbers = {"link_up": float(read_text(folder / "operstate") in ("up", "unknown"))}
        megabits, changes = read_number(folder / "speed"), read_number(folder / "carrier_changes")
        if megabits is not None and megabits > 0:  # -1: unknown
            found["link_speed_bits_per_second"] = megabits * 1e6
        if changes is not None:
            found["link_carrier_changes_total"] = changes
        for name, files in _ETHERNET_COUNTS.items():
            counts = [read_number(folder / "statistics" / file) for file in files]
            known = [count for count in counts if count is not None]
            found |= self._rates.rate(name, device, sum(known) if known else None)
        return found


_WORD_BYTES = 4  # data counters count 32-bit words (InfiniBand Architecture, PortCounters)
_TRAFFIC = {
    "link_receive_bytes_per_second": ("port_rcv_data", _WORD_BYTES),
    "link_transmit_bytes_per_second": ("port_xmit_data", _WORD_BYTES),
    "link_waits_per_second": ("port_xmit_wait", 1),
}
_TOTALS = {
    "link_downed_total": "counters/link_downed",
    "link_recoveries_total": "counters/link_error_recovery",
    "link_symbol_errors_total": "counters/symbol_error",
    "link_receive_errors_total": "counters/port_rcv_errors",
    "link_transmit_discards_total": "counters/port_xmit_discards",
    "link_out_of_sequence_total": "hw_counters/out_of_sequence",
    "link_ack_timeouts_total": "hw_counters/local_ack_timeout_err",
    "link_congestion_notifications_total": "hw_counters/np_cnp_sent",
}
# Nodes are compared by their rates: totals depend on how long a node has been up.
_ERRORS = {
    "link_recoveries": "Times that the link recovered from errors",
    "link_symbol_errors": "Small errors on the wire",
    "link_receive_errors": "Packets that arrived damaged",
    "link_transmit_discards": "Packets that could not be sent",
    "link_out_of_sequence": "Packets that arrived out of order: others were lost",
    "link_ack_timeouts": "Packets that were not acknowledged in time",
}


class InfiniBand(LinkProbe):
    """Health probe of InfiniBand and RoCE ports, by port such as mlx5_0/1."""

    name = "infiniband"
    numbers: Mapping[str, str] = {
        **_LINK,
        "link_waits_per_second": "Moments at which the port had data and no credit to send",
        "link_downed_total": "Times that the link went down",
        "link_congestion_notifications_total": "Requests to a sender to be slower (RoCE)",
        **{f"{name}_total": text for name, text in _ERRORS.items()},
        **{f"{name}_per_second": text for name, text in _ERRORS.items()},
    }

    def __init__(self, root: Path = Path("/sys/class/infiniband")) -> None:
        super().__init__(root)

    def devices(self) -> Iterable[tuple[str, Path]]:
        folders = sorted(self._root.glob("*/ports/*"))
        return [(f"{each.parents[1].name}/{each.name}", each) for each in folders]

    def read(self, device: str, folder: Path) -> Numbers:
        found: Numbers = {}
        if (state := read_text(folder / "state")) is not None:  # "4: ACTIVE"
            found["link_up"] = float(state.startswith("4"))
        with suppress(IndexError, ValueError):  # "400 Gb/sec (4X NDR)"
            gigabits = float((read_text(folder / "rate") or "").split()[0])
            found["link_speed_bits_per_second"] = gigabits * 1e9
        totals = {name: read_number(folder / file) for name, file in _TOTALS.items()}
        found |= {name: count for name, count in totals.items() if count is not None}
        counts = {f"{name}_per_second": totals[f"{name}_total"] for name in _ERRORS}
        for name, (file, factor) in _TRAFFIC.items():
            count = read_number(folder / "counters" / file)
            counts[name] = None if count is None else count * factor
        for name, count in counts.items():
            found |= self._rates.rate(name, device, count)
        return found


# --- TCP connections.

_SOCK_DIAG, _BY_FAMILY = 4, 20  # from linux/netlink.h and linux/sock_diag.h
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_INFO = 2  # INET_DIAG_INFO
_ESTABLISHED = 1 << 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_FOUND = struct.Struct("=BBBB2H16s16sI8s5I")
_ATTRIBUTE = struct.Struct("=HH")
# Offsets in struct tcp_info: tcpi_retransmits, tcpi_last_ack_recv, tcpi_bytes_acked,
# tcpi_busy_time (and tcpi_rwnd_limited after it), and the end of these.
_RETRIES_AT, _SINCE_ACK_AT, _ACKED_AT, _BUSY_AT, _MIN_BYTES = 2, 56, 120, 168, 184
_ADDRESS_BYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}
_ANSWER_BYTES = 2**16
_NETLINK_SECONDS = 1.0
_IPV4_IN_IPV6 = "::ffff:"


@dataclass(frozen=True)
class TcpConnection:
    """One end of an established TCP connection, with its counters of traffic."""

    inode: int  # inode of the socket
    own: str  # own address
    peer: str  # address of the other end
    retries: int  # retransmissions of the data sent last
    answered_seconds: float  # time since the last acknowledgement
    acked_bytes: int  # total of acknowledged bytes
    busy_seconds: float  # total time with unacknowledged data, without time at a full window


def connections_of(pids: Iterable[int]) -> list[TcpConnection]:
    """Return the TCP connections of processes to other addresses than the node's own.

    Processes of other users, and families that the kernel does not report, are left out.
    """
    # sock_diag does not tell the process of a connection, but the inode of its socket.
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    if not inodes:
        return []
    found: list[TcpConnection] = []
    for family in _ADDRESS_BYTES:
        with suppress(OSError, struct.error):
            found += _of_family(family)
    return [each for each in found if each.inode in inodes and each.own != each.peer]


def _of_family(family: socket.AddressFamily) -> Iterator[TcpConnection]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(_NETLINK_SECONDS)
        # The kernel filters by state: on a busy node most sockets are in others.
        what = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED, b"")
        length = _HEADER.size + len(what)
        netlink.sendall(_HEADER.pack(length, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + what)
        while True:
            for kind, message in _parts(netlink.recv(_ANSWER_BYTES), _HEADER):
                if kind in (_ERROR, _DONE):
                    return
                if (found := _connection(message)) is not None:
                    yield found


def _parts(data: bytes, header: struct.Struct, at: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield kind and content of each netlink message, or attribute of one, from byte `at` on."""
    while at + header.size <= len(data):
        length, kind, *_ = header.unpack_from(data, at)
        yield kind, data[at + header.size : at + length]
        at += (max(length, header.size) + 3) & ~3  # aligned to 4 bytes, which `length` leaves out


def _connection(message: bytes) -> TcpConnection | None:
    """Parse a connection from sock_diag; None: `tcp_info` is too short (kernels before 4.10)."""
    family, _, _, _, _, _, own, peer, _, _, *rest = _FOUND.unpack_from(message)
    info = dict(_parts(message, _ATTRIBUTE, _FOUND.size)).get(_INFO, b"")
    if len(info) < _MIN_BYTES:
        return None
    busy, full = struct.unpack_from("=2Q", info, _BUSY_AT)
    return TcpConnection(
        inode=rest[-1],
        own=_address(family, own),
        peer=_address(family, peer),
        retries=info[_RETRIES_AT],
        answered_seconds=struct.unpack_from("=I", info, _SINCE_ACK_AT)[0] / 1e3,
        acked_bytes=struct.unpack_from("=Q", info, _ACKED_AT)[0],
        busy_seconds=max(0, busy - full) / 1e6,
    )


def _address(family: int, packed: bytes) -> str:
    known = socket.AddressFamily(family)
    text = socket.inet_ntop(known, packed[: _ADDRESS_BYTES[known]])
    # A socket for both versions shows IPv4 addresses in IPv6 form; nodes publish the plain ones.
    return text.removeprefix(_IPV4_IN_IPV6)


def _socket_inodes(pid: int) -> Iterator[int]:
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for file in files:
        with suppress(OSError):  # closed meanwhile
            name = str(file.readlink())
            if name.startswith("socket:["):
                yield int(name[len("socket:[") : -1])


# --- Latency and rates to other nodes. A slow link makes a collective equally slow for all ranks.
# The kernel's statistics tell links apart: on connections over the slow one, data is always in
# flight.

BUSY = "peer_busy_share"
RATE = "peer_send_bytes_per_second"
UNANSWERED = "peer_unanswered_seconds"
_UNANSWERED_RETRIES = 4  # about 3 s on a fast network; healthy links never need that many
_USED = 0.25  # fraction of the busiest peer's traffic below which a peer is not compared
_MIN_TRAFFIC_BYTES = 2**16


class PeerConnections(HealthProbe):
    """Health probe of the ranks' TCP traffic to other nodes since the last sample.

    Traffic over InfiniBand is not included: the probe `InfiniBand` counts it.

    Args:
        pids: returns the pids of the ranks.
    """

    name = "reach"
    numbers: Mapping[str, str] = {
        BUSY: "Share of the time with data in flight to that node, over ranks' TCP",
        RATE: "Bytes sent per second of the time with data in flight",
        UNANSWERED: "Time for which that node has acknowledged nothing, after four retries; else 0",
    }

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._hosts: Mapping[str, str] = {}
        # Keyed by inode and peer, as the kernel gives the inode of a closed socket to another one.
        self._before: dict[tuple[int, str], TcpConnection] = {}
        self._sampled_at = time.monotonic()
        self.addresses: list[str] = []  # addresses of this node that its ranks use

    def set_hosts(self, hosts: Mapping[str, str]) -> None:
        self._hosts = hosts

    def sample(self) -> Numbers:
        """Measure the ranks' TCP traffic to each node since the last sample, as `name:node`."""
        found = connections_of(self._pids())
        before, self._before = self._before, {(each.inode, each.peer): each for each in found}
        then, self._sampled_at = self._sampled_at, time.monotonic()
        self.addresses = sorted({each.own for each in found})
        pairs = [(before[key], each) for key, each in self._before.items() if key in before]
        unanswered: Numbers = {}
        for each in found:
            name = f"{UNANSWERED}:{self._hosts.get(each.peer, each.peer)}"
            # The time alone says nothing, as an idle connection has no acknowledgements either.
            is_unanswered = each.retries >= _UNANSWERED_RETRIES
            seconds = round(each.answered_seconds, 3) if is_unanswered else 0.0
            unanswered[name] = max(unanswered.get(name, 0.0), seconds)
        return peer_traffic(pairs, self._sampled_at - then, self._hosts) | unanswered


def peer_traffic(
    pairs: Iterable[tuple[TcpConnection, TcpConnection]],
    seconds: float,
    hosts: Mapping[str, str],
) -> Numbers:
    """Compute rate and busy time of the TCP traffic to each node that has enough of it.

    Args:
        pairs: each connection before and after.
        seconds: time between both.
        hosts: node of each address.
    """
    sent: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for before, after in pairs:
        host = hosts.get(after.peer, after.peer)
        sent[host] += after.acked_bytes - before.acked_bytes
        # Connections to one node share the link and are busy at the same time, so no sum.
        busy[host] = max(busy[host], after.busy_seconds - before.busy_seconds)
    least = max(_USED * max(sent.values(), default=0), _MIN_TRAFFIC_BYTES)
    found: Numbers = {}
    for host in (each for each, count in sent.items() if count >= least):
        found[f"{BUSY}:{host}"] = round(min(1.0, busy[host] / max(seconds, 1e-9)), 4)
        if busy[host]:
            found[f"{RATE}:{host}"] = round(sent[host] / busy[host])
    return found
