"""Draws labelled grids of pictures, and text in any writing system, in the same few colours.

DejaVu Sans of matplotlib has Latin, Greek and Cyrillic letters. Other characters come from fonts
of this machine; one that no font has is drawn as a box, and a line on stderr says so once.
"""

import os
import shutil
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from longtake import errors, fsio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER, INK, PALE_INK, RULE = "#fcfcfa", "#22252a", "#767c85", "#e4e4df"
SERIES = ("#1f4e8c", "#c8453b", "#2f8f5b", "#b7791f", "#6b4fa0", "#1f8a93", "#a23b72", "#6f7d2c")
"""Colours that distinguish series, in the order in which they are used."""
TITLE_SIZE, TEXT_SIZE, NOTE_SIZE = 22, 15, 13

Size = tuple[int, int]
"""Width and height in pixels."""

_GREEN, _RED = SERIES[2], SERIES[1]
_MARGIN, _LABEL_GAP, _TITLE_GAP, _HEADING_GAP = 28, 22, 10, 6

_LEADING = 1.4  # line height over font size
_FC_MATCH_SECONDS = 5.0
_FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "/System/Library/Fonts")
_FONT_SUFFIXES = (".ttf", ".otf", ".ttc")
_MOST_FONTS = 400
"""Files that are looked into where there is no fontconfig; those with many characters first."""
_PROBES = "中あ한ไहአ"
"""A character each of writing systems that DejaVu Sans lacks."""
_SHOWN = 8
_PROBE_SIZE = 12

_missing_said = False


@dataclass(frozen=True)
class TextLine:
    text: str
    size: int = TEXT_SIZE
    ink: str = INK


@dataclass(frozen=True)
class GridCell:
    picture: Image.Image
    gap: int = 0  # pixels between this cell and what is left of it


@dataclass(frozen=True)
class GridRow:
    """A label and, right of it, cells."""

    label: Sequence[TextLine]  # lines that fit `Grid.label_width`, see `wrapped_lines`
    cells: Sequence[GridCell]  # from left to right
    is_correct: bool | None = None  # draws a tick, a cross or nothing left of the label


@dataclass(frozen=True)
class Grid:
    """Rows of pictures with labels left of them, on one page; widths and gaps are in pixels."""

    rows: Sequence[GridRow]  # at least one
    label_width: int
    title: str = ""
    headings: Sequence[Sequence[TextLine]] = ()  # lines above each cell
    footers: Mapping[str, Sequence[tuple[str, bool]]] = field(default_factory=dict)
    """Below each cell, by the name at the left, a text and whether it is an alarm."""
    mark_width: int = 0  # left of the labels, for ticks and crosses
    row_gap: int = 26
    has_rules: bool = True  # draw a line between two rows

    def corner(self, row: int, cell: int) -> tuple[int, int]:
        """Left and top of a cell's picture on the page."""
        cells = self.rows[row].cells
        before = sum(each.gap + each.picture.width for each in cells[:cell])
        left = _MARGIN + self.mark_width + self.label_width + _LABEL_GAP + before + cells[cell].gap
        return left, self._tops[row]

    @property
    def size(self) -> Size:
        """Width and height of the page in pixels."""
        widths = [round(text_width(self.title, TITLE_SIZE)) + _MARGIN]
        for index, row in enumerate(self.rows):
            last = len(row.cells) - 1
            widths.append(self.corner(index, last)[0] + row.cells[last].picture.width)
        bottom = self._tops[-1] + len(self.footers) * line_height(NOTE_SIZE)
        return max(widths) + _MARGIN, bottom + _MARGIN - (0 if self.footers else self.row_gap)

    def draw(self) -> Image.Image:
        """The page in RGB."""
        page, tops = Image.new("RGB", self.size, PAPER), self._tops
        pen = ImageDraw.Draw(page)
        _draw_lines(pen, (_MARGIN, _MARGIN), [TextLine(self.title, TITLE_SIZE)])
        for cell, heading in enumerate(self.headings):
            _draw_lines(pen, (self.corner(0, cell)[0], self._heading_top()), heading)
        for index, row in enumerate(self.rows):
            if index and self.has_rules:
                rule = tops[index] - self.row_gap // 2
                pen.line((_MARGIN, rule, page.width - _MARGIN, rule), fill=RULE)
            _draw_mark(pen, (_MARGIN, tops[index]), row.is_correct)
            _draw_lines(pen, (_MARGIN + self.mark_width, tops[index]), row.label)
            for cell, each in enumerate(row.cells):
                page.paste(each.picture, self.corner(index, cell))
        self._draw_footers(pen, tops[-1])
        return page

    def _draw_footers(self, pen: ImageDraw.ImageDraw, top: int) -> None:
        for name, values in self.footers.items():
            draw_text(pen, (_MARGIN, top), name, NOTE_SIZE, PALE_INK)
            for cell, (text, is_alarm) in enumerate(values):
                left = self.corner(0, cell)[0]
                draw_text(pen, (left, top), text, NOTE_SIZE, _RED if is_alarm else INK)
                if is_alarm:  # a triangle: the font has none
                    left += round(text_width(text, NOTE_SIZE)) + 7
                    corners = [(left, top + 12), (left + 8, top + 12), (left + 4, top + 4)]
                    pen.polygon(corners, fill=_RED)
            top += line_height(NOTE_SIZE)

    def _heading_top(self) -> int:
        if not self.title:
            return _MARGIN
        return _MARGIN + line_height(TITLE_SIZE) + (_TITLE_GAP if self.headings else self.row_gap)

    @cached_property
    def _tops(self) -> list[int]:
        """Tops of the rows, and where the next one would begin."""
        heading = max(map(_height_of, self.headings), default=0)
        tops = [self._heading_top() + heading + (_HEADING_GAP if self.headings else 0)]
        for row in self.rows:
            heights = [_height_of(row.label), *(cell.picture.height for cell in row.cells)]
            tops.append(tops[-1] + max(heights) + self.row_gap)
        return tops


def wrapped_lines(text: str, width: int, size: int = TEXT_SIZE, ink: str = INK) -> list[TextLine]:
    return [TextLine(line, size, ink) for line in wrap(text, size, width)]


def side_by_side(pictures: Sequence[Image.Image], gap: int, background: str = PAPER) -> Image.Image:
    """One picture of several, their upper edges in one line."""
    width = sum(picture.width for picture in pictures) + gap * (len(pictures) - 1)
    strip = Image.new("RGB", (width, max(picture.height for picture in pictures)), background)
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + gap
    return strip


def resized(picture: Image.Image, size: Size) -> Image.Image:
    """A picture in another size; one that is enlarged keeps its pixels sharp."""
    if picture.size == size:
        return picture
    is_enlarged = size[0] >= 2 * picture.width
    method = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.LANCZOS
    return picture.resize(size, method)


def save_picture(picture: "Image.Image | Figure", path: Path) -> None:
    """Write a PNG file aside and rename it.

    Raises:
        RunError: it cannot be written.
    """
    try:
        with fsio.atomic_write(path) as aside:
            if isinstance(picture, Image.Image):
                picture.save(aside, format="PNG")
            else:
                picture.savefig(aside, format="png")
    except OSError as error:
        raise errors.RunError(f"{path} cannot be written: {error.strerror or error}.") from error


def _draw_lines(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], lines: Sequence[TextLine]
) -> None:
    left, top = place
    for line in lines:
        draw_text(pen, (left, top), line.text, line.size, line.ink)
        top += line_height(line.size)


def _height_of(lines: Sequence[TextLine]) -> int:
    return sum(line_height(line.size) for line in lines)


def _draw_mark(pen: ImageDraw.ImageDraw, place: tuple[int, int], is_correct: bool | None) -> None:
    """A tick or a cross, of lines: the font has neither."""
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
    left, baseline = place[0], place[1] + _font(_dejavu(), size).getmetrics()[0]
    for path, part in _parts(text):
        font = _font(path, size)
        pen.text((left, baseline), part, fill=ink, font=font, anchor="ls")
        left += font.getlength(part)


def text_width(text: str, size: int) -> float:
    return sum(_font(path, size).getlength(part) for path, part in _parts(text))


def line_height(size: int) -> int:
    return round(size * _LEADING)


def wrap(text: str, size: int, width: int) -> list[str]:
    """Break text between words so that every line fits `width` pixels; a longer word is cut."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(joined, size) <= width:
            lines[-1] = joined
        else:
            lines.extend(_cut(word, size, width))
    return lines


@contextmanager
def figure_text(*texts: str) -> Iterator[None]:
    """Let matplotlib draw text of any writing system in the block, and no formulas.

    `texts` come from a user; it is said if a character of them cannot be drawn.
    """
    from matplotlib import font_manager, rc_context

    _say_missing("".join(texts))
    families = ["DejaVu Sans"]
    for path in dict.fromkeys(map(_path_of, [*_PROBES, *"".join(texts)])):
        if path is not None and path != _dejavu():
            font_manager.fontManager.addfont(path)
            families.append(font_manager.FontProperties(fname=path).get_name())
    with rc_context({"font.family": families, "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def _cut(word: str, size: int, width: int) -> list[str]:
    """Split a word into pieces that fit; almost always into one."""
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
    for path, part in groupby(shown, lambda character: _path_of(character) or _dejavu()):
        yield path, "".join(part)


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


def _say_missing(text: str) -> None:
    global _missing_said
    lacking = [each for each in dict.fromkeys(text) if _path_of(each) is None]
    lacking = [each for each in lacking if not _is_invisible(each) and not each.isspace()]
    if lacking and not _missing_said:
        _missing_said = True
        sys.stderr.write(
            f"No font of this machine has {' '.join(lacking[:_SHOWN])}: pictures show boxes "
            "instead. Install one, such as Noto CJK (Debian: fonts-noto-cjk) for Chinese, "
            "Japanese and Korean.\n"
        )


@cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


@cache
def _dejavu() -> str:
    from matplotlib import get_data_path

    return str(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


@cache
def _path_of(character: str) -> str | None:
    """The font that a character is drawn with; None where none has it."""
    if character.isspace() or ord(character) in _characters(_dejavu()):
        return _dejavu()
    found = (path for path in (*_found, _by_fontconfig(character)) if path is not None)
    path = next((path for path in found if ord(character) in _characters(path)), None)
    path = path or next((p for p in _installed() if ord(character) in _characters(p)), None)
    if path is not None and path not in _found:
        _found.append(path)
    return path


_found: list[str] = []
"""Fonts that had a character so far; they are asked first."""


@cache
def _characters(path: str) -> frozenset[int]:
    """The code points of a font; none where it cannot be drawn in any size, as colour bitmaps."""
    from matplotlib.ft2font import FT2Font

    with suppress(OSError, RuntimeError, ValueError):
        _font(path, _PROBE_SIZE)
        return frozenset(FT2Font(path).get_charmap())
    return frozenset()


def _by_fontconfig(character: str) -> str | None:
    program = shutil.which("fc-match")
    if program is None:
        return None
    command = [program, "-f", "%{file}", f"sans:charset={ord(character):x}"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(  # noqa: S603 - fontconfig's own program
            command, capture_output=True, text=True, check=True, timeout=_FC_MATCH_SECONDS
        )
        return done.stdout if Path(done.stdout).is_file() else None
    return None


@cache
def _installed() -> tuple[str, ...]:
    """Fonts in the usual folders; those first that are named after the scripts they are for."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    folders = [Path(data) / "fonts", Path.home() / ".fonts", *map(Path, _FONT_FOLDERS)]
    with suppress(OSError):
        files = [each for folder in folders if folder.is_dir() for each in folder.rglob("*")]
        fonts = [str(each) for each in files if each.suffix.lower() in _FONT_SUFFIXES]
        return tuple(sorted(fonts, key=lambda path: ("CJK" not in path, path))[:_MOST_FONTS])
    return ()
