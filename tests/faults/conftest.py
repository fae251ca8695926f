"""Sandboxes for drills from end to end, and sites whose run was trained in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from longtake import config
from longtake.faults import evaluation, sandbox
from longtake.faults.registry import DrillResult, all_faults, run_drill
from longtake.faults.sandbox import Sandbox, TrainingSite
from longtake.training.run import train


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


@pytest.fixture
def started_warm(start_warm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drills start processes that have imported everything: half of what most of them take."""
    for module in (sandbox, evaluation):
        monkeypatch.setattr(module, "start", start_warm)


@pytest.fixture(scope="session")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """For drills in which the watcher has no part."""
    less = "watch.enabled = false\ntracking.tensorboard = false\n"
    return Sandbox(tmp_path_factory.mktemp("unwatched"), Console(quiet=True), less)


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """With a watcher that reports a stall sooner than by default."""
    soon = "watch.min_seconds = 2.0\nwatch.round_seconds = 0.5\ntracking.tensorboard = false\n"
    return Sandbox(tmp_path_factory.mktemp("watched"), Console(quiet=True), soon)


@pytest.fixture
def drill() -> Callable[..., DrillResult]:
    """Runs a drill that must pass: `drill(sandbox, "kill", bitwise=True)`."""

    def run(sandbox: Sandbox, name: str, bitwise: bool | None = None) -> DrillResult:
        result = run_drill(all_faults()[name], sandbox)
        assert result.passed, result.message
        assert result.equal_to_undisturbed is bitwise
        if result.detected_seconds is not None:
            assert 0 < result.detected_seconds < result.drill_seconds
        return result

    return run
