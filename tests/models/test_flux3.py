"""What FLUX.3 adds to what each family promises: what references alone train, other releases."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import release_flux3
from tests.models.tiny import make_recipe, write_configs
from torch import nn

from longtake.config import ModelSection, Recipe
from longtake.errors import RecipeError
from longtake.flow.shift import ShiftRule
from longtake.models.components import outline
from longtake.models.flux3 import Flux3
from longtake.models.releases import MODULAR_INDEX
from longtake.models.trainable import lora_layers

_PICTURE = {"kind": "picture", "path": "../{stem}.png"}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("flux3") / "release"
    release_flux3.make(folder)
    return folder


def _recipe(released: Path, names: Collection[str], **sections: Any) -> Recipe:
    data = {"conditioning": dict.fromkeys(names, _PICTURE)}
    return make_recipe("flux3", (1, 64, 96), released, data=data, **sections)


def _trained(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


def test_parts_that_read_references_train_with_references_alone(released: Path) -> None:
    whole = outline(_recipe(released, ["reference"], trainable={"kind": "full"}))
    text = outline(_recipe(released, [], trainable={"kind": "full"}))
    names = {name for name, _ in whole.model.named_parameters()}
    assert _trained(whole.model) == names
    frozen = names - _trained(text.model)
    assert frozen == {name for name in names if "image_cond" in name}
    assert {name.partition(".image_cond")[0] for name in frozen} == {
        "x_embedders",
        "early_stream_modulations",
        "single_stream_modulations",
        "mode_blocks",
    }
    assert len(whole.family.blocks(whole.model)) == len(text.family.blocks(text.model)) + 2


def test_lora_without_references_is_nowhere_that_they_alone_reach(released: Path) -> None:
    section = {"kind": "lora", "rank": 2}
    parts = outline(_recipe(released, [], trainable=section))
    layers = [name for name, _ in lora_layers(parts.model)]
    assert len(layers) == 4 * len(parts.family.blocks(parts.model))
    assert not [name for name in layers if "image_cond" in name]
    section["targets"] = ["to_q", "mode_blocks.image_cond.*.attn.to_k"]
    with pytest.raises(
        RecipeError, match=r"'mode_blocks.image_cond\.\*.* names only .* data.conditioning names no"
    ):
        outline(_recipe(released, [], trainable=section))
    with_them = outline(_recipe(released, ["reference_2"], trainable=section))
    assert any("image_cond.0.attn.to_k" in name for name, _ in lora_layers(with_them.model))


def _written(folder: Path, **files: Any) -> ModelSection:
    """A release of these configurations alone, and what its index says of them."""
    index = {"_class_name": "Flux3ModularPipeline", "_blocks_class_name": "Flux3AutoBlocks"}
    parts = {name: ["diffusers", "Any", {"subfolder": name}] for name in files}
    configs = {f"{name}/{name}_config.json": values for name, values in files.items()}
    configs["transformer/config.json"] = {"_class_name": "Flux3Transformer2DModel"}
    where = write_configs(folder, {MODULAR_INDEX: index | parts, **configs})
    return ModelSection(family="flux3", pretrained=where)


def test_shift_and_guidance_are_those_of_the_blocks_or_of_the_release(tmp_path: Path) -> None:
    found = Flux3().defaults(_written(tmp_path / "plain"))
    assert (found.shift, found.guidance_scale) == (ShiftRule(6.93), 3.5)
    given = _written(tmp_path / "own", scheduler={"shift": 4.0}, guider={"guidance_scale": 4.0})
    found = Flux3().defaults(given)
    assert (found.shift, found.guidance_scale) == (ShiftRule(4.0), 4.0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"flow_map": True}, "flow_map True .* is trained without flow_map"),
        ({"axes_dims_rope": [4, 4, 8]}, r"\[4, 4, 8\]\. .* that add up to attention_head_dim 16"),
        ({"axes_dims_rope": [4, 4, 4, 2]}, r"\[4, 4, 4, 2\]"),
    ],
)
def test_transformers_that_would_train_wrongly_are_refused(
    config: dict[str, Any], said: str
) -> None:
    made = release_flux3.transformer(**config)
    with pytest.raises(RecipeError, match=said):
        Flux3().check_config(made.config)
