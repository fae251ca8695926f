"""Runs whose checkpoints were sampled, made of drawn videos: nothing is trained."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.build import bare_recipe

from longtake import fsio
from longtake.data.encode import write_image, write_video
from longtake.evaluation_dir import SCORES, Alarm, EvaluationDirectory, Scores
from longtake.run_dir import RunDirectory

FRAMES, FPS, SIDE = 12, 12.0, 32
PROMPTS = ("a red square moves right", "a blue square moves down")
STEPS = (40, 80, 120, 160, 200)
Video = NDArray[np.uint8]


def make_run(path: Path) -> RunDirectory:
    path.mkdir(parents=True)
    run = RunDirectory(path)
    shape = {"num_frames": FRAMES, "height": SIDE, "width": SIDE}
    training, sampling = {"steps": 200}, {"fps": FPS}
    run.create(bare_recipe(path, data={"buckets": [shape]}, training=training, sampling=sampling))
    run.record_launch(start_step=0, world_size=1, device="cpu", precision="fp32")
    return run


def square(number: int, colour: tuple[int, int, int], frames: int = FRAMES) -> Video:
    """A square of one colour that moves by two pixels a frame over grey."""
    video = np.full((frames, SIDE, SIDE, 3), 40, np.uint8)
    for place in range(frames):
        left = (2 * place + number) % (SIDE - 8)
        rows, columns = slice(8, 16), slice(left, left + 8)
        video[place, rows, columns] = colour
    return video


def add_result(
    run: RunDirectory,
    preset: str,
    step: int,
    *,
    prompts: Sequence[str] = PROMPTS,
    videos: Sequence[Video] | None = None,
    suffix: str = ".mp4",
    settings: Mapping[str, Any] | None = None,
    alarms: Sequence[Alarm] = (),
    **changes: Any,
) -> Path:
    """Write a result as an evaluation does; `videos` unset: the files are empty."""
    folder = EvaluationDirectory(run).result_path(preset, step)
    folder.mkdir(parents=True)
    names = [f"{number:02d}_s0{suffix}" for number in range(len(prompts))]
    for number, name in enumerate(names):
        if videos is None:
            (folder / name).write_bytes(b"")
        elif suffix == ".png":
            write_image(folder / name, videos[number][0])
        else:
            write_video(folder / name, videos[number], FPS)
    usual = {"fps": FPS, "num_frames": FRAMES, "height": SIDE, "width": SIDE}
    record = Scores(
        preset=preset,
        step=step,
        key="0a1b2c3d",
        weights="ema/main",
        time=fsio.now(),
        server="vm-1",
        settings=usual | dict(settings or {}),
        videos=[
            {"file": name, "prompt": prompt, "seed": 0, "measures": {"brightness": 40.0 + step}}
            for name, prompt in zip(names, prompts, strict=True)
        ],
        measures={"brightness": 40.0 + step, "motion": 30.0},
        held_out={"0.1": 3.0, "0.9": 0.1, "mean": 100.0 / step},
        alarms=list(alarms),
        seconds={},
    )
    written = {**record, **changes}
    SCORES.validate_json(json.dumps(written))
    fsio.write_json(folder / "scores.json", written)
    return folder


def write_reference(run: RunDirectory, preset: str, low: float, high: float) -> None:
    spread = {"low": low, "median": (low + high) / 2, "high": high, "mean": low}
    record = {"of": {}, "num_clips": 64, "measures": {"brightness": spread}}
    fsio.write_json(EvaluationDirectory(run).reference_path(preset), record)


def add_results(run: RunDirectory, preset: str, brightness: int, **changes: Any) -> None:
    """All checkpoints of two prompts, with videos; each checkpoint's look different."""
    for place, step in enumerate(STEPS):
        shade = 60 + 30 * place + brightness
        videos = [square(0, (shade, 0, 0)), square(8, (0, 0, shade))]
        add_result(run, preset, step, videos=videos, **changes)
