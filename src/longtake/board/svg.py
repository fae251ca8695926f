"""Sparklines and SVG elements: they need no script, and work in a report too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Final

from markupsafe import Markup

from longtake.formatting import printable


@dataclass(frozen=True)
class Bar:
    """A part of a stacked bar of `charts.stacks`, with its label and its value in words."""

    label: str
    value: float
    """Length of the part in the bar's unit; at least 0."""
    text: str
    """The part's value in words, with its unit."""
    colour: str = "1"
    """Suffix of a `fill-*` class in board.css that colours the part."""


SPARK_PADDING: Final = 4


def sparkline(
    steps: Sequence[int],
    values: Sequence[float | None],
    *,
    band: tuple[float, float] | None = None,
    marks: Mapping[int, str] | None = None,
    now: int | None = None,
) -> Markup:
    """Draw a sparkline: a small line through values over steps.

    Args:
        steps: steps in ascending order.
        values: one value for each step; None leaves a gap.
        band: the expected range, drawn behind the line.
        marks: texts by step; these steps are marked above the line.
        now: step of the vertical line; a script may move it.
    """
    width, height = 200, 40
    known = [value for value in (*values, *(band or ())) if value is not None]
    if not known:
        return picture(width, height, "", "sparkline")
    (first, last), (low, high) = (steps[0], steps[-1]), (min(known), max(known))
    room = width - 2 * SPARK_PADDING, height - 2 * SPARK_PADDING

    def at(step: int) -> float:
        return SPARK_PADDING + room[0] * ((step - first) / (last - first) if last > first else 0.5)

    def up(value: float) -> float:
        return SPARK_PADDING + room[1] * ((high - value) / (high - low) if high > low else 0.5)

    parts = []
    if band is not None:
        top, bottom = up(band[1]), up(band[0])
        parts.append(
            f'<rect x="0" y="{top:.1f}" width="{width}" height="{max(1.0, bottom - top):.1f}" '
            f'class="spark-band"><title>98 % of the training clips</title></rect>'
        )
    if now is not None:
        parts.append(
            f'<line x1="{at(now):.1f}" x2="{at(now):.1f}" y1="0" y2="{height}" class="spark-now"/>'
        )
    points_at = zip(steps, values, strict=True)
    for _, group in groupby(points_at, key=lambda point: point[1] is None):
        points = [(at(step), up(value)) for step, value in group if value is not None]
        if points:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" class="spark-line"/>')
        # A line of one point is invisible.
        if len(points) == 1:
            ((x, y),) = points
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" class="fill-1"/>')
    for step, words in (marks or {}).items():
        x = at(step)
        parts.append(
            f'<path d="M{x - 4:.1f} 0h8l-4 6z" class="fill-warn"><title>step {step:,}: '
            f"{text(words)}</title></path>"
        )
    return picture(width, height, "".join(parts), "sparkline")


def no_still(reason: str) -> bytes:
    """Return an SVG file to show in place of a video's still, with the reason for its absence."""
    words, lines = f"No still: {reason}".split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 30:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word[:30]}".strip()
    spans = "".join(
        f'<text x="8" y="{20 + 16 * place}" font-family="sans-serif" font-size="11" fill="#666d77">'
        f"{text(line)}</text>"
        for place, line in enumerate(lines[:7])
    )
    found = picture(200, 130, f'<rect width="200" height="130" fill="#8884"/>{spans}', "still")
    # Within HTML the namespace is implied; in a file of its own it is required.
    return found.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).encode()


def picture(width: float, height: float, content: str, kind: str) -> Markup:
    """Return an SVG that shrinks with the page; texts in `content` must come from `text`."""
    return Markup(  # noqa: S704 - made of numbers and of what `text` returned
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img">{content}</svg>'
    )


def text(value: object) -> str:
    """Return a text for use in SVG: escaped, with control characters spelled out."""
    return escape(printable(value))


COLOURS: Final = ("1", "2", "3", "4", "5", "6", "7", "8")
