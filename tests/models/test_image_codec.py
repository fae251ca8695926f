"""What the codec of single images promises: FLUX's latents, frame by frame, and the way back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.config import Bucket, CodecSection
from longtake.errors import RecipeError
from longtake.models.codec import ImageCodec, build_codec, outline_codec

_TINY: dict[str, Any] = {
    "block_out_channels": [4, 4, 4],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
}


def _section(**config: Any) -> CodecSection:
    return CodecSection(kind="autoencoder", class_name="AutoencoderKL", config=_TINY | config)


def _codec(**config: Any) -> ImageCodec:
    torch.manual_seed(0)
    codec = build_codec(_section(**config))
    assert isinstance(codec, ImageCodec)
    return codec


def _videos(num_frames: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (2, 3, num_frames, 16, 24)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def test_latents_are_those_of_kontexts_pipeline() -> None:
    """(mode - shift_factor) * scaling_factor of pixels in [-1, 1], as references are encoded."""
    from diffusers import FluxKontextPipeline

    codec, videos = _codec(scaling_factor=0.3611, shift_factor=0.1159), _videos()
    pipeline = FluxKontextPipeline(None, codec.autoencoder, *[None] * 5)
    images = pipeline.image_processor.preprocess(videos[:, :, 0].float() / 255)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(images, torch.Generator())
    torch.testing.assert_close(codec.encode(videos)[:, :, 0], expected, atol=1e-5, rtol=1e-5)


def test_decoding_is_the_pipelines() -> None:
    """Latents are scaled and shifted back before the autoencoder sees them."""
    codec = _codec(scaling_factor=0.3611, shift_factor=0.1159)
    latents = torch.randn(2, 4, 1, 4, 6, generator=torch.Generator().manual_seed(2))
    autoencoder: Any = codec.autoencoder
    with torch.no_grad():
        pixels = autoencoder.decode(latents[:, :, 0] / 0.3611 + 0.1159).sample
    expected = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    assert torch.equal(codec.decode(latents)[:, :, 0], expected)


def test_frames_are_encoded_one_by_one() -> None:
    """A clip's latents are those of its frames alone, and so is what comes back."""
    codec, videos = _codec(), _videos(num_frames=3)
    latents = codec.encode(videos)
    decoded = codec.decode(latents)
    assert (latents.shape, decoded.shape) == ((2, 4, 3, 4, 6), (2, 3, 3, 16, 24))
    for frame in range(3):
        alone = codec.encode(videos[:, :, frame : frame + 1])
        torch.testing.assert_close(latents[:, :, frame : frame + 1], alone, atol=1e-5, rtol=1e-5)
    assert codec.latent_shape(Bucket(num_frames=3, height=16, width=24)) == (3, 4, 6)


def test_shapes_are_true() -> None:
    """What is said of a bucket is what encoding gives; each stage but the last halves."""
    for widths, step in (([4], 1), ([4, 4], 2), ([4, 4, 4, 4], 8)):
        codec = _codec(block_out_channels=widths)
        said = codec.latent_shape(Bucket(num_frames=1, height=16, width=24))
        assert said == (1, 16 // step, 24 // step)
        assert tuple(codec.encode(_videos()).shape) == (2, 4, *said)


def test_a_bucket_that_does_not_divide_gets_the_nearest() -> None:
    """In the words of the recipe."""
    with pytest.raises(RecipeError, match=r"divisible by 4\. The nearest that fits is 1 .* 24x16"):
        _codec().latent_shape(Bucket(num_frames=1, height=17, width=23))
    with pytest.raises(RecipeError, match=r"The nearest that fits is 1 frame of 4x4\."):
        _codec().latent_shape(Bucket(num_frames=1, height=1, width=1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_out_channel": [4]}, r"config\.block_out_channel is .* mean block_out_channels\?"),
        ({"block_out_channels": 4}, r"block_out_channels = 4: expected a width for each stage"),
        ({"block_out_channels": []}, r"block_out_channels = \[\]: expected a width"),
        ({"norm_num_groups": 3}, r"\[4, 4, 4\] do not divide into norm_num_groups = 3\."),
        ({"down_block_types": ["Nope"] * 3}, r"codec\.config does not fit AutoencoderKL\."),
    ],
)
def test_wrong_arguments_are_named(config: dict[str, Any], message: str) -> None:
    """In the recipe's words, or at least by the recipe's key."""
    with pytest.raises(RecipeError, match=message):
        _codec(**config)


def test_a_saved_codec_encodes_alike_and_a_pretrained_one_is_not_copied(tmp_path: Path) -> None:
    """A run goes on with the very autoencoder that it made."""
    codec = _codec()
    codec.save(tmp_path)
    torch.manual_seed(7)
    again = build_codec(_section(), tmp_path)
    assert torch.equal(again.encode(_videos()), codec.encode(_videos()))
    section = CodecSection(kind="autoencoder", class_name="AutoencoderKL", pretrained=str(tmp_path))
    loaded = build_codec(section)
    assert torch.equal(loaded.encode(_videos()), codec.encode(_videos()))
    loaded.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_an_outline_knows_shapes_and_has_no_values() -> None:
    """Random or pretrained, on the meta device; it cannot encode."""
    bucket = Bucket(num_frames=1, height=1024, width=1024)
    flux = CodecSection(
        kind="autoencoder",
        class_name="AutoencoderKL",
        pretrained="black-forest-labs/FLUX.1-Kontext-dev",
    )
    for section, expected in ((_section(), (1, 256, 256)), (flux, (1, 128, 128))):
        outline = outline_codec(section)
        assert outline.latent_shape(bucket) == expected
        weights = [weight for module in outline.modules() for weight in module.parameters()]
        assert {(weight.device.type, weight.dtype) for weight in weights} == {
            ("meta", torch.float32)
        }
    assert outline.channels == 16


@pytest.mark.parametrize("class_name", ["AutoencoderKL", "AutoencoderKLWan"])
def test_a_codec_computes_in_what_the_recipe_says(class_name: str, tmp_path: Path) -> None:
    """Latents are fp32 in any case, and near; also where it is loaded from a folder."""
    wan = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1}
    kl = {"block_out_channels": [4, 4], "norm_num_groups": 2}
    config = kl if class_name == "AutoencoderKL" else wan | {"temperal_downsample": [False]}
    section = CodecSection(kind="autoencoder", class_name=class_name, config=config)
    torch.manual_seed(0)
    exact = build_codec(section)
    exact.save(tmp_path)
    videos = torch.randint(0, 256, (1, 3, 1, 16, 24), dtype=torch.uint8)
    loaded = CodecSection(
        kind="autoencoder", class_name=class_name, pretrained=str(tmp_path), dtype="bf16"
    )
    for each in (
        build_codec(loaded),
        build_codec(section.model_copy(update={"dtype": "bf16"}), tmp_path),
    ):
        (module,) = each.modules()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        latents = each.encode(videos)
        assert latents.dtype == torch.float32
        torch.testing.assert_close(latents, exact.encode(videos), rtol=0.1, atol=0.1)
        assert not torch.equal(latents, exact.encode(videos))
        off = each.decode(latents).float() - exact.decode(latents).float()
        assert off.abs().mean() < 4
