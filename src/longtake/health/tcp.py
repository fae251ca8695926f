"""What the kernel knows of processes' TCP connections: how busy each is, and who answers.

Asked over netlink (sock_diag(7)), as `ss -ti` does, which needs no rights; fields are those of
`struct tcp_info` in linux/tcp.h, which only ever grows at its end.
"""

import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SOCK_DIAG, _BY_FAMILY = 4, 20  # of linux/netlink.h and linux/sock_diag.h
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_INFO = 2  # INET_DIAG_INFO
_ESTABLISHED = 1 << 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_FOUND = struct.Struct("=BBBB2H16s16sI8s5I")
_ATTRIBUTE = struct.Struct("=HH")
_RETRIES_AT, _SINCE_ANSWER_AT, _ACKED_AT, _BUSY_AT, _LONG_ENOUGH = 2, 56, 120, 168, 184
_ADDRESS_BYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}
_BYTES = 2**16
_SECONDS = 1.0
_IPV4_IN_IPV6 = "::ffff:"


@dataclass(frozen=True)
class Connection:
    """One end of an established connection.

    Attributes:
        inode: of the socket.
        own: this end's address.
        peer: the other's.
        retries: how often what was sent last was sent again without an answer.
        answered_seconds: since the other end last confirmed anything.
        acked_bytes: that it has confirmed, ever.
        busy_seconds: in which something was on its way or waited to be, ever, without those in
            which the other end took nothing more.
    """

    inode: int
    own: str
    peer: str
    retries: int
    answered_seconds: float
    acked_bytes: int
    busy_seconds: float


def connections_of(pids: Iterable[int]) -> list[Connection]:
    """Those of some processes to other addresses than their own; none if the kernel says nothing.

    Args:
        pids: processes of this user.
    """
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    if not inodes:
        return []
    return [each for each in _all() if each.inode in inodes and each.own != each.peer]


def _all() -> Iterator[Connection]:
    for family in _ADDRESS_BYTES:
        with suppress(OSError, struct.error):
            yield from _of_family(family)


def _of_family(family: socket.AddressFamily) -> Iterator[Connection]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asked:
        asked.settimeout(_SECONDS)
        what = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED, b"")
        length = _HEADER.size + len(what)
        asked.sendall(_HEADER.pack(length, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + what)
        while True:
            answer = asked.recv(_BYTES)
            for kind, message in _messages(answer):
                if kind in (_ERROR, _DONE):
                    return
                if (found := _connection(message)) is not None:
                    yield found


def _messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(answer):
        length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
        yield kind, answer[at + _HEADER.size : at + length]
        at += _aligned(max(length, _HEADER.size))


def _connection(message: bytes) -> Connection | None:
    """None: this kernel says too little (before 4.10)."""
    family, _, _, _, _, _, own, peer, _, _, *rest = _FOUND.unpack_from(message)
    info = _attribute(message, _INFO)
    if len(info) < _LONG_ENOUGH:
        return None
    busy, full = struct.unpack_from("=2Q", info, _BUSY_AT)
    return Connection(
        inode=rest[-1],
        own=_address(family, own),
        peer=_address(family, peer),
        retries=info[_RETRIES_AT],
        answered_seconds=struct.unpack_from("=I", info, _SINCE_ANSWER_AT)[0] / 1e3,
        acked_bytes=struct.unpack_from("=Q", info, _ACKED_AT)[0],
        busy_seconds=max(0, busy - full) / 1e6,
    )


def _attribute(message: bytes, wanted: int) -> bytes:
    at = _FOUND.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == wanted:
            return message[at + _ATTRIBUTE.size : at + length]
        at += _aligned(max(length, _ATTRIBUTE.size))
    return b""


def _address(family: int, packed: bytes) -> str:
    known = socket.AddressFamily(family)
    text = socket.inet_ntop(known, packed[: _ADDRESS_BYTES[known]])
    return text.removeprefix(_IPV4_IN_IPV6)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _inodes(pid: int) -> Iterator[int]:
    """Of a process's sockets."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        files = list(folder.iterdir())
    except OSError:
        return
    for file in files:
        with suppress(OSError):  # it was closed meanwhile
            name = str(file.readlink())
            if name.startswith("socket:["):
                yield int(name[len("socket:[") : -1])
