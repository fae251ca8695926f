"""What Qwen-Image 2.1 adds to what each family promises: opacity, sizes, other models, names."""

from typing import Any

import pytest
import torch
from tests.families import release_qwen_image21
from torch import Tensor

from longtake.config import Bucket, ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models.base import latent_shape
from longtake.models.codec import RgbaCodec
from longtake.models.qwen_image21 import QwenImage21
from longtake.parallel.context_parallel import TokenSharing

_FAMILY = QwenImage21()


@pytest.fixture(scope="module")
def codec() -> RgbaCodec:
    torch.manual_seed(0)
    return RgbaCodec(release_qwen_image21.autoencoder())


def _pixels(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@torch.no_grad()
def test_pictures_are_encoded_as_opaque_ones(codec: RgbaCodec) -> None:
    """As diffusers' training script reads a picture without opacity; frames one by one."""
    pixels = _pixels(1, 3, 2, 64, 96)
    latents = codec.encode(pixels)
    rgba = torch.cat([pixels, torch.full_like(pixels[:, :1], 255)], dim=1) / 127.5 - 1
    mean, std = (getattr(codec.autoencoder.config, f"latents_{n}") for n in ("mean", "std"))
    for frame in range(2):
        mode = codec.autoencoder.encode(rgba[:, :, frame : frame + 1]).latent_dist.mode()  # type: ignore[operator]
        expected = (mode[0, :, 0] - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
            :, None, None
        ]
        torch.testing.assert_close(latents[0, :, frame], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [32, 64, 500])
def test_tiles_give_the_latents_of_the_whole_picture(codec: RgbaCodec, tile: int) -> None:
    pixels = _pixels(1, 3, 1, 112, 208)
    whole = codec.encode(pixels)
    tiled = RgbaCodec(codec.autoencoder)
    tiled.encode_tile = tile
    found = tiled.encode(pixels)
    assert tiled.can_tile
    assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_transparent_pixels_are_shown_on_white(
    codec: RgbaCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = torch.zeros(1, 4, 1, 1, 3, dtype=torch.uint8)
    decoded[0, :, 0, 0] = torch.tensor([[10, 10, 10], [20, 20, 20], [30, 30, 30], [255, 0, 51]])
    monkeypatch.setattr(codec, "_decoded", lambda _latents, *, tiles: decoded)
    shown = codec.decode(torch.zeros(1, codec.channels, 1, 1, 1))
    assert shown[0, :, 0, 0].T.tolist() == [[10, 20, 30], [255] * 3, [206, 208, 210]]


def test_sizes_are_whole_slots_of_the_text_encoder(codec: RgbaCodec) -> None:
    patch = _FAMILY.patch(ModelSection(family="qwen_image21"))
    with pytest.raises(RecipeError, match=r"height and width divisible by 32\. "):
        latent_shape(codec, Bucket(num_frames=1, height=64, width=80), patch)


@pytest.mark.parametrize("settings", [{"patch_size": 2}, {"causal_condition": False}])
def test_other_transformers_of_its_class_are_refused(settings: dict[str, Any]) -> None:
    config = release_qwen_image21.transformer(**settings).config
    with pytest.raises(RecipeError, match=r"patch_size \d and causal_condition .* has 1 and true"):
        _FAMILY.check_config(config)


def test_ranks_that_would_attend_in_a_ring_are_refused() -> None:
    with pytest.raises(ModelError, match="its 4 ranks would need one"):
        _FAMILY.block.share_tokens(release_qwen_image21.transformer(), TokenSharing(0, 4, 2))


def test_a_whole_model_has_other_names_in_comfyui() -> None:
    with pytest.raises(RecipeError, match=r"apart here, such as img_in\.weight; it reads LoRA"):
        _FAMILY.comfyui_name("img_in.weight", is_lora=False)
