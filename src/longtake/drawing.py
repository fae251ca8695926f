"""Drawing of labelled picture grids, and of text in any writing system.

Pillow's own font has only unaccented Latin letters. Other characters are drawn with fonts installed
on this machine; a character that no font has is drawn as a box, with one warning on stderr.
"""

import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from longtake import errors, fsio

PAPER, INK, PALE_INK, RULE = "#fcfcfa", "#22252a", "#767c85", "#e4e4df"
TITLE_SIZE, TEXT_SIZE, NOTE_SIZE = 22, 15, 13

Size = tuple[int, int]
"""Size of a picture: width and height in pixels."""

_GREEN, _RED = "#2f8f5b", "#c8453b"
_MARGIN, _LABEL_GAP, _ROW_GAP = 28, 22, 26

_LEADING = 1.4  # line height over font size
_FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "/System/Library/Fonts")
_FIRST_FONTS = ("CJK", "Noto", "DejaVu")
_FONT_SUFFIXES = (".ttf", ".otf", ".ttc")
_MOST_FONTS = 2000
"""Maximum number of font files that are tried for a character. 2,000 take 0.25 s and, as each stays
open, 300 MB."""
_SHOWN = 8
_PROBE_SIZE = 12
# A noncharacter, which Unicode assigns to nothing.
_IN_NO_FONT = "\U0010ffff"

_missing_said = False


@dataclass(frozen=True)
class TextLine:
    text: str
    size: int = TEXT_SIZE
    ink: str = INK


@dataclass(frozen=True)
class GridCell:
    picture: Image.Image
    gap: int = 0  # pixels between this cell and its left neighbour


@dataclass(frozen=True)
class GridRow:
    """One row of a grid of pictures: a label, and cells to its right."""

    label: Sequence[TextLine]  # lines that fit `Grid.label_width`, see `wrapped_lines`
    cells: Sequence[GridCell]  # from left to right
    is_correct: bool | None = None  # draws a tick (True), a cross (False) or nothing


@dataclass(frozen=True)
class Grid:
    """A page with rows of pictures and a label left of each row; widths are in pixels."""

    rows: Sequence[GridRow]  # at least one
    label_width: int
    title: str = ""
    mark_width: int = 0  # width of the column of ticks and crosses, left of the labels

    def corner(self, row: int, cell: int) -> tuple[int, int]:
        """Return left and top, in pixels on the page, of the picture in a cell of the grid."""
        cells = self.rows[row].cells
        before = sum(each.gap + each.picture.width for each in cells[:cell])
        left = _MARGIN + self.mark_width + self.label_width + _LABEL_GAP + before + cells[cell].gap
        return left, self._tops[row]

    @property
    def size(self) -> Size:
        """Width and height of the whole page in pixels."""
        widths = [round(text_width(self.title, TITLE_SIZE)) + _MARGIN]
        for index, row in enumerate(self.rows):
            last = len(row.cells) - 1
            widths.append(self.corner(index, last)[0] + row.cells[last].picture.width)
        return max(widths) + _MARGIN, self._tops[-1] + _MARGIN - _ROW_GAP

    def draw(self) -> Image.Image:
        """Draw the grid of pictures as one RGB picture."""
        page = Image.new("RGB", self.size, PAPER)
        pen = ImageDraw.Draw(page)
        draw_text(pen, (_MARGIN, _MARGIN), self.title, TITLE_SIZE, INK)
        # `_tops` has one more entry, the end of the last row.
        for index, (row, top) in enumerate(zip(self.rows, self._tops, strict=False)):
            if index:
                rule = top - _ROW_GAP // 2
                pen.line((_MARGIN, rule, page.width - _MARGIN, rule), fill=RULE)
            _draw_mark(pen, (_MARGIN, top), row.is_correct)
            line_top = top
            for line in row.label:
                left = _MARGIN + self.mark_width
                draw_text(pen, (left, line_top), line.text, line.size, line.ink)
                line_top += line_height(line.size)
            for cell, each in enumerate(row.cells):
                page.paste(each.picture, self.corner(index, cell))
        return page

    @cached_property
    def _tops(self) -> list[int]:
        """Top of each row of the grid in pixels, and that of a row after the last."""
        tops = [_MARGIN + (line_height(TITLE_SIZE) + _ROW_GAP if self.title else 0)]
        for row in self.rows:
            label = sum(line_height(line.size) for line in row.label)
            heights = [label, *(cell.picture.height for cell in row.cells)]
            tops.append(tops[-1] + max(heights) + _ROW_GAP)
        return tops


def wrapped_lines(text: str, width: int, size: int = TEXT_SIZE, ink: str = INK) -> list[TextLine]:
    return [TextLine(line, size, ink) for line in wrap(text, size, width)]


def side_by_side(pictures: Sequence[Image.Image], gap: int, background: str = PAPER) -> Image.Image:
    """Join pictures to one, from left to right, aligned at the top."""
    width = sum(picture.width for picture in pictures) + gap * (len(pictures) - 1)
    strip = Image.new("RGB", (width, max(picture.height for picture in pictures)), background)
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + gap
    return strip


def resized(picture: Image.Image, size: Size) -> Image.Image:
    """Resize a picture; if enlarged at least twice, its pixels stay sharp squares."""
    if picture.size == size:
        return picture
    is_enlarged = size[0] >= 2 * picture.width
    method = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.LANCZOS
    return picture.resize(size, method)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture to a PNG file atomically.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        with fsio.atomic_write(path) as aside:
            picture.save(aside, format="PNG")
    except OSError as error:
        raise errors.RunError(f"{path} cannot be written: {error.strerror or error}.") from error


def _draw_mark(pen: ImageDraw.ImageDraw, place: tuple[int, int], is_correct: bool | None) -> None:
    """Draw a tick or a cross (or nothing) from lines, as Pillow's font has neither."""
    if is_correct is None:
        return
    strokes = (
        [[(1, 10), (6, 15), (16, 4)]] if is_correct else [[(3, 4), (14, 15)], [(3, 15), (14, 4)]]
    )
    for stroke in strokes:
        points = [(place[0] + x, place[1] + y) for x, y in stroke]
        pen.line(points, _GREEN if is_correct else _RED, width=3, joint="curve")


def draw_text(
    pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, size: int, ink: str
) -> None:
    """Draw one line of text; `place` is its upper left corner."""
    _say_missing(text)
    left, baseline = place[0], place[1] + _font("", size).getmetrics()[0]
    for path, part in _parts(text):
        font = _font(path, size)
        # Anchored at the baseline: fonts have different ascents, and one line may mix several.
        pen.text((left, baseline), part, fill=ink, font=font, anchor="ls")
        left += font.getlength(part)


def text_width(text: str, size: int) -> float:
    return sum(_font(path, size).getlength(part) for path, part in _parts(text))


def line_height(size: int) -> int:
    return round(size * _LEADING)


def wrap(text: str, size: int, width: int) -> list[str]:
    """Break text between words into lines of at most `width` pixels; a longer word is split."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(joined, size) <= width:
            lines[-1] = joined
        else:
            lines.extend(_cut(word, size, width))
    return lines


def _cut(word: str, size: int, width: int) -> list[str]:
    """Split a word into pieces of at most `width` pixels; most words are one piece."""
    if text_width(word, size) <= width:
        return [word]
    pieces = [""]
    for letter in word:
        if pieces[-1] and text_width(pieces[-1] + letter, size) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def _parts(text: str) -> Iterator[tuple[str, str]]:
    shown = [character for character in text if not _is_invisible(character)]
    for path, part in groupby(shown, lambda character: _path_of(character) or ""):
        yield path, "".join(part)


def _is_invisible(character: str) -> bool:
    # Format characters, such as joiners, and variation selectors have no glyph of their own.
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


def _say_missing(text: str) -> None:
    global _missing_said
    lacking = [each for each in dict.fromkeys(text) if _path_of(each) is None]
    lacking = [each for each in lacking if not _is_invisible(each) and not each.isspace()]
    if lacking and not _missing_said:
        _missing_said = True
        sys.stderr.write(
            f"No font in this machine's usual folders has {' '.join(lacking[:_SHOWN])}: pictures "
            "show boxes instead. Install one, such as Noto CJK (Debian: fonts-noto-cjk) for "
            "Chinese, Japanese and Korean.\n"
        )


@cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a font from its file, or Pillow's own for an empty path."""
    if path:
        return ImageFont.truetype(path, size)
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


@cache
def _path_of(character: str) -> str | None:
    """Return the file of a font that has this character; empty: Pillow's own; None: no font has."""
    if character.isspace() or _has("", character):
        return ""
    path = next((path for path in (*_found, *_installed()) if _has(path, character)), None)
    if path is not None and path not in _found:
        _found.append(path)
    return path


_found: list[str] = []
"""Files of fonts that had an earlier character; they are tried first for the next."""


def _has(path: str, character: str) -> bool:
    """Return True if the font in a file has this character.

    Pillow cannot tell directly: compare its bitmap with that of a character that no font has.
    """
    with suppress(OSError, ValueError):  # not a font, or one of colour bitmaps in other sizes
        font = _font(path, _PROBE_SIZE)
        return bytes(font.getmask(character)) != bytes(font.getmask(_IN_NO_FONT))
    return False


@cache
def _installed() -> tuple[str, ...]:
    """List font files in the usual folders; those of families with most characters come first."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    folders = [Path(data) / "fonts", Path.home() / ".fonts", *map(Path, _FONT_FOLDERS)]
    with suppress(OSError):
        files = [each for folder in folders if folder.is_dir() for each in folder.rglob("*")]
        fonts = [str(each) for each in files if each.suffix.lower() in _FONT_SUFFIXES]
        fonts.sort(key=lambda path: ([name not in path for name in _FIRST_FONTS], path))
        return tuple(fonts[:_MOST_FONTS])
    return ()
