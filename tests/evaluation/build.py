"""Runs and checkpoints of a few bytes, the places where they are, and what servers leave there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.evaluation.probe import BeforeTask, Probe

from longtake.checkpoint.files import commit, describe_files, list_files, needed_steps
from longtake.evaluation.options import ServerOptions, ServerReport
from longtake.evaluation.server import EvaluationServer
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import append_json, write_json
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.process import StopSignal
from longtake.run_dir import RunDirectory


def claims_of(run: RunDirectory, step: int, preset: str = "probe") -> list[dict[str, Any]]:
    folders = (EvaluationDirectory(run).path / "claims" / preset).glob(f"step_{step:08d}-*")
    return [record for folder in sorted(folders) for record in history(folder)]


def steps_of(run: RunDirectory, preset: str = "probe") -> list[int]:
    return EvaluationDirectory(run).steps(preset)


def leftovers(run: RunDirectory) -> list[Path]:
    return [*run.path.glob("evaluations/*/.*"), *map(run.checkpoint_path, needed_steps(run))]


def steps_in(run: RunDirectory, kind: str) -> list[int]:
    """Steps of the events of a kind that servers have written to a run."""
    return [event["step"] for event in read_events(run) if event["event"] == kind]


def save(run: RunDirectory, *steps: int, content: bytes = b"") -> Path:
    """Save small checkpoints of some steps; returns the last one's folder."""
    for step in steps:
        path = _write_checkpoint(run.checkpoint_path(step), content or f"{step}".encode())
    return path


def serve(
    place: RunDirectory | Path,
    before: BeforeTask | None = None,
    stop: StopSignal | None = None,
    **options: Any,
) -> EvaluationServer:
    """Serve a run, or a folder of runs, in this process, by a `Probe`; returns the server."""
    path = place.path if isinstance(place, RunDirectory) else place
    report = ServerReport(Console(width=400))  # prints, for capsys
    with stop or StopSignal() as entered:
        chosen = ServerOptions((path,), look_seconds=0.02, lease_seconds=1.0, **options)
        server = EvaluationServer(chosen, Probe(before=before), report, entered)
        server.serve()
    return server


def at_10(act: Callable[[], object]) -> BeforeTask:
    """Act before the checkpoint of step 10 is evaluated, for `serve`."""
    return lambda task, *_: act() if task.step == 10 else None


def _write_checkpoint(path: Path, content: bytes) -> Path:
    for part in ("model", "ema/main"):
        (path / part).mkdir(parents=True, exist_ok=True)
        for name in ("__0_0.distcp", ".metadata"):
            (path / part / name).write_bytes(f"{part}/{name}".encode() + content)
    write_json(path / "trainer.json", {"global_step": int(path.name.removeprefix("step_"))})
    commit(path, describe_files(path, list_files(path)))
    return path


MakeRun = Callable[..., RunDirectory]
"""Makes a run directory: `make_run("name", more)`, with more lines of its recipe."""


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
        append_json(self.run.metrics_path, {"step": step, "loss": 1.0})

    def save(self, step: int, weights: bytes = b"w" * 1000) -> Path:
        folder = self.run.checkpoint_path(step)
        names = ("model/.metadata", "model/__0_0.distcp", "optimizer/__0_0.distcp", "trainer.json")
        for name in names:
            write(folder / name, weights if name.endswith("distcp") else b"{}")
        commit(folder, describe_files(folder, names))
        return folder


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
