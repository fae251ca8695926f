"""Drills of ranks, hosts and links that are lost, from end to end, in real processes.

Hosts are network namespaces of this machine, each with a launcher, a rank and a watcher.
"""

import time
from pathlib import Path

import pytest
from rich.console import Console

from longtake.drill.comeback import Comeback, judge, judge_near_weights, must_name, must_note
from longtake.drill.fault import Fault
from longtake.drill.faults import (
    cut_link,
    kill_node,
    kill_rank,
    lose_node_and_shrink,
    slow_link,
    world_2_1_2,
)
from longtake.drill.ground import Ground
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.run import drill
from longtake.drill.verdict import Verdict
from longtake.node_dir import this_node

_FAULTS = (
    kill_rank.FAULT,
    world_2_1_2.FAULT,
    kill_node.FAULT,
    lose_node_and_shrink.FAULT,
    slow_link.FAULT,
    cut_link.FAULT,
)
_TO_THE_BIT = ("kill-rank", "kill-node", "cut-link")


@pytest.fixture(scope="module")
def watched_ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """What these drills share; its runs are watched."""
    less = "tracking.tensorboard = false\n"
    return Ground(tmp_path_factory.mktemp("cluster"), Console(quiet=True), less)


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_a_drill_passes(watched_ground: Ground, fault: Fault) -> None:
    """Whatever is lost, the run goes on, and comes to what it would have come to."""
    result = drill(fault, watched_ground)
    if result.skipped is not None:
        pytest.skip(result.skipped)
    assert result.passed, result.message
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is (True if fault.name in _TO_THE_BIT else None)


def test_a_run_that_does_not_come_back_is_complained_of() -> None:
    """Or from an older checkpoint than it could have, or late."""
    verdict = Verdict("kill-rank")
    judge(verdict, Comeback(None, 10, 3.0))
    assert verdict.complaints[0] == "no event says that it went on"
    verdict = Verdict("kill-rank")
    judge(verdict, Comeback(Sighting({"step": 5}, 0.0), 10, 61.0), limit_seconds=60)
    assert verdict.complaints == [
        "it went on from step 5, and its newest checkpoint was of step 10",
        "after 61.0 s it trained again, not within 60",
    ]
    verdict = Verdict("kill-rank")
    judge(verdict, Comeback(Sighting({"step": 10}, 0.0), 10, 3.0))
    assert verdict.complaints == []


def test_a_rank_that_nobody_names_is_complained_of(tmp_path: Path) -> None:
    """An event has to name it, and so has what people read."""
    with Launch(tmp_path, (), 1) as launch:
        launch.wait()
        verdict = Verdict("kill-rank")
        must_note(verdict, launch, 1)
        must_name(verdict, launch, "Rank 1 of 2")
        assert len(verdict.complaints) == 2
        this_node(Place(tmp_path).run).append_event("rank_failed", rank=1)
        verdict = Verdict("kill-rank")
        must_note(verdict, launch, 1)
        must_name(verdict, launch, "There is no recipe")
        assert verdict.complaints == []


def test_weights_that_are_elsewhere_are_complained_of(trained: Place, place: Place) -> None:
    """Of two runs to the same end none is; of one that ended earlier, they are."""
    verdict = Verdict("world-2-1-2")
    assert judge_near_weights(verdict, place, trained) == 0
    assert verdict.complaints == []


def test_a_link_is_named_wrongly() -> None:
    """Another host's, or with another rate, or too late."""
    said = {"host": "node0", "peer": "node2", "send_bytes_per_second": 0.9e6, "message": "slow"}
    since = time.monotonic()
    verdict = Verdict("slow-link")
    slow_link.judge(verdict, Sighting(said, since + 4), [said], "node2", since)
    assert verdict.complaints == []
    assert verdict.detected_seconds == pytest.approx(4)
    wrong = {**said, "peer": "node1", "message": "not that"}
    verdict = Verdict("slow-link")
    fast = {**said, "send_bytes_per_second": 9e6}
    slow_link.judge(verdict, Sighting(fast, since + 99), [said, wrong], "node2", since)
    assert [each.split(",")[0] for each in verdict.complaints] == [
        "it was told of after 99.0 s",
        "a link is called slow that is not node2's: ['not that']",
        "it is said to take 9.00 MB/s",
    ]
    verdict = Verdict("slow-link")
    slow_link.judge(verdict, None, [], "node2", since)
    assert verdict.complaints == ["no event says that a link is slow"]


def test_a_world_that_was_another_is_complained_of(trained: Place) -> None:
    """One rank all the time is not two, one, and two."""
    message = world_2_1_2.judge(trained, trained).message
    assert "it was trained by [1] ranks, not by [2, 1, 2]" in message
