"""The page on which videos are compared: where each stands, and the words around them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from longtake.drawing import (
    INK,
    PALE_INK,
    PAPER,
    RULE,
    SERIES,
    draw_text,
    line_height,
    text_width,
    wrap,
)
from longtake.evaluation.comparing.cells import copied_picture
from longtake.evaluation.comparing.choose import Comparison

_MARGIN, _ROW_GAP, _COLUMN_GAP, _FRAME_GAP = 28, 18, 14, 3
_LABEL_WIDTH, _LABEL_GAP = 230, 22
_TITLE, _HEADING, _CAPTION, _NOTE = 22, 15, 15, 13
_RED = SERIES[1]
_LEAST_HEIGHT = 112
_ROOM = 1600, 1200
"""Pixels for all pictures of a page, across and down, unless they would be too low."""

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class Page:
    """Where everything stands.

    Attributes:
        comparison: what is on it.
        frame: size of one picture.
        num_frames: pictures of each video, side by side.
    """

    comparison: Comparison
    frame: Size
    num_frames: int = 1

    @property
    def cell_width(self) -> int:
        """Of all pictures of one video."""
        return self.num_frames * (self.frame[0] + _FRAME_GAP) - _FRAME_GAP

    @property
    def size(self) -> Size:
        """Of the whole page; even, as H.264 wants it."""
        columns = len(self.comparison.columns)
        width = self._left(columns) - _COLUMN_GAP + _MARGIN
        lines = len(self.comparison.measures())
        height = self._tops()[-1] + lines * line_height(_NOTE) + (_ROW_GAP if lines else 0)
        height += _MARGIN - _ROW_GAP
        title = round(text_width(self.comparison.title, _TITLE)) + 2 * _MARGIN
        return _even(max(width, title)), _even(height)

    def corner(self, row: int, column: int, frame: int = 0) -> tuple[int, int]:
        """Left and top of a picture."""
        left = self._left(column) + frame * (self.frame[0] + _FRAME_GAP)
        return left, self._tops()[row]

    def reference_corner(self, row: int, place: int) -> tuple[int, int]:
        """Left and top of a picture that the model goes by, of the size of a frame."""
        left = _MARGIN + _LABEL_WIDTH + _LABEL_GAP + place * (self.frame[0] + _FRAME_GAP)
        return left, self._tops()[row]

    def draw(self) -> Image.Image:
        """All words, and the pictures that the model goes by; the videos' places are left grey."""
        page = Image.new("RGB", self.size, PAPER)
        pen = ImageDraw.Draw(page)
        draw_text(pen, (_MARGIN, _MARGIN), self.comparison.title, _TITLE, INK)
        self._draw_headings(pen)
        tops = self._tops()
        for row, words in enumerate(self._captions()):
            self._draw_caption(pen, tops[row], *words)
            self._draw_references(page, row)
            for column in range(len(self.comparison.columns)):
                left, top = self.corner(row, column)
                right, bottom = left + self.cell_width - 1, top + self.frame[1] - 1
                pen.rectangle((left, top, right, bottom), fill=RULE)
        self._draw_measures(pen, tops[-1])
        return page

    def _draw_headings(self, pen: ImageDraw.ImageDraw) -> None:
        for place, lines in enumerate(self._headings()):
            top = self._heading_top()
            for number, line in enumerate(lines):
                ink = INK if number == 0 else PALE_INK
                draw_text(pen, (self._left(place), top), line, _HEADING, ink)
                top += line_height(_HEADING)

        for place, name in enumerate(self.comparison.pictures):
            corner = self.reference_corner(0, place)[0], self._heading_top()
            draw_text(pen, corner, name.replace("_", " "), _HEADING, PALE_INK)

    def _draw_references(self, page: Image.Image, row: int) -> None:
        """As far as there are copies of them."""
        scene, column = self.comparison.scenes[row], self.comparison.columns[0]
        for place, name in enumerate(self.comparison.pictures):
            path = column.picture(scene, name)
            if path.is_file():
                page.paste(copied_picture(path, self.frame), self.reference_corner(row, place))

    def _draw_caption(
        self, pen: ImageDraw.ImageDraw, top: int, caption: Sequence[str], note: str
    ) -> None:
        for line in caption:
            draw_text(pen, (_MARGIN, top), line, _CAPTION, INK)
            top += line_height(_CAPTION)
        draw_text(pen, (_MARGIN, top), note, _NOTE, PALE_INK)

    def _draw_measures(self, pen: ImageDraw.ImageDraw, top: int) -> None:
        """A line for each measure, below the columns; red where there is an alarm."""
        for name, values in self.comparison.measures().items():
            draw_text(pen, (_MARGIN, top), name.replace("_", " "), _NOTE, PALE_INK)
            for column, (value, is_alarm) in enumerate(values):
                text = "" if value is None else f"{value:.3g}"
                left = self._left(column)
                draw_text(pen, (left, top), text, _NOTE, _RED if is_alarm else INK)
                if is_alarm:
                    _draw_mark(pen, left + round(text_width(text, _NOTE)) + 7, top)
            top += line_height(_NOTE)

    def _captions(self) -> Iterator[tuple[list[str], str]]:
        for scene in self.comparison.scenes:
            note = f"seed {scene.seed}" if self.comparison.has_seeds else ""
            yield wrap(scene.prompt, _CAPTION, _LABEL_WIDTH), note

    def _headings(self) -> list[list[str]]:
        """Lines above each column; a long name of a run takes several."""
        return [
            [line for title in column.titles for line in wrap(title, _HEADING, self.cell_width)]
            for column in self.comparison.columns
        ]

    def _heading_top(self) -> int:
        return _MARGIN + line_height(_TITLE) + 10

    def _tops(self) -> list[int]:
        """Tops of the rows, and where the next would begin."""
        lines = max(map(len, self._headings()))
        tops = [self._heading_top() + lines * line_height(_HEADING) + 6]
        for caption, note in self._captions():
            text = len(caption) * line_height(_CAPTION) + bool(note) * line_height(_NOTE)
            tops.append(tops[-1] + max(self.frame[1], text) + _ROW_GAP)
        return tops

    def _left(self, column: int) -> int:
        count = len(self.comparison.pictures)
        references = count * (self.frame[0] + _FRAME_GAP) + (_COLUMN_GAP if count else 0)
        first = _MARGIN + _LABEL_WIDTH + _LABEL_GAP + references
        return first + column * (self.cell_width + _COLUMN_GAP)


def fitting(size: Size, across: int, down: int = 1) -> Size:
    """The size of a picture, so that so many of them make a page that fits a screen.

    Large pictures shrink, though not below 112 pixels of height; lower ones are enlarged by whole
    factors to at least that, so that their own pixels stay visible.

    Args:
        size: of the picture.
        across: how many stand beside each other.
        down: how many stand below each other.
    """
    width, height = size
    if height < _LEAST_HEIGHT:
        factor = -(-_LEAST_HEIGHT // height)
        return width * factor, height * factor
    scale = min(1.0, _ROOM[0] / (across * width), _ROOM[1] / (down * height))
    scale = max(scale, _LEAST_HEIGHT / height)
    return round(width * scale), round(height * scale)


def _draw_mark(pen: ImageDraw.ImageDraw, left: int, top: int) -> None:
    """A small triangle, for an alarm: the font has none."""
    pen.polygon([(left, top + 12), (left + 8, top + 12), (left + 4, top + 4)], fill=_RED)


def _even(size: int) -> int:
    return size + size % 2
