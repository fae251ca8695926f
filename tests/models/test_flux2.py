"""What FLUX.2 adds to what each family promises: references, joint blocks, guidance, names."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from tests.families import release_flux2
from tests.families.own_module import Notes
from torch import Tensor

from longtake import config
from longtake.config import TrainableSection
from longtake.errors import RecipeError
from longtake.flow.shift import ClipSize
from longtake.flow.solver import integrate
from longtake.flow.timesteps import build_sigmas
from longtake.models import added_module, trainable
from longtake.models.codec import PatchedImageCodec, build_codec
from longtake.models.flux2 import Flux2
from longtake.models.text import build_text

_SHAPE = (16, 1, 4, 6)  # latents of 96 x 64 pixels
_WORDS = 7


def _model() -> Any:
    torch.manual_seed(0)
    return release_flux2.transformer(guidance=True).eval()


def _inputs() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    given = {
        "prompt_embeds": torch.randn(2, _WORDS, 3 * release_flux2.WIDTH, generator=generator),
        "guidance": torch.tensor([4.0, 4.0]),
        "reference_latents": torch.randn(2, 16, 1, 2, 3, generator=generator),
    }
    return torch.randn(2, *_SHAPE, generator=generator), torch.tensor([0.7, 0.7]), given


def test_the_decoder_is_planned_with_all_its_tokens_and_hidden_layers() -> None:
    calls: list[dict[str, Any]] = []
    encoders: Any = {"text_encoder": lambda **given: calls.append(given)}
    Flux2().text.run(encoders, {"text_encoder": _WORDS})
    (given,) = calls
    assert given.pop("input_ids").shape == given.pop("attention_mask").shape == (1, _WORDS)
    assert given == {"output_hidden_states": True, "use_cache": False}


@torch.no_grad()
def test_samples_by_several_references_are_the_pipelines() -> None:
    """In a batch, of which each sample has references of its own; the pipeline has one set."""
    family, steps, guidance = Flux2(), 2, 4.0
    pipeline = diffusers.Flux2Pipeline(
        release_flux2.scheduler(), release_flux2.vae(), None, None, _model()
    )
    pipeline.set_progress_bar_config(disable=True)
    codec = PatchedImageCodec(pipeline.vae)
    noise, _, given = _inputs()
    del given["reference_latents"]
    generator = torch.Generator().manual_seed(2)
    pixels = [
        torch.randint(0, 256, (2, 3, 1, *size), generator=generator, dtype=torch.uint8)
        for size in ((64, 80), (96, 64))
    ]
    for name, each in zip(family.inputs.optional, pixels, strict=False):
        given[f"{name}_latents"] = torch.cat([codec.encode(each[:1]), codec.encode(each[1:])])
    sigmas = build_sigmas(
        steps, family.scheduler.default_shift.factor(ClipSize(24, 64, 96, 1), steps)
    )
    found = integrate(
        lambda noisy, sigma: family.predict_velocity(
            pipeline.transformer, noisy, torch.full((2,), sigma), given
        ),
        noise,
        sigmas,
        "euler",
    )
    for row in range(2):
        images = [Image.fromarray(each[row, :, 0].permute(1, 2, 0).numpy()) for each in pixels]
        expected = pipeline(
            prompt_embeds=given["prompt_embeds"][row : row + 1],
            image=images,
            latents=noise[row : row + 1, :, 0],
            height=64,
            width=96,
            num_inference_steps=steps,
            guidance_scale=guidance,
            output_type="latent",
        ).images
        expected = expected.mT.unflatten(2, _SHAPE[2:])
        torch.testing.assert_close(found[row : row + 1, :, 0], expected, atol=2e-5, rtol=1e-5)


def test_modules_run_around_blocks_of_two_streams_and_of_one() -> None:
    """A single block's tokens are the text's and the images'; gradients come from all blocks."""
    model, family, module = _model(), Flux2(), Notes()
    noisy, sigmas, given = _inputs()
    with torch.no_grad():
        expected = family.predict_velocity(model, noisy, sigmas, given)
    names = added_module.block_names(model, family, ("*",))
    added_module.attach(model, {"own": module}, family, {"own": names}, torch.float32)
    added_module.condition(model, noisy, sigmas, given)
    found = family.predict_velocity(model, noisy, sigmas, given)
    images = 4 * 6 + 2 * 3
    assert torch.equal(found, expected)
    seen = [
        (each.tokens.shape[1], None if each.text is None else each.text.shape[1])
        for each in module.seen
    ]
    assert seen == [(images, _WORDS)] * 2 + [(_WORDS + images, None)] * 2
    torch.autograd.backward(found.square().mean())
    assert module.weight.grad


def test_lora_is_in_every_block() -> None:
    """The usual four names of attention's layers hit no single block."""
    model, family = _model(), Flux2()
    trainable.add_lora(
        model, family.block.lora_targets, TrainableSection(kind="lora"), torch.float32
    )
    layers = [name for name, _ in trainable.lora_layers(model)]
    for block in ("transformer_blocks.{}.", "single_transformer_blocks.{}."):
        for number in range(2):
            assert any(name.startswith(block.format(number)) for name in layers)
    named = [family.comfyui_name(name, is_lora=True) for name in layers]
    assert named == [f"transformer.{name}" for name in layers]


@pytest.mark.parametrize(
    ("name", "is_lora", "message"),
    [
        ("transformer_blocks.0.attn.to_q.weight", False, "of FLUX.2's transformer_blocks.0.attn.t"),
        ("single_stream_modulation.linear", True, "of the LoRA of FLUX.2's single_stream_mod"),
    ],
)
def test_names_that_comfyui_may_not_know_are_refused(
    name: str, is_lora: bool, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        Flux2().comfyui_name(name, is_lora=is_lora)


@pytest.mark.parametrize(
    ("axes", "message"),
    [((4, 4, 4), r"\[4, 4, 4\] adds up to 12, but .* is 16"), ((4, 6, 6), "adds up to 16")],
)
def test_wrong_axes_are_named(axes: tuple[int, ...], message: str) -> None:
    """Three of them would leave out the place of a word."""
    config = release_flux2.transformer(guidance=True, axes_dims_rope=axes).config
    with pytest.raises(RecipeError, match=f"{message}.* FLUX.2's release has \\[32, 32, 32, 32"):
        Flux2().check_config(config)


def test_a_distilled_klein_is_sampled_and_exported_as_one(tmp_path: Path) -> None:
    """It takes no second pass, which its pipeline knows from model_index.json."""
    torch.manual_seed(0)
    release_flux2.make_klein(tmp_path / "klein", is_distilled=True)
    where, family = str(tmp_path / "klein"), Flux2()
    section = config.ModelSection(family="flux2", pretrained=where)
    defaults = family.defaults(section)
    found = defaults.guidance_scale, defaults.num_inference_steps, defaults.caption_dropout
    assert found == (1.0, 4, 0.0)
    of_text = config.TextSection(kind="transformers", pretrained=where, max_tokens=64)
    text = build_text(of_text, family, (), None)
    of_codec = config.CodecSection(kind="autoencoder", pretrained=where)
    codec = build_codec(of_codec, family.frozen.codec)
    model = release_flux2.transformer(guidance=False)
    family.export(section, model, codec, text, defaults.shift, 3.0, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert (index["_class_name"], index["is_distilled"]) == ("Flux2KleinPipeline", True)
