"""Samples videos in batches, and writes videos, pictures and contact sheets; without torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from longtake import drawing, errors, fsio, progress
from longtake.config import Bucket, Recipe, SamplingSection
from longtake.data.encode import Sound, write_image, write_video
from longtake.evaluation_dir import note_of_video
from longtake.sampling.preset_files import pictures_in, refuse_other_inputs
from longtake.sampling.preset_prompts import refuse_flags, with_trigger
from longtake.sampling.presets import (
    Preset,
    Request,
    RequestGroup,
    rate_with_sound,
    refuse_unwritable,
    settings_for,
    suffix_of,
)

if TYPE_CHECKING:
    from longtake.sampling.sampler import Sampler

MAX_FRAMES = 8
FRAME_HEIGHT = 96
_FRAME_GAP, _INPUTS_GAP = 6, 22
_LABEL_WIDTH, _MARK_WIDTH = 250, 30


@dataclass(frozen=True)
class SampledVideo:
    """A sampled video, and the file to which it was written."""

    request: Request
    path: Path
    video: NDArray[np.uint8]  # [F, H, W, 3]


def sample_preset(
    sampler: "Sampler",
    preset: Preset,
    folder: Path,
    on_step: Callable[[int, int], None] | None = None,
) -> Iterator[SampledVideo]:
    """Sample a preset's videos, yield each as soon as it is written, and then write sheet.png.

    Only the frames that the sheet shows stay in memory. `on_step` is called with (done, total)
    after each step of the solver; its exceptions propagate.

    Raises:
        RecipeError: the codec or the model cannot divide the preset's size.
        PlanError: not even one video fits the memory.
        RunError: a file cannot be written, or a reference input has changed.
    """
    # When sampling starts, not when the preset is read: a server may wait for hours in between.
    preset.refuse_changed_files()
    requests, rows = preset.requests(), dict[str, SheetRow]()
    has_seeds = len(requests) > len(preset.prompts)
    videos = _sample(sampler, preset.groups(), preset.batch_size, on_step, preset.decoding)
    for group, request, video, sound in videos:
        path = folder / request.file
        try:
            _write(path, video, preset.settings.fps, sound)
        except errors.DataError as error:  # a full disk, not a defect of the data
            raise errors.RunError(f"{error} Make room, or choose another place.") from error
        is_noted = has_seeds or request.own
        note = note_of_video(request.seed, request.own) if is_noted else ""
        inputs = pictures_in(request.conditioning.values(), group.bucket)
        # A copy, so that the whole video can be freed.
        shown = shown_frames(video).copy()
        rows[request.file] = SheetRow(request.prompt, shown, note=note, inputs=inputs)
        yield SampledVideo(request, path, video)
    title = f"{preset.name}, step {sampler.step}, {sampler.weights}"
    contact_sheet([rows[each.file] for each in requests], folder / "sheet.png", title=title)


def _sample(
    sampler: "Sampler",
    groups: Sequence[RequestGroup],
    batch_size: int,
    on_step: Callable[[int, int], None] | None,
    decoding: str = "auto",
) -> Iterator[tuple[RequestGroup, Request, NDArray[np.uint8], Sound | None]]:
    """Sample one video [F, H, W, 3] and its sound per request, in batches of one group.

    `on_step` gets (done, total) steps.
    """
    batches = [
        (group, group.requests[start : start + batch_size])
        for group in groups
        for start in range(0, len(group.requests), batch_size)
    ]
    steps = [sampler.num_steps(group.settings) for group, _ in batches]
    for number, (group, batch) in enumerate(batches):
        # `done` is a default value because the closure would see a later `number`.
        def on_batch_step(step: int, done: int = sum(steps[:number])) -> None:
            if on_step is not None:
                on_step(done + step, sum(steps))

        videos, sounds = sampler.sample_with_sound(
            batch, group.settings, group.bucket, on_batch_step, decoding=decoding
        )
        yield from ((group, *each) for each in zip(batch, videos, sounds, strict=True))


def _write(path: Path, video: NDArray[np.uint8], fps: float, sound: Sound | None) -> None:
    if path.suffix == ".png":
        write_image(path, video[0])
    else:
        write_video(path, video, fps, sound=sound)


def sample_in_batches(
    sampler: "Sampler",
    requests: Sequence[Request],
    settings: SamplingSection,
    bucket: Bucket,
    batch_size: int,
    console: Console,
) -> list[NDArray[np.uint8]]:
    """Sample one video [F, H, W, 3] per request, with a progress bar over the solver's steps."""
    group = RequestGroup(settings, bucket, tuple(requests))
    with progress.counted(console, "sample") as advance:
        return [video for _, _, video, _ in _sample(sampler, [group], batch_size, advance)]


def check_samples(
    recipe: Recipe,
    prompts: Sequence[str],
    conditioning: Sequence[str],
    out: Path,
    **changes: Any,
) -> tuple[list[str], dict[str, Path], SamplingSection, Bucket]:
    """Refuse what `write_samples` could not sample, before a model is loaded.

    Args:
        recipe: recipe of the run.
        prompts: prompts, which may contain `[trigger]`.
        conditioning: reference inputs as NAME=FILE.
        out: file to write, whose folder is created.
        changes: changes of the recipe's settings, as for `presets.settings_for`.

    Returns:
        Prompts, reference inputs, settings and size.

    Raises:
        RecipeError: a prompt or a setting is invalid.
        RunError: a reference input does not exist, or `out` cannot be written.
    """
    for prompt in prompts:
        refuse_flags(prompt, "--prompt")
    prompts = with_trigger(prompts, recipe)
    rate, asked = rate_with_sound(recipe), changes.get("fps")
    if None not in (rate, asked) and rate != asked:
        raise errors.RecipeError(
            f"--fps {asked:g}: samples of this run have sound, and {rate:g} frames a second as in "
            "its training (data.fps / data.frame_stride). Leave --fps out."
        )
    inputs = inputs_by_name(conditioning)
    refuse_other_inputs(inputs, recipe.model_inputs())
    settings, bucket = settings_for(recipe, **changes)
    check_out(out, bucket)
    return list(prompts), inputs, settings, bucket


def write_samples(
    sampler: "Sampler",
    prompts: Sequence[str],
    seed: int,
    settings: SamplingSection,
    bucket: Bucket,
    out: Path,
    batch_size: int,
    console: Console,
    conditioning: Mapping[str, Path] | None = None,
) -> dict[str, list[str] | str]:
    """Sample one video per prompt, all with the same reference inputs, and write them.

    Returns:
        `videos`, the paths written (PNG for one frame), and `sheet`, the path of a contact sheet.

    Raises:
        RecipeError: H.264 cannot encode the size or frame rate, or the model not the size.
        RunError: the contact sheet cannot be written.
        DataError: a reference input cannot be read, or a video cannot be written.
    """
    refuse_unwritable(bucket, settings.fps)
    for prompt in prompts:
        if unknown := sampler.unknown_words(prompt):
            words = f"  words that no caption of the training has: {', '.join(unknown)}"
            console.print(words, markup=False)
    requests = [Request(prompt, seed, conditioning or {}) for prompt in prompts]
    group = RequestGroup(settings, bucket, tuple(requests))
    with progress.counted(console, "sample") as advance:
        sampled = list(_sample(sampler, [group], batch_size, advance))
    paths = [out]
    if len(prompts) > 1:
        names = (f"{out.stem}_{index:02d}{out.suffix}" for index in range(len(prompts)))
        paths = [out.with_name(name) for name in names]
    for path, (_, _, video, sound) in zip(paths, sampled, strict=True):
        _write(path, video, settings.fps, sound)
    # A sample of one frame has the name itself.
    sheet = out.with_name(f"{out.stem}_sheet.png" if out.suffix == ".png" else f"{out.stem}.png")
    shown = pictures_in((conditioning or {}).values(), bucket)
    rows = [SheetRow(each[1].prompt, each[2], inputs=shown) for each in sampled]
    contact_sheet(rows, sheet, title=f"{sampler.recipe.out.name}, step {sampler.step}")
    return {"videos": [str(path) for path in paths], "sheet": str(sheet)}


def check_out(out: Path, bucket: Bucket) -> None:
    """Check the name of a sample's file, and create its folder before sampling starts.

    Raises:
        RunError: `out` is not the name of an mp4 file (for one frame: of a PNG file), or its folder
            cannot be created or written to.
    """
    suffix = suffix_of(bucket)
    if out.suffix != suffix:
        of_what = "a sample of one frame is an image" if suffix == ".png" else "samples are videos"
        kind = "a PNG" if suffix == ".png" else "an mp4"
        raise errors.RunError(
            f"--out {str(out)[:200]}: {of_what}; expected the name of {kind} file, such as "
            f"sample{suffix}."
        )
    fsio.check_picture_name(out, (suffix,))
    try:
        fsio.make_writable(out.parent)
    except OSError as error:
        raise errors.RunError(
            f"--out {out} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error


def inputs_by_name(given: Sequence[str]) -> dict[str, Path]:
    """Parse reference inputs of the form NAME=FILE into files by name.

    Raises:
        RunError: an argument has another form, or its file does not exist.
    """
    files = {}
    for each in given:
        name, _, file = each.partition("=")
        if not name or not Path(file).is_file():
            reason = f"there is no file {file}" if name and file else "expected NAME=FILE"
            raise errors.RunError(
                f"--conditioning {each}: {reason}. Give it like --conditioning pose=picture.png."
            )
        files[name] = Path(file)
    return files


@dataclass(frozen=True)
class SheetRow:
    """One row of a contact sheet: a clip's caption and frames."""

    caption: str
    frames: NDArray[np.uint8]  # [F, H, W, 3] RGB, at least one frame
    is_correct: bool | None = None  # draws a green tick or a red cross; None: nothing
    note: str = ""  # small text below the caption, such as a measured value
    inputs: Sequence[NDArray[np.uint8]] = ()  # pictures [H, W, 3] in RGB, drawn left of the clip


def contact_sheet(rows: Sequence[SheetRow], path: Path, *, title: str = "") -> None:
    """Write a contact sheet as PNG: the caption and up to 8 evenly spaced frames of each clip.

    Large frames are shrunk to 96 pixels of height; smaller ones are enlarged by whole factors to at
    least that height, so that their pixels stay visible. The file is written aside and renamed.

    Raises:
        RunError: the file cannot be written.
    """
    assert rows, "a contact sheet needs at least one row"
    grid_rows = []
    for row in rows:
        label = drawing.wrapped_lines(row.caption, _LABEL_WIDTH)
        label += drawing.wrapped_lines(row.note, _LABEL_WIDTH, drawing.NOTE_SIZE, drawing.PALE_INK)
        inputs = [drawing.GridCell(_strip(np.stack(row.inputs)))] if row.inputs else []
        gap = {"gap": _INPUTS_GAP} if inputs else {}
        cells = [*inputs, drawing.GridCell(_strip(row.frames), **gap)]
        grid_rows.append(drawing.GridRow(label, cells, row.is_correct))
    grid = drawing.Grid(grid_rows, label_width=_LABEL_WIDTH, title=title, mark_width=_MARK_WIDTH)
    drawing.save_picture(grid.draw(), path)


def shown_frames(video: NDArray[np.uint8]) -> NDArray[np.uint8]:
    chosen = np.linspace(0, len(video) - 1, min(len(video), MAX_FRAMES)).round().astype(int)
    return video[chosen]


def _strip(frames: NDArray[np.uint8]) -> Image.Image:
    """Draw up to 8 frames of a clip side by side, for a contact sheet."""
    assert frames.dtype == np.uint8, f"frames are {frames.dtype}"
    assert frames.ndim == 4 and len(frames), f"frames are {frames.shape}"  # noqa: PT018 - one shape
    height, width = frames.shape[1:3]
    size = max(1, round(width * FRAME_HEIGHT / height)), FRAME_HEIGHT
    if height <= FRAME_HEIGHT:
        factor = -(-FRAME_HEIGHT // height)
        size = width * factor, height * factor
    pictures = [Image.fromarray(np.ascontiguousarray(each)) for each in shown_frames(frames)]
    return drawing.side_by_side([drawing.resized(each, size) for each in pictures], _FRAME_GAP)
