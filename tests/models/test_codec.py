"""What a codec promises: shapes that are true, latents of unit scale, and the way back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.config import Bucket, CodecSection
from longtake.errors import ModelError, RecipeError
from longtake.models.codec import AutoencoderCodec, PixelCodec, build_codec

_TINY: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
}


def _section(**config: Any) -> CodecSection:
    return CodecSection(kind="autoencoder", config=_TINY | config)


def _codec(**config: Any) -> AutoencoderCodec:
    torch.manual_seed(0)
    codec = build_codec(_section(**config))
    assert isinstance(codec, AutoencoderCodec)
    return codec


def _videos(num_frames: int = 5, height: int = 16, width: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (1, 3, num_frames, height, width)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def test_pixels_come_back_exactly() -> None:
    """Every one of the 256 values survives the way to fp32 and back; the scale is [-1, 1]."""
    videos = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 16, 16).expand(1, 3, 1, 16, 16)
    latents = PixelCodec().encode(videos)
    assert (latents.min().item(), latents.max().item()) == (-1, 1)
    assert latents.dtype == torch.float32
    assert torch.equal(PixelCodec().decode(latents), videos)


def test_pixels_outside_the_range_are_clamped() -> None:
    """A sampled value beyond white is white, not black."""
    decoded = PixelCodec().decode(torch.tensor([-7.0, -1.01, 1.01, 7.0]))
    assert decoded.tolist() == [0, 0, 255, 255]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"temperal_downsample": [False, True]},
        {"temperal_downsample": [False, False]},
        {"patch_size": 2, "in_channels": 12, "out_channels": 12},
    ],
)
@pytest.mark.parametrize("num_frames", [1, 5, 9])
def test_latent_shape_is_what_encode_gives(config: dict[str, Any], num_frames: int) -> None:
    """For every compression, and what is decoded has the clip's shape again."""
    codec, videos = _codec(**config), _videos(num_frames)
    latents = codec.encode(videos)
    bucket = Bucket(num_frames=num_frames, height=16, width=24)
    assert latents.shape == (1, codec.channels, *codec.latent_shape(bucket))
    assert latents.dtype == torch.float32
    decoded = codec.decode(latents)
    assert (decoded.shape, decoded.dtype) == (videos.shape, torch.uint8)


def test_latents_are_normalised_as_wans_pipeline_expects_them() -> None:
    """Encoding gives (mode - mean) / std; decoding undoes it in the words of WanPipeline."""
    mean, std = [0.5, -1.0, 2.0, 0.0], [2.0, 0.5, 1.0, 3.0]
    codec, videos = _codec(latents_mean=mean, latents_std=std), _videos()
    autoencoder: Any = codec.autoencoder
    raw = autoencoder.encode(videos.float() / 127.5 - 1).latent_dist.mode()
    latents = codec.encode(videos)
    # pipeline_wan.py: latents_std = 1 / config.latents_std; latents / latents_std + latents_mean
    latents_mean = torch.tensor(autoencoder.config.latents_mean).view(1, 4, 1, 1, 1)
    latents_std = 1.0 / torch.tensor(autoencoder.config.latents_std).view(1, 4, 1, 1, 1)
    torch.testing.assert_close(latents / latents_std + latents_mean, raw)
    decoded = autoencoder.decode(raw).sample
    expected = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round()
    assert (codec.decode(latents).float() - expected).abs().max() <= 1


def test_a_random_codec_carries_what_a_pipeline_reads() -> None:
    """Statistics have one entry per channel, and the stated compression is the true one."""
    config: Any = _codec(temperal_downsample=[False, True]).autoencoder.config
    assert (list(config.latents_mean), list(config.latents_std)) == ([0.0] * 4, [1.0] * 4)
    assert (config.scale_factor_temporal, config.scale_factor_spatial) == (2, 4)


@pytest.mark.parametrize(
    ("sizes", "nearest"),
    [
        ((16, 16, 16), "17 frames of 16x16"),
        ((3, 16, 16), "1 frame of 16x16"),
        ((17, 15, 16), "17 frames of 16x16"),
        ((17, 16, 1), "17 frames of 4x16"),
    ],
)
def test_a_bucket_that_does_not_divide_names_the_nearest(
    sizes: tuple[int, int, int], nearest: str
) -> None:
    """Nothing is cut off in silence: frames, height and width must divide."""
    num_frames, height, width = sizes
    bucket = Bucket(num_frames=num_frames, height=height, width=width)
    with pytest.raises(RecipeError, match=f"nearest that fits is {nearest}"):
        _codec().latent_shape(bucket)


@pytest.mark.parametrize(
    ("patch", "bucket", "nearest"),
    [
        ((1, 2, 2), (5, 488, 832), "divisible by 16 .* 5 frames of 832x480"),
        ((1, 2, 3), (5, 16, 32), "height divisible by 16 and width by 24 .* 5 frames of 24x16"),
        ((2, 1, 1), (9, 16, 16), "5 frames of 16x16"),
        ((2, 1, 1), (12, 16, 16), "13 frames of 16x16"),
    ],
)
def test_latents_have_to_divide_into_a_models_patches(
    patch: tuple[int, int, int], bucket: tuple[int, int, int], nearest: str
) -> None:
    """The nearest is one that both take."""
    codec = _codec(dim_mult=[1, 1, 1, 1], temperal_downsample=[False, True, True])
    num_frames, height, width = bucket
    asked = Bucket(num_frames=num_frames, height=height, width=width)
    with pytest.raises(RecipeError, match=f"codec and model want .*{nearest}"):
        codec.latent_shape(asked, patch)


def test_frames_come_in_fours_whatever_the_compression() -> None:
    """The autoencoder drops frames 6 and 7 of 7, though halving time would divide them."""
    codec = _codec(temperal_downsample=[False, True])
    assert torch.equal(codec.encode(_videos(7)), codec.encode(_videos(7)[:, :, :5]))
    with pytest.raises(RecipeError, match="4 n \\+ 1 frames"):
        codec.latent_shape(Bucket(num_frames=7, height=16, width=16))


def test_a_saved_codec_gives_the_same_latents(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run goes on with the very codec it made, whatever the seed, and says nothing about it."""
    codec = _codec()
    codec.save(tmp_path)
    torch.manual_seed(1)
    again = build_codec(_section(), tmp_path)
    assert torch.equal(again.encode(_videos()), codec.encode(_videos()))
    assert capfd.readouterr() == ("", "")


def test_a_pretrained_codec_is_not_copied(tmp_path: Path) -> None:
    """It is loaded from where the recipe says, so saving writes nothing."""
    codec = _codec()
    codec.save(tmp_path)
    loaded = build_codec(CodecSection(kind="autoencoder", pretrained=str(tmp_path)))
    assert torch.equal(loaded.encode(_videos()), codec.encode(_videos()))
    loaded.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_codec_is_frozen() -> None:
    """No gradient is kept for it, and it is in inference mode."""
    codec = _codec()
    assert not any(parameter.requires_grad for parameter in codec.autoencoder.parameters())
    assert not codec.autoencoder.training
    assert not codec.encode(_videos()).requires_grad


def test_a_missing_folder_is_named() -> None:
    """A path that is no folder fails at once and without asking the network."""
    with pytest.raises(ModelError, match=r"There is no folder \./nowhere/wan\. Expected"):
        build_codec(CodecSection(kind="autoencoder", pretrained="./nowhere/wan"))


@pytest.mark.parametrize(
    ("class_name", "message"),
    [
        ("AutoencoderKLWann", "no class AutoencoderKLWann. Did you mean AutoencoderKLWan"),
        ("AutoencoderKLCogVideoX", "neither .* Use AutoencoderKL or AutoencoderKLWan"),
        ("WanPipeline", "neither an autoencoder of images nor a causal one of videos"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(class_name: str, message: str) -> None:
    """Misspelt names get the nearest; other autoencoders are told apart before they are built."""
    with pytest.raises(RecipeError, match=message):
        build_codec(CodecSection(kind="autoencoder", class_name=class_name))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"z_dimm": 4}, r"codec\.config\.z_dimm is not an argument .* did you mean z_dim\?"),
        ({"_z_dim": 4}, r"codec\.config\._z_dim is not an argument"),
        ({"latents_mean": [0.0]}, "z_dim is 4, but latents_mean has 1 values"),
        ({"temperal_downsample": [True]}, "expected 2 values"),
        ({"dim_mult": [1] * 4, "temperal_downsample": [True] * 3}, "at most two of them true"),
        ({"z_dim": "four"}, r"codec\.config does not fit AutoencoderKLWan"),
        ({"dim_mult": 2}, r"codec\.config does not fit AutoencoderKLWan"),
        ({"base_dim": "four"}, r"codec\.config does not fit AutoencoderKLWan"),
    ],
)
def test_wrong_arguments_are_named(config: dict[str, Any], message: str) -> None:
    """Neither an unknown argument nor one of a wrong size passes silently."""
    with pytest.raises(RecipeError, match=message):
        _codec(**config)


@pytest.mark.parametrize(
    "section",
    [
        CodecSection(pretrained="somewhere/wan"),
        CodecSection(config={"z_dim": 4}),
        CodecSection(kind="autoencoder", pretrained="somewhere/wan", config={"z_dim": 4}),
    ],
)
def test_keys_that_would_not_be_used_are_refused(section: CodecSection) -> None:
    """Whoever names weights but leaves the kind at pixels does not train on pixels unawares."""
    with pytest.raises(RecipeError, match="would not be used"):
        build_codec(section)
