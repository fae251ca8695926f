"""Adapters in training or in samples alone: merged weights there, and nothing anywhere else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.build import (
    QUIET,
    Recipes,
    assert_saved_alike,
    fill_lora,
    forget_after,
    hold_weights,
    losses,
    saved,
)
from torch import Tensor

from longtake import config
from longtake.errors import RecipeError
from longtake.evaluation.evaluator import SampleEvaluator
from longtake.evaluation.options import ServerReport
from longtake.evaluation_dir import EvaluationDirectory
from longtake.models.components import Components, assemble
from longtake.models.frozen_adapter import attach_adapters, attach_sampling_adapter, sampled_with
from longtake.planner.record import BlockOption, BlockWeights
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import NotHereError
from longtake.sampling.presets import Request, find_preset, settings_for
from longtake.sampling.sampler import load_sampler
from longtake.training.train import train

_CPU = torch.device("cpu")
_LAYERS = ("blocks.0.attention.to_qkv", "blocks.1.attention.to_out", "tube_out")
_LORA = ("trainable.kind=lora", "trainable.rank=2", "trainable.targets=['to_qkv', 'tube_out']")


@pytest.fixture
def adapter(small_recipe: Recipes, tmp_path: Path) -> Path:
    """A LoRA of rank 3 and alpha 6 for some layers, of which a run's LoRA has two."""
    model, generator = assemble(small_recipe(), ["a"], None).model, torch.Generator().manual_seed(4)
    weights = dict[str, Tensor]()
    for name in _LAYERS:
        rows, columns = model.get_parameter(f"{name}.weight").shape
        weights[f"{name}.lora_down.weight"] = torch.randn(3, columns, generator=generator) / 8
        weights[f"{name}.lora_up.weight"] = torch.randn(rows, 3, generator=generator) / 8
        weights[f"{name}.alpha"] = torch.tensor(6.0)
    save_file(weights, tmp_path / "adapter.safetensors")
    return tmp_path / "adapter.safetensors"


def _merge(parts: Components, file: Path, strength: float = 1.0) -> None:
    from safetensors.torch import load_file

    stored = load_file(file)
    for name in _LAYERS:
        update = stored[f"{name}.lora_up.weight"] @ stored[f"{name}.lora_down.weight"]
        layer = parts.model.get_submodule(name)
        weight = getattr(layer, "base_layer", layer).weight
        assert isinstance(weight, Tensor)
        weight.data += strength * 2 * update  # alpha / rank


def _predicted(parts: Components) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 3, 8, 32, 32, generator=generator)
    told = parts.text.encode(["a red ball", "a square"])
    return parts.predict_velocity(noise, torch.tensor([0.4, 0.9]), told)


@pytest.mark.parametrize("changes", [(), _LORA], ids=["full", "lora"])
def test_in_training_it_is_merged_and_otherwise_it_is_not_there(
    small_recipe: Recipes, adapter: Path, changes: Sequence[str]
) -> None:
    plain, merged, parts = (assemble(small_recipe(*changes), ["a"], None) for _ in range(3))
    for each in (plain, merged, parts):
        fill_lora(each.model)
    _merge(merged, adapter)
    recipe = small_recipe(*changes, f"model.training_adapter={adapter}")
    attach_adapters(recipe, parts.model, parts.family, _CPU)
    expected, found = _predicted(merged), _predicted(parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - _predicted(plain)).abs().max() > 0.01
    for one in (merged, parts):
        one.model.zero_grad()
        torch.autograd.backward(_predicted(one).square().mean())
    gradients = [
        {n: p.grad for n, p in each.model.named_parameters() if p.grad is not None}
        for each in (parts, merged)
    ]
    assert gradients[0]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert torch.equal(_predicted(_in_evaluation(parts)), _predicted(_in_evaluation(plain)))
    assert parts.model.state_dict().keys() == plain.model.state_dict().keys()


def _in_evaluation(parts: Components) -> Components:
    parts.model.eval()
    return parts


def test_a_run_resumes_with_it_and_is_sampled_without_the_file(
    small_recipe: Recipes, adapter: Path
) -> None:
    changes = (*_LORA, f"model.training_adapter={adapter}", "training.steps=6")
    recipe = small_recipe.trained(*changes, "checkpoint.every=3", name="with")
    without = small_recipe.trained(*_LORA, "training.steps=1", name="without")
    assert losses(recipe)[0] != losses(without)[0]
    again = small_recipe.trained(*changes, "checkpoint.every=3", name="again")
    forget_after(again, 3)
    assert train(again, QUIET).start_step == 3
    assert_saved_alike(again, recipe, 6)
    assert saved(recipe, 6, "model").keys() == saved(without, 1, "model").keys()
    adapter.unlink()
    sampler = load_sampler(recipe.out)
    assert "adapter" not in " ".join(name for name, _ in sampler.components.model.named_buffers())


def _attach(parts: Components, file: Path) -> None:
    sampling = config.SamplingSection(adapter=file)
    attach_sampling_adapter(sampling, parts.model, parts.family, None, _CPU)


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_in_samples_it_is_merged_and_otherwise_it_is_not_there(
    small_recipe: Recipes, adapter: Path, strength: float
) -> None:
    plain, merged, parts = (assemble(small_recipe(*_LORA), ["a"], None) for _ in range(3))
    for each in (plain, merged, parts):
        fill_lora(each.model)
    _merge(merged, adapter, strength)
    _attach(parts, adapter)
    assert torch.equal(_predicted(parts), _predicted(plain))  # in training
    parts, plain, merged = map(_in_evaluation, (parts, plain, merged))
    assert torch.equal(_predicted(parts), _predicted(plain))  # of held-out clips
    with sampled_with(strength):
        found = _predicted(parts)
    torch.testing.assert_close(found, _predicted(merged), rtol=1e-4, atol=1e-4)
    assert (found - _predicted(plain)).abs().max() > 0.01
    assert parts.model.state_dict().keys() == plain.model.state_dict().keys()


@pytest.mark.parametrize("weights", ["stream", "int8", "stream-int8"])
def test_weights_that_are_streamed_or_quantised_have_it_too(
    small_recipe: Recipes, adapter: Path, weights: BlockWeights
) -> None:
    """The difference that it makes is that of weights which are neither."""
    found = []
    for each in ("keep", weights):
        parts = _in_evaluation(assemble(small_recipe(*_LORA), ["a"], None))
        _attach(parts, adapter)
        blocks = dict(enumerate(parts.family.blocks(parts.model)))
        named = {str(number): block for number, block in blocks.items()}
        hold_weights(named, dict.fromkeys(named, BlockOption("keep", each)))
        with torch.no_grad():
            plain = _predicted(parts)
            with sampled_with(1.0):
                found.append(_predicted(parts) - plain)
    assert found[0].abs().max() > 0.01
    if weights == "stream":
        assert torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.05)


def _sampled_run(small_recipe: Recipes, name: str, *changes: str) -> tuple[config.Recipe, Any]:
    """Train four steps with samples at the end; return the recipe and the samples' scores."""
    recipe = small_recipe(
        *_LORA,
        "training.steps=4",
        "sampling={every=4, num_inference_steps=2, guidance_scale=1.0}",
        "evaluation.presets.mine={prompts=['a red ball']}",
        "evaluation.reference_clips=0",
        *changes,
        name=name,
    )
    train(recipe, QUIET, evaluate=SampleEvaluator("test", ServerReport(QUIET)))
    return recipe, EvaluationDirectory(RunDirectory(recipe.out)).scores("mine", 4)


def test_a_run_trains_as_without_it_and_samples_with_it(
    small_recipe: Recipes, adapter: Path
) -> None:
    """Between its steps as by `longtake sample`, and a preset can do without."""
    plain, without = _sampled_run(small_recipe, "plain")
    adapted, found = _sampled_run(small_recipe, "adapted", f"sampling.adapter={adapter}")
    assert_saved_alike(adapted, plain, 4)
    assert losses(adapted) == losses(plain)
    settings = found["settings"]
    assert (settings["adapter"], settings["adapter_strength"]) == ("adapter.safetensors", 1.0)
    assert "adapter_strength" not in without["settings"]
    assert found["measures"] != without["measures"]
    request = Request("a red ball", 0)
    sampled = {}
    for name, recipe, strength in (
        ("plain", plain, 1.0),
        ("on", adapted, 1.0),
        ("off", adapted, 0.0),
    ):
        how = settings_for(recipe, adapter_strength=strength if name != "plain" else None)
        sampled[name] = load_sampler(recipe.out, device="cpu").sample([request], *how)
    assert (sampled["on"] != sampled["plain"]).any()
    assert (sampled["off"] == sampled["plain"]).all()
    off = config.changed(adapted, ["evaluation.presets.mine.adapter_strength=0"])
    assert find_preset(off, "mine").settings.adapter_strength == 0
    exact = load_sampler(adapted.out, device="cpu", exact=True)
    assert "adapter" not in " ".join(name for name, _ in exact.components.model.named_buffers())
    moved = adapter.rename(adapter.with_name("moved.safetensors"))
    with pytest.raises(
        NotHereError, match=r"sampling\.adapter is .*adapter\.safetensors, and there"
    ):
        load_sampler(adapted.out, device="cpu")
    there = config.changed(adapted, [f"sampling.adapter={moved}"]).sampling
    second = there.model_copy(update={"adapter_2": adapter})
    with pytest.raises(NotHereError, match=r"adapter_2 is .*name its place here: a recipe with"):
        load_sampler(adapted.out, device="cpu", sampling=second)
    again = load_sampler(adapted.out, device="cpu", sampling=there)
    assert (again.sample([request], *settings_for(adapted)) == sampled["on"]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sampling.adapter_strength=0.5"], r"adapter_strength is 0\.5, but sampling\.adapter"),
        (["sampling.adapter_2=a.safetensors"], r"adapter_2 is for the low-noise .* is unset"),
    ],
)
def test_settings_of_an_adapter_that_is_not_there_are_refused(
    small_recipe: Recipes, changes: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        small_recipe(*changes)


def test_an_adapter_of_another_model_is_refused(small_recipe: Recipes, tmp_path: Path) -> None:
    parts, file = assemble(small_recipe(), ["a"], None), tmp_path / "other.safetensors"
    wide = {
        "tube_out.lora_A.weight": torch.zeros(2, 7),
        "tube_out.lora_B.weight": torch.zeros(5, 2),
    }
    save_file(wide, file)
    with pytest.raises(RecipeError, match=r"sampling\.adapter .* maps 7 to 5 numbers"):
        _attach(parts, file)
