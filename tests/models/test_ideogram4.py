"""What Ideogram 4 adds to what each family promises: its guidance and its sigmas."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.families import release_ideogram4
from tests.families.release_ideogram4 import LENGTH, ROWS
from tests.families.tiny import LONG, SHORT, Tiny, relative
from tests.models.tiny import write_configs
from tests.sampling.build import sample_latents
from torch import Tensor

from longtake.config import ModelSection, SamplingSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.timesteps import build_sigmas
from longtake.models import release_checks, releases
from longtake.models.components import outline
from longtake.models.ideogram4 import Ideogram4
from longtake.models.lora_files import read_lora
from longtake.planner.devices import device_budget
from longtake.planner.memory import outline_step, static_memory
from longtake.planner.phases import forecast_phases
from longtake.run_dir import RunDirectory
from longtake.sampling.guidance import guidance_end, refuse_wrong_settings, uses_other
from longtake.sampling.other_expert import other_bytes
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import load_sampler

_OTHER = "unconditional_transformer"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(ROWS[0], tmp_path_factory.mktemp("ideogram"))


def _called(tiny: Tiny, num_steps: int, **options: Any) -> Any:
    _, height, width = tiny.row.bucket
    tokens = tiny.noise(3)[:, :, 0].flatten(2).mT
    size = {"height": height, "width": width, "max_sequence_length": LENGTH}
    given = {"num_inference_steps": num_steps, "latents": tokens, **size, **options}
    return tiny.released(LONG, **given)[0]


def test_the_last_sixteenth_of_the_steps_is_guided_by_the_releases_other_scale(tiny: Tiny) -> None:
    """Rounded up, as in the presets of 48, 20 and 12 steps that are published."""
    schedule = (7.0,) * 18 + (3.0,) * 2
    tokens = _called(tiny, 20, guidance_schedule=schedule, output_type="latent")
    expected = tokens.mT.unflatten(2, (1, 4, 6))
    found = sample_latents(tiny.sampler, Request(LONG, 3), num_inference_steps=20)
    assert relative(found, expected) <= 1e-5
    constant = sample_latents(
        tiny.sampler, Request(LONG, 3), num_inference_steps=20, guidance_scale=7.0
    )
    assert relative(constant, expected) > 1e-3
    parts, bucket = tiny.sampler.components, tiny.recipe().data.buckets[0]
    for num_steps, last in ((48, 3), (20, 2), (12, 1)):
        end = guidance_end(parts, SamplingSection(), bucket, num_steps)
        assert end is not None
        factor = parts.shift(None, bucket, num_steps)
        sigmas = build_sigmas(num_steps, factor, logit_std=1.5)
        assert sum(sigma <= end.sigma for sigma in sigmas[:-1]) == last


def test_a_decoded_picture_is_the_pipelines_and_encoding_is_its_inverse(tiny: Tiny) -> None:
    """Channels of a latent pixel go by row, column and channel, and so do the statistics."""
    options = {"guidance_scale": 1.0, "guidance_schedule": None, "output_type": "np"}
    expected = np.round(_called(tiny, 2, **options)[0] * 255)
    chosen, bucket = settings_for(tiny.recipe(), num_inference_steps=2, guidance_scale=1.0)
    (video,) = tiny.sampler.sample([Request(LONG, 3)], chosen, bucket)
    assert np.abs(video[0] - expected).max() <= 1
    codec: Any = tiny.sampler.components.codec
    latents = tiny.noise(5)[:, :, 0]
    raw = codec._denormalized(latents)
    torch.testing.assert_close(codec._normalized(raw), latents, rtol=1e-5, atol=1e-5)
    mean = codec.autoencoder.bn.running_mean
    scaled = latents[:, 4 * 3 + 2] * (codec.autoencoder.bn.running_var[14] + codec._epsilon).sqrt()
    torch.testing.assert_close(raw[:, 2, 1::2, 1::2], scaled + mean[14])


def test_without_guidance_the_other_transformer_is_not_loaded(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny.recipe().model_copy(update={"out": tmp_path / "run"})
    recipe.out.mkdir()
    RunDirectory(recipe.out).create(recipe)
    guided, plain = (settings_for(recipe, guidance_scale=scale)[0] for scale in (None, 1.0))
    load = partial(load_sampler, recipe.out, step=0, device="cpu")
    assert load(sampling=guided).components.other is not None
    sampler = load(sampling=plain)
    assert sampler.components.other is None
    found = sample_latents(sampler, Request(LONG, 3), num_inference_steps=2, guidance_scale=1.0)
    options = {"guidance_scale": 1.0, "guidance_schedule": None, "output_type": "latent"}
    expected = _called(tiny, 2, **options).mT.unflatten(2, (1, 4, 6))
    assert relative(found, expected) <= 1e-5


@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_plan_counts_the_other_transformer_only_where_samples_are_guided(
    tiny: Tiny, scale: float | None
) -> None:
    preset = {"tiny": {"prompts": ["a"]}}
    recipe = tiny.recipe(
        sampling={"every": 2, "guidance_scale": scale},
        evaluation={"presets": preset, "reference_clips": 0},
        recompute={"device": "a100-80gb"},
    )
    step = outline_step(recipe, device_budget(recipe))
    (phase,) = (each for each in forecast_phases(step) if each.name == "sampling")
    static = static_memory(step)
    more = phase.weight_bytes - static.weights - static.resident
    foreseen = other_bytes(step.recipe, step.components, "cuda")
    assert foreseen > 0
    assert more == (foreseen if scale is None else 0)
    assert (f"second pass is by {_OTHER}" in str(phase.how)) == (scale is None)
    sampling = step.recipe.sampling
    assert uses_other(step.components, sampling) == (scale is None)


def test_what_a_second_pass_by_the_other_transformer_leaves_out_is_refused(tiny: Tiny) -> None:
    """A model from scratch has no other one, and is guided by itself."""
    recipe = tiny.recipe(data={"caption_dropout": 0.1})
    with pytest.raises(RecipeError, match=rf"caption_dropout is 0\.1, .*{_OTHER}, which is not t"):
        outline(recipe)
    negative = SamplingSection(negative_prompt="blue")
    with pytest.raises(RecipeError, match=f"negative_prompt 'blue' .*{_OTHER}, which reads no te"):
        refuse_wrong_settings(tiny.sampler.components, negative)
    section = ModelSection(family="ideogram4", config=_SIZES)
    scratch = outline(recipe.model_copy(update={"model": section}))
    refuse_wrong_settings(scratch, negative)
    assert not scratch.has_other
    assert scratch.defaults.caption_dropout > 0


_SIZES = {
    name: value
    for name, value in release_ideogram4.transformer().config.items()
    if not name.startswith("_")
}


def _release(folder: Path, scheduler: dict[str, Any], **config: Any) -> ModelSection:
    files = {
        "model_index.json": {"_class_name": "Ideogram4Pipeline", _OTHER: ["diffusers", "X"]},
        "transformer/config.json": {"_class_name": "Ideogram4Transformer2DModel", **config},
        "scheduler/scheduler_config.json": scheduler,
    }
    return ModelSection(family="ideogram4", pretrained=write_configs(folder, files))


@pytest.mark.parametrize("scheduler", [{"shift": 3.0}, {"use_dynamic_shifting": True}])
def test_a_scheduler_that_shifts_the_pipelines_sigmas_is_refused(
    scheduler: dict[str, Any], tmp_path: Path
) -> None:
    plain = Ideogram4().defaults(_release(tmp_path / "plain", {"shift": 1.0}))
    assert (plain.guidance_scale, plain.end_guidance_scale) == (7.0, 3.0)
    with pytest.raises(ModelError, match="sigmas that the pipeline has shifted already"):
        Ideogram4().defaults(_release(tmp_path / "other", scheduler))


def test_quantised_weights_of_another_library_are_refused(tmp_path: Path) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    section = _release(tmp_path, {}, quantization_config=stored)
    with pytest.raises(ModelError, match=r"quantised by another library.* model\.quantize keeps"):
        release_checks.refuse_untrained(releases.read_release(section), (), section)


def test_a_caption_is_cut_to_the_tokens_of_the_recipe(tiny: Tiny) -> None:
    """Those of the chat template in front count."""
    text = tiny.sampler.components.text
    whole, short = (text.encode([LONG, SHORT]), text.encode([SHORT]))
    assert whole["prompt_length"][0] > whole["prompt_length"][1] == short["prompt_length"][0] > 8
    assert torch.equal(whole["prompt_embeds"][1:], short["prompt_embeds"])
    cut = tiny.made(text={"max_tokens": 10}).components.text.encode([LONG])
    assert cut["prompt_length"].tolist() == [10]
    assert torch.equal(cut["prompt_embeds"], whole["prompt_embeds"][:1, :10])


@torch.no_grad()
def test_times_are_not_rounded_to_the_weights_dtype(tiny: Tiny) -> None:
    """bf16 has no number between 1 - 2 ** -8 and 1, in which 39 of Ideogram's 10,000 times lie."""
    parts = tiny.made(model={"dtype": "bf16"}).components
    told = tiny.told(tiny.sampler, [SHORT])
    first, second = (
        parts.predict_velocity(tiny.noise(1), torch.tensor([sigma]), told)
        for sigma in (0.0002, 0.0008)
    )
    assert not torch.equal(first, second)


def test_a_lora_with_the_names_of_ideograms_code_is_read(tiny: Tiny, tmp_path: Path) -> None:
    """As ai-toolkit and ComfyUI have it: queries, keys and values are one layer."""
    recipe = tiny.recipe(trainable={"kind": "lora", "rank": 2})
    parts, file = outline(recipe), tmp_path / "native.safetensors"
    state = dict[str, Tensor]()
    for name, rows in (("attention.qkv", 96), ("attention.o", 32), ("feed_forward.w1", 64)):
        state[f"diffusion_model.layers.1.{name}.lora_A.weight"] = torch.randn(2, 32)
        state[f"diffusion_model.layers.1.{name}.lora_B.weight"] = torch.randn(rows, 2)
    save_file(state, file)
    found = read_lora(file, parts.model, parts.family)
    ends = {name.removeprefix("layers.1.") for name in found}
    assert ends == {*(f"attention.to_{each}" for each in ("q", "k", "v", "out.0"))} | {
        "feed_forward.w1"
    }
    keys: Any = found["layers.1.attention.to_k"]
    assert torch.equal(
        keys.up, state["diffusion_model.layers.1.attention.qkv.lora_B.weight"][32:64]
    )
