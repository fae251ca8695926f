"""Formatting of numbers, names, errors and untrusted text for messages."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from difflib import SequenceMatcher, get_close_matches
from itertools import pairwise
from typing import Final

_NEAR = 0.6  # similarity below which a name is not suggested; the default of difflib
_AS_NEAR = 0.1  # names within this similarity of the nearest one are suggested too
_MAX_NEAR = 3
_PART_LETTERS = 3  # shortest misspelt name that is looked for as a part of others

# C0, DEL, C1; marks and overrides of the writing direction; separators of lines and paragraphs.
_SPECIAL: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
# Lone surrogates stand for bytes of a file name that are not UTF-8; printing one raises an error.
_UNSAFE: Final = re.compile(f"[{_SPECIAL}\ud800-\udfff]")
_UNSAFE_IN_A_LINE: Final = re.compile(f"[{_SPECIAL}\ud800-\udfff\t\n]")


def plural(number: int, noun: str, many: str = "") -> str:
    return f"{number:,} {noun if number == 1 else many or f'{noun}s'}"


def format_size(num_bytes: int) -> str:
    """Format a number of bytes in the largest unit that gives at least 1: 1.50 GiB, 3 bytes."""
    for unit, of_one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= of_one:
            return f"{num_bytes / of_one:.2f} {unit}"
    return f"{num_bytes} bytes"


def format_duration(seconds: float) -> str:
    """Format a duration in whole seconds: 42 s, 3:05, 2:10:00, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_short_duration(seconds: float) -> str:
    """Format a duration with up to three digits below a minute: 3.2 ms, 1.25 s, 42.1 s, 3:05."""
    # 59.96 would otherwise be formatted as 60.0 s.
    if round(seconds, 1) >= 60:
        return format_duration(seconds)
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def for_seconds(seconds: float) -> str:
    """Format a duration for a sentence: 12 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_time(text: str, *, with_date: bool = False) -> str:
    """Format a record's ISO 8601 time in UTC: 20:15:59 UTC, optionally with the date."""
    form = "%Y-%m-%d %H:%M:%S UTC" if with_date else "%H:%M:%S UTC"
    return datetime.fromisoformat(text).astimezone(UTC).strftime(form)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers within names by value: node2 before node10."""
    parts = re.split(r"(\d+)", name)
    # Pairs, because a number cannot be compared with a text.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def join_words(words: Iterable[object], last: str = "and") -> str:
    *some, end = [str(word) for word in words] or [""]
    return f"{', '.join(some)} {last} {end}" if some else end


def number_ranges(numbers: Sequence[int], most: int | None = None, width: int = 0) -> str:
    """Format ascending numbers, with at least `width` digits, as ranges: 0-3, 7.

    Of more than `most` ranges, only the first ones and the count of all numbers are shown.
    """
    cuts = [0, *(at for at, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    runs = [(numbers[first], numbers[end - 1]) for first, end in pairwise(cuts) if end > first]
    # A run of a single number holds it twice.
    texts = ["-".join(f"{each:0{width}}" for each in dict.fromkeys(run)) for run in runs]
    if most is not None and len(texts) > most:
        texts = [*texts[: most - 1], f"… ({len(numbers)} in all)"]
    return ", ".join(texts)


def nearest(name: str, known: Iterable[str], cutoff: float = _NEAR) -> str | None:
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(
    name: str, known: Iterable[str], shown: int = 20, otherwise: str | None = None
) -> str:
    """Ask "did you mean ...?" with up to three known names that resemble a misspelt one.

    Args:
        name: the misspelt name.
        known: all known names.
        shown: number of known names to list if none resembles it.
        otherwise: text to return in that case instead of the list.
    """
    names = sorted(set(known))
    likeness = {each: SequenceMatcher(None, name, each).ratio() for each in names}
    limit = max(_NEAR, max(likeness.values(), default=0) - _AS_NEAR)
    near = [each for each in names if likeness[each] >= limit]
    # difflib sees little likeness between a short name and a long one that contains it.
    near = near or [each for each in names if len(name) >= _PART_LETTERS and name in each]
    if near:
        best = sorted(near, key=lambda each: -likeness[each])[:_MAX_NEAR]
        return f"did you mean {' or '.join(best)}?"
    if otherwise is not None:
        return otherwise
    more = ", ..." if len(names) > shown else ""
    return f"there are: {', '.join(names[:shown]) or 'none'}{more}."


def shorten(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(error: BaseException) -> str:
    """Return the whole message of an error in one line; its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException, max_length: int = 300) -> str:
    line = str(error).strip().partition("\n")[0][:max_length].rstrip()
    return line or type(error).__name__


def reason_of(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return reason if isinstance(reason, str) else first_line(error)


def printable(text: object) -> str:
    r"""Replace control characters by escapes such as `\x1b` or `\n`, so that the text is one line.

    Untrusted text, such as a file's name, then cannot control the terminal.
    """
    return _UNSAFE_IN_A_LINE.sub(_spelled, str(text))


def printable_lines(text: str) -> str:
    return _UNSAFE.sub(_spelled, text)


def escape_lines(text: str) -> str:
    """Escape control characters and rich's markup in a message of one or several lines."""
    return "\n".join(map(escape, text.split("\n")))


def escape(text: object) -> str:
    from rich.markup import escape as escape_markup

    return escape_markup(printable(text))


def _spelled(found: "re.Match[str]") -> str:
    number = ord(found[0])
    known = {9: r"\t", 10: r"\n", 13: r"\r"}
    return known.get(number) or (f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
