"""A drill of a hang can fail: whoever is wrongly named, or named too late, is said to be."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longtake.drill import culprit, hangs
from longtake.drill.faults import (
    clock_slew,
    clock_step_back,
    dead_watcher,
    full_run_disk,
    hung_rank,
    slow_rank,
)
from longtake.drill.faults import frozen_loader_worker as frozen
from longtake.drill.hangs import Hang
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.verdict import Verdict
from longtake.stacks import state_of

_HANG = Hang(pid=7, at=10.0, file="/here/hangs.py", function="asleep", line=50)
_DECODING = dataclasses.replace(_HANG, clip="c0ffee", path="/clips/a.mp4")
_SUSPECT = {
    "pid": 7,
    "rank": 1,
    "function": "asleep",
    "file": "/there/hangs.py",
    "line": 50,
    "clip": "c0ffee",
    "clip_path": "/clips/a.mp4",
}
_SAID = {
    "suspects": [_SUSPECT],
    "waiting": [{"doing": "a collective", "ranks": [0], "host_count": 1}],
    "sentence": "gpu07: process 7 of rank 1 is in asleep (hangs.py:50), on a.mp4. Rank 0 waits.",
}


def _complaints(said: dict[str, Any], hang: Hang = _DECODING, at: float = 20.0) -> list[str]:
    verdict = Verdict("a-fault")
    culprit.judge(verdict, Sighting({"token": "t"}, at), said, hang, rank=1)
    culprit.must_wait(verdict, said, [0])
    return verdict.complaints


def test_a_hang_that_is_named_as_it_must_be_passes() -> None:
    """Wherever the program lies; a process that was stopped from outside has no line to name."""
    assert _complaints(_SAID) == []
    stopped = Hang(7, 10.0, "", "", 0, path="/clips/a.mp4")
    elsewhere = _SAID | {"suspects": [_SUSPECT | {"line": 3, "clip": "any"}]}
    assert _complaints(elsewhere, stopped) == []


def test_a_hang_that_nobody_names_fails_the_drill() -> None:
    """Without a word of it, with a word and no suspect, or 5 s too late."""
    verdict = Verdict("a-fault")
    culprit.judge(verdict, None, {}, _HANG, rank=1)
    assert verdict.complaints == ["no event says that process 7 hangs"]
    assert verdict.detected_seconds is None
    assert _complaints(_SAID, at=30.0) == ["it was named after 20.0 s, not within 15"]
    assert _complaints({}) == [
        "the verdict names processes [], and 7 hangs",
        "the sentence does not say 7, a.mp4, hangs.py:50: ",
        "ranks [] are said to wait, and [0] do",
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pid": 8}, "the verdict names processes [8], and 7 hangs"),
        ({"rank": 0}, "it is taken for rank 0's, and is rank 1's"),
        ({"line": 51}, "it is said to be in asleep (hangs.py:51), not asleep (hangs.py:50)"),
        (
            {"file": "/torch/x.py", "function": "wait"},
            "it is said to be in wait (x.py:50), not asleep (hangs.py:50)",
        ),
        ({"clip": "beef"}, "it is said to decode the clip beef, not c0ffee"),
        ({"clip_path": "/b.mp4"}, "it is said to decode /b.mp4, not /clips/a.mp4"),
    ],
)
def test_another_culprit_fails_the_drill(changes: dict[str, Any], complaint: str) -> None:
    """Another process, rank, line or clip."""
    assert _complaints(_SAID | {"suspects": [_SUSPECT | changes]}) == [complaint]


def test_an_innocent_beside_the_culprit_fails_the_drill() -> None:
    """So does one who waits and is not said to, and a sentence that leaves out the line."""
    both = _SAID | {"suspects": [_SUSPECT, _SUSPECT | {"pid": 8}], "waiting": []}
    assert _complaints(both) == [
        "the verdict names processes [7, 8], and 7 hangs",
        "ranks [] are said to wait, and [0] do",
    ]
    vague = _SAID | {"sentence": "Process 7 hangs on a.mp4."}
    assert _complaints(vague) == [
        "the sentence does not say hangs.py:50: Process 7 hangs on a.mp4."
    ]


def test_a_worker_that_nobody_ended_fails_the_drill(trained: Place) -> None:
    """Though the run came to its end: by the time-out of its pool, or because it woke up."""
    verdict = Verdict("a-fault")
    frozen.judge_end(verdict, trained, _HANG, None, trained)
    assert verdict.complaints == ["process 7 was to be ended by the watcher, and None was"]
    good = Verdict("a-fault")
    frozen.judge_end(good, trained, _HANG, Sighting({"pid": 7}, 1.0), trained)
    assert good.complaints == []
    assert good.is_equal is True


def test_a_restart_that_is_none_fails_the_drill() -> None:
    """The rank that hung has to be killed, and the run to go on from a checkpoint before."""
    verdict = Verdict("a-fault")
    hung_rank.judge_restart(verdict, _HANG, Sighting({"pid": 8}, 1.0), Sighting({"step": 0}, 2.0))
    assert verdict.complaints == [
        "rank 1 is process 7, and 8 was killed",
        "it went on from step 0, and hung in 23",
    ]
    good = Verdict("a-fault")
    hung_rank.judge_restart(good, _HANG, Sighting({"pid": 7}, 1.0), Sighting({"step": 20}, 2.0))
    assert good.complaints == []


def test_a_clock_has_to_be_off_by_what_it_is_said_to() -> None:
    """To a millisecond, with its sign; a rate to what the machine's own may be off."""
    for seconds, is_right in ((-2.4995, True), (-2.497, False), (2.5, False)):
        verdict = Verdict("a-fault")
        clock_step_back.judge_size(verdict, Sighting({"seconds": seconds}, 1.0))
        assert (not verdict.complaints) is is_right
    for ppm, is_right in ((540.0, True), (-500.0, False), (250.0, False)):
        verdict = Verdict("a-fault")
        clock_slew.judge_rate(verdict, Sighting({"ppm": ppm}, 1.0))
        assert (not verdict.complaints) is is_right


def test_a_slow_rank_has_to_be_named_with_how_slow_it_is() -> None:
    """To five points in a hundred, in time; the other rank is not it."""
    good = Sighting({"rank": 1, "percent": 12.1}, 9.0)
    assert slow_rank.judge("a-fault", good, 1.0, 0.1).complaints == []
    bad = Sighting({"rank": 0, "percent": 4.0}, 99.0)
    assert slow_rank.judge("a-fault", bad, 1.0, 0.1).complaints == [
        "it was told of after 98.0 s, not within 45",
        "rank 0 is said to be slow, and rank 1 is",
        "it is said to take 4.0% longer, and takes 10% longer",
    ]
    none = slow_rank.judge("a-fault", None, 1.0, 0.1)
    assert none.complaints == ["no event says that a rank is slow"]


def test_a_run_without_another_watcher_fails_the_drill(trained: Place) -> None:
    """So does one that has it too late."""
    verdict = dead_watcher.judge(trained, 7, 1.0, None, trained)
    assert verdict.complaints == ["no watcher has taken the place of process 7"]
    verdict = dead_watcher.judge(trained, 7, 1.0, Sighting({"pid": 8}, 7.5), trained)
    assert verdict.complaints == ["another watches after 6.5 s, not within 5"]


def test_a_full_disk_has_to_be_told_of(trained: Place) -> None:
    """By the watcher, which must not die of it, and by the trainer, which may."""
    assert full_run_disk.judge_watcher(None, 7, 8) == [
        "the watcher was process 7, and 8 afterwards",
        "no event tells that the watcher found no room",
    ]
    assert full_run_disk.judge_watcher(Sighting({}, 1.0), 7, 7) == []
    said = "The run directory run cannot\nbe written: File too large."
    assert full_run_disk.judge_end(2, said, trained) == []
    assert full_run_disk.judge_end(1, "Traceback (most recent call last)", trained) == [
        "without room it ended with exit code 1 and not 2",
        "nobody is told that the run directory cannot be written",
        "it ended with a traceback",
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a process that hangs in some way, if none has hung in its folder; ends it."""
    started: list[subprocess.Popen[bytes]] = []

    def start_(how: str) -> subprocess.Popen[bytes]:
        program = f"from longtake.drill import hangs; hangs.hang_once(hangs.{how}, 'c0ffee')"
        started.append(subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path))
        return started[-1]

    yield start_
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.parametrize("how", ["asleep", "in_c", "holding_gil", "stopped"])
def test_a_process_says_where_it_hangs_before_it_does(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, how: str
) -> None:
    """And does hang; another in the same folder does not."""
    process = start(how)
    word = _wait_for_word(tmp_path)
    lines = Path(hangs.__file__).read_text().splitlines()
    assert (word.pid, word.function, word.clip) == (process.pid, how, "c0ffee")
    assert word.at <= time.monotonic()
    wanted = {"asleep": "time.sleep", "stopped": "os.kill"}.get(how, ".read(")
    assert wanted in lines[word.line - 1]
    deadline = time.monotonic() + 10
    while state_of(process.pid) != ("T" if how == "stopped" else "S"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert start(how).wait(timeout=300) == 0
    assert process.poll() is None


def _wait_for_word(folder: Path) -> Hang:
    deadline = time.monotonic() + 20
    while (word := hangs.read_word(folder)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return word
