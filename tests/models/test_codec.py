"""What codecs promise: shapes that are true, latents as the pipelines have them, the way back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import release_flux2
from tests.models.tiny import KL
from torch import Tensor

from longtake.config import Bucket, CodecSection
from longtake.errors import RecipeError
from longtake.models.codec import (
    PatchedImageCodec,
    PixelCodec,
    build_codec,
    keep_tile,
    kept_tile,
    outline_codec,
    use_channels_last,
)
from longtake.models.flux import Flux
from longtake.models.ltx2 import LTX2
from longtake.models.wan import Wan

_PARTS = {"video": Wan.frozen.codec, "image": Flux.frozen.codec}
_TINY: dict[str, dict[str, Any]] = {
    "video": {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
    },
    "image": KL | {"block_out_channels": [4, 4, 4]},
}
_OF_BOTH = pytest.mark.parametrize("kind", _PARTS)


def _section(kind: str, **config: Any) -> CodecSection:
    return CodecSection(kind="autoencoder", config=_TINY[kind] | config)


def _codec(kind: str = "video", **config: Any) -> Any:
    torch.manual_seed(0)
    return build_codec(_section(kind, **config), _PARTS[kind])


def _videos(num_frames: int = 5, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (batch, 3, num_frames, 16, 24)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _bucket(num_frames: int, height: int, width: int) -> Bucket:
    return Bucket(num_frames=num_frames, height=height, width=width)


def test_pixels_come_back_exactly() -> None:
    """Every one of the 256 values survives the way to fp32 and back; the scale is [-1, 1]."""
    videos = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 16, 16).expand(1, 3, 1, 16, 16)
    latents = PixelCodec().encode(videos)
    assert (latents.min().item(), latents.max().item()) == (-1, 1)
    assert latents.dtype == torch.float32
    assert torch.equal(PixelCodec().decode(latents), videos)


def test_pixels_outside_the_range_are_clamped() -> None:
    decoded = PixelCodec().decode(torch.tensor([-7.0, -1.01, 1.01, 7.0]))
    assert decoded.tolist() == [0, 0, 255, 255]


@_OF_BOTH
def test_in_bf16_and_channels_last_a_video_looks_the_same(kind: str) -> None:
    """At most a grey level away on average, and 8 anywhere, encoded and decoded."""
    decoded = []
    for dtype in ("fp32", "bf16"):
        torch.manual_seed(0)
        section = _section(kind).model_copy(update={"dtype": dtype})
        codec = build_codec(section, _PARTS[kind])
        if dtype == "bf16":
            (module,) = codec.modules()
            use_channels_last(module)
            strides = [p.stride()[1] for p in module.parameters() if p.dim() > 3 and p.shape[1] > 1]
            assert set(strides) == {1}
        decoded.append(codec.decode(codec.encode(_videos())).int())
    difference = (decoded[0] - decoded[1]).abs()
    assert difference.float().mean() <= 1
    assert difference.max() <= 8
    assert decoded[0].float().std() > 1


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("video", {}),
        ("video", {"temperal_downsample": [False, True]}),
        ("video", {"temperal_downsample": [False, False]}),
        ("video", {"patch_size": 2, "in_channels": 12, "out_channels": 12}),
        ("image", {"block_out_channels": [4]}),
        ("image", {"block_out_channels": [4, 4]}),
        ("image", {"block_out_channels": [4, 4, 4, 4]}),
    ],
)
@pytest.mark.parametrize("num_frames", [1, 5, 9])
def test_latent_shape_is_what_encode_gives(
    kind: str, config: dict[str, Any], num_frames: int
) -> None:
    """For every compression, and what is decoded has the clip's shape again."""
    codec, videos = _codec(kind, **config), _videos(num_frames)
    latents = codec.encode(videos)
    assert latents.shape == (1, codec.channels, *codec.latent_shape(_bucket(num_frames, 16, 24)))
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
    config = _codec(temperal_downsample=[False, True]).autoencoder.config
    assert (list(config.latents_mean), list(config.latents_std)) == ([0.0] * 4, [1.0] * 4)
    assert (config.scale_factor_temporal, config.scale_factor_spatial) == (2, 4)


_DEEP: dict[str, Any] = {"dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]}
_SLOW: dict[str, Any] = {"temperal_downsample": [False, True]}


@pytest.mark.parametrize(
    ("kind", "config", "patch", "bucket", "message"),
    [
        ("video", {}, (1, 1, 1), (16, 16, 16), "nearest that fits is 17 frames of 16x16"),
        ("video", {}, (1, 1, 1), (3, 16, 16), "nearest that fits is 1 frame of 16x16"),
        ("video", {}, (1, 1, 1), (17, 15, 16), "nearest that fits is 17 frames of 16x16"),
        ("video", {}, (1, 1, 1), (17, 16, 1), "nearest that fits is 17 frames of 4x16"),
        ("video", _SLOW, (1, 1, 1), (7, 16, 16), r"4 n \+ 1 frames"),
        ("video", _DEEP, (1, 2, 2), (5, 488, 832), "model want .* by 16 .* 5 frames of 832x480"),
        ("video", _DEEP, (1, 2, 3), (5, 16, 32), "height divisible by 16 and width by 24 .* 24x16"),
        ("video", _DEEP, (2, 1, 1), (9, 16, 16), "codec and model want .*5 frames of 16x16"),
        ("video", _DEEP, (2, 1, 1), (12, 16, 16), "codec and model want .*13 frames of 16x16"),
        ("image", {}, (1, 1, 1), (1, 17, 23), r"divisible by 4\. .* that fits is 1 .* 24x16"),
        ("image", {}, (1, 1, 1), (1, 1, 1), r"The nearest that fits is 1 frame of 4x4\."),
    ],
)
def test_a_bucket_that_does_not_divide_names_the_nearest(
    kind: str,
    config: dict[str, Any],
    patch: tuple[int, int, int],
    bucket: tuple[int, int, int],
    message: str,
) -> None:
    """Nothing is cut off in silence, also not of latents by a model that divides them."""
    with pytest.raises(RecipeError, match=message):
        _codec(kind, **config).latent_shape(_bucket(*bucket), patch)


def test_frames_come_in_fours_whatever_the_compression() -> None:
    """The autoencoder drops frames 6 and 7 of 7, though halving time would divide them."""
    codec, videos = _codec(**_SLOW), _videos(7)
    assert torch.equal(codec.encode(videos), codec.encode(videos[:, :, :5]))


def test_a_codec_is_frozen() -> None:
    codec = _codec()
    assert not any(parameter.requires_grad for parameter in codec.autoencoder.parameters())
    assert not codec.autoencoder.training
    assert not codec.encode(_videos()).requires_grad


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("video", {"z_dimm": 4}, r"codec\.config\.z_dimm is not an argument .* mean z_dim\?"),
        ("video", {"_z_dim": 4}, r"codec\.config\._z_dim is not an argument"),
        ("video", {"latents_mean": [0.0]}, "z_dim is 4, but latents_mean has 1 values"),
        ("video", {"temperal_downsample": [True]}, "expected 2 values"),
        ("video", _DEEP | {"temperal_downsample": [True] * 3}, "at most two of them true"),
        ("video", {"z_dim": "four"}, r"codec\.config does not fit AutoencoderKLWan"),
        ("video", {"dim_mult": 2}, r"codec\.config does not fit AutoencoderKLWan"),
        ("video", {"base_dim": "four"}, r"codec\.config does not fit AutoencoderKLWan"),
        ("image", {"block_out_channel": [4]}, r"block_out_channel is .* block_out_channels\?"),
        ("image", {"block_out_channels": 4}, r"block_out_channels = 4: expected a width for each"),
        ("image", {"block_out_channels": []}, r"block_out_channels = \[\]: expected a width"),
        ("image", {"norm_num_groups": 3}, r"\[4, 4, 4\] do not divide into norm_num_groups = 3\."),
        (
            "image",
            {"down_block_types": ["Nope"] * 3},
            r"codec\.config does not fit AutoencoderKL\.",
        ),
    ],
)
def test_wrong_arguments_are_named(kind: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _codec(kind, **config)


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
        build_codec(section, _PARTS["video"])


def test_latents_are_encoded_and_decoded_as_by_kontexts_pipeline() -> None:
    """(mode - shift_factor) * scaling_factor of pixels in [-1, 1], and back."""
    from diffusers import FluxKontextPipeline

    codec = _codec("image", scaling_factor=0.3611, shift_factor=0.1159)
    videos = _videos(num_frames=1, batch=2)
    pipeline = FluxKontextPipeline(None, codec.autoencoder, *[None] * 5)
    images = pipeline.image_processor.preprocess(videos[:, :, 0].float() / 255)
    latents = torch.randn(2, 4, 1, 4, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = pipeline._encode_vae_image(images, torch.Generator())
        pixels = codec.autoencoder.decode(latents[:, :, 0] / 0.3611 + 0.1159).sample
    torch.testing.assert_close(codec.encode(videos)[:, :, 0], expected, atol=1e-5, rtol=1e-5)
    decoded = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    assert torch.equal(codec.decode(latents)[:, :, 0], decoded)


def test_latents_of_patches_are_those_of_flux2s_pipeline() -> None:
    """Normalised by buffers of the autoencoder; decoding undoes it."""
    from diffusers import Flux2Pipeline

    torch.manual_seed(0)
    codec = PatchedImageCodec(release_flux2.vae())
    pixels = torch.randint(0, 256, (2, 3, 1, 32, 48), dtype=torch.uint8)
    pipeline = Flux2Pipeline(None, codec.autoencoder, *[None] * 3)
    images = pipeline.image_processor.preprocess(pixels[:, :, 0].float() / 255)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(images, torch.Generator())
        mode = codec.autoencoder.encode(images).latent_dist.mode()  # type: ignore[operator]
        decoded = codec.autoencoder.decode(mode).sample  # type: ignore[operator]
    latents = codec.encode(pixels)
    torch.testing.assert_close(latents[:, :, 0], expected, atol=1e-5, rtol=1e-5)
    assert tuple(latents.shape[1:]) == (16, *codec.latent_shape(_bucket(1, 32, 48)))
    difference = ((decoded + 1) * 127.5).clamp(0, 255) - codec.decode(latents)[:, :, 0]
    assert difference.abs().max() <= 1
    with pytest.raises(RecipeError, match=r"divisible by 16\. The nearest that fits is 1 .* 48x32"):
        codec.latent_shape(_bucket(1, 39, 48))


def test_frames_are_encoded_one_by_one() -> None:
    """An image codec's latents of a clip are those of its frames alone."""
    codec, videos = _codec("image"), _videos(num_frames=3, batch=2)
    latents = codec.encode(videos)
    for frame in range(3):
        alone = codec.encode(videos[:, :, frame : frame + 1])
        torch.testing.assert_close(latents[:, :, frame : frame + 1], alone, atol=1e-5, rtol=1e-5)


def test_an_outline_knows_shapes_and_has_no_values() -> None:
    flux = CodecSection(kind="autoencoder", pretrained="black-forest-labs/FLUX.1-Kontext-dev")
    for section, expected in ((_section("image"), (1, 256, 256)), (flux, (1, 128, 128))):
        outline = outline_codec(section, _PARTS["image"])
        assert outline.latent_shape(_bucket(1, 1024, 1024)) == expected
        weights = [weight for module in outline.modules() for weight in module.parameters()]
        assert {(weight.device.type, weight.dtype) for weight in weights} == {
            ("meta", torch.float32)
        }
    assert outline.channels == 16


@_OF_BOTH
def test_a_codec_computes_in_what_the_recipe_says(kind: str, tmp_path: Path) -> None:
    """Latents are fp32 in any case, and near; also where it is loaded from a folder."""
    exact, part = _codec(kind), _PARTS[kind]
    exact.save(tmp_path)
    videos = _videos(num_frames=1)
    pretrained = CodecSection(kind="autoencoder", pretrained=str(tmp_path), dtype="bf16")
    saved = _section(kind).model_copy(update={"dtype": "bf16"})
    for codec in (build_codec(pretrained, part), build_codec(saved, part, tmp_path)):
        (module,) = codec.modules()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        latents = codec.encode(videos)
        assert latents.dtype == torch.float32
        torch.testing.assert_close(latents, exact.encode(videos), rtol=0.1, atol=0.1)
        assert not torch.equal(latents, exact.encode(videos))
        off = codec.decode(latents).float() - exact.decode(latents).float()
        assert off.abs().mean() < 4


@pytest.mark.parametrize(
    ("kind", "config", "shape"),
    [
        ("video", {}, (1, 4, 2, 16, 72)),  # 5 frames of 288x64: two tiles of 256
        ("image", {"block_out_channels": [4] * 4}, (1, 4, 1, 40, 72)),  # 576x320: two of 512
    ],
    ids=["video", "image"],
)
def test_tiles_look_like_the_whole_and_are_for_one_call(
    kind: str, config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Not the same, because the decoder's attention sees one tile only: a few grey levels.

    With random weights and latents they differ by 2 levels on average at most; another clip's
    differ by ten times as much. What is encoded, or decoded whole, afterwards is the same to a bit
    as before.
    """
    codec = _codec(kind, **config)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = codec.decode(latents)
    encoded = codec.encode(whole)
    tiles = codec.decode(latents, tiles=True)
    assert torch.equal(codec.decode(latents), whole)
    assert torch.equal(codec.encode(whole), encoded)
    assert tiles.shape == whole.shape
    difference = (whole.int() - tiles.int()).abs().float().mean()
    assert 0 < difference <= 2
    other = codec.decode(-latents).int()
    assert (whole.int() - other).abs().float().mean() > 10 * difference


def test_pixels_have_no_tiles() -> None:
    codec = build_codec(CodecSection(), _PARTS["video"])
    latents = torch.linspace(-1, 1, 3 * 4 * 4).view(1, 3, 1, 4, 4)
    assert torch.equal(codec.decode(latents, tiles=True), codec.decode(latents))


@_OF_BOTH
def test_a_saved_codec_encodes_alike_and_a_pretrained_one_is_not_copied(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run resumes with the very autoencoder that it made, whatever the seed, and silently."""
    section, part = _section(kind), _PARTS[kind]
    codec = build_codec(section, part)
    codec.save(tmp_path)
    torch.manual_seed(7)
    expected = codec.encode(_videos())
    assert torch.equal(build_codec(section, part, tmp_path).encode(_videos()), expected)
    assert capfd.readouterr() == ("", "")
    loaded = build_codec(CodecSection(kind="autoencoder", pretrained=str(tmp_path)), part)
    assert torch.equal(loaded.encode(_videos()), expected)
    loaded.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_tiles_are_named_or_those_that_the_run_has_kept(tmp_path: Path) -> None:
    section = _section("video")
    assert (kept_tile(section, None), kept_tile(section, tmp_path)) == (0, 0)
    keep_tile(8, tmp_path)
    assert kept_tile(section, tmp_path) == 8
    torch.manual_seed(0)
    tiled = build_codec(section, _PARTS["video"], tmp_path)
    torch.testing.assert_close(tiled.encode(_videos()), _codec().encode(_videos()))
    assert tiled.encode_tile == 8
    named = section.model_copy(update={"encode_tile": 0})
    assert kept_tile(named, tmp_path) == 0
    keep_tile(0, tmp_path)
    assert kept_tile(section, tmp_path) == 0


def test_tiles_are_refused_where_there_are_none() -> None:
    config = {"encoder_causal": False, "block_out_channels": (8, 8, 8, 8)}
    of_both_ways = CodecSection(kind="autoencoder", encode_tile=64, config=config)
    with pytest.raises(RecipeError, match="encode_tile is 64, but this AutoencoderKLLTX2Video"):
        outline_codec(of_both_ways, LTX2.frozen.codec)
    with pytest.raises(RecipeError, match="encode_tile is set, but it would not be used"):
        build_codec(CodecSection(encode_tile=64), _PARTS["video"])
