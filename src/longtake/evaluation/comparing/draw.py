"""Draws a comparison: as one picture, or as a video in which all videos play side by side."""

from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from longtake.data.encode import encode_frames
from longtake.errors import DataError, RunError
from longtake.evaluation.comparing.cells import chosen_frames, frames, num_frames, size_of
from longtake.evaluation.comparing.choose import Column, Comparison
from longtake.evaluation.comparing.page import Page, fitting
from longtake.fsio import atomic_write, check_picture_name

_ACROSS = 8
"""Pictures in a row: where there are fewer columns, each shows more than one of its frames."""
_SHORT_SECONDS, _LONG_ENOUGH_SECONDS = 2.0, 4.0
_MOST_FPS = 60.0
_CRF = 16


def draw(comparison: Comparison, out: Path) -> None:
    """Write a comparison as .png or .mp4; the file is written aside and renamed.

    Raises:
        RunError: it is neither, cannot be written, or a video cannot be read.
    """
    {".png": draw_sheet, ".mp4": draw_film}[check_out(out)](comparison, out)


def check_out(out: Path) -> str:
    """The suffix of what is to be written.

    Raises:
        RunError: it is neither .png nor .mp4, or its folder is not there.
    """
    check_picture_name(out, (".png", ".mp4"))
    if not out.absolute().parent.is_dir():
        raise RunError(f"--out {out}: there is no folder {out.parent}. Make it first.")
    return out.suffix.lower()


def draw_sheet(comparison: Comparison, out: Path) -> None:
    """Write a PNG: of each video the middle frame, or several where there is room.

    Raises:
        RunError: it cannot be written, or a video cannot be read.
    """
    columns, scene, rows = comparison.columns, comparison.scenes[0], len(comparison.scenes)
    shortest = min(num_frames(column.video(scene)) for column in columns)
    count = max(1, min(_ACROSS // len(columns), shortest))
    across = count * len(columns) + len(comparison.pictures)
    size = fitting(size_of(columns[0].video(scene)), across, rows)
    page = Page(comparison, size, count)
    picture = page.draw()
    for row, scene in enumerate(comparison.scenes):
        for place, column in enumerate(columns):
            shown = chosen_frames(column.video(scene), size, count)
            for number, frame in enumerate(shown):
                picture.paste(frame, page.corner(row, place, number))
    try:
        with atomic_write(out) as aside:
            picture.save(aside, format="PNG")
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}.") from error


def draw_film(comparison: Comparison, out: Path) -> None:
    """Write an mp4 (H.264) in which all videos play at once; short ones several times.

    Raises:
        RunError: it cannot be written, or a video cannot be read.
    """
    columns, rows = comparison.columns, len(comparison.scenes)
    native = size_of(columns[0].video(comparison.scenes[0]))
    across = len(columns) + len(comparison.pictures)
    page = Page(comparison, fitting(native, across, rows), 1)
    fps = min(_MOST_FPS, max(column.fps for column in columns))
    first = columns[0].video(comparison.scenes[0])
    seconds = num_frames(first) / columns[0].fps
    times = round(_LONG_ENOUGH_SECONDS / seconds) if seconds < _SHORT_SECONDS else 1
    pictures = (each for _ in range(times) for each in _pictures(page, fps))
    try:
        encode_frames(out, _timed(pictures, fps), fps=fps, crf=_CRF, gop=max(1, round(fps)))
    except DataError as error:
        raise RunError(str(error)) from error


def _pictures(page: Page, fps: float) -> Iterator[Image.Image]:
    """The whole page, with each video's frame of that moment; one that is over stands still."""
    cells = {
        page.corner(row, place): _played(column, column.video(scene), page.frame, fps)
        for row, scene in enumerate(page.comparison.scenes)
        for place, column in enumerate(page.comparison.columns)
    }
    picture = page.draw()
    while cells:
        shown = {corner: next(cell, None) for corner, cell in cells.items()}
        cells = {corner: cells[corner] for corner, frame in shown.items() if frame is not None}
        for corner, frame in shown.items():
            if frame is not None:
                picture.paste(frame, corner)
        if cells:
            yield picture


def _played(column: Column, path: Path, size: tuple[int, int], fps: float) -> Iterator[Image.Image]:
    """A video's frames at another rate: each is shown again, or left out, as time has it."""
    with closing(frames(path, size)) as pictures:  # type: ignore[type-var]
        shown = 0
        for number, picture in enumerate(pictures):
            until = int((number + 1) * fps / column.fps)
            for _ in range(until - shown):
                yield picture
            shown = max(shown, until)


def _timed(pictures: Iterator[Image.Image], fps: float) -> Iterator[av.VideoFrame]:
    rate = Fraction(fps).limit_denominator(1001)
    for number, picture in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(np.asarray(picture), "rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = number, 1 / rate
        yield frame
