"""LoRA on frozen weights that are quantised or streamed, from a release to an exported file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.build import QUIET, TINY_WAN, MakeRecipe, losses, saved

from longtake.errors import RecipeChangedError
from longtake.evaluation.export import export
from longtake.models.quantized import QuantizedLinear
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import load_sampler
from longtake.training.train import train

_LORA = ('trainable={kind="lora", rank=2}', "optimizer.schedule=constant", "training.steps=4")


@pytest.fixture(scope="module")
def release(
    small_recipe_in: Callable[[Path], MakeRecipe], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny Wan in the layout of released pipelines."""
    folder = tmp_path_factory.mktemp("release")
    recipe = small_recipe_in(folder)(*TINY_WAN, "training.steps=1")
    train(recipe, QUIET)
    export(load_sampler(recipe.out, ema=False, device="cpu"), folder / "wan", "diffusers")
    return folder / "wan"


@pytest.fixture
def lora_recipe(small_recipe: MakeRecipe, release: Path) -> MakeRecipe:
    """Makes recipes of a LoRA on the release."""
    always = (
        "data.buckets=[{num_frames=5, height=32, width=32}]",
        f'model={{family="wan", pretrained="{release}"}}',
        f'codec={{kind="autoencoder", pretrained="{release}"}}',
        f'text={{kind="transformers", pretrained="{release}", max_tokens=16}}',
        *_LORA,
    )
    return lambda *changes: small_recipe(*always, *changes)


def test_a_streamed_run_trains_bitwise_the_same(lora_recipe: MakeRecipe, tmp_path: Path) -> None:
    """With gradients that accumulate, and recomputed blocks."""
    parts = "training.micro_batch_size=2"
    plain = lora_recipe(parts, "recompute.policy=none", f"out={tmp_path / 'plain'}")
    streamed = lora_recipe(
        parts, "recompute.policy=alternate", "model.stream=all", f"out={tmp_path / 'streamed'}"
    )
    for recipe in (plain, streamed):
        train(recipe, QUIET)
    assert losses(streamed) == losses(plain)
    states = [saved(recipe, 4, "model") for recipe in (streamed, plain)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["int8_dynamic", "fp8_dynamic"])
def test_a_lora_trains_by_products_in_8_bits(
    lora_recipe: MakeRecipe, tmp_path: Path, kind: str
) -> None:
    """To the bit with streamed weights, and near a run with exact ones."""
    dynamic = f"model.quantize={kind}"
    kept, streamed, exact = (
        lora_recipe(*changes, f"out={tmp_path / name}")
        for name, changes in {
            "kept": (dynamic,),
            "streamed": (dynamic, "model.stream=all"),
            "exact": (),
        }.items()
    )
    for recipe in (kept, streamed, exact):
        train(recipe, QUIET)
    assert losses(streamed) == losses(kept)
    assert losses(kept) != losses(exact)
    assert losses(kept) == pytest.approx(losses(exact), rel=0.05)


def test_a_lora_on_quantised_weights_is_resumed_and_exported(
    lora_recipe: MakeRecipe, release: Path, tmp_path: Path
) -> None:
    """Bitwise, though it streams from then on; the LoRA fits on the release as it is."""
    import diffusers

    nf4 = ("model.quantize=nf4", "text.quantize=int8", "checkpoint.every=2")
    whole, parted = (lora_recipe(*nf4, f"out={tmp_path / name}") for name in ("whole", "parted"))
    train(whole, QUIET)
    train(lora_recipe(*nf4, f"out={parted.out}", "training.steps=2"), QUIET)
    train(lora_recipe(*nf4, f"out={parted.out}", "model.stream=all"), QUIET)
    assert losses(parted) == losses(whole)
    trained = saved(whole, 4, "model")
    torch.testing.assert_close(saved(parted, 4, "model"), trained, rtol=0, atol=0)
    assert all("lora_" in name for name in trained)
    exact = lora_recipe(f"out={tmp_path / 'exact'}")
    train(exact, QUIET)
    assert losses(whole) != losses(exact)
    assert losses(whole) == pytest.approx(losses(exact), rel=0.1)

    with pytest.raises(RecipeChangedError, match=r"model\.quantize"):
        train(lora_recipe(*nf4, "model.quantize=int8", f"out={whole.out}"), QUIET)

    sampler = load_sampler(whole.out, device="cpu")
    quantised = _quantised(sampler.components.model)
    assert {each.kind for each in quantised} == {"nf4"}
    assert _quantised(sampler.components.text.modules()[0])
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=2)
    assert sampler.sample([Request("a red circle", 0)], settings, bucket).shape[1:3] == (5, 32)

    exact_sampler = load_sampler(whole.out, device="cpu", exact=True)
    out = tmp_path / "exported"
    export(exact_sampler, out, "diffusers")
    pipeline = diffusers.WanPipeline.from_pretrained(release)
    pipeline.load_lora_weights(out)
    name = "blocks.1.attn1.to_q"
    base = diffusers.WanPipeline.from_pretrained(release).transformer.get_submodule(name)
    loaded = pipeline.transformer.get_submodule(name)
    assert torch.equal(loaded.base_layer.weight, base.weight)
    merged = diffusers.WanPipeline.from_pretrained(out).transformer.get_submodule(name)
    (adapter,) = loaded.lora_A
    update = loaded.lora_B[adapter].weight @ loaded.lora_A[adapter].weight
    torch.testing.assert_close(merged.weight, base.weight + update, rtol=1e-5, atol=1e-6)


def _quantised(model: torch.nn.Module) -> list[QuantizedLinear]:
    return [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
