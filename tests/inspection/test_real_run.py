"""A run that really went back, as `longtake show` sees it."""

from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from tests.build import MakeRecipe

from longtake.data.batch import Batch
from longtake.inspection.facts import run_facts, step_facts
from longtake.inspection.tables import print_run, print_steps
from longtake.run_dir import RunDirectory
from longtake.training import loop
from longtake.training.guard_runner import GuardRunner
from longtake.training.session import SampleLosses, Session, TrainingState
from longtake.training.step import compute_gradients
from longtake.training.train import train

_HARM = (13, 14)
"""Batches with which the gradient is lost, the second of which is one too many."""


@pytest.fixture
def repaired(small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of 20 steps that left out one update, then went back from step 15 to step 10."""
    honest = compute_gradients

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        samples = honest(session, state, batch)
        if batch.step in _HARM:
            last = list(state.components.model.parameters())[-1]
            assert last.grad is not None
            last.grad.fill_(float("nan"))
        return samples

    monkeypatch.setattr(loop, "compute_gradients", compute)
    few_skips = partial(GuardRunner, max_skips=1, margin_batches=2)
    monkeypatch.setattr("longtake.training.train.GuardRunner", few_skips)
    recipe = small_recipe("training.steps=20", "checkpoint.every=5")
    train(recipe, Console(quiet=True))
    return RunDirectory(recipe.out)


def test_a_repaired_run_is_shown(repaired: RunDirectory) -> None:
    facts = run_facts(repaired)
    assert (facts["state"], facts["steps"], facts["abandoned_rows"]) == ("finished", 20, 5)
    verdicts = [(each["step"], each["verdict"], each["reason"]) for each in facts["verdicts"]]
    assert verdicts == [(14, "skip", "non_finite"), (15, "roll_back", "non_finite")]
    (rolled_back,) = facts["rollbacks"]
    assert (rolled_back["from_step"], rolled_back["to_step"]) == (15, 10)
    assert not any(each["damage"] or each["abandoned"] for each in facts["checkpoints"])

    facts = step_facts(repaired, 15, 2)
    first, end = rolled_back["skipped"]
    rows = [(row["step"], row["batch"], row["abandoned"]) for row in facts["rows"]]
    assert rows[:3] == [(13, 12, True), (14, 13, True), (15, 14, True)]
    assert rows[3:] == [(step, step - 1 + end - first, False) for step in range(13, 18)]
    assert facts["rows"][2]["grad_norm"] is None
    assert [event["event"] for event in facts["events"]][:3] == [
        "update_skipped",
        "anomaly_detected",
        "rolled_back",
    ]
    report, clips = facts["report"], facts["clips"]
    assert (report["step"], report["verdict"]["kind"]) == (15, "roll_back")
    assert (report["checkpoint"], clips["batch"], len(clips["samples"])) == (10, 14, 4)
    losses = [each["loss"] for each in clips["samples"]]
    assert losses == sorted(losses, reverse=True)
    assert all(Path(each["path"]).is_file() for each in clips["samples"])

    after = step_facts(repaired, 19, 0)["clips"]  # where nothing happened: by the ledger
    assert (after["source"], after["batch"]) == ("ledger", 18 + end - first)
    assert [bool(each["caption"]) for each in after["samples"]] == [True] * 4

    console = Console(quiet=True)
    print_run(console, run_facts(repaired))
    print_steps(console, facts)
