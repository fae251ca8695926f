"""Further inputs become the model's tensors, of the shapes that a plan expects."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.build import TINY_WAN, MakeRecipe

from longtake.config import Bucket, ConditioningSection
from longtake.data.conditioning import empty_conditioning
from longtake.models.base import family
from longtake.models.codec import Codec, PixelCodec, build_codec
from longtake.models.conditioning import condition_on, loss_weights, on_latents, outline_inputs

_BUCKET = Bucket(num_frames=5, height=16, width=32)
_SECTIONS: dict[str, dict[str, Any]] = {
    "pose": {"kind": "picture"},
    "view": {"kind": "picture", "encode": False},
    "depth": {"kind": "video"},
    "raw": {"kind": "video", "encode": False},
    "person": {"kind": "mask"},
    "camera": {"kind": "numbers", "width": 12, "per_frame": True},
    "scene": {"kind": "numbers", "width": 7},
}


@pytest.fixture(params=["pixels", "wan"])
def codec(request: pytest.FixtureRequest, small_recipe: MakeRecipe) -> Codec:
    if request.param == "pixels":
        return PixelCodec()
    return build_codec(small_recipe(*TINY_WAN).codec, family("wan").frozen.codec, None)


@pytest.mark.parametrize("name", _SECTIONS)
def test_an_outline_has_the_shapes_of_what_is_read(name: str, codec: Codec) -> None:
    parts: Any = SimpleNamespace(family=family("wan"), codec=codec, text=None)
    section = ConditioningSection.model_validate({"path": "{stem}.x", **_SECTIONS[name]})
    read = empty_conditioning(section, _BUCKET, 2)
    read[...] = np.random.default_rng(0).integers(0, 256, read.shape)
    found = condition_on(parts, {name: section}, {name: torch.from_numpy(read)}, _BUCKET)
    outlined = outline_inputs(parts, {name: section}, _BUCKET)
    assert found.keys() == outlined.keys()
    for key, tensor in found.items():
        assert (2, *outlined[key].shape[1:]) == tensor.shape
        assert tensor.dtype == outlined[key].dtype == torch.float32
    if section.is_encoded:
        alone = condition_on(parts, {name: section}, {name: torch.from_numpy(read[1:])}, _BUCKET)
        assert torch.equal(found[f"{name}_latents"][1:], alone[f"{name}_latents"])
    if section.encode is False:
        assert (found[name].min().item(), found[name].max().item()) == (-1, 1)


def test_a_latents_mask_is_the_mean_of_its_pixels(small_recipe: MakeRecipe) -> None:
    """The first latent frame stands for the first frame, the others for groups of the rest."""
    codec = build_codec(small_recipe(*TINY_WAN).codec, family("wan").frozen.codec, None)
    mask = torch.rand(1, 1, 5, 16, 32)
    found = on_latents(codec, mask)
    frames, height, width = codec.latent_shape(_BUCKET)
    assert found.shape == (1, 1, frames, height, width)
    blocks = mask.reshape(5, height, 16 // height, width, 32 // width).mean((2, 4))
    torch.testing.assert_close(found[0, 0, 0], blocks[0])
    size = 4 // (frames - 1)
    for frame in range(1, frames):
        group = blocks[1 + (frame - 1) * size : 1 + frame * size]
        torch.testing.assert_close(found[0, 0, frame], group.mean(0))
    assert torch.equal(on_latents(PixelCodec(), mask), mask)


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.3])
def test_white_weighs_exactly_1_and_black_the_floor(floor: float, codec: Codec) -> None:
    mask = torch.full((1, 1, 5, 16, 32), 255, dtype=torch.uint8)
    assert (loss_weights(codec, mask, floor) == 1).all()
    assert (loss_weights(codec, mask * 0, floor) == torch.tensor(floor)).all()
