"""Sandboxes for drills from end to end, and sites whose run was trained in this process."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from longtake import config
from longtake.faults.sandbox import TrainingSite
from longtake.training.train import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainingSite:
    """A site with an undisturbed run; copy it to change it. A second, not five."""
    site = TrainingSite(tmp_path_factory.mktemp("trained"))
    site.prepare()
    here = (f"out={site.run.path}", f"data.catalog={site.catalog_path}")
    cheap = ("data.workers=0", "checkpoint.every=100")
    recipe = config.load(site.folder / "recipe.toml", here + cheap)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower with more
    try:
        train(recipe, Console(quiet=True))
    finally:
        torch.set_num_threads(threads)
    return site


@pytest.fixture
def site(trained: TrainingSite, tmp_path: Path) -> TrainingSite:
    """A copy of it."""
    return trained.copied_to(tmp_path / "site")
