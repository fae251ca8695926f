"""Small plots over time or steps, and stacked bars, as SVG that needs no script."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from longtake.board import svg
from longtake.inspection.columns import Numbers

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 8, 20
_ROW, _BAR = 22, 14
_LEAST_SPAN = 0.02
"""Smallest height of a plot's y axis as a share of the values, so that small changes look small."""
_GAP = 0.1
"""A gap between points that is wider than this share of a plot's x axis, and than five usual
distances, breaks the line."""


@dataclass(frozen=True)
class Line:
    """One line of a plot; x is in ascending order, and numbers that are not finite are left out."""

    label: str
    x: Numbers
    y: Numbers
    colour: str = "1"  # suffix of a `line-*` class in nodes.css


@dataclass(frozen=True)
class Band:
    """The area between two lines of a plot, such as minimum and maximum."""

    label: str
    x: Numbers
    low: Numbers
    high: Numbers


@dataclass(frozen=True)
class Axes:
    """Labels of the axes, limit line and size of a plot."""

    unit: str
    said_of_x: Callable[[float], str]
    said_of_y: Callable[[float], str]
    limit: float | None = None  # a value at which a line is drawn
    width: int = 420
    height: int = 132


def line_plot(lines: Sequence[Line], axes: Axes, bands: Sequence[Band] = ()) -> Markup | None:
    """Draw a plot of lines with each pixel's minimum and maximum; None without any line.

    A spike of a single number is drawn, however many numbers share its pixel.
    """
    xs = [each.x[np.isfinite(each.y)] for each in lines] + [each.x for each in bands]
    ys = [each.y[np.isfinite(each.y)] for each in lines]
    ys += [each.low for each in bands] + [each.high for each in bands]
    x, y = np.concatenate([*xs, np.empty(0)]), np.concatenate([*ys, np.empty(0)])
    y = y[np.isfinite(y)]
    if not len(y) or x.min() == x.max():
        return None
    space = _Space.around(x, y, axes)
    parts = [*_grid(space, axes)]
    for band in bands:
        columns = _LEFT + space.columns(band.x)
        above, below = space.rows(band.high), space.rows(band.low)
        points = [f"{x} {y:.1f}" for x, y in zip(columns, above, strict=True)]
        points += [f"{x} {y:.1f}" for x, y in zip(columns[::-1], below[::-1], strict=True)]
        title = f"<title>{svg.text(band.label)}</title>"
        parts.append(f'<path d="M{" L".join(points)}Z" class="band">{title}</path>')
    for each in lines:
        path = " ".join(_path(each, space))
        title = f"<title>{svg.text(each.label)}</title>"
        parts.append(f'<path d="{path}" class="line line-{each.colour}">{title}</path>')
    return svg.picture(axes.width, axes.height, "".join(parts), "plot")


@dataclass(frozen=True)
class _Space:
    """Maps values of a plot to positions in the SVG picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int
    height: int

    @classmethod
    def around(cls, x: Numbers, y: Numbers, axes: Axes) -> "_Space":
        first, last = float(x.min()), float(x.max())
        low, high = float(y.min()), float(y.max())
        if axes.limit is not None:
            low, high = min(low, axes.limit), max(high, axes.limit)
        # Noise of a nearly constant number should look small, so the axis has a least height.
        room = max(0.05 * (high - low), _LEAST_SPAN * max(abs(low), abs(high)) / 2, 1e-12)
        width, height = axes.width - _LEFT - _RIGHT, axes.height - _TOP - _BOTTOM
        # Numbers that cannot be negative get no negative axis.
        floor = low - room if low < 0 else max(0.0, low - room)
        return cls((first, last), (floor, high + room), width, height)

    def columns(self, x: Numbers) -> NDArray[Any]:
        first, last = self.x
        return np.floor((x - first) / (last - first) * (self.width - 1)).astype(np.int64)

    def rows(self, y: Numbers) -> Numbers:
        low, high = self.y
        return _TOP + (high - y) / (high - low) * self.height


def _grid(space: _Space, axes: Axes) -> Iterator[str]:
    end = _LEFT + space.width
    low, high = space.y
    for value in ticks(low, high):
        y = float(space.rows(np.array(value)))
        yield f'<line x1="{_LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" class="rule"/>'
        label = svg.text(axes.said_of_y(value))
        yield f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end" class="pale">{label}</text>'
    bottom = _TOP + space.height + 14
    first, last = map(svg.text, map(axes.said_of_x, space.x))
    yield f'<text x="{_LEFT}" y="{bottom}" class="pale">{first}</text>'
    yield f'<text x="{end}" y="{bottom}" text-anchor="end" class="pale">{last}</text>'
    if axes.limit is not None:
        y = float(space.rows(np.array(axes.limit)))
        yield f'<line x1="{_LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>'


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return round numbers within a range, as labels for the axis of a plot."""
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(each * unit for each in (1, 2, 2.5, 5, 10) if each * unit >= rough * 0.999)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)][: 2 * most]


def _path(line: Line, space: _Space) -> Iterator[str]:
    """Yield SVG path commands of a plot's line; a gap starts a new segment."""
    is_number = np.isfinite(line.y)
    x, y = line.x[is_number], line.y[is_number]
    if not len(x):
        return
    columns = space.columns(x)
    # The first number in each column of pixels.
    starts = np.flatnonzero(np.diff(columns, prepend=columns[0] - 1))
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    distances = np.diff(x, prepend=x[0])
    usual = float(np.median(distances[1:])) if len(x) > 1 else 0.0
    gap = max(_GAP * (space.x[1] - space.x[0]), 5 * usual)
    is_new = np.maximum.reduceat(distances > gap, starts)
    is_new[0] = True
    tops, bottoms = space.rows(high), space.rows(low)
    before = bottoms[0]
    for column, top, bottom, begins in zip(columns[starts], tops, bottoms, is_new, strict=True):
        at = _LEFT + int(column)
        # Each pixel is a vertical line; it begins at the end that is nearer to the previous pixel.
        near, far = (top, bottom) if abs(top - before) < abs(bottom - before) else (bottom, top)
        yield f"{'M' if begins else 'L'}{at} {near:.1f}"
        if far != near:
            yield f"L{at} {far:.1f}"
        before = far


@dataclass(frozen=True)
class Stack:
    """A stacked bar of several parts, with the texts before and after it."""

    label: str
    parts: Sequence[svg.Bar]
    text: str
    begin: float = 0.0
    """Value on the scale at which the bar begins."""


def stacks(
    rows: Sequence[Stack],
    *,
    limit: float | None = None,
    label_width: int = 130,
    room: int = 130,
    width: int = 640,
    kind: str = "stacks",
) -> Markup:
    """Draw stacked bars, one below the other on one scale, and a line at a limit.

    `room` is the width in pixels for the words after the bars, `kind` the class of the picture.
    """
    ends = (each.begin + sum(part.value for part in each.parts) for each in rows)
    most = max(limit or 0.0, *ends, 0.0) or 1.0
    across, found = width - label_width - room, list[str]()
    for place, each in enumerate(rows):
        y, left = place * _ROW, label_width + across * each.begin / most
        found.append(
            f'<text x="{label_width - 8}" y="{y + 14}" text-anchor="end">'
            f"{svg.text(each.label)}</text>"
        )
        for part in each.parts:
            length = across * part.value / most
            # Half a pixel between neighbours separates parts of one colour.
            drawn = max(0.5, length - 0.5) if part.value else 0.0
            found.append(
                f'<rect x="{left:.1f}" y="{y + 3}" width="{drawn:.1f}" '
                f'height="{_BAR}" class="fill-{part.colour}">'
                f"<title>{svg.text(part.label)}: {svg.text(part.text)}</title></rect>"
            )
            left += length
        found.append(
            f'<text x="{left + 6:.1f}" y="{y + 14}" class="pale">{svg.text(each.text)}</text>'
        )
    if limit is not None:
        x, end = label_width + across * limit / most, len(rows) * _ROW
        found.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{end}" class="limit"/>')
    return svg.picture(width, len(rows) * _ROW, "".join(found), kind)
