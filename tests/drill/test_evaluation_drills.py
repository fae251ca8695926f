"""Drills of evaluation servers beside a run: two from end to end, and what fails each of them."""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longtake.drill import evaluators
from longtake.drill.evaluators import PRESET, PROMPTS, must_be_evaluated_once
from longtake.drill.fault import Fault
from longtake.drill.faults import (
    checkpoint_deleted_under_evaluator,
    evaluator_killed_while_sampling,
    two_evaluators,
)
from longtake.drill.faults.checkpoint_deleted_under_evaluator import Seen
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.run import drill
from longtake.drill.verdict import Verdict
from longtake.evaluation.server.checkpoints import checkpoint_key
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
from longtake.fsio import now, write_json
from longtake.lease import Lease, Leases

_FAULTS = [evaluator_killed_while_sampling.FAULT, checkpoint_deleted_under_evaluator.FAULT]
_LAST = 50


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_a_drill_passes(ground: Ground, fault: Fault) -> None:
    """No checkpoint is lost or done twice, and the training is the undisturbed one."""
    result = drill(fault, ground)
    assert result.passed, result.message
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is True


class _Results:
    """Writes by hand what servers leave in a run directory."""

    def __init__(self, place: Place) -> None:
        self._run = place.run
        self._directory = EvaluationDirectory(place.run)

    def take(self, step: int, server: str = "one") -> Lease:
        """A claim that nobody ends."""
        ServerDirectory(self._run, server).append_event("evaluating", step=step)
        owner = {"server": server, "place": None}  # as if on another machine
        claim = self._directory.claim_path(PRESET, step, self._key(step))
        leases = Leases(1e-6, owner)
        lease = leases.take(claim) or leases.take(claim)  # the second finds it silent
        assert lease is not None
        return lease

    def make(self, step: int, server: str = "one") -> Path:
        """A whole result."""
        self.take(step, server).end("done")
        ServerDirectory(self._run, server).append_event("evaluated", step=step)
        folder = self._directory.result_path(PRESET, step)
        folder.mkdir(parents=True, exist_ok=True)
        files = [f"{number:02}_s0.mp4" for number in range(PROMPTS)]
        for file in files:
            (folder / file).write_bytes(b"video")
        nothing: dict[str, Any] = {
            "settings": {"fps": 8.0},
            "measures": {},
            "seconds": {},
            "alarms": [],
        }
        whose = {"preset": PRESET, "step": step, "key": self._key(step), "server": server}
        about = {"prompt": "a red square", "seed": 0, "measures": {}}
        scores = {
            **nothing,
            **whose,
            "weights": "ema/main",
            "time": now(),
            "videos": [{"file": file, **about} for file in files],
        }
        write_json(folder / "scores.json", scores)
        return folder

    def _key(self, step: int) -> str:
        return str(checkpoint_key(self._run.checkpoint_path(step), "ema/main"))


@pytest.fixture
def results(place: Place) -> _Results:
    """For the run of a place, whose one checkpoint is of its last step."""
    assert place.run.checkpoint_steps() == [_LAST]
    return _Results(place)


def _complaints(place: Place) -> list[str]:
    verdict = Verdict("a-fault")
    must_be_evaluated_once(verdict, place.run, [_LAST])
    return verdict.complaints


def test_a_result_for_each_checkpoint_passes(place: Place, results: _Results) -> None:
    """Made by whomever, after however many died over it."""
    results.take(_LAST)
    results.make(_LAST, "two")
    assert _complaints(place) == []


def test_a_checkpoint_that_is_lost_or_done_twice_fails_the_drill(
    place: Place, results: _Results
) -> None:
    """Nobody's, claimed and left, or told of twice."""
    lost = ["step 50 was done 0 times, and told of 0 times", "the result of step 50 is not whole"]
    assert _complaints(place) == lost
    results.take(_LAST)
    assert _complaints(place) == lost
    results.make(_LAST)
    results.make(_LAST, "two")
    assert _complaints(place) == ["step 50 was done 2 times, and told of 2 times"]


def test_a_result_that_is_half_or_of_other_weights_fails_the_drill(
    place: Place, results: _Results
) -> None:
    """An empty video, a missing one, or the key of another checkpoint."""
    folder = results.make(_LAST)
    (folder / "02_s0.mp4").write_bytes(b"")
    half = ["the result of step 50 is not whole"]
    assert _complaints(place) == half
    (folder / "02_s0.mp4").write_bytes(b"video")
    assert _complaints(place) == []
    committed = place.run.checkpoint_path(_LAST) / "COMMITTED"
    committed.write_text(re.sub(r'("sha256": ").', r"\g<1>0", committed.read_text()))
    assert _complaints(place) == half


def test_what_a_dead_server_leaves_fails_the_drill(place: Place, results: _Results) -> None:
    """Half a result, a need, a result that was replaced."""
    folder = results.make(_LAST)
    shutil.copytree(folder, folder.with_name(f".{folder.name}.one-abc-0.partial"))
    shutil.copytree(folder, EvaluationDirectory(place.run).superseded_path(PRESET, _LAST, "abc"))
    heartbeat = {"server": "one", "time": now(), "needs": [_LAST]}
    ServerDirectory(place.run, "one").write_heartbeat(heartbeat)
    assert _complaints(place) == [
        "this is left over: 00_s0.mp4, 01_s0.mp4, 02_s0.mp4, 03_s0.mp4, the need of step 50",
        "1 results were made twice",
    ]
    assert [evaluators.step_of(path) for path in evaluators.partial_videos(place.run, "one")] == [
        _LAST
    ] * PROMPTS


def test_a_claim_that_nobody_took_over_fails_the_drill(
    place: Place, trained: Place, results: _Results
) -> None:
    """Or somebody did too late."""
    results.make(_LAST, "two")
    verdict = evaluator_killed_while_sampling.judge(place, _LAST, "one", "two", 9.0, trained)
    assert verdict.complaints == [
        "it was taken over after 9.0 s, not within 5",
        "step 50 was to be lost by one and done by two, and there is [('two', 'done')]",
    ]


def test_a_server_that_has_done_nothing_fails_the_drill(
    place: Place, trained: Place, results: _Results
) -> None:
    """Two that share their work have both worked."""
    results.make(_LAST, "two")
    shares = two_evaluators.shares_of(place)
    assert shares == Counter({"two": 1})
    verdict = two_evaluators.judge(place, shares, ("one", "two"), trained)
    assert verdict.complaints == ["server one has evaluated nothing"]


def test_a_deleted_checkpoint_has_to_be_gone_or_done(
    place: Place, trained: Place, results: _Results
) -> None:
    """A hold that was not put to the test, a failure, and a result of what was gone."""
    results.make(_LAST)
    verdict = checkpoint_deleted_under_evaluator.judge(place, Seen(_LAST, 2, [1, 2, 3]), trained)
    assert verdict.complaints == ["step 50 was held for 2 saves, and the run keeps 2 anyway"]
    results.take(_LAST).end("gone")
    verdict = checkpoint_deleted_under_evaluator.judge(place, Seen(_LAST, 3, [_LAST]), trained)
    assert verdict.complaints == [
        "1 checkpoints were deleted under the server, not 3",
        "step 50 ended as done, gone",
        "there are results of steps [50], which were gone",
    ]
