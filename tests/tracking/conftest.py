"""A run without steps, and a W&B server that cannot be reached."""

import os
from collections.abc import Callable

import pytest

from longtake.config import Recipe
from longtake.run_dir import RunDirectory


@pytest.fixture
def run(small_recipe: Callable[..., Recipe]) -> RunDirectory:
    recipe = small_recipe("tracking.tensorboard=true")
    found = RunDirectory(recipe.out)
    found.path.mkdir()
    found.create(recipe)
    return found


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at its port."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "WANDB_MODE" not in os.environ
