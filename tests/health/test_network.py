"""The network of a node: TCP connections of its ranks, by what the kernel says."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from longtake.health.network import PeerConnections, TcpConnection, connections_of
from longtake.heartbeat import HeartbeatWriter
from longtake.monitor.node_health import _rank_pids

Ends = tuple[socket.socket, socket.socket]
_HERE, _THERE = "127.0.0.2", "127.0.0.1"


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server((_THERE, 0)) as server:
        here = socket.create_connection(server.getsockname(), source_address=(_HERE, 0))
        there, _ = server.accept()
        with here, there:
            yield here, there


def _of(found: list[TcpConnection], own: str) -> TcpConnection:
    (one,) = [each for each in found if each.own == own]
    return one


def test_both_ends_of_a_connection_are_there_with_what_was_confirmed(ends: Ends) -> None:
    here, there = ends
    here.sendall(b"x" * 10_000)
    there.recv(10_000)
    found = connections_of([os.getpid()])
    mine = _of(found, _HERE)
    assert (mine.peer, mine.inode) == (_THERE, os.fstat(here.fileno()).st_ino)
    assert mine.acked_bytes >= 10_000
    assert mine.retries == 0
    assert _of(found, _THERE).peer == _HERE


def test_connections_of_others_do_not_count(ends: Ends) -> None:
    """Nor those of processes that are gone."""
    assert connections_of([]) == []
    assert connections_of([2**22 - 1]) == []
    assert all(each.own != _HERE for each in connections_of([os.getppid()]))


def test_what_nobody_takes_is_not_the_links_fault(ends: Ends) -> None:
    """A rank that is late reads late; its peer's connection is not busy for it."""
    here, _ = ends
    here.settimeout(0.2)
    with suppress(TimeoutError):
        while True:
            here.send(b"x" * 2**16)
    before = _of(connections_of([os.getpid()]), _HERE)
    time.sleep(0.5)
    after = _of(connections_of([os.getpid()]), _HERE)
    assert after.busy_seconds - before.busy_seconds < 0.25


def test_a_peer_has_its_nodes_name_or_else_its_address(ends: Ends, tmp_path: Path) -> None:
    here, there = ends
    heart = HeartbeatWriter(tmp_path, "rank", rank=3)
    heart.set_phase("collective")
    reach = PeerConnections(lambda: _rank_pids(tmp_path))
    reach.set_hosts({_THERE: "gpu08"})
    first = reach.sample()
    assert first == {f"peer_unanswered_seconds:{each}": 0.0 for each in ("gpu08", _HERE)}
    for _ in range(20):
        here.sendall(b"x" * 20_000)
        left = 20_000
        while left:
            left -= len(there.recv(left))
    found = reach.sample()
    assert 0 <= found["peer_busy_share:gpu08"] <= 1
    assert found.get("peer_send_bytes_per_second:gpu08", 1) > 0
    assert f"peer_busy_share:{_HERE}" not in found  # where next to nothing was sent
    assert reach.addresses == [_THERE, _HERE]
    heart.close()
    assert reach.sample() == {}
    heart.remove()
