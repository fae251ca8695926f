"""Clips that are encoded in tiles and chunks: latents are those of whole clips."""

import math
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longtake.models.cuts import Reach, cuts
from longtake.models.tiled_encoding import encode_tiles, halves_of

_WAN: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_HUNYUAN: dict[str, Any] = {
    "latent_channels": 2,
    "block_out_channels": (4, 8, 8),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
}
_AUTOENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("AutoencoderKLWan", _WAN),
    "wan, all frames": ("AutoencoderKLWan", _WAN | {"temperal_downsample": [False, False]}),
    "wan 2.2": (
        "AutoencoderKLWan",
        _WAN | {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12},
    ),
    "qwen": ("AutoencoderKLQwenImage", _WAN | {"temperal_downsample": [True, True]}),
    "hunyuan": ("AutoencoderKLHunyuanVideo15", _HUNYUAN),
    "hunyuan, as released": (
        "AutoencoderKLHunyuanVideo15",
        _HUNYUAN | {"block_out_channels": (4, 8, 8, 8), "temporal_compression_ratio": 4},
    ),
    "ltx2": (
        "AutoencoderKLLTX2Video",
        {
            "latent_channels": 4,
            "block_out_channels": (8, 8, 16),
            "decoder_block_out_channels": (4, 4, 8),
            "layers_per_block": (1, 2, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1),
            "spatio_temporal_scaling": (True, True, True),
            "decoder_spatio_temporal_scaling": (True, True, True),
            "downsample_type": ("spatial", "temporal", "spatiotemporal"),
            "patch_size": 2,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 4,
        },
    ),
}  # fmt: skip
_OF_ALL = pytest.mark.parametrize("name", _AUTOENCODERS)


def _made(name: str) -> Any:
    torch.manual_seed(0)
    kind, config = _AUTOENCODERS[name]
    return getattr(diffusers, kind)(**config).eval().requires_grad_(False)


def _pixels(*shape: int) -> Tensor:
    return torch.rand(1, 3, *shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


@_OF_ALL
@pytest.mark.parametrize(
    ("num_frames", "rows", "columns", "tile"),
    [(1, 7, 13, 3), (9, 5, 11, 4), (5, 1, 9, 2), (9, 6, 5, 100)],
)
def test_tiles_and_chunks_give_the_latents_of_the_whole_clip(
    name: str, num_frames: int, rows: int, columns: int, tile: int
) -> None:
    """Within 1e-5 of the largest: odd numbers of latents, one row, one frame, one tile."""
    autoencoder = _made(name)
    halves = halves_of(autoencoder)
    patch = 16 // halves.patched(_pixels(1, 16, 16)).shape[3]
    step = patch * halves.reach.stride
    pixels = _pixels(num_frames, rows * step, columns * step)
    expected = autoencoder.encode(pixels).latent_dist.parameters
    found = encode_tiles(autoencoder, pixels, tile * step)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@_OF_ALL
def test_a_tile_reads_all_pixels_on_which_it_depends_and_no_others(name: str) -> None:
    """The pixels that a gradient of one row of features reaches, in the middle of a picture."""
    halves = halves_of(_made(name))
    reach = halves.reach
    needed = math.ceil(max(reach.before, reach.after) / reach.stride) + 1
    size = (2 * needed + 1) * reach.stride
    channels = halves.patched(_pixels(1, 4, 4)).shape[1]
    frame = torch.rand(1, channels, 1, size, size, requires_grad=True)
    features = halves.begin()(frame)
    (gradient,) = torch.autograd.grad(features[..., needed, needed].sum(), frame)
    for other in (-1, -2):
        reached = gradient.abs().sum((0, 1, 2, other)).nonzero().flatten()
        first = needed * reach.stride
        assert reached[0] == first - reach.before
        assert reached[-1] == first + reach.stride - 1 + reach.after


@given(
    features=st.integers(1, 40), tile=st.integers(1, 200), stride=st.sampled_from([1, 2, 8]),
    before=st.integers(0, 70), after=st.integers(0, 70),
)  # fmt: skip
def test_cuts_cover_every_feature_once_and_read_what_it_needs(
    features: int, tile: int, stride: int, before: int, after: int
) -> None:
    size, covered = features * stride, list[int]()
    for cut in cuts(size, tile, Reach(stride, before, after)):
        start, end = cut.place.start, cut.place.stop
        covered += range(start, end)
        assert (end - start) * stride <= max(tile, stride)
        assert cut.read.start <= max(0, start * stride - before)
        assert cut.read.stop >= min(size, end * stride + after)
        assert cut.read.start % stride == cut.read.stop % stride == 0
        # What is kept of the tile's own features are those of its place.
        assert cut.kept.start + cut.read.start // stride == start
        assert cut.kept.stop - cut.kept.start == end - start
    assert covered == list(range(features))


_PICTURES: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "block_out_channels": (4, 8, 8),
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "norm_num_groups": 2,
        "use_quant_conv": False,
    },
    "AutoencoderKLFlux2": {
        "block_out_channels": (4, 8, 8),
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "norm_num_groups": 2,
    },
}


@pytest.mark.parametrize("kind", _PICTURES)
@pytest.mark.parametrize(("rows", "columns", "band"), [(7, 5, 4), (5, 9, 3), (1, 3, 1), (6, 6, 99)])
def test_bands_give_the_latents_of_whole_pictures(
    kind: str, rows: int, columns: int, band: int
) -> None:
    """Brightness differs from row to row, so that no band has the statistics of the whole."""
    torch.manual_seed(0)
    autoencoder = getattr(diffusers, kind)(**_PICTURES[kind]).eval().requires_grad_(False)
    for weight in autoencoder.parameters():  # norms are not the identity
        if weight.dim() == 1:
            weight += torch.randn_like(weight) / 4
    pictures = _pixels(2, 4 * rows, 4 * columns)[0].transpose(0, 1)  # two
    pictures += torch.linspace(-4, 4, 4 * rows)[:, None]
    expected = autoencoder.encode(pictures).latent_dist.parameters
    found = encode_tiles(autoencoder, pictures, band)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
