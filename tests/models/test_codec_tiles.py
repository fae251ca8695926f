"""How far decoding in tiles may differ from decoding whole, and that it leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.config import CodecSection
from longtake.models.codec import Codec, build_codec

_WAN: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
}
_IMAGES: dict[str, Any] = {
    "block_out_channels": [4, 4, 4, 4],
    "norm_num_groups": 2,
    "latent_channels": 4,
}
_SECTIONS = {
    "AutoencoderKLWan": (_WAN, (1, 4, 2, 16, 72)),  # 5 frames of 288x64: two tiles of 256
    "AutoencoderKL": (_IMAGES, (1, 4, 1, 40, 72)),  # 576x320: two tiles of 512
}


def _made(name: str) -> tuple[Codec, Tensor]:
    config, shape = _SECTIONS[name]
    torch.manual_seed(0)
    codec = build_codec(CodecSection(kind="autoencoder", class_name=name, config=config))
    return codec, torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", _SECTIONS)
def test_tiles_look_like_the_whole(name: str) -> None:
    """Not the same, because the decoder's attention sees one tile only: a few grey levels.

    With random weights and latents they differ by 2 levels on average at most; another clip's
    differ by ten times as much.
    """
    codec, latents = _made(name)
    whole, tiles = codec.decode(latents).int(), codec.decode(latents, tiles=True).int()
    assert tiles.shape == whole.shape
    difference = (whole - tiles).abs().float().mean()
    assert 0 < difference <= 2
    assert (whole - codec.decode(-latents).int()).abs().float().mean() > 10 * difference


@pytest.mark.parametrize("name", _SECTIONS)
def test_tiles_are_for_one_call(name: str) -> None:
    """What is encoded, or decoded whole, afterwards is the same to a bit as before."""
    codec, latents = _made(name)
    whole = codec.decode(latents)
    encoded = codec.encode(whole)
    codec.decode(latents, tiles=True)
    assert torch.equal(codec.decode(latents), whole)
    assert torch.equal(codec.encode(whole), encoded)


def test_pixels_have_no_tiles() -> None:
    """Latents that are the pixels are decoded in either way alike."""
    codec = build_codec(CodecSection())
    latents = torch.linspace(-1, 1, 3 * 4 * 4).view(1, 3, 1, 4, 4)
    assert torch.equal(codec.decode(latents, tiles=True), codec.decode(latents))
