"""Runs to mirror: folders as a training leaves them, with checkpoints of a few bytes."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import fsspec
import pytest
from tests.cluster.hosts import Cluster

from longtake.checkpoint.files import commit, describe_files
from longtake.fsio import append_json
from longtake.run_dir import RunDirectory


class Trainer:
    """Writes what a training writes, as far as a mirror is concerned.

    Args:
        path: of the run directory.
    """

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory(path)
        if self.run.exists():
            return
        write(path / "components" / "vae" / "weights.model", b"v" * 1000)
        write(path / "ledger" / "rank_0.bin", b"l")
        write(path / "nodes" / "gpu00" / "stacks" / "1.json", b"{}")
        write(path / "tensorboard" / "events", b"t")
        write(path / "tracking" / "writer" / "0.json", b"{}")
        self.log(0)
        write(path / "recipe.toml", b"")

    def log(self, step: int) -> None:
        """Write a row of metrics."""
        append_json(self.run.metrics_path, {"step": step, "loss": 1.0})

    def save(self, step: int, weights: bytes = b"w" * 1000) -> Path:
        """Save a checkpoint."""
        folder = self.run.checkpoint_path(step)
        names = ("model/.metadata", "model/__0_0.distcp", "optimizer/__0_0.distcp", "trainer.json")
        for name in names:
            write(folder / name, weights if name.endswith("distcp") else b"{}")
        commit(folder, describe_files(folder, names))
        return folder


def write(path: Path, content: bytes) -> None:
    """Write a file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


class Place:
    """A folder of runs, as it is reached by one way or another.

    Args:
        folder: where the runs are trained.
        way: `rsync`, `file` or `memory`.
    """

    def __init__(self, folder: Path, way: str) -> None:
        self.folder, self._way = folder, way
        self.text = {"rsync": str(folder), "file": f"file://{folder}", "memory": "memory://runs"}[
            way
        ]

    def publish(self) -> None:
        """Let the source be what is in the folder now."""
        if self._way == "memory":
            store = fsspec.filesystem("memory")
            if store.exists("/runs"):
                store.rm("/runs", recursive=True)
            for path in self._paths():
                store.pipe_file(f"/runs/{path.relative_to(self.folder)}", path.read_bytes())

    def read(self, name: str) -> bytes:
        """The content of a file at the source."""
        if self._way == "memory":
            return bytes(fsspec.filesystem("memory").cat_file(f"/runs/{name}"))
        return (self.folder / name).read_bytes()

    def delete(self, name: str) -> None:
        """Delete a file at the source."""
        if self._way == "memory":
            fsspec.filesystem("memory").rm_file(f"/runs/{name}")
        else:
            (self.folder / name).unlink()

    def names(self) -> list[str]:
        """The files that the source has."""
        if self._way == "memory":
            found = fsspec.filesystem("memory").find("/runs")
            return sorted(name.removeprefix("/runs/") for name in found)
        return sorted(str(path.relative_to(self.folder)) for path in self._paths())

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture(params=["rsync", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A folder of one run, `one [a]`, with two checkpoints; reached in each way."""
    if request.param == "rsync" and not shutil.which("rsync"):
        pytest.skip("rsync is not installed")
    place = Place(tmp_path / "runs", request.param)
    trainer = Trainer(place.folder / "one [a]")
    trainer.save(1)
    trainer.save(2)
    place.publish()
    yield place
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def train() -> Callable[[Path], Trainer]:
    """Begins, or goes on with, a run in a folder."""
    return Trainer


@pytest.fixture(scope="module")
def two_hosts(
    namespaces: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """node0, where runs are trained, and node1, where they are mirrored to."""
    if not shutil.which("rsync"):
        pytest.skip("rsync is not installed")
    with namespaces.hosts(2, tmp_path_factory.mktemp("hosts"), with_ssh=True) as cluster:
        yield cluster
