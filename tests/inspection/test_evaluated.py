"""What `show` says of evaluations: results, alarms, and what failed."""

from collections.abc import Callable
from pathlib import Path

from longtake.evaluation_dir import EvaluationDirectory
from longtake.inspection.evaluated import evaluated
from longtake.inspection.tables import _evaluated
from longtake.lease import Leases
from longtake.run_dir import RunDirectory


def test_the_newest_result_stands_for_a_preset(
    add_scores: Callable[..., Path], tmp_path: Path
) -> None:
    """With its alarms, and how many checkpoints have one."""
    run = RunDirectory(tmp_path)
    add_scores(run, "demo", 100)
    message = "brightness of demo rose 4 checkpoints in a row, +9 %"
    alarm = {"measure": "brightness", "kind": "drift", "message": message}
    unlike = {"measure": "frame_change", "kind": "range", "message": "it is 9"}
    facts = {"measures": {"brightness": 0.5}, "held_out": {"mean": 0.3}}
    add_scores(run, "demo", 200, **facts, alarms=[alarm, unlike])
    (found,) = evaluated(run)
    assert (found["preset"], found["steps"]) == ("demo", [100, 200])
    assert (found["measures"], found["held_out"]) == ({"brightness": 0.5}, {"mean": 0.3})
    assert found["alarms"] == [message]
    first, second, third = _evaluated(found)
    assert first == "2 checkpoints, the newest of step 200: brightness 0.5, held-out loss 0.3"
    assert second == f"alarm: {message}"
    assert third == "unlike the clips of the training: frame change"


def test_what_failed_is_told_until_there_is_a_result(tmp_path: Path) -> None:
    """With the reason of its last attempt, and how many there were."""
    run = RunDirectory(tmp_path)
    claim = EvaluationDirectory(run).claim_path("low4s", 100, "abcd1234")
    for reason in ("no space left", "still none"):
        lease = Leases(60, {}).take(claim)
        assert lease is not None
        lease.end("failed", reason=reason)
    (found,) = evaluated(run)
    assert found["failed"] == [{"step": 100, "reason": "still none", "attempts": 2}]
    assert _evaluated(found) == ["step 100 failed 2 times: still none"]


def test_a_run_that_nobody_evaluates_has_nothing_to_tell(tmp_path: Path) -> None:
    """Not even an empty heading."""
    assert evaluated(RunDirectory(tmp_path)) == []
