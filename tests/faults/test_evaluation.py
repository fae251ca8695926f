import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtake.config import TrackingSection
from longtake.errors import RecipeError
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
from longtake.faults import evaluation
from longtake.faults.evaluation import (
    PRESET,
    PROMPTS,
    HeldCheckpoints,
    brighten,
    expect_drift_alarm,
    expect_evaluated_once,
    expect_held,
    expect_only_whole,
    expect_shared,
    expect_takeover,
    expect_tracked,
    partial_videos,
    step_of,
)
from longtake.faults.expect import Evidence
from longtake.faults.registry import all_faults, run_drill
from longtake.faults.sandbox import Sandbox, TrainingSite
from longtake.fsio import now, write_json
from longtake.lease import Lease, Leases
from longtake.sampling.claims import checkpoint_key
from longtake.sampling.sampler import load_sampler

_LAST = 50


def test_without_wandb_the_drill_of_a_tracker_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(section: TrackingSection) -> None:
        raise RecipeError("tracking.wandb needs W&B")

    monkeypatch.setattr(evaluation, "refuse_missing_packages", refuse)
    result = run_drill(all_faults()["tracker-down"], Sandbox(tmp_path, Console(quiet=True)))
    assert result.skipped == "W&B is not installed: pip install 'longtake[wandb]'"


class _Results:
    """Writes what servers leave in a run directory."""

    def __init__(self, site: TrainingSite) -> None:
        self._run = site.run
        self._directory = EvaluationDirectory(site.run)

    def take(self, step: int, server: str = "one") -> Lease:
        """A claim that is not ended."""
        ServerDirectory(self._run, server).append_event("evaluation_started", step=step)
        owner = {"server": server, "place": None}  # as if on another machine
        claim = self._directory.claim_path(PRESET, step, self._key(step))
        leases = Leases(1e-6, owner)
        lease = leases.take(claim) or leases.take(claim)  # the second finds it silent
        assert lease is not None
        return lease

    def make(self, step: int, server: str = "one") -> Path:
        """A whole result."""
        self.take(step, server).end("done")
        ServerDirectory(self._run, server).append_event("evaluation_finished", step=step)
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
def results(site: TrainingSite) -> _Results:
    """For the run of a site, whose one checkpoint is of its last step."""
    assert site.run.checkpoint_steps() == [_LAST]
    return _Results(site)


def _complaints(site: TrainingSite) -> list[str]:
    evidence = Evidence()
    expect_evaluated_once(evidence, site.run, [_LAST])
    return evidence.complaints


def test_a_checkpoint_must_be_evaluated_once(site: TrainingSite, results: _Results) -> None:
    lost = ["step 50 was done 0 times, announced 0 times", "the result of step 50 is not whole"]
    assert _complaints(site) == lost
    results.take(_LAST)
    assert _complaints(site) == lost
    results.make(_LAST)
    assert _complaints(site) == []
    results.make(_LAST, "two")
    assert _complaints(site) == ["step 50 was done 2 times, announced 2 times"]


def test_a_result_must_be_whole_and_of_the_saved_weights(
    site: TrainingSite, results: _Results
) -> None:
    folder = results.make(_LAST)
    (folder / "02_s0.mp4").write_bytes(b"")
    half = ["the result of step 50 is not whole"]
    assert _complaints(site) == half
    (folder / "02_s0.mp4").write_bytes(b"video")
    assert _complaints(site) == []
    committed = site.run.checkpoint_path(_LAST) / "COMMITTED"
    text = committed.read_text()
    for digest in re.findall(r'"xxh3_64": "(\w+)"', text):
        text = text.replace(digest, f"{int(digest, 16) ^ 1:0{len(digest)}x}")
    committed.write_text(text)
    assert _complaints(site) == half


def test_nothing_may_be_left_over(site: TrainingSite, results: _Results) -> None:
    folder = results.make(_LAST)
    shutil.copytree(folder, folder.with_name(f".{folder.name}.one-abc-0.partial"))
    shutil.copytree(folder, EvaluationDirectory(site.run).superseded_path(PRESET, _LAST, "abc"))
    heartbeat = {"server": "one", "time": now(), "needs": [_LAST]}
    ServerDirectory(site.run, "one").write_heartbeat(heartbeat)
    assert _complaints(site) == [
        "this is left over: 00_s0.mp4, 01_s0.mp4, 02_s0.mp4, 03_s0.mp4, the need of step 50",
        "1 results were made twice",
    ]
    assert [step_of(path) for path in partial_videos(site.run, "one")] == [_LAST] * PROMPTS


def test_a_claim_must_be_taken_over_in_time(site: TrainingSite, results: _Results) -> None:
    evidence = Evidence()
    results.make(_LAST, "two")
    expect_takeover(evidence, site.run, _LAST, "one", "two", 9.0)
    assert evidence.complaints == [
        "it was taken over after 9.0 s, not within 5",
        "step 50 was to be lost by one and done by two, and there is [('two', 'done')]",
    ]


def test_both_servers_must_evaluate(site: TrainingSite, results: _Results) -> None:
    evidence = Evidence()
    results.make(_LAST, "two")
    assert expect_shared(evidence, site.run, ("one", "two")) == Counter({"two": 1})
    assert evidence.complaints == ["server one has evaluated nothing"]


def test_a_deleted_checkpoint_must_be_gone_or_done(site: TrainingSite, results: _Results) -> None:
    untested, wrong = Evidence(), Evidence()
    results.make(_LAST)
    expect_held(untested, site.run, HeldCheckpoints(_LAST, 2, [1, 2, 3]))
    assert untested.complaints == ["step 50 was held for 2 saves, and the run keeps 2 anyway"]
    results.take(_LAST).end("gone")
    expect_held(wrong, site.run, HeldCheckpoints(_LAST, 3, [_LAST]))
    assert wrong.complaints == [
        "1 checkpoints were deleted under the server, not 3",
        "step 50 ended as done, gone",
        "there are results of steps [50], which were gone",
    ]


def test_a_checkpoint_that_is_tried_too_early_or_never_is_complained_of(
    site: TrainingSite,
) -> None:
    evidence = Evidence()
    expect_only_whole(evidence, site.run, 5, 10, 6.0, is_untouched=False)
    assert evidence.complaints[:3] == [
        "step 10 was tried while its files were short",
        "step 10 was to be refused until it was whole, and its attempts ended []",
        "it was evaluated 6.0 s after it was whole, not within 5",
    ]
    assert "the result of step 5 is not whole" in evidence.complaints


def test_rows_that_a_tracker_was_not_told_are_complained_of(site: TrainingSite) -> None:
    evidence = Evidence()
    shutil.rmtree(site.run.tensorboard_path, ignore_errors=True)
    site.run.record_path.write_text('{"id": "run-1"}')
    expect_tracked(evidence, site.run, rows_before=3)
    assert evidence.complaints == [
        "TensorBoard does not have every step once",
        "W&B got 3 rows though it is unreachable",
        "W&B did not get every step once later",
    ]


def test_brighter_checkpoints_differ_in_their_ema_only(site: TrainingSite) -> None:
    """Weights, which decide the loss, stay bitwise the same."""
    (last,) = site.run.checkpoint_steps()[-1:]
    steps = brighten(site.run, times=4, brighter=0.03, distance=5)
    assert steps == [last + 5, last + 10, last + 15, last + 20]
    for ema in (False, True):
        models = [
            load_sampler(site.run.path, step=step, ema=ema, device="cpu").components.model
            for step in (last, steps[-1])
        ]
        states = [model.state_dict() for model in models]
        changed = {name for name in states[0] if not states[0][name].equal(states[1][name])}
        assert changed == ({"tube_out.bias"} if ema else set())


@pytest.mark.parametrize(
    ("early", "late", "complaint"),
    [
        ([], ["brightness of drill rose 4 checkpoints in a row, +9 %."], None),
        ([], [], "no alarm was raised at step 30, where brightness was [100.0, 100.0, 100.0]"),
        (["brightness of drill fell"], ["brightness of drill rose 4"], "an alarm was raised befo"),
    ],
)
def test_an_alarm_is_expected_at_the_end_and_none_before(
    site: TrainingSite,
    add_scores: Callable[..., Path],
    early: list[str],
    late: list[str],
    complaint: str | None,
) -> None:
    for step, messages in ((10, early), (20, []), (30, late)):
        drifts = [{"measure": "brightness", "kind": "drift", "message": each} for each in messages]
        alarms = [*drifts, {"measure": "motion", "kind": "drift", "message": "another"}]
        add_scores(site.run, "drill", step, alarms=alarms)
    evidence = Evidence()
    expect_drift_alarm(evidence, site.run, [10], [20, 30])
    if complaint is None:
        assert evidence.complaints == []
    else:
        assert evidence.complaints[0].startswith(complaint)
