"""A run's files as a training and an evaluation server write them, without either."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtake.config import Recipe, TrackingSection
from longtake.data.encode import write_video
from longtake.evaluation_dir import EvaluationDirectory, Scores, cursor_path
from longtake.lease import Lease
from longtake.run_dir import Metrics, RunDirectory
from longtake.tracking.feed import Feed
from longtake.tracking.reader import Cursor
from longtake.tracking.tensorboard import TensorBoard


@pytest.fixture
def run(small_recipe: Callable[..., Recipe]) -> RunDirectory:
    """A run that has begun, with no step yet."""
    recipe = small_recipe("tracking.tensorboard=true")
    found = RunDirectory(recipe.out)
    found.path.mkdir()
    found.create(recipe)
    return found


@pytest.fixture(scope="session")
def add_steps() -> Callable[..., None]:
    """Appends rows: `add_steps(run, range(1, 4), loss=2.0)`."""

    def add(run: RunDirectory, steps: range, loss: float = 1.0) -> None:
        for step in steps:
            row = Metrics(
                step=step,
                epoch=0,
                loss=loss / step,
                grad_norm=1.0,
                learning_rate=1e-3,
                step_seconds=0.25,
                data_seconds=0.5,
                time=1000.0 * loss + step,
            )
            run.append_metrics(row)

    return add


@pytest.fixture(scope="session")
def add_result() -> Callable[..., Path]:
    """Puts a whole result, with two real videos, into a run: `add_result(run, "demo", 6)`."""

    def add(run: RunDirectory, preset: str, step: int, key: str = "0a1b2c3d") -> Path:
        folder = EvaluationDirectory(run).result_path(preset, step)
        aside = folder.with_name(f".{folder.name}.partial")
        aside.mkdir(parents=True)
        names = ["00_s0.mp4", "01_s0.mp4"]
        for place, name in enumerate(names):
            frames = np.full((4, 32, 32, 3), 20 * place + step, np.uint8)
            write_video(aside / name, frames, fps=8.0)
        Image.new("RGB", (40, 20), (step, 0, 0)).save(aside / "sheet.png")
        _write_scores(aside, preset, step, key, names)
        aside.rename(folder)
        return folder

    return add


def _write_scores(folder: Path, preset: str, step: int, key: str, names: list[str]) -> None:
    scores = Scores(
        preset=preset,
        step=step,
        key=key,
        weights="model",
        time=f"2026-01-02T03:04:{step % 60:02d}.000+00:00",
        server="here-1",
        settings={"fps": 8.0},
        videos=[
            {"file": name, "prompt": "a red disc", "seed": 0, "measures": {"brightness": 0.5}}
            for name in names
        ],
        measures={"brightness": 0.25 + step, "motion": 1.5},
        held_out={"0.1": 0.75, "mean": 0.5},
        alarms=[{"measure": "brightness", "kind": "drift", "message": f"brightness at {step}"}],
        seconds={"sample": 1.0},
    )
    (folder / "scores.json").write_text(json.dumps(scores))


@pytest.fixture
def make_feed() -> Callable[..., Feed]:
    """Makes the feed of a run's TensorBoard: `make_feed(run, lease)`."""

    def make(run: RunDirectory, lease: Lease | None = None) -> Feed:
        return Feed(run, "tensorboard", TensorBoard(run, TrackingSection()), lease)

    return make


@pytest.fixture
def send_to_tensorboard(make_feed: Callable[..., Feed]) -> Callable[..., None]:
    """Sends TensorBoard what a run has gained, as a follower does between start and end."""

    def send(run: RunDirectory) -> None:
        feed = make_feed(run)
        feed.start()
        feed.finish()
        assert feed.join(30.0)
        assert feed.is_over

    return send


@pytest.fixture(scope="session")
def scalars() -> Callable[..., dict[int, float]]:
    """A scalar of a run's TensorBoard by step: `scalars(run, "eval/demo/motion", "eval")`."""

    def read(run: RunDirectory, tag: str = "train/loss", folder: str = ".") -> dict[int, float]:
        path = run.tensorboard_path / folder
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        return {event.step: event.value for event in events.Scalars(tag)}

    return read


@pytest.fixture(scope="session")
def cursor() -> Callable[..., Cursor]:
    """How far a run's tracker was sent: `cursor(run, "wandb")`."""
    return lambda run, name="tensorboard": Cursor.load(cursor_path(run, name))


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for something to become true: `until(lambda: path.exists())`."""

    def wait(is_so: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.05)

    return wait


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A W&B server that cannot be reached: nothing listens at its port."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "WANDB_MODE" not in os.environ
