"""Samples requests in batches and writes what came out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from longtake.config import Bucket, SamplingSection
from longtake.data.encode import write_image, write_video
from longtake.errors import DataError, RunError
from longtake.evaluation.presets import Preset, refuse_unwritable, suffix_of
from longtake.evaluation.sampling.read_pictures import Request, read_picture
from longtake.evaluation.sampling.sampler import Sampler
from longtake.evaluation.sampling.sheet import SheetRow, contact_sheet, shown_frames
from longtake.fsio import check_picture_name, make_writable
from longtake.progress import counted


@dataclass(frozen=True)
class Sampled:
    """A video that has been written.

    Attributes:
        index: of its request among the preset's.
        request: what it shows.
        path: its file.
        video: [F, H, W, 3].
    """

    index: int
    request: Request
    path: Path
    video: NDArray[np.uint8]


def sample_preset(
    sampler: Sampler,
    preset: Preset,
    folder: Path,
    on_step: Callable[[int, int], None] | None = None,
) -> Iterator[Sampled]:
    """Sample a preset's videos, and give each as soon as it is written; then write sheet.png.

    Of what was given nothing is kept here but the frames that the sheet shows.

    Args:
        sampler: of a checkpoint.
        preset: what to sample; says the names of the files.
        folder: where to write; it is there already.
        on_step: told (done, in all) after each step of the solver. What it raises ends all this.

    Raises:
        RecipeError: the codec or the model cannot divide the preset's size.
        PlanError: not even one video fits the memory.
        RunError: a file cannot be written, or a picture that the preset goes by has changed.
    """
    preset.refuse_changed_pictures()
    rows = []
    for index, request, video in _batches(sampler, preset, on_step):
        path = folder / preset.file_name(index)
        _write(path, video, preset.settings.fps)
        note = f"seed {request.seed}" if len(preset.seeds) > 1 else ""
        pictures = _references(request, preset.bucket)
        shown = shown_frames(video).copy()
        rows.append(SheetRow(request.prompt, shown, note=note, references=pictures))
        yield Sampled(index, request, path, video)
    title = f"{preset.name}, step {sampler.step}, {sampler.weights}"
    contact_sheet(rows, folder / "sheet.png", title=title)


def _batches(
    sampler: Sampler, preset: Preset, on_step: Callable[[int, int], None] | None
) -> Iterator[tuple[int, Request, NDArray[np.uint8]]]:
    requests, size = preset.requests(), preset.batch_size
    steps, starts = sampler.num_steps(preset.settings), range(0, len(requests), size)
    for number, start in enumerate(starts):

        def told(step: int, done: int = number * steps) -> None:
            if on_step is not None:
                on_step(done + step, len(starts) * steps)

        batch = requests[start : start + size]
        videos = sampler.sample(
            batch,
            preset.settings,
            preset.bucket,
            told,
            guidance=preset.guidance,
            decoding=preset.decoding,
        )
        yield from zip(range(start, start + size), batch, videos, strict=False)


def _references(request: Request, bucket: Bucket) -> list[NDArray[np.uint8]]:
    """The pictures that a video goes by, as the model sees them."""
    return [read_picture(path, bucket) for path in request.references.values()]


def _write(path: Path, video: NDArray[np.uint8], fps: float) -> None:
    """Write a sample; a disk that is full says nothing against the data."""
    try:
        _encode(path, video, fps)
    except DataError as error:
        raise RunError(f"{error} Make room, or choose another place.") from error


def _encode(path: Path, video: NDArray[np.uint8], fps: float) -> None:
    """Write a sample as its file's name says: an image, or a video."""
    if path.suffix == ".png":
        write_image(path, video[0])
    else:
        write_video(path, video, fps)


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
    steps = sampler.num_steps(settings)
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
        `videos`, the files written (images of one frame are PNG), and `sheet`, the picture beside
        them.

    Raises:
        RecipeError: H.264 does not take the size or frame rate, or the model not the size.
        RunError: the contact sheet cannot be written.
        DataError: a reference picture cannot be read, or a video cannot be written.
    """
    refuse_unwritable(bucket, settings.fps)
    for prompt in prompts:
        if unknown := sampler.unknown_words(prompt):
            words = f"  not in the captions of the training: {', '.join(unknown)}"
            console.print(words, markup=False)
    requests = [Request(prompt, seed, references or {}) for prompt in prompts]
    videos = sample_in_batches(sampler, requests, settings, bucket, batch_size, console)
    paths = _numbered(out, len(prompts))
    for path, video in zip(paths, videos, strict=True):
        _encode(path, video, settings.fps)
    sheet = out.with_name(f"{out.stem}_sheet.png" if out.suffix == ".png" else f"{out.stem}.png")
    rows = [
        SheetRow(request.prompt, video, references=_references(request, bucket))
        for request, video in zip(requests, videos, strict=True)
    ]
    contact_sheet(rows, sheet, title=f"{sampler.recipe.out.name}, step {sampler.step}")
    return {"videos": [str(path) for path in paths], "sheet": str(sheet)}


def check_out(out: Path, bucket: Bucket) -> None:
    """Make the folder of a sample, so that what cannot be written is known before the sampling.

    Raises:
        RunError: it is not the name of an mp4 file (of one frame: of a PNG file), or its folder
            cannot be made or written to.
    """
    suffix = suffix_of(bucket)
    if out.suffix != suffix:
        of_what = "a sample of one frame is an image" if suffix == ".png" else "samples are videos"
        kind = "a PNG" if suffix == ".png" else "an mp4"
        raise RunError(
            f"--out {str(out)[:200]}: {of_what}; expected the name of {kind} file, such as "
            f"sample{suffix}."
        )
    check_picture_name(out, (suffix,))
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
    return [out.with_name(f"{out.stem}_{index:02d}{out.suffix}") for index in range(count)]
