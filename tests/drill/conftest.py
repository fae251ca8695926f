"""A place of the drills in which a run was trained, by this process: a second, not five."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from longtake import config
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.training.run import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place whose run nothing befell; copy it to change it."""
    place = Place(tmp_path_factory.mktemp("trained"))
    place.prepare()
    here = (f"out={place.run.path}", f"data.catalog={place.catalog_path}")
    cheap = ("data.workers=0", "checkpoint.every=100")
    recipe = config.load(place.folder / "recipe.toml", here + cheap)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model only loses by more
    try:
        train(recipe, Console(quiet=True))
    finally:
        torch.set_num_threads(threads)
    return place


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """What all drills share."""
    return Ground(tmp_path_factory.mktemp("ground"), Console(quiet=True))


@pytest.fixture(scope="session")
def impatient_ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """Likewise, where a stall is called sooner than by default."""
    soon = "watch.min_seconds = 2.0\nwatch.round_seconds = 0.5\n"
    return Ground(tmp_path_factory.mktemp("impatient"), Console(quiet=True), soon)


@pytest.fixture
def place(trained: Place, tmp_path: Path) -> Place:
    """A copy of it."""
    return trained.copied_to(tmp_path / "place")
