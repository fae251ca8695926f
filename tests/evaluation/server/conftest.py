"""Runs whose checkpoints are small, and servers that read them."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtake.checkpoint import files
from longtake.evaluation.options import ServerOptions
from longtake.evaluation.report import ServerReport
from longtake.evaluation.server import EvaluationServer
from longtake.fsio import write_json
from longtake.process import StopSignal, environment
from longtake.run_dir import RunDirectory

_PROBE = Path(__file__).with_name("probe.py")

_RECIPE = """
out = "run"
[data]
catalog = "catalog.parquet"
buckets = [{ num_frames = 8, height = 32, width = 32 }]
[model]
family = "tubelet"
[training]
steps = 100
batch_size = 4
[tracking]
tensorboard = false
[evaluation]
lease_seconds = 1.0
max_attempts = 3
[evaluation.presets.probe]
prompts = ["a red square moves left"]
"""

Save = Callable[..., Path]
Serve = Callable[..., EvaluationServer]


@pytest.fixture(scope="session")
def probe() -> Any:
    """The module of the work that reads and nothing else."""
    spec = importlib.util.spec_from_file_location("longtake_probe", _PROBE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDirectory]:
    """Makes a run directory: `make_run("name", more)`, with more lines of its recipe."""

    def make(name: str = "run", more: str = "", recipe: str = _RECIPE) -> RunDirectory:
        run = RunDirectory(tmp_path / name)
        run.checkpoints_path.mkdir(parents=True)
        run.recipe_path.write_text(recipe + more)
        return run

    return make


@pytest.fixture
def run(make_run: Callable[..., RunDirectory]) -> RunDirectory:
    """A run directory without checkpoints."""
    return make_run()


def write_checkpoint(path: Path, content: bytes) -> Path:
    """Write a checkpoint of the weights and of one average, and commit it."""
    for part in ("model", "ema/main"):
        (path / part).mkdir(parents=True, exist_ok=True)
        for name in ("__0_0.distcp", ".metadata"):
            (path / part / name).write_bytes(f"{part}/{name}".encode() + content)
    write_json(path / "trainer.json", {"global_step": int(path.name.removeprefix("step_"))})
    files.commit(path, files.describe_files(path, files.list_files(path)))
    return path


@pytest.fixture
def save() -> Save:
    """Saves a checkpoint: `save(run, 10, b"its bytes")`."""

    def save(run: RunDirectory, step: int, content: bytes = b"") -> Path:
        return write_checkpoint(run.checkpoint_path(step), content or f"{step}".encode())

    return save


@pytest.fixture
def serve(probe: Any) -> Serve:
    """Lets a server of this process serve: `serve(run, work, follows=True)`; gives it back."""

    def serve(
        place: RunDirectory | Path, work: Any = None, stop: StopSignal | None = None, **options: Any
    ) -> EvaluationServer:
        path = place.path if isinstance(place, RunDirectory) else place
        given = ServerOptions(places=(path,), look_seconds=0.02, **options)
        report = ServerReport(Console(width=400))  # prints, for capsys
        with stop or StopSignal() as entered:
            server = EvaluationServer(given, work or probe.Probe(), report, entered)
            server.serve()
        return server

    return serve


@pytest.fixture
def probing(tmp_path: Path) -> Callable[..., Any]:
    """Starts a process that serves a run, with further arguments; ends it after the block."""

    @contextmanager
    def probing(run: RunDirectory, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
        log = tmp_path / f"probe_{len(list(tmp_path.glob('probe_*')))}.log"
        command = [sys.executable, "-P", str(_PROBE), str(run.path), *arguments]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stderr=file, stdout=file, cwd=tmp_path, env=environment()
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.kill(process.pid, 18)  # SIGCONT: one that is stopped could not end
                process.kill()
            process.wait(30)

    return probing
