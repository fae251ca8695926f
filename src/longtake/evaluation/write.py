"""Samples requests in batches and writes what came out."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from longtake.aside import make_writable
from longtake.config import Bucket, SamplingSection
from longtake.data.encode import write_video
from longtake.errors import RecipeError, RunError
from longtake.evaluation.sample import Request, Sampler
from longtake.evaluation.sheet import SheetRow, contact_sheet
from longtake.progress import counted

_LEAST_FPS, _MOST_FPS = 0.1, 1000


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
    references: Mapping[str, Path] | None = None,
) -> dict[str, list[str] | str]:
    """Sample one video per prompt, and write them and a contact sheet.

    All videos go by the same reference pictures, where the model goes by any.

    Returns:
        `videos`, the files written, and `sheet`, the picture beside them.

    Raises:
        RecipeError: H.264 does not take the size or frame rate, or the model not the size.
        RunError: the contact sheet cannot be written.
        DataError: a reference picture cannot be read, or a video cannot be written.
    """
    _refuse_unwritable(bucket, settings.fps)
    for prompt in prompts:
        if unknown := sampler.unknown_words(prompt):
            words = f"  not in the captions of the training: {', '.join(unknown)}"
            console.print(words, markup=False)
    requests = [Request(prompt, seed, references or {}) for prompt in prompts]
    videos = sample_in_batches(sampler, requests, settings, bucket, batch_size, console)
    paths = _numbered(out, len(prompts))
    for path, video in zip(paths, videos, strict=True):
        write_video(path, video, settings.fps)
    sheet = out.with_suffix(".png")
    rows = [SheetRow(prompt, video) for prompt, video in zip(prompts, videos, strict=True)]
    contact_sheet(rows, sheet, title=f"{sampler.recipe.out.name}, step {sampler.step}")
    return {"videos": [str(path) for path in paths], "sheet": str(sheet)}


def check_out(out: Path) -> None:
    """Make the folder of an mp4, so that what cannot be written is known before the sampling.

    Raises:
        RunError: it is not the name of an mp4 file, or its folder cannot be made or written to.
    """
    if out.suffix != ".mp4" or out.is_dir():
        raise RunError(f"--out {out}: expected the name of an mp4 file, such as sample.mp4.")
    try:
        make_writable(out.parent)
    except OSError as error:
        raise RunError(
            f"--out {out} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error


def references_by_name(given: Sequence[str]) -> dict[str, Path]:
    """Pictures by name, of what was given as NAME=FILE.

    Raises:
        RunError: it was given otherwise, or there is no such file.
    """
    pictures = {}
    for each in given:
        name, _, file = each.partition("=")
        if not name or not Path(file).is_file():
            reason = f"there is no file {file}" if name and file else "expected NAME=FILE"
            raise RunError(
                f"--reference {each}: {reason}. Give it like --reference reference=picture.png."
            )
        pictures[name] = Path(file)
    return pictures


def _numbered(out: Path, count: int) -> list[Path]:
    if count == 1:
        return [out]
    return [out.with_name(f"{out.stem}_{index:02d}.mp4") for index in range(count)]


def _refuse_unwritable(bucket: Bucket, fps: float) -> None:
    """Refuse before the sampling what the encoder would refuse, or change in silence, after it."""
    height, width = (size + size % 2 for size in (bucket.height, bucket.width))
    if (width, height) != (bucket.width, bucket.height):
        raise RecipeError(
            f"{bucket} cannot be written as mp4: H.264 in 4:2:0 needs an even size, such as "
            f"{width}x{height}."
        )
    if not _LEAST_FPS <= fps <= _MOST_FPS:
        raise RecipeError(
            f"{fps:g} frames a second cannot be written as mp4: expected {_LEAST_FPS} to "
            f"{_MOST_FPS}. Set --fps or sampling.fps."
        )
