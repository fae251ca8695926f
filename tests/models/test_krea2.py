"""What Krea 2 adds to what each family promises: Turbo, padding, other releases, names."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.families import release_krea2
from tests.models.tiny import make_recipe, write_configs
from tests.sampling.build import make_sampler
from torch import Tensor

from longtake.cli import init
from longtake.config import ModelSection, Recipe
from longtake.errors import RecipeError
from longtake.flow.shift import MuLine, ShiftRule
from longtake.models.components import outline
from longtake.models.krea2 import Krea2
from longtake.models.lora_files import read_lora


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("krea") / "release"
    release_krea2.make(folder)
    return folder


def _recipe(released: Path, max_tokens: int = 48, **model: Any) -> Recipe:
    return make_recipe(
        "krea2",
        (1, 48, 64),
        released,
        text={"max_tokens": max_tokens},
        model=model,
        trainable={"kind": "lora", "rank": 2},
    )


def _written(folder: Path, index: dict[str, Any], scheduler: dict[str, Any]) -> ModelSection:
    """A release of these configurations alone."""
    files = {
        "model_index.json": {"_class_name": "Krea2Pipeline", **index},
        "transformer/config.json": {"_class_name": "Krea2Transformer2DModel"},
        "scheduler/scheduler_config.json": scheduler,
    }
    return ModelSection(family="krea2", pretrained=write_configs(folder, files))


def test_turbo_has_one_shift_at_every_size_and_no_second_pass(tmp_path: Path) -> None:
    dynamic = {"use_dynamic_shifting": True, "max_image_seq_len": 6400}
    turbo = _written(tmp_path / "turbo", {"is_distilled": True}, dynamic)
    found = Krea2().defaults(turbo)
    assert (found.guidance_scale, found.num_inference_steps) == (1.0, 8)
    assert (found.caption_dropout, found.shift) == (0.0, ShiftRule(math.exp(1.15)))
    plain = Krea2().defaults(_written(tmp_path / "raw", {"is_distilled": False}, dynamic))
    assert (plain.guidance_scale, plain.num_inference_steps) == (5.5, 28)
    assert plain.shift == ShiftRule(MuLine(max_tokens=6400))
    static = _written(tmp_path / "static", {"is_distilled": True}, {"shift": 2.0})
    assert Krea2().defaults(static).shift == ShiftRule(2.0)


def test_init_says_that_turbo_is_distilled(tmp_path: Path) -> None:
    """And of the release that is not, nothing."""
    for is_distilled in (True, False):
        folder = tmp_path / str(is_distilled)
        _written(folder, {"is_distilled": is_distilled}, {"use_dynamic_shifting": True})
        template = init.template_of_release(str(folder), None)
        recipe = init.render_recipe(template, None, Path("clips.parquet"), tmp_path / "x.toml")
        assert (
            "better trained on krea/Krea-2-Raw" in " ".join(recipe.replace("#", "").split())
        ) == is_distilled


@torch.no_grad()
def test_a_text_is_embedded_alike_whatever_its_padding(released: Path) -> None:
    """So `text.max_tokens` below the pipeline's 512 changes nothing but memory."""
    embeds = {}
    for max_tokens in (24, 48):
        text = make_sampler(_recipe(released, max_tokens)).components.text
        told = text.encode(["a red ball rolls left", ""])
        lengths = told["prompt_length"].tolist()
        assert lengths[0] > lengths[1] == 5  # tokens that end the template
        embeds[max_tokens] = told["prompt_embeds"][:, : lengths[0]]
    torch.testing.assert_close(embeds[24], embeds[48], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("index", "model", "said"),
    [
        ({"text_encoder_select_layers": [1, 2]}, {}, r"text_encoder_select_layers \[1, 2\].*35\]"),
        ({"patch_size": 1}, {}, r"patch_size 1\. longtake trains Krea 2 with 2"),
        ({}, {"num_text_layers": 3}, "num_text_layers is 3, but .* has 12 hidden states"),
    ],
)
def test_releases_of_other_layers_or_patches_are_refused(
    index: dict[str, Any], model: dict[str, Any], said: str, released: Path, tmp_path: Path
) -> None:
    text = outline(_recipe(released)).text
    section = _written(tmp_path, index, {})
    shaped = release_krea2.transformer()
    shaped.register_to_config(**model)
    with pytest.raises(RecipeError, match=said):
        Krea2().adapt(shaped, section, [], text)


def test_a_lora_with_the_names_of_kreas_code_is_read(released: Path, tmp_path: Path) -> None:
    """As ai-toolkit and ComfyUI write it; diffusers knows these names."""
    parts, file = outline(_recipe(released)), tmp_path / "native.safetensors"
    state = dict[str, Tensor]()
    for ours, theirs in (
        ("transformer_blocks.1.attn.to_gate", "blocks.1.attn.gate"),
        ("text_fusion.refiner_blocks.0.attn.to_out.0", "txtfusion.refiner_blocks.0.attn.wo"),
    ):
        layer: Any = parts.model.get_submodule(ours)
        rows, columns = layer.out_features, layer.in_features
        state[f"diffusion_model.{theirs}.lora_A.weight"] = torch.randn(2, columns)
        state[f"diffusion_model.{theirs}.lora_B.weight"] = torch.randn(rows, 2)
    save_file(state, file)
    found = read_lora(file, parts.model, parts.family)
    assert {name.rpartition(".attn.")[2] for name in found} == {"to_gate", "to_out.0"}
    gate: Any = found["transformer_blocks.1.attn.to_gate"]
    assert torch.equal(gate.up, state["diffusion_model.blocks.1.attn.gate.lora_B.weight"])


def test_a_whole_model_has_other_names_in_comfyui() -> None:
    with pytest.raises(RecipeError, match=r"shapes than img_in\.weight; it reads LoRA"):
        Krea2().comfyui_name("img_in.weight", is_lora=False)
