"""Draws generated clips as one picture: a prompt and its frames per row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from longtake.drawing import INK, PALE_INK, PAPER, RULE, draw_text, line_height, text_width, wrap
from longtake.errors import RunError
from longtake.fsio import atomic_write

MAX_FRAMES = 8
FRAME_HEIGHT = 96

_MARGIN, _ROW_GAP, _FRAME_GAP = 28, 26, 6
_MARK_WIDTH, _TEXT_WIDTH, _TEXT_GAP = 30, 250, 22
_CAPTION_SIZE, _NOTE_SIZE, _TITLE_SIZE = 15, 13, 22
_GREEN, _RED = "#2f8f5b", "#c8453b"


@dataclass(frozen=True)
class SheetRow:
    """One clip of a contact sheet.

    Attributes:
        caption: the prompt.
        frames: [F, H, W, 3] uint8 RGB, at least one frame.
        correct: draws a green tick (True), a red cross (False) or nothing (None).
        note: a few pale words below the caption, such as a measured value.
        references: [H, W, 3] uint8 RGB each: pictures that the clip goes by, drawn left of it.
    """

    caption: str
    frames: NDArray[np.uint8]
    correct: bool | None = None
    note: str = ""
    references: Sequence[NDArray[np.uint8]] = ()


def contact_sheet(rows: Sequence[SheetRow], path: Path, *, title: str = "") -> None:
    """Write a PNG with the caption left and up to 8 evenly spaced frames right, one row per clip.

    Large frames shrink to 96 pixels of height; smaller ones are enlarged by whole factors to at
    least that, so that their own pixels stay visible. The file is written aside and renamed.

    Raises:
        RunError: the file cannot be written.
    """
    assert rows, "a contact sheet needs at least one row"
    pictures = [_draw_row(row) for row in rows]
    title_height = line_height(_TITLE_SIZE) + _ROW_GAP if title else 0
    width = max(picture.width for picture in pictures)
    if title:
        width = max(width, round(text_width(title, _TITLE_SIZE)))
    height = sum(picture.height for picture in pictures) + _ROW_GAP * (len(rows) - 1)
    sheet = Image.new("RGB", (width + 2 * _MARGIN, height + title_height + 2 * _MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    draw_text(pen, (_MARGIN, _MARGIN), title, _TITLE_SIZE, INK)
    top = _MARGIN + title_height
    for index, picture in enumerate(pictures):
        if index:
            rule = top - _ROW_GAP // 2
            pen.line((_MARGIN, rule, _MARGIN + width, rule), fill=RULE)
        sheet.paste(picture, (_MARGIN, top))
        top += picture.height + _ROW_GAP
    _save(sheet, path)


def shown_frames(video: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Up to 8 evenly spaced frames [f, H, W, 3], first and last among them."""
    chosen = np.linspace(0, len(video) - 1, min(len(video), MAX_FRAMES)).round().astype(int)
    frames: NDArray[np.uint8] = video[chosen]
    return frames


def _draw_row(row: SheetRow) -> Image.Image:
    strip = _draw_strips(row)
    caption = wrap(row.caption, _CAPTION_SIZE, _TEXT_WIDTH)
    note = wrap(row.note, _NOTE_SIZE, _TEXT_WIDTH)
    text_height = line_height(_CAPTION_SIZE) * len(caption) + line_height(_NOTE_SIZE) * len(note)
    left = _MARK_WIDTH + _TEXT_WIDTH + _TEXT_GAP
    picture = Image.new("RGB", (left + strip.width, max(strip.height, text_height)), PAPER)
    picture.paste(strip, (left, 0))
    pen = ImageDraw.Draw(picture)
    _draw_mark(pen, row.correct)
    top = _draw_lines(pen, 0, caption, _CAPTION_SIZE, INK)
    _draw_lines(pen, top, note, _NOTE_SIZE, PALE_INK)
    return picture


def _draw_strips(row: SheetRow) -> Image.Image:
    """The pictures that a clip goes by, a gap, and the clip."""
    strip = _draw_strip(row.frames)
    if not row.references:
        return strip
    before = _draw_strip(np.stack(row.references))
    left = before.width + _TEXT_GAP
    both = Image.new("RGB", (left + strip.width, max(before.height, strip.height)), PAPER)
    both.paste(before, (0, 0))
    both.paste(strip, (left, 0))
    return both


def _draw_strip(frames: NDArray[np.uint8]) -> Image.Image:
    """Return up to 8 evenly spaced frames, first and last among them, side by side."""
    assert frames.dtype == np.uint8, f"frames are {frames.dtype}"
    assert frames.ndim == 4 and len(frames), f"frames are {frames.shape}"  # noqa: PT018 - one shape
    chosen = shown_frames(frames)
    height, width = chosen.shape[1:3]
    if height > FRAME_HEIGHT:
        size = (max(1, round(width * FRAME_HEIGHT / height)), FRAME_HEIGHT)
        filter_ = Image.Resampling.LANCZOS
    else:
        factor = -(-FRAME_HEIGHT // height)
        size = (width * factor, height * factor)
        filter_ = Image.Resampling.NEAREST
    step = size[0] + _FRAME_GAP
    strip = Image.new("RGB", (step * len(chosen) - _FRAME_GAP, size[1]), PAPER)
    for place, picture in enumerate(chosen):
        frame = Image.fromarray(np.ascontiguousarray(picture))
        strip.paste(frame.resize(size, filter_), (place * step, 0))
    return strip


def _draw_mark(pen: ImageDraw.ImageDraw, correct: bool | None) -> None:
    """Draw a tick or a cross with lines: the font has neither."""
    if correct is True:
        pen.line([(1, 10), (6, 15), (16, 4)], fill=_GREEN, width=3, joint="curve")
    elif correct is False:
        pen.line([(3, 4), (14, 15)], fill=_RED, width=3)
        pen.line([(3, 15), (14, 4)], fill=_RED, width=3)


def _draw_lines(
    pen: ImageDraw.ImageDraw, top: int, lines: Sequence[str], size: int, ink: str
) -> int:
    """Draw lines below `top` and return where the next one would begin."""
    for line in lines:
        draw_text(pen, (_MARK_WIDTH, top), line, size, ink)
        top += line_height(size)
    return top


def _save(sheet: Image.Image, path: Path) -> None:
    try:
        with atomic_write(path) as aside:
            sheet.save(aside, format="PNG")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}.") from error
