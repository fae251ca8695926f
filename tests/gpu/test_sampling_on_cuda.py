"""Sampling on a GPU: the same videos, also where its memory ends; skipped where there is none."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.build import MakeRecipe

from longtake.sampling.presets import Request
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.training.train import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_REQUESTS = [Request("a red circle moving up", seed) for seed in range(32)]


@pytest.fixture
def sampler(small_recipe: MakeRecipe) -> Sampler:
    """The sampler, on the GPU, of a small model that was trained on the CPU."""
    recipe = small_recipe("training.steps=6", "data.buckets=[{num_frames=8,height=64,width=64}]")
    train(recipe, Console(quiet=True))
    return load_sampler(recipe.out, device="cuda")


@pytest.fixture
def whole_memory() -> Iterator[None]:
    """Give back what a test has taken of the GPU's memory from itself."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_gpu_makes_the_videos_that_a_cpu_makes(sampler: Sampler) -> None:
    recipe = sampler.recipe
    settings, bucket = recipe.sampling, recipe.data.buckets[0]
    here = load_sampler(recipe.out, device="cpu").sample(_REQUESTS[:2], settings, bucket)
    there = sampler.sample(_REQUESTS[:2], settings, bucket)
    assert np.abs(here.astype(int) - there.astype(int)).mean() < 1


def test_where_a_gpu_s_memory_ends_less_is_done_at_once(
    sampler: Sampler, whole_memory: None
) -> None:
    settings, bucket = sampler.recipe.sampling, sampler.recipe.data.buckets[0]
    sampler.sample(_REQUESTS[:1], settings, bucket)  # cuBLAS takes its workspaces, and keeps them
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    wanted = sampler.sample(_REQUESTS, settings, bucket)
    assert str(sampler.memory.strategies[bucket]) == "all at once"
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    sampler.memory.strategies.clear()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((kept + 0.6 * (peak - kept)) / total)
    found = sampler.sample(_REQUESTS, settings, bucket)
    assert str(sampler.memory.strategies[bucket]) != "all at once"
    assert np.abs(wanted.astype(int) - found.astype(int)).max() <= 2
