"""Training and sampling on a GPU; skipped where there is none."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from longtake import config
from longtake.config import Recipe
from longtake.demo.run import demo_recipe
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import load_sampler
from longtake.training.train import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_STEPS = 8


def _recipe(out: Path, catalog: Path, device: str, precision: str) -> Recipe:
    values = demo_recipe(out, _STEPS, seed=0).model_dump(mode="json", exclude_none=True)
    values["data"]["catalog"] = str(catalog)
    values["training"] |= {"device": device, "precision": precision}
    return config.parse(values, source="test")


def _losses(recipe: Recipe) -> list[float]:
    train(recipe, Console(quiet=True))
    return RunDirectory(recipe.out).losses()


def test_cuda_follows_the_cpu_in_fp32(tmp_path: Path, shapes_catalog: Path) -> None:
    on_cpu = _losses(_recipe(tmp_path / "cpu", shapes_catalog, "cpu", "fp32"))
    on_cuda = _losses(_recipe(tmp_path / "cuda", shapes_catalog, "cuda", "fp32"))
    assert on_cuda == pytest.approx(on_cpu, rel=1e-2)
    assert on_cuda[0] == pytest.approx(on_cpu[0], rel=1e-5)


def test_cuda_trains_and_samples_in_bf16(tmp_path: Path, shapes_catalog: Path) -> None:
    recipe = _recipe(tmp_path / "run", shapes_catalog, "cuda", "auto")
    losses = _losses(recipe)
    assert losses[-1] < losses[0]
    (row, *later) = RunDirectory(recipe.out).metrics()
    assert 2**20 < row["peak_memory_bytes"] < torch.cuda.get_device_properties(0).total_memory
    assert all("peak_memory_bytes" not in each for each in later)  # every tenth has it
    sampler = load_sampler(recipe.out, device="cuda")
    settings, bucket = settings_for(recipe, num_inference_steps=2)
    videos = sampler.sample([Request("a red circle moving left", 0)], settings, bucket)
    assert videos.shape == (1, 8, 32, 32, 3)
