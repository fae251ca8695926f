"""Samples requests in batches and writes what came out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from longtake.config import Bucket, SamplingSection
from longtake.data.encode import write_video
from longtake.errors import RunError
from longtake.evaluation.sample import Request, Sampler
from longtake.evaluation.sheet import SheetRow, contact_sheet
from longtake.progress import counted


def sample_in_batches(
    sampler: Sampler,
    requests: Sequence[Request],
    settings: SamplingSection,
    bucket: Bucket,
    batch_size: int,
    console: Console,
) -> list[NDArray[np.uint8]]:
    """One video [F, H, W, 3] per request, with a progress bar over the solver's steps."""
    videos: list[NDArray[np.uint8]] = []
    parts = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    steps = settings.num_inference_steps
    with counted(console, "sample") as advance:
        for number, part in enumerate(parts):
            done = number * steps

            def on_step(step: int, done: int = done) -> None:
                advance(done + step, len(parts) * steps)

            videos.extend(sampler.sample(part, settings, bucket, on_step))
    return videos


def write_samples(
    sampler: Sampler,
    prompts: Sequence[str],
    seed: int,
    settings: SamplingSection,
    bucket: Bucket,
    out: Path,
    batch_size: int,
    console: Console,
) -> dict[str, list[str] | str]:
    """Sample one video per prompt, and write them and a contact sheet.

    Returns:
        `videos`, the files written, and `sheet`, the picture beside them.

    Raises:
        RunError: the output is not an mp4 or its folder cannot be made.
        DataError: a video cannot be written.
    """
    paths = _numbered(out, len(prompts))
    for prompt in prompts:
        if unknown := sampler.unknown_words(prompt):
            console.print(f"  no caption of the training had the word: {', '.join(unknown)}")
    requests = [Request(prompt, seed) for prompt in prompts]
    videos = sample_in_batches(sampler, requests, settings, bucket, batch_size, console)
    for path, video in zip(paths, videos, strict=True):
        write_video(path, video, settings.fps)
    sheet = out.with_suffix(".png")
    rows = [SheetRow(prompt, video) for prompt, video in zip(prompts, videos, strict=True)]
    contact_sheet(rows, sheet, title=f"{sampler.recipe.out.name}, step {sampler.step}")
    return {"videos": [str(path) for path in paths], "sheet": str(sheet)}


def _numbered(out: Path, count: int) -> list[Path]:
    if out.suffix != ".mp4":
        raise RunError(f"--out {out}: expected the name of an mp4 file, such as sample.mp4.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out.parent} cannot be made: {error.strerror}.") from error
    if count == 1:
        return [out]
    return [out.with_name(f"{out.stem}_{index:02d}.mp4") for index in range(count)]
