"""Families refuse arguments and latents that do not fit before anything large is built."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.families.release_z_image import SIZES
from tests.models.tiny import CLIP, FLUX, T5, WAN

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.models.base import LatentShape, family

_SHAPE = LatentShape(4, 2, 8, 12)
_IMAGE = _SHAPE._replace(num_frames=1)
_MODELS = {"wan": WAN, "flux": FLUX | {"guidance_embeds": True}, "z_image": SIZES}
_TEXT_WIDTHS = {"wan": T5["d_model"], "flux": T5["d_model"], "z_image": SIZES["cap_feat_dim"]}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("wan", {"num_layer": 2}, r"config\.num_layer is not .* did you mean num_layers\?"),
        ("wan", {"num_layers": "2"}, r"model\.config does not fit WanTransformer3DModel"),
        ("wan", {"in_channels": 36}, "in_channels is 36, but codec and text encoder give 4"),
        ("wan", {"text_dim": 4096}, "text_dim is 4096, but codec and text encoder give 12"),
        ("flux", {"in_channels": 64}, "in_channels is 64, but codec and text encoder give 16"),
        ("flux", {"joint_attention_dim": 4096}, "is 4096, but codec and text encoder give 12"),
        ("flux", {"axes_dims_rope": [4, 6, 6]}, r"\[4, 6, 6\] adds up to 16, but .* is 12\. They"),
        ("flux", {"out_channels": 4}, r"out_channels 4 and patch_size 1 give another latent"),
        ("z_image", {"siglip_feat_dim": 8}, "siglip_feat_dim 8: it is Z-Image Omni's"),
        ("z_image", {"all_patch_size": [4]}, r"\[4\] .* lack the patch of 1 x 2 x 2"),
        ("z_image", {"axes_lens": [64, 64, 64]}, "64 tokens of text .* but 66 are needed"),
        ("z_image", {"axes_lens": [1024, 3, 64]}, "for 3 rows of tokens, but 4 are needed"),
    ],
)
def test_wrong_arguments_are_named(name: str, config: dict[str, Any], message: str) -> None:
    section = ModelSection(family=name, config=_MODELS[name] | config)
    text: Any = SimpleNamespace(embed_dim=_TEXT_WIDTHS[name], pooled_dim=None, max_tokens=64)
    if name == "flux":
        text.pooled_dim = CLIP["hidden_size"]
    with pytest.raises(RecipeError, match=message):
        family(name).build(section, [_IMAGE], text, weights=False)


@pytest.mark.parametrize(
    ("name", "config", "shape", "message"),
    [
        ("wan", {}, LatentShape(4, 2, 5, 6), "nearest latents that do are 2 frames of 6x4: mult"),
        ("wan", {}, LatentShape(4, 2, 4, 1), "nearest latents that do are 2 frames of 2x4: mult"),
        ("wan", {"patch_size": [2, 2, 2]}, LatentShape(4, 3, 4, 6), "that do are 4 frames of 6x4:"),
        ("wan", {"patch_size": 2}, _SHAPE, r"model\.config\.patch_size = .* expected frames"),
        ("wan", {"patch_size": [2, 2]}, _SHAPE, r"config\.patch_size = .* expected frames"),
        ("wan", {"patch_size": [1, 0, 2]}, _SHAPE, r"config\.patch_size = .* expected frames"),
        ("wan", {"patch_size": [1, 2, "2"]}, _SHAPE, r"config\.patch_size = .* expected frames"),
        ("flux", {}, _SHAPE, r"a bucket has 2 frames\. Set num_frames = 1\."),
        ("flux", {}, LatentShape(4, 1, 5, 8), "latents of 8x5 .* nearest latents that do are 8x4"),
        ("flux", {}, LatentShape(4, 1, 6, 1), "latents of 1x6 .* nearest latents that do are 2x6"),
    ],
)
def test_latents_that_do_not_fit_name_the_nearest(
    name: str, config: dict[str, Any], shape: LatentShape, message: str
) -> None:
    section = ModelSection(family=name, config=_MODELS[name] | config)
    with pytest.raises(RecipeError, match=message):
        family(name).check(section, [_IMAGE if name == "flux" else _SHAPE, shape])
