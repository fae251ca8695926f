"""An adapter that is there in training alone: merged weights there, and nothing anywhere else."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.build import QUIET, Recipes, assert_saved_alike, fill_lora, forget_after, losses, saved
from torch import Tensor

from longtake.errors import RecipeError
from longtake.models.components import Components, assemble
from longtake.models.frozen_adapter import attach_training_adapter
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


def _merge(parts: Components, file: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(file)
    for name in _LAYERS:
        update = stored[f"{name}.lora_up.weight"] @ stored[f"{name}.lora_down.weight"]
        layer = parts.model.get_submodule(name)
        weight = getattr(layer, "base_layer", layer).weight
        assert isinstance(weight, Tensor)
        weight.data += 2 * update  # alpha / rank


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
    attach_training_adapter(adapter, parts.model, parts.family, None, _CPU)
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


def test_an_adapter_of_another_model_is_refused(small_recipe: Recipes, tmp_path: Path) -> None:
    parts, file = assemble(small_recipe(), ["a"], None), tmp_path / "other.safetensors"
    wide = {
        "tube_out.lora_A.weight": torch.zeros(2, 7),
        "tube_out.lora_B.weight": torch.zeros(5, 2),
    }
    save_file(wide, file)
    with pytest.raises(RecipeError, match="maps 7 to 5 numbers"):
        attach_training_adapter(file, parts.model, parts.family, None, _CPU)
