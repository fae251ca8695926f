"""What LTX-2 adds to what each family promises: no audio, seconds, given frames, its codec."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_ltx2_lora_to_diffusers
from tests.families import release_ltx2
from tests.families.own_module import Notes
from tests.families.row import Row
from tests.families.tiny import Tiny, relative
from torch import Tensor

from longtake.config import Bucket, CodecSection, ModelSection, TrainableSection
from longtake.errors import RecipeError
from longtake.models import added_module, conditioning, trainable
from longtake.models.base import LatentShape
from longtake.models.codec import LTX2Codec, build_codec
from longtake.models.components import outline
from longtake.models.conditioning import training_conditioning
from longtake.models.ltx2 import LTX2, original_name
from longtake.planner.devices import CPU
from longtake.planner.encoding import clip_trace, encode_clip, make_encoders_fake
from longtake.planner.fake_tensors import CachedFakeMode

_SHAPE = LatentShape(8, 3, 2, 3)
_T2V, _I2V, _NEWER, _WITH_SOUND = release_ltx2.ROWS


def _model(**settings: Any) -> Any:
    torch.manual_seed(0)
    return release_ltx2.transformer(**settings).eval()


def _inputs() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    given = {
        "prompt_embeds": torch.randn(2, 8, 16, generator=generator),
        "first_latents": torch.randn(2, 8, 1, 2, 3, generator=generator),
        "fps": torch.tensor([24.0, 24.0]),
    }
    return torch.randn(2, *_SHAPE, generator=generator), torch.tensor([0.3, 0.8]), given


@torch.no_grad()
def test_the_video_depends_on_no_weight_that_is_not_trained() -> None:
    model, family, (noisy, sigmas, given) = _model(), LTX2(), _inputs()
    before = family.predict_velocity(model, noisy, sigmas, given)
    names = family.block.untrained_parameters(model)
    for name in names:
        model.get_parameter(name).add_(1)
    assert torch.equal(family.predict_velocity(model, noisy, sigmas, given), before)
    assert {each.split(".")[2] for each in names if each.startswith("transformer_blocks.0.")} == {
        "audio_attn1",
        "audio_attn2",
        "audio_ff",
        "audio_scale_shift_table",
        "audio_to_video_attn",
        "audio_a2v_cross_attn_scale_shift_table",
        "video_to_audio_attn",
        "video_a2v_cross_attn_scale_shift_table",
    }


@pytest.mark.parametrize("targets", [None, ("to_q", "ff.net.2")])
def test_lora_is_in_the_video_alone(targets: tuple[str, ...] | None) -> None:
    model = _model()
    trainable.make_trainable(model, LTX2(), TrainableSection(kind="lora", targets=targets), 8)
    layers = [name for name, _ in trainable.lora_layers(model)]
    assert layers
    assert not [name for name in layers if "audio" in name]


def test_targets_of_the_audio_alone_are_refused() -> None:
    section = TrainableSection(kind="lora", targets=("attn1.to_v", "*audio*.to_q"))
    with pytest.raises(
        RecipeError, match=r"'\*audio\*.to_q' names only layers .* model.audio = .train"
    ):
        trainable.make_trainable(_model(), LTX2(), section, 8)


@torch.no_grad()
def test_frames_per_second_are_each_samples_own() -> None:
    model, family, (noisy, sigmas, given) = _model(), LTX2(), _inputs()
    both = family.predict_velocity(model, noisy, sigmas, given | {"fps": torch.tensor([24.0, 12])})
    same = family.predict_velocity(model, noisy, sigmas, given)
    torch.testing.assert_close(both[0], same[0])
    assert relative(both[1], same[1]) > 1e-3


@torch.no_grad()
def test_a_given_frame_is_not_predicted() -> None:
    """Noise in its place changes nothing; its loss is 0, and a sample begins with it."""
    model, family, (noisy, sigmas, given) = _model(), LTX2(), _inputs()
    other = noisy.clone()
    other[:, :, 0] = 7
    found, again = (family.predict_velocity(model, x, sigmas, given) for x in (noisy, other))
    assert torch.equal(found, again)
    sampled = family.inputs.with_given(noisy, given)
    assert torch.equal(sampled[:, :, :1], given["first_latents"])
    assert torch.equal(sampled[:, :, 1:], noisy[:, :, 1:])
    weights = family.inputs.loss_weights(noisy, given)
    assert weights is not None
    assert weights.flatten(2).sum(2).tolist() == [[12], [12]]
    del given["first_latents"]
    assert family.inputs.loss_weights(noisy, given) is None
    assert torch.equal(family.inputs.with_given(noisy, given), noisy)


def test_a_given_frame_is_encoded_as_by_its_pipeline(
    tiny_of: Callable[[Row], Tiny],
) -> None:
    tiny = tiny_of(_I2V)
    pipeline, sampler = tiny.pipeline(), tiny.sampler
    bucket = sampler.recipe.data.buckets[0]
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (1, 3, 1, 64, 96), generator=generator, dtype=torch.uint8)
    inputs = sampler.recipe.model_inputs()
    told = conditioning.condition_on(sampler.components, inputs, {"first": pixels}, bucket)
    with torch.no_grad():
        tokens, _ = pipeline.prepare_latents(
            pixels[:, :, 0] / 127.5 - 1, 1, 8, 64, 96, 17, 0.0, torch.float32, "cpu"
        )
    expected = pipeline._unpack_latents(tokens, *_SHAPE[1:])[:, :, :1]
    assert relative(told["first_latents"], expected) <= 1e-5


def test_a_module_around_blocks_reads_and_changes_the_video() -> None:
    model, family, (noisy, sigmas, given) = _model(), LTX2(), _inputs()
    plain = family.predict_velocity(model, noisy, sigmas, given)
    module, blocks = Notes(), ["transformer_blocks.1"]
    added_module.attach(model, {"own": module}, family, {"own": blocks}, torch.float32)
    added_module.condition(model, noisy, sigmas, given)
    assert torch.equal(family.predict_velocity(model, noisy, sigmas, given), plain)
    (seen,) = module.seen
    assert seen.tokens.shape == (2, 18, family.block.width(model))
    assert seen.text is not None
    assert seen.text.shape == (2, 8, 32)
    assert seen.audio is not None
    assert seen.audio.shape[1] == 1
    assert module.attended == ["attn1 18 18", "audio_attn1 1 1", "attn2 18 8", "audio_attn2 1 1"]
    added_module.condition(model, noisy, sigmas, given)
    family.predict_velocity(model, noisy, sigmas, given).sum().backward()  # type: ignore[no-untyped-call]
    assert module.weight.grad


def _codec(**config: Any) -> LTX2Codec:
    torch.manual_seed(0)
    return LTX2Codec(release_ltx2.autoencoder(**config))


def test_latents_are_normalised_as_the_pipeline_does() -> None:
    codec = _codec(scaling_factor=2.0)
    vae: Any = codec.autoencoder
    generator = torch.Generator().manual_seed(1)
    videos = torch.randint(0, 256, (1, 3, 17, 64, 96), generator=generator, dtype=torch.uint8)
    latents = codec.encode(videos)
    bucket = Bucket(num_frames=17, height=64, width=96)
    assert latents.shape[2:] == codec.latent_shape(bucket)
    statistics = vae.latents_mean, vae.latents_std, 2.0
    with torch.no_grad():
        mode = vae.encode(videos / 127.5 - 1).latent_dist.mode()
        expected = diffusers.LTX2Pipeline._normalize_latents(mode, *statistics)
        pixels = vae.decode(diffusers.LTX2Pipeline._denormalize_latents(expected, *statistics))
    torch.testing.assert_close(latents, expected)
    shown = ((pixels.sample + 1) * 127.5).round().clamp(0, 255)
    assert (codec.decode(latents).float() - shown).abs().max() <= 1


@pytest.mark.parametrize(
    ("sizes", "nearest"),
    [
        ((16, 64, 96), "17 frames of 96x64"),
        ((33, 80, 96), "33 frames of 96x64"),
        ((121, 480, 848), "121 frames of 832x480"),
    ],
)
def test_clips_that_it_cannot_encode_are_refused_with_the_nearest(
    sizes: tuple[int, int, int], nearest: str
) -> None:
    codec = _codec()
    bucket = Bucket(**dict(zip(("num_frames", "height", "width"), sizes, strict=True)))
    with pytest.raises(RecipeError, match=rf"divisible by 32 and 8 n \+ 1 .* fits is {nearest}"):
        codec.latent_shape(bucket)


def test_one_of_random_weights_says_its_true_compression() -> None:
    """The class's own default for the frames that a latent stands for is 16."""
    config = {**release_ltx2.CODEC, "patch_size": 2}
    section = CodecSection(kind="autoencoder", config=config)
    codec = build_codec(section, LTX2.frozen.codec)
    vae: Any = codec.modules()[0]
    assert (vae.spatial_compression_ratio, vae.temporal_compression_ratio) == (16, 8)
    assert codec.latent_shape(Bucket(num_frames=9, height=32, width=48)) == (2, 2, 3)
    with pytest.raises(RecipeError, match="timestep_conditioning: it decodes noisy latents"):
        _codec(timestep_conditioning=True)


def test_encoding_a_long_clip_is_extrapolated_from_clips_that_fit() -> None:
    codec, bucket = _codec(), Bucket(num_frames=41, height=64, width=96)
    mode = CachedFakeMode()
    with mode:
        make_encoders_fake(codec, SimpleNamespace(modules=list))
    peaks = [
        clip_trace(
            mode, codec, bucket.model_copy(update={"num_frames": count}), encode_clip, CPU
        ).peak_bytes
        for count in (9, 17, 41)
    ]
    assert peaks[2] - peaks[1] == 3 * (peaks[1] - peaks[0]) > 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"audio": None}}, r'makes videos with audio\. Set model\.audio = "train"'),
        ({"data": {"fps": None}}, r"data\.fps is unset\. Set it, such as data\.fps = 24"),
        ({"text": {"max_tokens": 60}}, r"fills captions with 8 learnt .*such as 64; .* is 1024"),
        ({"text": {"kind": "words", "pretrained": None}}, "a Gemma 3 and on the connectors"),
    ],
)
def test_what_a_recipe_must_say(
    sections: dict[str, Any], message: str, tiny_of: Callable[[Row], Tiny]
) -> None:
    tiny = tiny_of(_T2V)
    recipe = tiny.recipe()
    for name, keys in sections.items():
        changed = getattr(recipe, name).model_copy(update=keys)
        recipe = recipe.model_copy(update={name: changed})
    with pytest.raises(RecipeError, match=message):
        outline(recipe)


def test_audio_is_a_key_of_this_family_alone(tiny_of: Callable[[Row], Tiny]) -> None:
    recipe = tiny_of(_T2V).recipe()
    sections = {
        "model": ModelSection(family="tubelet", audio="off"),
        "codec": CodecSection(kind="pixels"),
    }
    with pytest.raises(RecipeError, match=r"tubelet has no audio\. Remove model\.audio, which is"):
        outline(recipe.model_copy(update=sections))


def test_other_patches_are_refused() -> None:
    with pytest.raises(RecipeError, match="patch_size and patch_size_t are 2 and 1"):
        LTX2().check_config(SimpleNamespace(patch_size=2, patch_size_t=1))


def test_frames_per_second_count_the_stride(tiny_of: Callable[[Row], Tiny]) -> None:
    tiny = tiny_of(_T2V)
    recipe, parts = tiny.recipe(data={"fps": 12.0, "frame_stride": 2}), tiny.sampler.components
    told = training_conditioning(parts, recipe, {"prompt_embeds": torch.zeros(2, 8, 16)})
    assert told["fps"].tolist() == [6, 6]


def test_an_export_has_the_releases_audio(tiny_of: Callable[[Row], Tiny], tmp_path: Path) -> None:
    """Byte by byte; without a release there is none to copy."""
    tiny = tiny_of(_T2V)
    parts, recipe = tiny.sampler.components, tiny.sampler.recipe
    rule = parts.defaults.shift

    def export(section: ModelSection) -> None:
        parts.family.export(
            section, parts.model, parts.codec, parts.text, rule, 1.0, tmp_path / "out"
        )

    export(recipe.model)
    for part in ("audio_vae", "vocoder"):
        files = sorted((tiny.folder / "release" / part).iterdir())
        assert len(files) == 2
        for file in files:
            assert (tmp_path / "out" / part / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(RecipeError, match="needs audio_vae and vocoder, which are copied from the"):
        export(recipe.model.model_copy(update={"pretrained": None}))


@pytest.mark.parametrize("row", [_T2V, _NEWER], ids=lambda row: row.kind)
def test_diffusers_turns_every_name_back(row: Row, tiny_of: Callable[[Row], Tiny]) -> None:
    names = [name for name, _ in tiny_of(row).sampler.components.model.named_parameters()]
    assert any("prompt_adaln" in name for name in names) == (row is _NEWER)
    family = LTX2()
    theirs = {family.comfyui_name(each, is_lora=True): torch.empty(0) for each in names}
    back = _convert_non_diffusers_ltx2_lora_to_diffusers(theirs)
    assert list(back) == [f"transformer.{name}" for name in names]
    assert original_name("time_embed.linear.weight") == "adaln_single.linear.weight"
