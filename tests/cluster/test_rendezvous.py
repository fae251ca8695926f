"""Processes meet in a store of torch, and a silent one is named in time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.build import listening, own_address, wait_until

from longtake.cluster import rendezvous
from longtake.cluster.rendezvous import Rendezvous, SilentProcessError
from longtake.cluster.topology import ProcessInfo
from longtake.errors import LongtakeError

_SECONDS = 120.0


def _processes(count: int) -> list[ProcessInfo]:
    first = ProcessInfo(0, count, 0, "gpu0", "0", own_address(), serves_store=True)
    rest = [
        replace(first, rank=rank, host=f"gpu{rank}", node=str(rank), serves_store=False)
        for rank in range(1, count)
    ]
    return [first, *rest]


def test_facts_go_to_rank_0_and_a_value_of_rank_0_to_all() -> None:
    def take_part(process: ProcessInfo) -> tuple[dict[int, str], str]:
        own = Rendezvous(process, _SECONDS)
        found = own.gather("facts", f"of {process.host}")
        word: str = own.from_first("word", f"by {process.host}")
        own.close()
        return found, word

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(take_part, _processes(3))
    assert first == ({0: "of gpu0", 1: "of gpu1", 2: "of gpu2"}, "by gpu0")
    assert second == third == ({}, "by gpu0")


def test_a_single_process_needs_no_store() -> None:
    own = Rendezvous(ProcessInfo(host="laptop"), _SECONDS)
    assert own.gather("facts", [1]) == {0: [1]}
    assert own.from_first("word", "x") == "x"
    own.close()


def test_a_store_on_loopback_is_not_reached_from_the_network() -> None:
    """Torch itself would listen on all addresses."""
    [only] = _processes(1)
    own = Rendezvous(only, _SECONDS)
    assert only.address is not None
    hosts = {host for host, port in listening() if port == only.address[1]}
    own.close()
    assert hosts == {only.address[0]}


def test_a_process_that_does_not_come_back_is_named_with_what_it_did() -> None:
    """Rank 0 says which node is silent and at what, within the time; the others hear of it."""
    told, silent = threading.Event(), threading.Event()

    def take_part(process: ProcessInfo) -> str:
        own = Rendezvous(process, _SECONDS)
        if process.rank == 2:
            own.doing("dataset")
            told.set()
            silent.wait(600)
            return ""
        told.wait(600)
        if process.is_first:
            store = own.store
            assert store is not None
            wait_until(lambda: store.check(["preflight/facts/1"]))
            own.seconds = 0.1
        with pytest.raises(SilentProcessError) as raised:
            own.gather("facts", process.rank)
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(take_part, process) for process in _processes(3)]
        said = [each.result() for each in running[:2]]
        silent.set()
    assert said[0] == said[1]
    assert "gpu2 (rank 2), which was at: dataset" in said[0]


def test_a_process_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its host, where Slurm or ssh says on which hosts there should be one."""
    connected = rendezvous._store
    monkeypatch.setattr(rendezvous, "_store", lambda process, _: connected(process, _SECONDS))
    first = replace(_processes(2)[0], expected_hosts=("gpu0", "gpu1"))
    with pytest.raises(SilentProcessError, match=r"gpu1 \(rank 1\).*never came") as raised:
        Rendezvous(first, 0.2)
    assert raised.value.silent == {1: ""}


def test_a_first_process_that_cannot_be_reached() -> None:
    second = _processes(2)[1]
    with pytest.raises(LongtakeError, match=r"gpu1 \(rank 1\) cannot reach 127[.\d]+:\d+"):
        Rendezvous(second, 0.2)
