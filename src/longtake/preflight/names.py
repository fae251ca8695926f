"""Many nodes in few words: gpu[000-006,012]."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

_MOST_PARTS = 4


def listed(nodes: Iterable[str]) -> str:
    """Nodes' names as one line: those that differ in their last number alone are drawn together."""
    parts = [_drawn_together(list(some)) for _, some in groupby(by_number(nodes), key=_around)]
    more = len(parts) - _MOST_PARTS
    return ", ".join(parts[:_MOST_PARTS]) + (f" and {more} groups more" if more > 0 else "")


def by_number(nodes: Iterable[str]) -> list[str]:
    """Names in the order of the numbers in them: gpu2 before gpu10."""
    return sorted(nodes, key=lambda name: [_orderly(part) for part in re.split(r"(\d+)", name)])


def _orderly(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def _around(name: str) -> tuple[str, str]:
    """What stands before and after a name's last number."""
    found = _last_number(name)
    return (found[1], found[3]) if found else (name, "")


def _drawn_together(names: Sequence[str]) -> str:
    if len(names) < 3:
        return ", ".join(names)
    before, after = _around(names[0])
    numbers = [found[2] for found in map(_last_number, names) if found]
    return f"{before}[{','.join(_spans(numbers))}]{after}"


def _last_number(name: str) -> "re.Match[str] | None":
    return re.fullmatch(r"(.*?)(\d+)(\D*)", name)


def _spans(numbers: Sequence[str]) -> list[str]:
    spans: list[list[str]] = []
    for number in numbers:
        if spans and int(number) == int(spans[-1][-1]) + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    shown = [span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return shown if len(shown) <= 8 else [*shown[:8], "..."]
