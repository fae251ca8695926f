"""What all pictures of longtake share: a few colours, and text in lines."""

from functools import cache

from PIL import ImageFont

PAPER, INK, PALE_INK, RULE = "#fcfcfa", "#22252a", "#767c85", "#e4e4df"
SERIES = ("#1f4e8c", "#c8453b", "#2f8f5b", "#b7791f", "#6b4fa0", "#1f8a93", "#a23b72", "#6f7d2c")
"""Colours of what is to be told apart, in the order in which they are used."""

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_LEADING = 1.4  # line height over font size


@cache
def font(size: int) -> Font:
    """Pillow's own font; it has Latin letters, others appear as boxes."""
    return ImageFont.load_default(size=size)


def line_height(size: int) -> int:
    """Pixels from one line to the next."""
    return round(size * _LEADING)


def wrap(text: str, size: int, width: int) -> list[str]:
    """Break text between words so that every line fits `width` pixels; a longer word is cut."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font(size).getlength(joined) <= width:
            lines[-1] = joined
        else:
            lines.extend(_cut(word, size, width))
    return lines


def _cut(word: str, size: int, width: int) -> list[str]:
    """Split a word into pieces that fit; almost always into one."""
    pieces = [""]
    for letter in word:
        if pieces[-1] and font(size).getlength(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces
