"""From how ranks ended follows whether they are started again, and what people are told."""

from pathlib import Path
from typing import Literal

import pytest

from longtake.failures import RankFailure
from longtake.launch.ending import judge


@pytest.fixture
def logs(tmp_path: Path) -> dict[int, Path]:
    """What two ranks said."""
    paths = {rank: tmp_path / f"rank_{rank:04d}.log" for rank in (0, 1)}
    for rank, path in paths.items():
        path.write_text(f"Traceback\n  word {rank}\n\n")
    return paths


def _failure(rank: int, kind: Literal["error", "exception", "killed", "ended"]) -> RankFailure:
    return RankFailure(rank, 2, "0a1b2c3d", 77, 12, "forward", kind, "it broke", host="node1")


@pytest.mark.parametrize("trail", [True, False])
def test_a_mistake_is_not_tried_again(logs: dict[int, Path], trail: bool) -> None:
    """Neither where the rank ran that made it, nor where others only missed that one."""
    found = [_failure(1, "error")] if trail else []
    ended = judge({0: 69, 1: 2}, found, logs)
    assert (ended.code, ended.kind) == (2, "mistake")
    if trail:
        assert judge({0: 69}, found, logs).code == 2


@pytest.mark.parametrize("code", [75, 130, 143])
def test_a_wish_to_stop_is_no_crash(logs: dict[int, Path], code: int) -> None:
    """All ranks end with the code of the signal."""
    ended = judge({0: code, 1: code}, [], logs)
    assert (ended.code, ended.kind) == (code, "stopped")


def test_the_first_to_fail_is_named_and_not_who_missed_it(logs: dict[int, Path]) -> None:
    """With its host, its step, and what it said; a kill is told as shells do, by 128 and more."""
    ended = judge({0: 69, 1: -9}, [_failure(1, "killed"), _failure(0, "exception")], logs)
    assert (ended.code, ended.kind) == (137, "crashed")
    assert ended.words == "Rank 1 of 2 on node1 failed at step 12 (forward): it broke."


def test_a_rank_that_left_no_trail_is_told_of_by_its_log(logs: dict[int, Path]) -> None:
    """One that failed before it met the others, say while it imported."""
    ended = judge({0: 69, 1: 1}, [], logs)
    assert ended.code == 1
    assert ended.words.startswith("Rank 1 ended with exit code 1. It said last: word 1 All of it")
    assert str(logs[1]) in ended.words
