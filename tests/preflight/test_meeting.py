"""How processes meet, and that a silent one is named in time. The store is torch's own."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from longtake.config import Recipe
from longtake.errors import LongtakeError
from longtake.preflight.finding import Judged
from longtake.preflight.meeting import LostError, Meeting
from longtake.preflight.place import Place
from longtake.preflight.setting import Facts, Setting, within

_SECONDS = 1.0


def _places(count: int) -> list[Place]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", free.getsockname()[1])
    first = Place(0, count, 0, "gpu0", "0", address, hosts_store=True, started_by="torchrun")
    rest = [
        replace(first, rank=rank, host=f"gpu{rank}", node=str(rank), hosts_store=False)
        for rank in range(1, count)
    ]
    return [first, *rest]


def test_all_tell_the_first_and_the_first_tells_all() -> None:
    """Facts come to rank 0 by rank, and nobody goes on before; a value of rank 0 comes to all."""

    def take_part(place: Place) -> tuple[dict[int, str], str]:
        meeting = Meeting(place, 5.0)
        told = meeting.gather("facts", f"of {place.host}")
        word: str = meeting.from_first("word", f"by {place.host}")
        meeting.end()
        return told, word

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(take_part, _places(3))
    assert first == ({0: "of gpu0", 1: "of gpu1", 2: "of gpu2"}, "by gpu0")
    assert second == third == ({}, "by gpu0")


def test_one_alone_waits_for_nobody() -> None:
    """Without a store the first is all there is."""
    meeting = Meeting(Place(host="laptop"), _SECONDS)
    assert meeting.gather("facts", [1]) == {0: [1]}
    assert meeting.from_first("word", "x") == "x"
    meeting.end()


def test_a_process_that_does_not_come_back_is_named_with_what_it_did() -> None:
    """Rank 0 says which node is silent and at what, within the time; the others hear of it."""
    silent = threading.Event()

    def take_part(place: Place) -> str:
        meeting = Meeting(place, _SECONDS)
        if place.rank == 2:
            meeting.doing("dataset")
            silent.wait(600)
            return ""
        with pytest.raises(LostError) as raised:
            meeting.gather("facts", place.rank)
        return str(raised.value)

    begun = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(take_part, place) for place in _places(3)]
        said = [each.result() for each in running[:2]]
        silent.set()
    assert said[0] == said[1]
    assert "gpu2 (rank 2), which was at: dataset" in said[0]
    assert time.monotonic() - begun < 60


def test_a_process_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm says on which hosts there should be one: the host that nobody came from is named."""
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[0-1]")
    first = replace(_places(2)[0], started_by="Slurm")
    with pytest.raises(LostError, match=r"gpu1 \(rank 1\).*never came") as raised:
        Meeting(first, 0.2)
    assert raised.value.silent == {1: ""}


def test_a_first_process_that_cannot_be_reached() -> None:
    """Nobody listens where all should meet: an error with address and name, within the time."""
    second = _places(2)[1]
    with pytest.raises(LongtakeError, match=r"gpu1 \(rank 1\) cannot reach 127.0.0.1:\d+"):
        Meeting(second, 0.2)


class _Hanging:
    NAME = "hanging"

    def __init__(self) -> None:
        self.released = threading.Event()

    def measure(self, setting: Setting) -> Facts:
        self.released.wait(600)
        return {}

    def judge(self, facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
        return Judged()


def test_a_check_that_hangs_is_left_behind() -> None:
    """As on a disk that does not answer: the check has failed, and the process goes on."""
    check = _Hanging()
    begun = time.monotonic()
    found = within(0.2, check, Setting(Place()))
    check.released.set()
    assert found == {"failed": "it took longer than 0.2 s", "hangs": True}
    assert time.monotonic() - begun < 60


class _Raising(_Hanging):
    def measure(self, setting: Setting) -> Facts:
        raise OSError(5, "Input/output error", str(Path("/store")))


def test_a_check_that_raises_has_failed() -> None:
    """What one check meets does not keep the others from being told."""
    found = within(5.0, _Raising(), Setting(Place()))
    assert "Input/output error" in found["failed"]
