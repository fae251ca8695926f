"""What may be printed of text that comes from files: nothing that a terminal would act on."""

import re
from typing import Final

# C0, DEL, C1; marks and overrides of the writing direction; separators of lines and paragraphs.
_SPECIAL: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_UNSAFE: Final = re.compile(f"[{_SPECIAL}\ud800-\udfff]")
_UNSAFE_IN_A_LINE: Final = re.compile(f"[{_SPECIAL}\ud800-\udfff\t\n]")


def printable(text: object) -> str:
    r"""One line, such as a file's name: control characters are spelled, as `\x1b` or `\n`."""
    return _UNSAFE_IN_A_LINE.sub(_spelled, str(text))


def printable_lines(text: str) -> str:
    """A text of several lines: as `printable`, but for tabs and the ends of lines."""
    return _UNSAFE.sub(_spelled, text)


def escape(text: object) -> str:
    """`printable`, for a place where rich reads markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(printable(text))


def _spelled(found: "re.Match[str]") -> str:
    number = ord(found[0])
    known = {9: r"\t", 10: r"\n", 13: r"\r"}
    return known.get(number) or (f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
