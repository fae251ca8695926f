"""Predicted memory and time of sampling between two steps, against the real ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.build import TINY_WAN, MakeRecipe, hold_weights

from longtake.config import Recipe
from longtake.models.components import assemble
from longtake.models.frozen_adapter import attach_adapters
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.block_weights import weight_costs
from longtake.planner.devices import DeviceBudget, device_budget, device_named
from longtake.planner.memory import outline_step, static_memory
from longtake.planner.phases import PhaseForecast, forecast_phases
from longtake.planner.profiler import measured
from longtake.planner.record import BlockOption, BlockWeights
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import training_presets
from longtake.sampling.sampler import Sampler

_CPU = torch.device("cpu")
_WAN = (
    *TINY_WAN,
    "model.config={num_layers=2, num_attention_heads=4, attention_head_dim=32, ffn_dim=256}",
    "data.buckets=[{num_frames=5, height=64, width=64}]",
    "data.catalog=none.parquet",
    "sampling.every=4",
)
_THREE_BLOCKS = "model.config.num_layers=3"
_PRESET = "evaluation.presets.tiny={{prompts=['a', 'b'],num_inference_steps=4,{}}}"


def _sampling(recipe: Recipe, device: DeviceBudget) -> PhaseForecast:
    phases = {phase.name: phase for phase in forecast_phases(outline_step(recipe, device))}
    return phases["sampling"]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ("guidance_scale=4.0", ()),
        ("solver='heun'", ()),
        ("solver='unipc'", ()),
        ("guidance_scale=1.0", ("stream", "stream", "stream")),
        ("guidance_scale=4.0", ("fp8", "int8", "nf4")),
        ("guidance_scale=1.0", ("nf4", "stream", "keep")),
    ],
)
def test_the_memory_of_the_phase_is_what_sampling_takes(
    small_recipe: MakeRecipe, settings: str, weights: tuple[BlockWeights, ...]
) -> None:
    """Frozen weights are held as the training holds them."""
    held = ("trainable={kind='lora', rank=2}", _THREE_BLOCKS) if weights else ()
    _assert_foreseen(small_recipe(*_WAN, _PRESET.format(settings), *held), weights)


def test_an_adapter_for_samples_is_foreseen(small_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Its weights stay in training, and its products are in samples alone."""
    file, lora = tmp_path / "adapter.safetensors", dict[str, torch.Tensor]()
    for name in (f"blocks.{n}.ffn.net.2" for n in range(2)):
        lora |= {f"{name}.lora_A.weight": torch.zeros(64, 256)}
        lora |= {f"{name}.lora_B.weight": torch.zeros(128, 64)}
    save_file(lora, file)
    settings = _PRESET.format("guidance_scale=4.0")
    plain = small_recipe(*_WAN, settings)
    recipe = small_recipe(*_WAN, settings, f"sampling.adapter={file}")
    found, before = (_assert_foreseen(each, ()) for each in (recipe, plain))
    num_bytes = sum(each.nbytes for each in lora.values())
    assert found.weight_bytes - before.weight_bytes == num_bytes
    assert found.seconds > before.seconds
    off = recipe.model_copy(
        update={"sampling": recipe.sampling.model_copy(update={"adapter_strength": 0.0})}
    )
    assert _sampling(off, device_budget(off, "cpu")).seconds == before.seconds


def _assert_foreseen(recipe: Recipe, weights: tuple[BlockWeights, ...]) -> PhaseForecast:
    """Compare the forecast of sampling with what it takes, and return it."""
    device = device_budget(recipe, "cpu")
    step = outline_step(recipe, device)
    options = {
        name: BlockOption("recompute", each)
        for name, each in zip(step.block_names, weights or ("keep", "keep"), strict=True)
    }
    phases = {phase.name: phase for phase in forecast_phases(step, options)}
    found = phases["sampling"]
    weight_bytes = step.tracer.trace(options).weight_bytes
    static = static_memory(step, weight_bytes=weight_bytes)
    assert found.weight_bytes == static.weights + static.resident
    assert static.weights == weight_bytes
    assert phases["step"].weight_bytes == found.weight_bytes

    parts = assemble(recipe, ["a", "b"], None)
    attach_adapters(recipe, parts.model, parts.family, _CPU)
    parts.model.eval()
    hold_weights(dict(zip(options, parts.family.blocks(parts.model), strict=True)), options)
    (preset,) = training_presets(recipe, RunDirectory(recipe.out))
    sampler = Sampler(parts, recipe, 0, _CPU, "fp32")
    sampler.encode_prompts(preset.requests(), preset.bucket, preset.settings.negative_prompt)
    with measured(_CPU) as taken:
        sampler.sample(preset.requests(), preset.settings, preset.bucket)
    predicted = found.peak_bytes - found.weight_bytes
    assert predicted == pytest.approx(taken.peak_bytes, rel=0.01)
    return found


def test_a_gpu_too_small_for_the_model_streams_it_to_sample_it(small_recipe: MakeRecipe) -> None:
    """All blocks are streamed, and the step waits for copies that take longer than blocks."""
    made = ("trainable={kind='lora', rank=2}", _THREE_BLOCKS, "training.device=cpu")
    recipe = small_recipe(*_WAN, _PRESET.format("guidance_scale=1.0"), *made)
    whole = device_named("1GiB,1TFLOPS,1000GB/s").with_own_memory()
    slow = replace(whole, host_bandwidth=1e6)
    step = outline_step(recipe, whole)
    options = options_of("none", step.block_names, "stream")
    found = {phase.name: phase for phase in forecast_phases(step, options)}
    assert found["model"].how == ""
    model_bytes = found["model"].weight_bytes
    small = replace(slow, memory_bytes=found["model"].peak_bytes - 1)
    least = {phase.name: phase for phase in forecast_phases(outline_step(recipe, small), options)}
    assert least["model"].how == "weights streamed"
    assert least["model"].fits
    blocks = list(step.tracer.subject.blocks.values())
    streamed = weight_costs("stream", blocks, slow).streamed
    assert model_bytes - least["model"].weight_bytes == streamed.sum() - 2 * streamed.max()
    copies = float(streamed[2:].sum()) / slow.link
    assert least["model"].seconds == pytest.approx(found["model"].seconds + copies, rel=0.1)
    more = least["sampling"].seconds - found["sampling"].seconds
    copied = 4 / 6  # of two traced steps of 3 blocks; the first two blocks' weights are there
    assert more == pytest.approx(2 * 4 * copied * float(streamed.sum()) / slow.link, rel=0.1)
    in_full = small_recipe(*_WAN, _THREE_BLOCKS)
    full = {phase.name: phase for phase in forecast_phases(outline_step(in_full, small))}
    assert full["model"].how == ""


def test_time_counts_all_videos_and_a_small_budget_takes_fewer_at_a_time(
    small_recipe: MakeRecipe,
) -> None:
    device = device_budget(small_recipe(*_WAN), "cpu")
    few = _sampling(small_recipe(*_WAN, _PRESET.format("seeds=[1]")), device)
    many = _sampling(small_recipe(*_WAN, _PRESET.format("seeds=[1, 2, 3, 4]")), device)
    assert many.seconds == pytest.approx(4 * few.seconds, rel=0.3)
    assert many.how == "tiny: 8 videos, all at once"
    assert many.fits is None
    between = (many.weight_bytes + many.peak_bytes) // 2 // 2**10
    tight = small_recipe(*_WAN, _PRESET.format("seeds=[1, 2, 3, 4]"))
    section = tight.recompute.model_copy(
        update={"memory": f"{between / 2**10 / 0.93:.3f}MiB", "reserve": 0.07}
    )
    tight = tight.model_copy(update={"recompute": section})
    least = _sampling(tight, device_budget(tight, "cpu"))
    assert least.how != many.how
    assert least.peak_bytes < many.peak_bytes


def test_a_prompt_of_its_own_size_counts_with_that_size(small_recipe: MakeRecipe) -> None:
    preset = "evaluation.presets.tiny={{prompts=['a', {}], num_inference_steps=4}}"
    device = device_budget(small_recipe(*_WAN), "cpu")
    usual, large, mixed = (
        _sampling(small_recipe(*_WAN, *more), device)
        for more in (
            [preset.format("'b'")],
            [_PRESET.format("width=128")],
            [preset.format("{prompt='b', width=128}")],
        )
    )
    assert usual.peak_bytes < mixed.peak_bytes < large.peak_bytes
    assert usual.seconds < mixed.seconds < large.seconds
    one = "tiny: 1 video of 5 frames of {}x64, all at once"
    assert mixed.how == f"{one.format(64)}; {one.format(128)}"


def test_nothing_is_planned_where_nothing_is_sampled(small_recipe: MakeRecipe) -> None:
    recipe = small_recipe(*_WAN[:-1])
    phases = forecast_phases(outline_step(recipe, device_budget(recipe, "cpu")))
    assert "sampling" not in {phase.name for phase in phases}
