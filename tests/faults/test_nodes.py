from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longtake.faults.expect import Evidence
from longtake.faults.faulty_processes import CLOCK_FILE, Hang
from longtake.faults.hangs import expect_diagnosis, expect_restart
from longtake.faults.health import expect_clock_event, expect_slow_rank
from longtake.faults.nodes import expect_disk_error
from longtake.faults.sandbox import ObservedEvent, TrainingSite
from longtake.fsio import write_json
from longtake.node_dir import this_node

_HANG = Hang(pid=7, at=10.0, file="/here/hangs.py", function="asleep", line=50)
_DECODING = replace(_HANG, clip="c0ffee", path="/clips/a.mp4")
_SUSPECT = {
    "pid": 7,
    "rank": 1,
    "function": "asleep",
    "file": "/there/hangs.py",
    "line": 50,
    "clip": "c0ffee",
    "clip_path": "/clips/a.mp4",
}
_DIAGNOSIS = {
    "suspects": [_SUSPECT],
    "waiting": [{"doing": "a collective", "ranks": [0], "host_count": 1}],
    "sentence": "gpu07: process 7 of rank 1 is in asleep (hangs.py:50), on a.mp4. Rank 0 waits.",
}


def _complaints(diagnosis: dict[str, Any], hang: Hang = _DECODING, at: float = 20.0) -> list[str]:
    evidence = Evidence()
    found = ObservedEvent({"token": "t"}, at)
    expect_diagnosis(evidence, found, diagnosis, hang, rank=1, waiting=[0])
    return evidence.complaints


def test_a_right_diagnosis_passes() -> None:
    assert _complaints(_DIAGNOSIS) == []
    stopped = Hang(7, 10.0, path="/clips/a.mp4")
    elsewhere = _DIAGNOSIS | {"suspects": [_SUSPECT | {"line": 3, "clip": "any"}]}
    assert _complaints(elsewhere, stopped) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pid": 8}, "the diagnosis names processes [8], and 7 hangs"),
        ({"rank": 0}, "its rank is said to be 0, not 1"),
        ({"line": 51}, "its line is said to be asleep (hangs.py:51), not asleep (hangs.py:50)"),
        (
            {"file": "/torch/x.py", "function": "wait"},
            "its line is said to be wait (x.py:50), not asleep (hangs.py:50)",
        ),
        ({"clip": "beef"}, "its clip is said to be beef, not c0ffee"),
        ({"clip_path": "/b.mp4"}, "its clip_path is said to be /b.mp4, not /clips/a.mp4"),
    ],
)
def test_a_wrong_suspect_is_complained_of(changes: dict[str, Any], complaint: str) -> None:
    assert _complaints(_DIAGNOSIS | {"suspects": [_SUSPECT | changes]}) == [complaint]


def test_late_diagnoses_further_suspects_and_vague_sentences_are_complained_of() -> None:
    assert _complaints(_DIAGNOSIS, at=26.0) == ["it was reported after 16.0 s, not within 15"]
    both = _DIAGNOSIS | {"suspects": [_SUSPECT, _SUSPECT | {"pid": 8}], "waiting": []}
    assert _complaints(both) == [
        "the diagnosis names processes [7, 8], and 7 hangs",
        "ranks [] are said to wait, and [0] do",
    ]
    vague = _DIAGNOSIS | {"sentence": "Process 7 hangs on a.mp4."}
    assert _complaints(vague) == [
        "the sentence does not say hangs.py:50: Process 7 hangs on a.mp4."
    ]
    evidence = Evidence()
    expect_diagnosis(evidence, None, {}, _HANG, rank=1, waiting=[])
    assert evidence.complaints == ["no event says that process 7 hangs"]


def test_the_rank_that_hung_must_be_killed_and_the_run_resume_before_it() -> None:
    bad, good = Evidence(), Evidence()
    expect_restart(bad, _HANG, ObservedEvent({"pid": 8}, 1.0), ObservedEvent({"step": 0}, 2.0))
    assert bad.complaints == [
        "rank 1 is process 7, and 8 was killed",
        "it resumed from step 0, and hung in 23",
    ]
    expect_restart(good, _HANG, ObservedEvent({"pid": 7}, 1.0), ObservedEvent({"step": 20}, 2.0))
    assert good.complaints == []


def test_a_slow_rank_must_be_named_with_how_slow_it_is() -> None:
    good, bad = Evidence(), Evidence()
    expect_slow_rank(good, ObservedEvent({"rank": 1, "percent": 12.1}, 9.0), 1.0, 0.1)
    assert good.complaints == []
    expect_slow_rank(bad, ObservedEvent({"rank": 0, "percent": 4.0}, 99.0), 1.0, 0.1)
    assert bad.complaints == [
        "it was reported after 98.0 s, not within 45",
        "rank 0 is said to be slow, and rank 1 is",
        "it is said to take 4.0% longer, and takes 10% longer",
    ]


def test_a_clock_event_must_be_the_only_one(tmp_path: Path) -> None:
    """Tiny steps of the machine's own clock are left out."""
    site, good, bad = TrainingSite(tmp_path), Evidence(), Evidence()
    write_json(site.folder / CLOCK_FILE, {"at": 1.0})
    found, node = ObservedEvent({"message": "Set."}, 2.0), this_node(site.run)
    node.append_event("clock_stepped", seconds=1e-9)
    node.append_event("clock_slewed", ppm=500.0)
    expect_clock_event(good, site, found, "clock_slewed", within=3.0)
    assert (good.complaints, good.detected_seconds) == ([], 1.0)
    node.append_event("clock_slewed", ppm=500.0)
    node.append_event("stalled", token="t")
    expect_clock_event(bad, site, ObservedEvent({"message": ""}, 9.0), "clock_slewed", within=3.0)
    assert bad.complaints == [
        "it was reported after 8.0 s, not within 3",
        "events of what did not happen: stalled",
        "it was reported 2 times",
    ]


def test_a_full_disk_must_be_named(trained: TrainingSite) -> None:
    good, bad = Evidence(), Evidence()
    output = "The run directory run cannot\nbe written: File too large."
    expect_disk_error(good, trained, 2, output)
    assert good.complaints == []
    expect_disk_error(bad, trained, 1, "Traceback (most recent call last)")
    assert bad.complaints == [
        "without room it ended with exit code 1, not 2",
        "the output does not say 'cannot be written'",
        "it ended with a traceback",
    ]
