"""What all pictures of longtake share: a few colours, and text in any writing system.

DejaVu Sans, which comes with matplotlib, has Latin, Greek, Cyrillic and more. Other characters,
such as Chinese ones, come from fonts of this machine: what fontconfig finds, else what lies in the
usual folders. A character that no font has is drawn as a box, and that is said once.
"""

import os
import shutil
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import groupby
from pathlib import Path

from PIL import ImageDraw, ImageFont

PAPER, INK, PALE_INK, RULE = "#fcfcfa", "#22252a", "#767c85", "#e4e4df"
SERIES = ("#1f4e8c", "#c8453b", "#2f8f5b", "#b7791f", "#6b4fa0", "#1f8a93", "#a23b72", "#6f7d2c")
"""Colours of what is to be told apart, in the order in which they are used."""

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

    Args:
        texts: that come from a user; it is said if a character of them cannot be drawn.
    """
    from matplotlib import font_manager, rc_context

    _say_missing("".join(texts))
    families = ["DejaVu Sans"]
    for path in dict.fromkeys(map(_path_of, [*_PROBES, *"".join(texts)])):
        if path is not None and path != _dejavu():
            font_manager.fontManager.addfont(path)
            families.append(font_manager.FontProperties(fname=path).get_name())
    with (
        rc_context({"font.family": families, "text.parse_math": False}),
        warnings.catch_warnings(),
    ):
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
