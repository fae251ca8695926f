"""A place of the drills in which a run was trained, by this process: a second, not five."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from longtake import config
from longtake.drill import evaluators, launch
from longtake.drill.faults import brightness_drift
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


@pytest.fixture
def started_warm(start_warm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drills start processes that have imported everything: the half of what most of them take."""
    for each in (launch, evaluators, brightness_drift):
        monkeypatch.setattr(each, "start", start_warm)


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """What all drills share, where nobody watches: for drills of what no watcher has a part in."""
    alone = "watch.enabled = false\ntracking.tensorboard = false\n"
    return Ground(tmp_path_factory.mktemp("ground"), Console(quiet=True), alone)


@pytest.fixture(scope="session")
def impatient_ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """Likewise, where a watcher calls a stall sooner than by default."""
    soon = "watch.min_seconds = 2.0\nwatch.round_seconds = 0.5\ntracking.tensorboard = false\n"
    return Ground(tmp_path_factory.mktemp("impatient"), Console(quiet=True), soon)


@pytest.fixture
def place(trained: Place, tmp_path: Path) -> Place:
    """A copy of it."""
    return trained.copied_to(tmp_path / "place")
