"""How ranks ended decides whether they are started again, and what is reported."""

from pathlib import Path
from typing import Literal

import pytest

from longtake.cluster.ranks import classify_exit
from longtake.failures import RankFailure


@pytest.fixture
def logs(tmp_path: Path) -> dict[int, Path]:
    """The logs of two ranks."""
    paths = {rank: tmp_path / f"rank_{rank:04d}.log" for rank in (0, 1)}
    for rank, path in paths.items():
        path.write_text(f"Traceback\n  word {rank}\n\n")
    return paths


def _failure(rank: int, kind: Literal["error", "exception", "killed", "ended"]) -> RankFailure:
    return RankFailure(rank, 2, "0a1b2c3d", 77, 12, "forward", kind, "it broke", host="node1")


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_mistake_is_not_retried(logs: dict[int, Path], is_recorded: bool) -> None:
    """Neither on the node of the rank that made it, nor where ranks only lost that peer."""
    failures = [_failure(1, "error")] if is_recorded else []
    ended = classify_exit({0: 69, 1: 2}, failures, logs)
    assert (ended.code, ended.kind) == (2, "mistake")
    if is_recorded:
        assert classify_exit({0: 69}, failures, logs).code == 2


@pytest.mark.parametrize("code", [75, 130, 143])
def test_a_requested_stop_is_no_crash(logs: dict[int, Path], code: int) -> None:
    ended = classify_exit({0: code, 1: code}, [], logs)
    assert (ended.code, ended.kind) == (code, "stopped")


def test_the_first_rank_to_fail_is_reported_not_those_that_lost_it(logs: dict[int, Path]) -> None:
    """With host, step and error; the code of a kill is 128 + the signal, as in shells."""
    failures = [_failure(1, "killed"), _failure(0, "exception")]
    ended = classify_exit({0: 69, 1: -9}, failures, logs)
    assert (ended.code, ended.kind) == (137, "crashed")
    assert ended.message == "Rank 1 of 2 on node1 failed at step 12 (forward): it broke."


def test_a_rank_without_a_failure_record_is_reported_by_its_log(logs: dict[int, Path]) -> None:
    """Such as one that failed while it imported."""
    ended = classify_exit({0: 69, 1: 1}, [], logs)
    assert ended.code == 1
    assert ended.message.startswith("Rank 1 ended with exit code 1. Its last line: word 1 All of")
    assert str(logs[1]) in ended.message
