"""How a verdict reads."""

from dataclasses import replace

import pytest

from longtake.monitor.diagnosis import (
    MissingIn,
    StallDiagnosis,
    StallSnapshot,
    Suspect,
    WaitingRanks,
)
from longtake.monitor.sentences import describe, for_seconds, ranges

_SNAPSHOT = StallSnapshot(ranks=[], decoding={}, lost=[], rounds=3, world_size=0)
_WORKER = Suspect(
    host="gpu07",
    pid=4121,
    role="decode",
    rank=3,
    function="read",
    file="/opt/lib/python3.11/site-packages/longtake/data/decode.py",
    line=88,
    doing="decode",
    seconds=12.2,
    clip="a-clip",
    clip_path="clips/a.mp4",
    state="S",
)
_RANK = replace(
    _WORKER, role="rank", clip="", clip_path="", doing="backward", step=120, seconds=250.0
)


def _sentence(
    *suspects: Suspect,
    waiting: tuple[WaitingRanks, ...] = (),
    missing: tuple[MissingIn, ...] = (),
    silent: tuple[str, ...] = (),
) -> str:
    diagnosis = StallDiagnosis(
        token="t",
        time="",
        host="gpu01",
        kind="stuck",
        launch="one",
        step=120,
        phase="backward",
        seconds=None,
        limit=None,
        suspects=suspects,
        waiting=waiting,
        silent_nodes=silent,
        missing_in=missing,
        sentence="",
    )
    return describe(diagnosis, _SNAPSHOT)


def test_a_worker_s_sentence_names_all_that_is_known() -> None:
    waiting = WaitingRanks("data", (3,), 1), WaitingRanks("a collective", (0, 1, 2, 4), 2)
    assert _sentence(_WORKER, waiting=waiting) == (
        "gpu07: decode worker 4121 of rank 3 has been in read (longtake/data/decode.py:88) for "
        "12 s, on clip clips/a.mp4, and has not moved in 3 rounds; it uses no processor time. "
        "Rank 3 only waits for data, and ranks 0-2, 4 for a collective."
    )


@pytest.mark.parametrize(
    ("suspect", "expected"),
    [
        (
            _RANK,
            "gpu07: rank 3 (process 4121) has been in read (longtake/data/decode.py:88) for 4 min "
            "10 s, in the backward pass of step 120, and has not moved in 3 rounds; it uses no "
            "processor time.",
        ),
        (
            replace(_RANK, thread="checkpoint_0", doing="checkpoint", cpu_share=0.25),
            "gpu07: thread checkpoint_0 of rank 3 (process 4121) has been in read "
            "(longtake/data/decode.py:88) for 4 min 10 s, at the checkpoint after step 120, and "
            "has not moved in 3 rounds; it uses 0.25 of a core.",
        ),
        (
            replace(_RANK, state="T", function=""),
            "gpu07: rank 3 (process 4121) is stopped (state T: by a signal); it has been in the "
            "backward pass of step 120 for 4 min 10 s, and has not moved in 3 rounds; it uses no "
            "processor time.",
        ),
        (
            replace(_RANK, state="", doing="forward"),
            "gpu07: rank 3 (process 4121) is gone: 4 min 10 s ago it was in the forward pass of "
            "step 120, and it did not end as it should.",
        ),
        (
            replace(_RANK, moved=True, cpu_share=1.02),
            "gpu07: rank 3 (process 4121) has been in read (longtake/data/decode.py:88) for 4 min "
            "10 s, in the backward pass of step 120; it is slow and not stuck: it has moved in 3 "
            "rounds, and uses a full core.",
        ),
        (
            replace(_RANK, waits_in="collective", within="all_reduce (torch/x.py:1)"),
            "gpu07: rank 3 (process 4121) has been in read (longtake/data/decode.py:88), and there "
            "in all_reduce (torch/x.py:1), for 4 min 10 s, in the backward pass of step 120; none "
            "of the others has joined that collective.",
        ),
        (Suspect("gpu09", 0, "node", None), "gpu09 gives no answer."),
    ],
)
def test_each_kind_of_culprit_has_its_words(suspect: Suspect, expected: str) -> None:
    assert _sentence(suspect) == expected


def test_further_suspects_and_the_flight_recorder_follow() -> None:
    more = [replace(_RANK, rank=rank, pid=rank) for rank in range(6)]
    missing = MissingIn("mine", "nccl:all_reduce", (1, 2)), MissingIn("x", "op", (4,), True)
    said = _sentence(_WORKER, *more, missing=missing, silent=("gpu09",))
    assert "Also: gpu07: rank 0 (process 0) in read" in said
    assert "; 3 more." in said
    assert "No answer came from gpu09." in said
    assert "By the flight recorder ranks 1-2 never joined nccl:all_reduce of mine." in said
    assert "By the flight recorder rank 4 joined and has not finished op of x." in said


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 6, 8, 9], "0-2, 6, 8-9"), (list(range(900)), "0-899")],
)
def test_ranks_are_told_in_ranges(ranks: list[int], expected: str) -> None:
    assert ranges(ranks) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.42, "0.4 s"), (12.4, "12 s"), (119.6, "120 s"), (250, "4 min 10 s"), (7500, "2 h 5 min")],
)
def test_times_are_told_as_people_do(seconds: float, expected: str) -> None:
    assert for_seconds(seconds) == expected
