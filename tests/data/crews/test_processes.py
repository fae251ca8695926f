"""Errands in processes of this machine: what comes of items, and how long processes stay."""

import os
import pickle
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from longtake.data.catalog import Catalog
from longtake.data.crews.errand import Errand, Sign, in_order
from longtake.data.crews.hands import Hands, Order
from longtake.data.crews.processes import Processes, result_of
from longtake.data.scores.motion import MotionScore
from longtake.data.scores.own import OwnScore
from longtake.errors import ClipError, DataError

_OWN = """
import os
from longtake.errors import DataError

def process(clip):
    return os.getpid()

def ends_itself(clip):
    os._exit(3)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A folder with a module of functions."""
    (tmp_path / "own_processes.py").write_text(_OWN)
    return str(tmp_path)


@pytest.fixture
def shapes(shapes_catalog: Path) -> Catalog:
    """64 clips of eight frames."""
    return Catalog.load(shapes_catalog)


def test_results_come_with_their_items_numbers(shapes: Catalog) -> None:
    """However many processes there are, in whatever order they finish."""
    clips = list(shapes.clips())[:6]
    here = list(in_order(Processes(0).work(MotionScore(), clips)))
    found = dict(Processes(2).work(MotionScore(), iter(clips)))
    assert [found[number] for number in range(6)] == here
    assert list(in_order(Processes(2).work(MotionScore(), []))) == []


def test_what_an_errand_raises_ends_the_work(shapes: Catalog, own: str) -> None:
    """The error comes from the process as it is; the other items are not waited for."""
    results = Processes(1).work(OwnScore("own_processes:none", own), shapes.clips())
    with pytest.raises(DataError, match="has no function 'none'"):
        next(results)


def test_an_item_that_ends_its_process_is_lost(shapes: Catalog, own: str) -> None:
    """With how it ended; each of the others gets a process of its own."""
    clips = list(shapes.clips())[:2]
    errand = OwnScore("own_processes:ends_itself", own)
    lost = list(in_order(Processes(1).work(errand, clips)))
    assert [str(each) for each in lost] == [
        f"{clip.path}: scoring it ended the process (exit code 3)" for clip in clips
    ]
    assert all(isinstance(each, ClipError) for each in lost)


def test_processes_stay_for_the_next_items(shapes: Catalog, own: str) -> None:
    """Until they are closed: what they have loaded is there."""
    errand = OwnScore("own_processes:process", own)
    clip = shapes.clip(0)
    with Hands(Order.of(errand), 1) as hands:
        seen = [
            result_of(errand, clip, answer)
            for _ in range(2)
            for _, answer in hands.work([pickle.dumps(clip)])
        ]
    assert seen[0] == seen[1] != os.getpid()
    assert isinstance(seen[0], float)
    assert not Path(f"/proc/{int(seen[0])}").exists()


@dataclass(frozen=True)
class _Counting(Errand[int, int]):
    start: int

    @cached_property
    def loaded(self) -> object:
        return open  # stands for what cannot be sent

    def do(self, item: int, alive: Sign) -> int:
        return self.start + item

    def lost(self, item: int, reason: str) -> int:
        return -1


def test_what_an_errand_has_loaded_is_not_sent() -> None:
    """Its settings are, and each process loads for itself."""
    errand = _Counting(3)
    assert errand.loaded is open
    assert errand.__getstate__() == {"start": 3}
    assert list(in_order(Processes(0).work(errand, range(3)))) == [3, 4, 5]


def test_results_are_put_in_order() -> None:
    """Each is there as soon as those before it are."""
    taken: list[int] = []

    def results() -> Generator[tuple[int, str]]:
        for number in (1, 0, 3, 2):
            taken.append(number)
            yield number, "abcd"[number]

    ordered = in_order(results())
    assert [next(ordered), next(ordered)] == ["a", "b"]
    assert taken == [1, 0]
    assert list(ordered) == ["c", "d"]


def test_a_clips_error_is_the_same_in_another_process(shapes: Catalog, tmp_path: Path) -> None:
    """Path and reason are those that it was made with."""
    clip = shapes.clip(0)
    gone = replace(clip, media=replace(clip.media, path=str(tmp_path / "gone.mp4")))
    (error,) = in_order(Processes(1).work(MotionScore(), [gone]))
    assert isinstance(error, ClipError)
    assert error.path == tmp_path / "gone.mp4"
    assert str(error) == str(MotionScore().do(gone, lambda: None))
