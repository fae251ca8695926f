"""What sampling between two steps takes, against what it takes."""

import pytest
import torch
from tests.build import TINY_WAN, MakeRecipe

from longtake.config import Recipe
from longtake.models.build import assemble
from longtake.planner.devices import DeviceBudget, device_budget
from longtake.planner.forecast import PhaseForecast, forecast_phases
from longtake.planner.memory import measured, outline_step, static_memory
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
_PRESET = "evaluation.presets.tiny={{prompts=['a', 'b'],num_inference_steps=4,{}}}"


def _sampling(recipe: Recipe, device: DeviceBudget) -> PhaseForecast:
    phases = {phase.name: phase for phase in forecast_phases(outline_step(recipe, device))}
    return phases["sampling"]


@pytest.mark.parametrize(
    "settings", ["guidance_scale=4.0", "guidance_scale=1.0", "solver='heun'", "solver='unipc'"]
)
def test_the_memory_of_the_phase_is_what_sampling_takes(
    small_recipe: MakeRecipe, settings: str
) -> None:
    recipe = small_recipe(*_WAN, _PRESET.format(settings))
    device = device_budget(recipe, "cpu")
    found = _sampling(recipe, device)
    static = static_memory(outline_step(recipe, device))
    assert found.weight_bytes == static.weights + static.resident

    parts = assemble(recipe, ["a", "b"], None)
    parts.model.eval()
    (preset,) = training_presets(recipe, RunDirectory(recipe.out))
    sampler = Sampler(parts, recipe, 0, _CPU, "fp32")
    sampler.encode_prompts([*preset.prompts, ""])
    with measured(_CPU) as taken:
        sampler.sample(preset.requests(), preset.settings, preset.bucket)
    predicted = found.peak_bytes - found.weight_bytes
    assert predicted == pytest.approx(taken.peak_bytes, rel=0.01)


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


def test_nothing_is_planned_where_nothing_is_sampled(small_recipe: MakeRecipe) -> None:
    recipe = small_recipe(*_WAN[:-1])
    phases = forecast_phases(outline_step(recipe, device_budget(recipe, "cpu")))
    assert "sampling" not in {phase.name for phase in phases}
