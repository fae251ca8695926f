"""A run's files as a training and an evaluation server write them, without either."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.build import make_row

from longtake.config import TrackingSection
from longtake.data.encode import write_video
from longtake.evaluation_dir import EvaluationDirectory, Scores, cursor_path
from longtake.lease import Lease
from longtake.run_dir import RunDirectory
from longtake.tracking.follower import Feed
from longtake.tracking.reader import Cursor
from longtake.tracking.tensorboard import TensorBoard


def add_steps(run: RunDirectory, steps: range, loss: float = 1.0) -> None:
    for step in steps:
        run.append_metrics(make_row(step, loss / step, time=1000.0 * loss + step))


def add_result(run: RunDirectory, preset: str, step: int, key: str = "0a1b2c3d") -> Path:
    """Put a whole result, with two real videos, into a run; returns its folder."""
    folder = EvaluationDirectory(run).result_path(preset, step)
    aside = folder.with_name(f".{folder.name}.partial")
    aside.mkdir(parents=True)
    names = ["00_s0.mp4", "01_s0.mp4"]
    for place, name in enumerate(names):
        frames = np.full((4, 32, 32, 3), 20 * place + step, np.uint8)
        write_video(aside / name, frames, fps=8.0)
    Image.new("RGB", (40, 20), (step, 0, 0)).save(aside / "sheet.png")
    facts = {"prompt": "a red disc", "seed": 0, "measures": {"brightness": 0.5}}
    scores = Scores(
        preset=preset,
        step=step,
        key=key,
        weights="model",
        time=f"2026-01-02T03:04:{step % 60:02d}.000+00:00",
        server="here-1",
        settings={"fps": 8.0},
        videos=[
            {"file": names[0], **facts},  # type: ignore[typeddict-item]
            {"file": names[1], **facts, "settings": {"width": 48}},  # type: ignore[typeddict-item]
        ],
        measures={"brightness": 0.25 + step, "motion": 1.5},
        held_out={"0.1": 0.75, "mean": 0.5},
        alarms=[{"measure": "brightness", "kind": "drift", "message": f"brightness at {step}"}],
        seconds={"sample": 1.0},
    )
    (aside / "scores.json").write_text(json.dumps(scores))
    aside.rename(folder)
    return folder


def make_feed(run: RunDirectory, lease: Lease | None = None) -> Feed:
    return Feed(run, "tensorboard", TensorBoard(run, TrackingSection()), lease)


def send_to_tensorboard(run: RunDirectory) -> None:
    """Send TensorBoard what a run has gained, as a follower does between start and end."""
    feed = make_feed(run)
    feed.start()
    feed.finish()
    assert feed.join(30.0)
    assert feed.is_over


def scalars(run: RunDirectory, tag: str = "train/loss", folder: str = ".") -> dict[int, float]:
    """A scalar of a run's TensorBoard by step."""
    path = run.tensorboard_path / folder
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def cursor(run: RunDirectory, name: str = "tensorboard") -> Cursor:
    return Cursor.load(cursor_path(run, name))
