"""What the FLUX families promise: diffusers' transformer, asked as FLUX's own pipelines ask it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import FLUX, KL, TEXT, TWO_TEXTS
from torch import Tensor

from longtake.config import CodecSection, ModelSection, TextSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.shift import ShiftRule
from longtake.models.base import LatentShape
from longtake.models.codec import Codec, PixelCodec, build_codec
from longtake.models.flux import Flux, FluxKontext, image_ids, pack, unpack
from longtake.models.text import TextEncoder, build_text

_CAPTIONS = ["a red ball rolls left", "a blue square"]
_SHAPE = LatentShape(channels=4, num_frames=1, height=6, width=8)
_TINY = FLUX | {"num_single_layers": 2, "guidance_embeds": True}


def _text() -> TextEncoder:
    torch.manual_seed(2)
    return build_text(TWO_TEXTS, Flux(), _CAPTIONS, None)


def _codec() -> Codec:
    torch.manual_seed(1)
    return build_codec(CodecSection(kind="autoencoder", config=KL), Flux.frozen.codec)


def _model(text: TextEncoder | None = None, **config: Any) -> Any:
    torch.manual_seed(0)
    section = ModelSection(family="flux", config=_TINY | config)
    return Flux().build(section, [_SHAPE], text or _text()).eval()


def _inputs(height: int = 6, width: int = 8) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    given = {
        "prompt_embeds": torch.randn(2, 8, 12, generator=generator),
        "pooled_prompt_embeds": torch.randn(2, 10, generator=generator),
        "guidance": torch.tensor([3.5, 3.5]),
        "reference_latents": torch.randn(2, 4, 1, height, width, generator=generator),
    }
    noisy = torch.randn(2, *_SHAPE, generator=generator)
    return noisy, torch.tensor([0.7, 0.7]), given


def test_tokens_and_ids_are_those_of_the_pipelines() -> None:
    """Bitwise, there and back; the reference's ids have a 1 where the noisy ones' have a 0."""
    from diffusers import FluxKontextPipeline as Pipeline

    latents = torch.randn(2, 4, 1, 6, 8)
    tokens = pack(latents)
    assert torch.equal(tokens, Pipeline._pack_latents(latents[:, :, 0], 2, 4, 6, 8))
    assert torch.equal(unpack(tokens, 6, 8), latents)
    assert torch.equal(unpack(tokens, 6, 8)[:, :, 0], Pipeline._unpack_latents(tokens, 6, 8, 1))
    ids = Pipeline._prepare_latent_image_ids(2, 3, 4, "cpu", torch.float32)
    assert torch.equal(image_ids(latents, number=0), ids)
    ids[..., 0] = 1
    assert torch.equal(image_ids(latents, number=1), ids)


def test_a_step_is_the_pipelines_step_by_a_reference_of_another_size() -> None:
    import diffusers

    model, (noisy, sigmas, given) = _model(), _inputs(4, 10)
    pipeline = diffusers.FluxKontextPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(),
        _codec().autoencoder,  # type: ignore[attr-defined]
        *[None] * 4,
        transformer=model,
    )
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        image=given["reference_latents"][:, :, 0],
        max_area=12 * 16,
        prompt_embeds=given["prompt_embeds"],
        pooled_prompt_embeds=given["pooled_prompt_embeds"],
        latents=pack(noisy),
        height=12,
        width=16,
        sigmas=[0.7],
        guidance_scale=3.5,
        output_type="latent",
    ).images
    with torch.no_grad():
        velocity = FluxKontext().predict_velocity(model, noisy, sigmas, given)
    assert velocity.shape == noisy.shape
    torch.testing.assert_close(pack(noisy - 0.7 * velocity), expected, atol=1e-6, rtol=1e-6)


def test_tokens_are_counted_as_the_shift_wants_them() -> None:
    """FLUX's shift follows the noisy tokens alone, though the model sees the reference's too."""
    model, (noisy, sigmas, given) = _model(), _inputs()
    seen: list[int] = []
    model.x_embedder.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    for family in (Flux(), FluxKontext()):
        family.predict_velocity(model, noisy, sigmas, given)
        assert family.block.num_tokens(model, _SHAPE) == 12
    assert seen == [12, 24]


def test_without_guidance_embedding_no_guidance_is_asked_for() -> None:
    """FLUX.1-schnell and models from nothing have none; with it, a missing scale is named."""
    noisy, sigmas, given = _inputs()
    del given["guidance"]
    plain, distilled = _model(guidance_embeds=False), _model()
    assert not Flux().distils_guidance(plain)
    assert Flux().predict_velocity(plain, noisy, sigmas, given).isfinite().all()
    assert Flux().distils_guidance(distilled)
    with pytest.raises(ModelError, match=r"names no guidance scale \(it has prompt_embeds, "):
        Flux().predict_velocity(distilled, noisy, sigmas, given)


def test_kontext_without_its_reference_says_so() -> None:
    noisy, sigmas, given = _inputs()
    del given["reference_latents"]
    with pytest.raises(ModelError, match=r"no reference_latents \(it has .* data\.conditioning\.r"):
        FluxKontext().predict_velocity(_model(), noisy, sigmas, given)


@pytest.mark.parametrize("section", [TextSection(), TEXT])
def test_one_text_encoder_is_not_enough(section: TextSection) -> None:
    with pytest.raises(RecipeError, match=r"two text encoders, .* section \[text\.pooled\]"):
        _model(build_text(section, Flux(), _CAPTIONS, None))


def test_what_diffusers_has_no_pipeline_for_is_not_exported(tmp_path: Path) -> None:
    text = _text()
    with pytest.raises(RecipeError, match=r"A FluxKontextPipeline needs .* has PixelCodec"):
        FluxKontext().export(
            ModelSection(family="flux_kontext"),
            _model(text),
            PixelCodec(),
            text,
            ShiftRule(5.0),
            5.0,
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
