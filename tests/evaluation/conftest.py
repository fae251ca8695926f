"""Runs that are served and mirrored, and the servers that do it."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cluster.hosts import Cluster
from tests.evaluation import probe
from tests.evaluation.build import MakeRun, Trainer

from longtake.run_dir import RunDirectory

_RECIPE = """
out = "run"
[data]
catalog = "catalog.parquet"
buckets = [{ num_frames = 8, height = 32, width = 32 }]
[model]
family = "tubelet"
[training]
steps = 100
global_batch_size = 4
[tracking]
tensorboard = false
[evaluation.presets.probe]
prompts = ["a red square moves left"]
"""


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run directory: `make_run("name", more)`, with more lines of its recipe."""

    def make(name: str = "run", more: str = "", recipe: str = _RECIPE) -> RunDirectory:
        run = RunDirectory(tmp_path / name)
        run.checkpoints_path.mkdir(parents=True)
        run.recipe_path.write_text(recipe + more)
        return run

    return make


@pytest.fixture
def run(make_run: MakeRun) -> RunDirectory:
    return make_run()


@pytest.fixture
def probing(start_warm: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Serves a run by a process of probe.py, which ends with the block."""

    @contextmanager
    def probing(run: RunDirectory, *arguments: str) -> Iterator[Any]:
        log = tmp_path / f"probe_{len(list(tmp_path.glob('probe_*')))}.log"
        command = [sys.executable, "-P", str(probe.__file__), str(run.path), *arguments]
        with log.open("wb") as file:
            process = start_warm(command, file, tmp_path)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.kill(process.pid, 18)  # SIGCONT: one that is stopped could not end
                process.kill()
            process.wait(30)

    return probing


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """The training of a run `one [a]`, with two checkpoints; skips where rsync is missing."""
    if not shutil.which("rsync"):
        pytest.skip("rsync is not installed")
    trainer = Trainer(tmp_path / "runs" / "one [a]")
    trainer.save(1)
    trainer.save(2)
    return trainer


@pytest.fixture(scope="module")
def two_hosts(
    namespaces: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if not shutil.which("rsync"):
        pytest.skip("rsync is not installed")
    with namespaces.hosts(2, tmp_path_factory.mktemp("hosts"), with_ssh=True) as cluster:
        yield cluster
