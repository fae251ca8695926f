"""Hosts, recipes for their preflight, and sites of runs that several hosts train."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from tests.build import bare_recipe
from tests.cluster import hosts
from tests.cluster.hosts import Cluster

from longtake import config
from longtake.faults.sandbox import Sandbox


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Shared by these drills; their runs are watched. Skips where hosts cannot be made."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    less = "tracking.tensorboard = false\n"
    return Sandbox(tmp_path_factory.mktemp("cluster"), Console(quiet=True), less)


@pytest.fixture(scope="module")
def three_hosts(
    namespaces: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """node0, node1 and node2, which share this machine's disk; tests leave them as they were."""
    with namespaces.hosts(3, tmp_path_factory.mktemp("hosts"), with_ssh=True) as cluster:
        yield cluster


@pytest.fixture
def write_recipe(shapes_catalog: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe of a small run in tmp_path/run; gives its path."""

    def write(path: Path, learning_rate: float = 3e-3) -> Path:
        recipe = bare_recipe(
            tmp_path / "run",
            data={"catalog": str(shapes_catalog)},
            model={"config": {"hidden_size": 48, "num_blocks": 2}},
            text={"max_tokens": 6},
            optimizer={"learning_rate": learning_rate},
            training={"steps": 12},
        )
        path.write_text(config.dump(recipe))
        return path

    return write
