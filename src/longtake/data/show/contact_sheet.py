"""Draws real frames of clips, and what of them is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from longtake.data.pictures import BARE, save_picture
from longtake.drawing import INK, PALE_INK, PAPER, RULE, SERIES, draw_text, line_height, wrap

MAX_FRAMES = 6
FRAME_HEIGHT = 120
MAX_FRAME_WIDTH = 480

_MARGIN, _ROW_GAP, _FRAME_GAP, _TEXT_WIDTH, _TEXT_GAP = 28, 26, 6, 260, 22
_TEXT_SIZE, _NOTE_SIZE, _CAPTION_LINES = 15, 13, 4
_FAILURE_WIDTH = 420
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
    pictures = [_draw_row(row) for row in rows]
    width = max(picture.width for picture in pictures) + 2 * _MARGIN
    height = sum(picture.height + _ROW_GAP for picture in pictures) - _ROW_GAP + 2 * _MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    top = _MARGIN
    for index, picture in enumerate(pictures):
        if index:
            rule = top - _ROW_GAP // 2
            pen.line((_MARGIN, rule, width - _MARGIN, rule), fill=RULE)
        sheet.paste(picture, (_MARGIN, top))
        top += picture.height + _ROW_GAP
    save_picture(sheet, path)


def _draw_row(row: CropRow) -> Image.Image:
    strip = _draw_strip(row) if len(row.frames) else _draw_failure(row.failure)
    caption = wrap(row.caption[:_CAPTION_LETTERS], _TEXT_SIZE, _TEXT_WIDTH)
    if len(caption) > _CAPTION_LINES:
        caption = [*caption[: _CAPTION_LINES - 1], f"{caption[_CAPTION_LINES - 1][:-2]}…"]
    lines = [(line, _TEXT_SIZE, SERIES[0]) for line in wrap(row.bucket, _TEXT_SIZE, _TEXT_WIDTH)]
    lines += [(line, _TEXT_SIZE, INK) for line in caption]
    if row.kept is not None:
        share = f"{row.kept[2] * row.kept[3]:.0%} of the picture is kept"
        lines += [(share, _NOTE_SIZE, PALE_INK)]
    height = max(strip.height, sum(line_height(size) for _, size, _ in lines))
    picture = Image.new("RGB", (_TEXT_WIDTH + _TEXT_GAP + strip.width, height), PAPER)
    picture.paste(strip, (_TEXT_WIDTH + _TEXT_GAP, 0))
    pen, top = ImageDraw.Draw(picture), 0
    for line, size, ink in lines:
        draw_text(pen, (0, top), line, size, ink)
        top += line_height(size)
    return picture


def _draw_strip(row: CropRow) -> Image.Image:
    num_frames = len(row.frames)
    height, width = frame_size(*row.frames.shape[1:3])
    chosen = np.linspace(0, num_frames - 1, min(num_frames, MAX_FRAMES)).round().astype(int)
    step = width + _FRAME_GAP
    strip = Image.new("RGB", (step * len(chosen) - _FRAME_GAP, FRAME_HEIGHT), PAPER)
    for place, index in enumerate(chosen):
        frame = Image.fromarray(np.ascontiguousarray(row.frames[index]))
        small = frame.resize((width, height), Image.Resampling.LANCZOS)
        corner = (place * step, (FRAME_HEIGHT - height) // 2)
        strip.paste(small if row.kept is None else _cropped(small, row.kept), corner)
    return strip


def _draw_failure(reason: str) -> Image.Image:
    """What stands where frames would be."""
    strip = Image.new("RGB", (_FAILURE_WIDTH, FRAME_HEIGHT), BARE)
    pen = ImageDraw.Draw(strip)
    lines = wrap(f"Cannot be decoded: {reason}", _NOTE_SIZE, _FAILURE_WIDTH - 2 * _TEXT_GAP)
    for number, line in enumerate(lines):
        place = (_TEXT_GAP, _TEXT_GAP + number * line_height(_NOTE_SIZE))
        draw_text(pen, place, line, _NOTE_SIZE, INK)
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
