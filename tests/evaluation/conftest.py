"""A run for the tests of whatever samples it."""

from pathlib import Path

import pytest
from rich.console import Console

from longtake import config
from longtake.config import Recipe
from longtake.training.run import train


@pytest.fixture(scope="session")
def tiny_recipe(shapes_catalog: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Six steps of a tubelet in fp32, each of them saved, with two averages that lag behind."""
    values = {
        "out": str(tmp_path_factory.mktemp("runs") / "tiny"),
        "data": {
            "catalog": str(shapes_catalog),
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
        },
        "model": {
            "family": "tubelet",
            "config": {"hidden_size": 48, "num_heads": 2, "num_blocks": 2},
        },
        "text": {"max_tokens": 6},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant"},
        "training": {"steps": 6, "batch_size": 8, "precision": "fp32", "device": "cpu"},
        "ema": {"profiles": [{"name": "fixed", "decay": 0.8}, {"name": "power", "width": 0.1}]},
        "checkpoint": {"every": 1, "keep": 10},
        "sampling": {"num_inference_steps": 4, "guidance_scale": 3.0, "shift": 3.0, "fps": 8.0},
    }
    return config.parse(values, source="tiny_recipe")


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe: Recipe) -> Path:
    """The run directory of `tiny_recipe`, trained to its end; copy it to change it."""
    train(tiny_recipe, Console(quiet=True))
    return tiny_recipe.out
