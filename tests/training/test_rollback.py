"""A run that goes back, and round the batches that did the harm: exact, killed or not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.data.batch import Batch
from longtake.data.ledger import read_ledger
from longtake.errors import DivergedError
from longtake.fsio import read_json_lines
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training import loop
from longtake.training.run import train
from longtake.training.step import SampleLosses, TrainingState, compute_gradients

_QUIET = Console(quiet=True)
_GUARD = ("guard.max_skips=1", "guard.margin_batches=2", "training.steps=30", "checkpoint.every=5")
_HARM = (13, 14)
"""Batches with which the gradient is lost, whatever the state is."""
_SKIPPED = [11, 17]
_KILLED_AT = 22


class _KilledError(Exception):
    """As if the process had ended here."""


def _compute(harm: tuple[int, ...], killed_at: int | None = None) -> Callable[..., SampleLosses]:
    """`compute_gradients`, whose gradients are lost with some batches."""
    honest = compute_gradients

    def compute(state: TrainingState, batch: Batch, recipe: Recipe, world: World) -> SampleLosses:
        if batch.step == killed_at:
            raise _KilledError
        samples = honest(state, batch, recipe, world)
        if batch.step in harm:
            last = list(state.components.model.parameters())[-1]
            assert last.grad is not None
            last.grad.fill_(float("nan"))
        return samples

    return compute


def _rows(recipe: Recipe) -> list[list[Any]]:
    keys = ("step", "batch", "epoch", "loss", "grad_norm", "weight_norm", "update_ratio")
    rows: list[Any] = RunDirectory(recipe.out).metrics()
    return [[row[key] for key in keys] for row in rows]


def _saved(recipe: Recipe, step: int) -> dict[str, Any]:
    path, saved = RunDirectory(recipe.out).checkpoint_path(step), {}
    for name in ("model", "ema/main", "optimizer"):
        dcp_to_torch_save(path / name, recipe.out / "saved.pt")
        saved[name] = torch.load(recipe.out / "saved.pt", weights_only=False)
    return saved


def _events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    events = read_json_lines(RunDirectory(recipe.out).events_path)
    return [event for event in events if event["event"] == kind]


@pytest.fixture(scope="module")
def rolled_back(
    small_recipe_in: Callable[[Path], Callable[..., Recipe]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Recipe:
    """A run that went back once, and came to its end."""
    recipe = small_recipe_in(tmp_path_factory.mktemp("rolled_back"))(*_GUARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compute_gradients", _compute(_HARM))
        train(recipe, _QUIET)
    return recipe


def test_it_goes_back_and_round_the_batches(rolled_back: Recipe) -> None:
    """To the checkpoint before; the steps and the schedule are whole, the batches are ahead."""
    run = RunDirectory(rolled_back.out)
    (event,) = _events(rolled_back, "rolled_back")
    assert (event["step"], event["from_step"], event["skipped"]) == (10, 15, _SKIPPED)
    assert event["reason"] == "non_finite"
    (skipped,) = _events(rolled_back, "skipped")
    assert (skipped["step"], skipped["batch"]) == (13, 13)
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert [row["batch"] for row in rows] == [*range(11), *range(17, 36)]
    assert [row["learning_rate"] for row in rows][-1] == 0.0  # the schedule aims at its end
    assert all("verdict" not in row for row in rows)
    (record,) = run.rollbacks()
    assert record["skipped"] == _SKIPPED
    assert run.checkpoint_steps()[-1] == 30


def test_the_ledger_counts_what_was_skipped(rolled_back: Recipe) -> None:
    """Nothing is repeated, and nothing is missing but the skipped samples."""
    audited = audit(RunDirectory(rolled_back.out))
    assert audited.ok
    assert audited.num_skipped == _SKIPPED[1] - _SKIPPED[0]
    assert sum(epoch.skipped for epoch in audited.epochs) == 4 * audited.num_skipped
    steps = read_ledger(RunDirectory(rolled_back.out).ledger_path).step
    assert set(steps.tolist()) == {*range(11), *range(17, 36)}


def test_the_report_has_batch_and_state(rolled_back: Recipe) -> None:
    """The clips of the batch with captions and losses, the steps before, and the checkpoint."""
    run = RunDirectory(rolled_back.out)
    (event,) = _events(rolled_back, "skipped")
    report = json.loads((run.path / event["report"]).read_text())
    assert (report["step"], report["batch"]) == (13, 13)
    assert "parameters" in report["verdict"]["message"]
    mine = [sample for sample in report["samples"] if sample["step"] == 13]
    assert len(mine) == 4
    assert all(sample["caption"] and 0 < sample["sigma"] < 1 for sample in mine)
    assert report["state"]["checkpoint"] == 10
    assert [row["step"] for row in report["history"]] == list(range(14))
    assert report["history"][-1]["verdict"] == "skip"


@pytest.mark.parametrize("killed_at", [_KILLED_AT, 18])
def test_killed_after_it_went_back_it_is_the_same(
    rolled_back: Recipe,
    small_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int,
) -> None:
    """From a later checkpoint, or from the one that it had gone back to: equal to the bit."""
    recipe = small_recipe(*_GUARD)
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM, killed_at))
    with pytest.raises(_KilledError):
        train(recipe, _QUIET)
    monkeypatch.undo()
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM))
    outcome = train(recipe, _QUIET)
    assert outcome.start_step == (15 if killed_at == _KILLED_AT else 10)
    assert len(_events(recipe, "rolled_back")) == 1
    assert _rows(recipe) == _rows(rolled_back)
    torch.testing.assert_close(_saved(recipe, 30), _saved(rolled_back, 30), rtol=0, atol=0)
    assert audit(RunDirectory(recipe.out)).ok


def test_killed_while_it_goes_back_it_is_the_same(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback is written down, and not one checkpoint is gone yet."""

    def killed(*_: object, **__: object) -> None:
        raise _KilledError

    recipe = small_recipe(*_GUARD, "guard.max_skips=3", "checkpoint.keep=9")
    harm = (13, 14, 15, 16)
    monkeypatch.setattr(loop, "compute_gradients", _compute(harm))
    monkeypatch.setattr("longtake.checkpoint.files.delete_after", killed)
    with pytest.raises(_KilledError):
        train(recipe, _QUIET)
    assert RunDirectory(recipe.out).checkpoint_steps() == [5, 10, 15]
    monkeypatch.undo()
    monkeypatch.setattr(loop, "compute_gradients", _compute(harm))
    assert train(recipe, _QUIET).start_step == 10
    straight = small_recipe(
        *_GUARD, "guard.max_skips=3", "checkpoint.keep=9", f"out={recipe.out}-straight"
    )
    train(straight, _QUIET)
    assert _rows(recipe) == _rows(straight)


def test_a_run_that_cannot_be_helped_stops(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a number of rollbacks without progress; the error says what, where and how to look."""
    recipe = small_recipe(*_GUARD, "guard.max_rollbacks=2")
    monkeypatch.setattr(loop, "compute_gradients", _compute(tuple(range(13, 200))))
    with pytest.raises(DivergedError, match="longtake show") as stopped:
        train(recipe, _QUIET)
    assert re.search("2 (rollbacks|times)", str(stopped.value))
    assert len(_events(recipe, "rolled_back")) == 2
    assert len(_events(recipe, "diverged")) == 1


def test_without_a_checkpoint_from_before_it_stops(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to go back to, which the error says."""
    recipe = small_recipe(*_GUARD, "checkpoint.every=100")
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM))
    with pytest.raises(DivergedError, match=r"checkpoint\.every"):
        train(recipe, _QUIET)


@pytest.mark.parametrize("mode", ["report", "off"])
def test_a_guard_that_does_not_act_stops_at_what_is_no_number(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Nobody may go on with it; the update is not made."""
    recipe = small_recipe(*_GUARD, f"guard.mode={mode}")
    monkeypatch.setattr(loop, "compute_gradients", _compute(_HARM))
    with pytest.raises(DivergedError):
        train(recipe, _QUIET)
    assert RunDirectory(recipe.out).metrics()[-1]["step"] == 14
