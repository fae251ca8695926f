"""Draws real frames of clips, and what of them is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from longtake.data.pictures import BARE, save_picture
from longtake.drawing import (
    INK,
    NOTE_SIZE,
    PALE_INK,
    PAPER,
    SERIES,
    TEXT_SIZE,
    Grid,
    GridCell,
    GridRow,
    TextLine,
    draw_text,
    line_height,
    side_by_side,
    wrap,
    wrapped_lines,
)

MAX_FRAMES = 6
FRAME_HEIGHT = 120
MAX_FRAME_WIDTH = 480

_LABEL_WIDTH, _FRAME_GAP, _CAPTION_LINES = 260, 6, 4
_FAILURE_WIDTH, _FAILURE_MARGIN = 420, 22
_CAPTION_LETTERS = 1000  # more than fill the lines; a file may hold megabytes


@dataclass(frozen=True)
class CropRow:
    """One clip of a contact sheet.

    Attributes:
        bucket: what is written above the caption, such as the bucket's name.
        caption: the beginning of it is shown. The font has Latin letters; others appear as boxes.
        frames: [F, H, W, 3] uint8 RGB, whole pictures; none where the clip cannot be decoded.
        kept: top, left, height and width of what is trained on, as fractions of the picture;
            None: nobody cuts it.
        failure: why there are no frames.
    """

    bucket: str
    caption: str
    frames: NDArray[np.uint8]
    kept: tuple[float, float, float, float] | None
    failure: str = ""


def frame_size(height: int, width: int) -> tuple[int, int]:
    scale = min(FRAME_HEIGHT / height, MAX_FRAME_WIDTH / width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def contact_sheet(path: Path, rows: Sequence[CropRow]) -> None:
    """Draw up to 6 evenly spaced frames of each clip; what the crop cuts off is pale.

    Raises:
        DataError: the file cannot be written.
    """
    assert rows
    save_picture(Grid([_grid_row(row) for row in rows], _LABEL_WIDTH).draw(), path)


def _grid_row(row: CropRow) -> GridRow:
    caption = wrap(row.caption[:_CAPTION_LETTERS], TEXT_SIZE, _LABEL_WIDTH)
    if len(caption) > _CAPTION_LINES:
        caption = [*caption[: _CAPTION_LINES - 1], f"{caption[_CAPTION_LINES - 1][:-2]}…"]
    label = wrapped_lines(row.bucket, _LABEL_WIDTH, ink=SERIES[0])
    label += [TextLine(line) for line in caption]
    if row.kept is not None:
        share = f"{row.kept[2] * row.kept[3]:.0%} of the picture is kept"
        label.append(TextLine(share, NOTE_SIZE, PALE_INK))
    strip = _draw_strip(row) if len(row.frames) else _draw_failure(row.failure)
    return GridRow(label, [GridCell(strip)])


def _draw_strip(row: CropRow) -> Image.Image:
    """Frames side by side, each in the middle of the strip's height."""
    num_frames = len(row.frames)
    height, width = frame_size(*row.frames.shape[1:3])
    chosen = np.linspace(0, num_frames - 1, min(num_frames, MAX_FRAMES)).round().astype(int)
    pictures = []
    for index in chosen:
        frame = Image.fromarray(np.ascontiguousarray(row.frames[index]))
        small = frame.resize((width, height), Image.Resampling.LANCZOS)
        picture = Image.new("RGB", (width, FRAME_HEIGHT), PAPER)
        top = (FRAME_HEIGHT - height) // 2
        picture.paste(small if row.kept is None else _cropped(small, row.kept), (0, top))
        pictures.append(picture)
    return side_by_side(pictures, _FRAME_GAP)


def _draw_failure(reason: str) -> Image.Image:
    strip = Image.new("RGB", (_FAILURE_WIDTH, FRAME_HEIGHT), BARE)
    pen = ImageDraw.Draw(strip)
    width = _FAILURE_WIDTH - 2 * _FAILURE_MARGIN
    for number, line in enumerate(wrap(f"Cannot be decoded: {reason}", NOTE_SIZE, width)):
        place = (_FAILURE_MARGIN, _FAILURE_MARGIN + number * line_height(NOTE_SIZE))
        draw_text(pen, place, line, NOTE_SIZE, INK)
    return strip


def _cropped(frame: Image.Image, kept: tuple[float, float, float, float]) -> Image.Image:
    """The frame, pale outside of what is kept."""
    top, left, height, width = kept
    box = (
        round(left * frame.width),
        round(top * frame.height),
        round((left + width) * frame.width),
        round((top + height) * frame.height),
    )
    pale = Image.blend(frame, Image.new("RGB", frame.size, PAPER), 0.7)
    pale.paste(frame.crop(box), box[:2])
    outline = (box[0], box[1], box[2] - 1, box[3] - 1)
    ImageDraw.Draw(pale).rectangle(outline, outline=SERIES[1], width=2)
    return pale
