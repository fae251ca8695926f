"""Leases: one holder at a time, and what is lost when it dies."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.build import not_none, wait_until

import longtake.lease
from longtake.lease import Leases, history, kept


def _elsewhere(folder: Path, number: int) -> None:
    path = folder / f"{number}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "place": "another machine"}))


def test_one_has_it_until_it_is_given_back(tmp_path: Path) -> None:
    first, second = Leases(60, {"server": "a"}), Leases(60, {"server": "b"})
    lease = not_none(first.take(tmp_path / "lease"))
    assert second.take(tmp_path / "lease") is None
    lease.end("done", videos=3)
    assert second.take(tmp_path / "lease") is not None
    one, two = history(tmp_path / "lease")
    assert (one["server"], one["ended"], one["videos"]) == ("a", "done", 3)
    assert (two["server"], two["ended"]) == ("b", None)
    assert not lease.is_held


def test_of_many_who_ask_at_once_one_gets_it(tmp_path: Path) -> None:
    for round_ in range(50):
        folder, barrier = tmp_path / str(round_), threading.Barrier(8)
        won: list[int] = []

        def ask(
            folder: Path = folder, barrier: threading.Barrier = barrier, won: list[int] = won
        ) -> None:
            leases = Leases(60, {})
            barrier.wait()
            if (lease := leases.take(folder)) is not None:
                won.append(lease.number)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert won == [0]


def test_a_process_of_this_machine_that_died_has_lost_it_at_once(tmp_path: Path) -> None:
    """Its number no longer exists: nobody has to wait for the lease to run out."""
    code = "import sys; from pathlib import Path; from longtake.lease import Leases\n"
    code += "assert Leases(3600, {}).take(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lease")], check=True, cwd=tmp_path)
    assert not_none(Leases(3600, {}).take(tmp_path / "lease")).number == 1


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_silent_holder_elsewhere_loses_it_and_one_that_beats_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = tmp_path / "lease", _Clock()
    assert Leases(10.0, {}).take(folder)
    _elsewhere(folder, 0)
    monkeypatch.setattr(longtake.lease, "time", clock)
    waiting = Leases(600.0, {})
    assert waiting.take(folder) is None
    record = json.loads((folder / "0.json").read_text())
    clock.now += 9.0
    (folder / "0.json").write_text(json.dumps({**record, "beat": 1}))
    assert waiting.take(folder) is None  # it lives: the wait begins again
    clock.now += 9.0
    assert waiting.take(folder) is None
    clock.now += 2.0
    assert waiting.take(folder) is not None


def test_a_kept_lease_beats(tmp_path: Path) -> None:
    lease = not_none(Leases(0.04, {}).take(tmp_path / "lease"))
    with kept(lease):
        wait_until(lambda: history(tmp_path / "lease")[0]["beat"] >= 3)
    assert history(tmp_path / "lease")[0]["pid"] == os.getpid()


def test_a_kept_lease_does_not_beat_while_its_work_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, beats = _Clock(), list[Callable[[], object]]()

    @contextmanager
    def by_hand(name: str, work: Callable[[], object], seconds: float) -> Iterator[None]:
        beats.append(work)
        yield

    monkeypatch.setattr(longtake.lease, "time", clock)
    monkeypatch.setattr(longtake.lease, "periodic", by_hand)
    lease = not_none(Leases(60.0, {}).take(tmp_path / "lease"))
    with kept(lease, stuck_seconds=10.0):
        for seconds, beat in ((9.0, 1), (2.0, 1), (9.0, 1)):
            clock.now += seconds
            beats[0]()
            assert lease.record["beat"] == beat
        lease.moved()
        beats[0]()
        assert lease.record["beat"] == 2
