"""Objectives against their formulas, in plain torch; and what an objective may not do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.build import MakeRecipe, fill_lora
from torch import Tensor

from longtake.config import Recipe
from longtake.errors import LongtakeError, ModelError, RecipeError
from longtake.models.added_module import added_modules
from longtake.models.base import latent_shape
from longtake.models.components import Components, assemble
from longtake.models.objective import (
    FlowBatch,
    FlowMatching,
    GuidedTarget,
    Objective,
    Passes,
    build_objective,
    joined,
    training_flops,
    training_losses,
)

_CPU = torch.device("cpu")
_CAPTIONS = ["a red ball rolls left", "a blue square"]
_LORA = ("trainable.kind=lora", "trainable.rank=2")
_OWN = "tests.models.test_objective"


@pytest.fixture
def parts_of(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Recipe, Components]]:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])  # where modules and objectives are

    def make(*changes: str) -> tuple[Recipe, Components]:
        recipe = small_recipe(*changes)
        parts = assemble(recipe, _CAPTIONS, None)
        # At its start the model predicts 0, and a LoRA changes nothing.
        generator = torch.Generator().manual_seed(1)
        for name, weight in parts.model.named_parameters():
            if not any(each in name for each in ("lora_", "lokr_", "added_modules")):
                weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
        fill_lora(parts.model)
        return recipe, parts

    return make


def _batch(parts: Components, recipe: Recipe, **conditioning: Tensor) -> FlowBatch:
    generator = torch.Generator().manual_seed(0)
    shape = (2, *latent_shape(parts.codec, recipe.data.buckets[0]))
    latents, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    told = {**parts.text.encode(_CAPTIONS), **conditioning}
    sigmas, empty = torch.tensor([0.3, 0.8]), parts.text.encode([""])
    return FlowBatch(latents, noise, sigmas, told, no_caption=empty)


def _predict(parts: Components, batch: FlowBatch, **changes: Tensor) -> Tensor:
    """Predict without the code of passes."""
    clips = changes.pop("latents", batch.latents)
    sigmas = batch.sigmas[:, None, None, None, None]
    noisy = (1 - sigmas) * clips + sigmas * batch.noise
    return parts.predict_velocity(noisy, batch.sigmas, {**batch.conditioning, **changes})


def _error(predicted: Tensor, target: Tensor) -> Tensor:
    return (predicted - target).pow(2).mean(dim=(1, 2, 3, 4))


def _gradients(parts: Components, losses: Tensor) -> dict[str, Tensor]:
    trained = {n: p for n, p in parts.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(losses.sum(), list(trained.values()))
    return dict(zip(trained, found, strict=True))


def _assert_alike(
    parts: Components, objective: Objective, batch: FlowBatch, expected: Tensor
) -> None:
    """The loss of each sample, and the gradient of every trained weight."""
    losses = training_losses(objective, parts, batch, "fp32", _CPU)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    gradients = _gradients(parts, losses)
    assert all(each.any() for each in gradients.values())
    torch.testing.assert_close(gradients, _gradients(parts, expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [(), _LORA], ids=["full", "lora"])
def test_the_guided_target_moves_away_from_the_prediction_without_caption(
    parts_of: Callable[..., tuple[Recipe, Components]], changes: Sequence[str]
) -> None:
    recipe, parts = parts_of(*changes)
    batch, empty = _batch(parts, recipe), parts.text.encode(["", ""])
    plain = _predict(parts, batch, **empty).detach()
    target = plain + 4.0 * (batch.noise - batch.latents - plain)
    expected = _error(_predict(parts, batch), target)
    _assert_alike(parts, GuidedTarget(4.0), batch, expected)
    # At 1 it is flow matching.
    ours, theirs = (
        training_losses(each, parts, batch, "fp32", _CPU)
        for each in (GuidedTarget(1.0), FlowMatching())
    )
    assert torch.equal(ours, theirs)


def test_pairs_are_compared_with_the_model_without_its_lora(
    parts_of: Callable[..., tuple[Recipe, Components]],
) -> None:
    base = parts_of()[1]
    recipe, parts = parts_of(
        *_LORA,
        "data.conditioning.worse={kind='video', path='{stem}.mp4'}",
        "objective={kind='examples.objectives.preference:Preference', inputs=['worse']}",
        "objective.options.beta=5.0",
    )
    shape = (2, *latent_shape(parts.codec, recipe.data.buckets[0]))
    worse = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    batch = _batch(parts, recipe, worse_latents=worse)
    gains = [
        _error(_predict(parts, batch, latents=clips), batch.noise - clips)
        - _error(_predict(base, batch, latents=clips), batch.noise - clips).detach()
        for clips in (batch.latents, worse)
    ]
    expected = torch.log1p(torch.exp(5.0 / 2 * (gains[0] - gains[1])))
    assert (expected - expected[0]).any()
    _assert_alike(parts, build_objective(recipe), batch, expected)


def test_tokens_are_aligned_with_features(
    parts_of: Callable[..., tuple[Recipe, Components]],
) -> None:
    """Four features of 5 numbers stand for the 128 tokens of a clip, which follow the caption's."""
    recipe, parts = parts_of(
        "trainable.kind=full",
        "trainable.modules.align.module=examples.objectives.alignment:Projector",
        "trainable.modules.align.blocks=['blocks.0']",
        "trainable.modules.align.options={feature_width=5, hidden_size=8, first_token=6}",
        "data.conditioning.features={kind='numbers', path='{stem}.npy', width=20}",
        "objective={kind='examples.objectives.alignment:Alignment', inputs=['features']}",
    )
    features = torch.randn(2, 20, generator=torch.Generator().manual_seed(2))
    batch = _batch(parts, recipe, features=features)
    seen = list[Tensor]()
    block = parts.model.get_submodule("blocks.0")
    with block.register_forward_hook(lambda module, args, output: seen.append(output)):
        losses = _error(_predict(parts, batch), batch.noise - batch.latents)
    projector = added_modules(parts.model)["align"]
    projector.projected.clear()  # type: ignore[union-attr, operator]
    projected = projector.layers(seen[0][:, 6:])  # type: ignore[operator]
    averaged = projected.reshape(2, 4, -1, 5).mean(dim=2)
    cosine = (F.normalize(averaged, dim=2) * F.normalize(features.view(2, 4, 5), dim=2)).sum(dim=2)
    _assert_alike(parts, build_objective(recipe), batch, losses + 0.5 * (1 - cosine.mean(dim=1)))


def test_one_long_step_ends_where_two_short_ones_of_the_release_do(
    parts_of: Callable[..., tuple[Recipe, Components]],
) -> None:
    """Two steps of a shift of 3 begin at 1 and at 0.75; sigmas of 0.3 and 0.8 choose them."""
    base = parts_of()[1]
    options = "{steps=2, shift=3.0, guidance=2.0, substeps=2}"
    kind = "examples.objectives.few_steps:FewSteps"
    recipe, parts = parts_of(*_LORA, f"objective={{kind='{kind}', options={options}}}")
    batch, empty = _batch(parts, recipe), parts.text.encode(["", ""])
    steps = [(0.75, 0.375, 0.0), (1.0, 0.875, 0.75)]
    wide = torch.tensor(steps)[:, :, None, None, None, None]
    begun = (1 - wide[:, 0]) * batch.latents + wide[:, 0] * batch.noise
    reached = begun
    for number in range(2):
        sigmas = torch.tensor(steps)[:, number]
        told = base.predict_velocity(reached, sigmas, batch.conditioning)
        plain = base.predict_velocity(reached, sigmas, {**batch.conditioning, **empty})
        velocity = plain + 2.0 * (told - plain)
        reached = (reached - (wide[:, number] - wide[:, number + 1]) * velocity).detach()
    target = (begun - reached) / (wide[:, 0] - wide[:, 2])
    predicted = parts.predict_velocity(begun, torch.tensor(steps)[:, 0], batch.conditioning)
    _assert_alike(parts, build_objective(recipe), batch, _error(predicted, target))


def test_the_clips_of_a_catalog_keep_the_prediction_that_training_began_with(
    parts_of: Callable[..., tuple[Recipe, Components]],
) -> None:
    base = parts_of()[1]
    recipe, parts = parts_of(
        *_LORA,
        "objective={kind='prior_preservation', options={catalogs=['catalog'], weight=0.5}}",
    )
    objective, batch = build_objective(recipe), _batch(parts, recipe)
    plain = batch.noise - batch.latents
    _assert_alike(parts, objective, batch, _error(_predict(parts, batch), plain))
    batch = replace(batch, source="catalog")
    prior = _predict(base, batch).detach()
    expected = _error(_predict(parts, batch), prior) + _error(prior, plain)
    _assert_alike(parts, objective, batch, 0.5 * expected)


@pytest.mark.parametrize(
    "changes",
    [
        _LORA,
        ("trainable.kind=dora", "trainable.rank=2"),
        ("trainable.kind=lokr", "trainable.rank=2"),
        (
            *_LORA,
            "trainable.modules.style.module=examples.modules.style_residual:StyleResidual",
            "trainable.modules.style.options.rank=2",
        ),
    ],
    ids=["lora", "dora", "lokr", "lora and module"],
)
def test_without_adapter_the_model_is_the_one_that_training_began_with(
    parts_of: Callable[..., tuple[Recipe, Components]], changes: Sequence[str]
) -> None:
    base = parts_of()[1]
    recipe, parts = parts_of(*changes)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    batch, passes = _batch(parts, recipe), Passes(parts, "fp32", _CPU)
    without = passes.predict_frozen(batch, adapter=False)
    assert torch.equal(without, _predict(base, batch).detach())
    as_is = passes.predict_frozen(batch)
    assert not as_is.requires_grad
    predicted = passes.predict(batch)
    assert torch.equal(as_is, predicted)
    assert (predicted - without).abs().max() > 1e-3
    assert all(each.requires_grad for each in parts.model.parameters() if each.grad is not None)


def test_a_step_counts_the_flops_of_every_pass(
    parts_of: Callable[..., tuple[Recipe, Components]],
) -> None:
    recipe, parts = parts_of()
    bucket = recipe.data.buckets[0]
    plain, guided = (
        training_flops(each, parts, recipe, bucket) for each in (FlowMatching(), GuidedTarget(2.0))
    )
    assert guided == pytest.approx(plain * 4 / 3)  # forward and backward, and another forward


class Twice(Objective):
    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        passes.predict(batch)
        return passes.velocity_losses(batch, passes.predict(batch))


class Late(Objective):
    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        passes.predict(batch)
        return passes.velocity_losses(batch, passes.predict_frozen(batch))


class Reference(Objective):
    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        return passes.velocity_losses(batch, passes.predict_frozen(batch, adapter=False))


class Mean(Objective):
    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        return passes.velocity_losses(batch, passes.predict(batch)).mean()


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (Twice(), "second time"),
        (Late(), "Call predict_frozen first"),
        (Reference(), "trains all weights"),
        (Mean(), r"expected \[2\]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_steps_that_cannot_be_taken_are_refused(
    parts_of: Callable[..., tuple[Recipe, Components]], objective: Objective, said: str
) -> None:
    recipe, parts = parts_of()
    with pytest.raises((ModelError, RecipeError), match=said):
        training_losses(objective, parts, _batch(parts, recipe), "fp32", _CPU)


class Needs(Objective):
    inputs = ("depth",)

    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        raise NotImplementedError


class Other(FlowMatching):
    sources = ("mian",)


class NoLosses(Objective):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (f"{_OWN}:Needs", "{}", "needs depth in data.conditioning"),
        (f"{_OWN}:Other", "{}", "lacks; there are: catalog"),
        (f"{_OWN}:NoLosses", "{}", "losses"),
        (f"{_OWN}:Parts", "{}", "has no class Parts"),
        ("torch.nn:Linear", "{}", "not an Objective"),
        ("guided_target", "{}", "lacks scale"),
        ("guided_target", "{scale=0.5}", "at least 1"),
        ("prior_preservation", "{catalogs=['mine']}", "loss for the catalog mine"),
        ("prior_preservation", "{catalogs=[]}", "expected a list of names"),
        ("prior_preservation", "{catalogs='mine'}", "expected a list of names"),
        ("guided_target", "{scala=2.0}", "did you mean scale"),
        ("guided", "{}", "be 'flow_matching', 'guided_target'"),
    ],
)
def test_an_objective_that_cannot_be_made_is_refused(
    parts_of: object, small_recipe: MakeRecipe, kind: str, options: str, said: str
) -> None:
    with pytest.raises(LongtakeError, match=said):
        build_objective(small_recipe(f"objective.kind='{kind}'", f"objective.options={options}"))


def test_inputs_of_the_objective_are_not_the_models(small_recipe: MakeRecipe) -> None:
    worse = "data.conditioning.worse={kind='video', path='{stem}.mp4'}"
    recipe = small_recipe(worse, "objective.inputs=['worse']")
    assert (list(recipe.model_inputs()), list(recipe.step_inputs())) == ([], ["worse"])
    with pytest.raises(LongtakeError, match="names wurse"):
        small_recipe(worse, "objective.inputs=['wurse']")


def test_joined_batches_are_one_after_the_other() -> None:
    latents, noise = torch.randn(2, 1, 1, 1, 1, 1)
    one = FlowBatch(latents, noise, torch.ones(1), {"text": torch.ones(1, 3)})
    both = joined([one, replace(one, sigmas=torch.zeros(1))])
    assert both.sigmas.tolist() == [1, 0]
    assert both.latents.shape == (2, 1, 1, 1, 1)
    assert both.conditioning["text"].shape == (2, 3)
    assert both.loss_weights is None
