"""Weights that are updated in the backward pass: as in ordinary steps, and rolled back if lost."""

import math
from dataclasses import replace

import pytest
import torch
from tests.build import (
    ALONE,
    QUIET,
    Recipes,
    all_saved,
    assert_saved_alike,
    events,
    forget_after,
    quiet_session,
    rows,
)
from torch import Tensor

from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.data.catalog import Catalog
from longtake.data.loader import Loader
from longtake.errors import DivergedError
from longtake.models.components import assemble
from longtake.run_dir import RunDirectory
from longtake.training import loop
from longtake.training.build import build_state
from longtake.training.session import SampleLosses, Session, TrainingState
from longtake.training.statistics import NormStats
from longtake.training.step import apply_update, compute_gradients, updating
from longtake.training.train import train

_FUSED = "optimizer.fused_backward=true"
_UNCLIPPED = "optimizer.max_grad_norm=1e9"
_ROW = ("step", "batch", "loss", "grad_norm", "weight_norm", "update_ratio", "learning_rate")
_KINDS = {
    "fp32": ("recompute.policy=save-attention", "optimizer.weight_decay=0.1"),
    "bf16 with masters": ("model.dtype=bf16", "optimizer.weight_decay=0.1"),
    "LoRA": ("trainable.kind=lora", "trainable.rank=4"),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_weights_states_averages_and_statistics_are_those_of_ordinary_steps(
    small_recipe: Recipes, kind: str
) -> None:
    changes = (*_KINDS[kind], _UNCLIPPED, "training.steps=6")
    ordinary = small_recipe.trained(*changes, name="ordinary")
    fused = small_recipe.trained(*changes, _FUSED, name="fused")
    assert rows(fused, *_ROW) == rows(ordinary, *_ROW)
    assert_saved_alike(fused, ordinary, 6)


def test_a_run_resumes_with_the_key_and_without(small_recipe: Recipes) -> None:
    changes = (_UNCLIPPED, "training.steps=6", "checkpoint.every=2")
    straight = small_recipe.trained(*changes, _FUSED, name="straight")
    parted = small_recipe.trained(*changes, name="parted")
    forget_after(parted, 2)
    assert train(small_recipe(*changes, _FUSED, name="parted"), QUIET).start_step == 2
    forget_after(parted, 4)
    assert train(parted, QUIET).start_step == 4
    assert rows(parted, *_ROW) == rows(straight, *_ROW)
    assert_saved_alike(parted, straight, 6)


def _state_and_batch(recipe: Recipe) -> tuple[TrainingState, Batch]:
    assert recipe.data.catalog is not None
    captions = Catalog.load(recipe.data.catalog).captions()
    state = build_state(quiet_session(recipe), assemble(recipe, captions, None))
    (batch,) = Loader(recipe.data, batch_size=4, seed=0).batches(1)
    return state, batch


def _weights(state: TrainingState) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in state.components.model.parameters()]


def _step(recipe: Recipe, weights: list[float]) -> TrainingState:
    """One step of a batch whose samples have these weights; none is updated without samples."""
    state, batch = _state_and_batch(recipe)
    session, model = quiet_session(recipe), state.components.model
    norms = NormStats(model, state.components.family.blocks(model), ALONE)
    batch = replace(batch, weights=torch.tensor(weights))
    with updating(session, state, norms, batch):
        compute_gradients(session, state, batch)
    if any(weights):
        apply_update(session, state, 1.0, batch.global_size / sum(weights), batch.position)
    return state


def test_a_stand_in_changes_nothing_and_without_samples_there_is_no_update(
    small_recipe: Recipes,
) -> None:
    weights = [1.0, 0.0, 1.0, 1.0]
    ordinary, fused = (small_recipe(_UNCLIPPED, *more) for more in ((), (_FUSED,)))
    expected = _weights(_step(ordinary, weights))
    assert all(map(torch.equal, _weights(_step(fused, weights)), expected))
    before = _weights(_state_and_batch(fused)[0])
    state = _step(fused, [0.0] * 4)
    assert all(map(torch.equal, _weights(state), before))
    assert all(parameter.grad is None for parameter in state.components.model.parameters())
    assert not any(optimizer.state for optimizer in state.optimizers)


_HARM = 8


def _lose_gradient(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
    """`compute_gradients`, which makes one number of the last weight's gradient NaN once."""
    if batch.step != _HARM:
        return compute_gradients(session, state, batch)
    last = list(state.components.model.parameters())[-1]

    def harm(gradient: Tensor) -> Tensor:
        lost = gradient.clone()
        lost.view(-1)[0] = math.nan
        return lost

    hook = last.register_hook(harm)  # type: ignore[no-untyped-call]
    samples = compute_gradients(session, state, batch)
    hook.remove()
    return samples


_LOST = (_UNCLIPPED, "training.steps=16", "checkpoint.every=4")


def test_nan_is_rolled_back_and_named_as_it_cannot_be_skipped(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first NaN, which an ordinary run skips; from then on it is as if it had been known."""
    monkeypatch.setattr(loop, "compute_gradients", _lose_gradient)
    recipe = small_recipe.trained(*_LOST, _FUSED)
    (event,) = events(recipe, "rolled_back")
    assert (event["step"], event["from_step"], event["reason"]) == (8, 9, "non_finite")
    assert "NaN or infinity is in the weights, which" in event["message"]
    assert ", 1 NaN of " in event["message"]
    assert not events(recipe, "update_skipped")
    batches = [batch for (batch,) in rows(recipe, "batch")]
    assert batches == [*range(8), *range(17, 25)]
    saved = all_saved(recipe, 16)
    for part in ("model", "ema/main", "optimizer"):
        tensors = [each for each in saved[part].values() if isinstance(each, Tensor)]
        assert all(bool(each.isfinite().all()) for each in tensors)


@pytest.mark.parametrize("mode", ["report", "off"])
def test_where_the_guard_does_not_act_nan_ends_the_run_unsaved(
    small_recipe: Recipes, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(loop, "compute_gradients", _lose_gradient)
    recipe = small_recipe(*_LOST, _FUSED, f"guard.mode={mode}", "checkpoint.every=3")
    with pytest.raises(DivergedError, match="NaN or infinity is in the weights"):
        train(recipe, QUIET)
    assert RunDirectory(recipe.out).checkpoint_steps() == [3, 6]
