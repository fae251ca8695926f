"""Pictures of the data page as SVG: buckets to scale, histograms, stages over the batches."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from longtake.board import charts, svg
from longtake.inspection.data_facts import Histogram, StageStrip

_BOX_WIDTH, _BOX_HEIGHT, _SIDE, _DEPTH = 64, 46, 34, 10
_BAR_WIDTH, _BAR_HEIGHT = 110, 12
_WIDTH, _HEIGHT, _TOP, _LEFT, _LANE = 460, 150, 16, 8, 16
_STRIP_HEIGHT: Final = 28
_MOST_LETTERS: Final = 24  # of a label


def colour(place: int) -> str:
    return svg.COLOURS[place % len(svg.COLOURS)]


def box(bucket: Mapping[str, Any], largest: int, longest: int) -> Markup:
    """Draw a bucket (clip shape) as a box: width and height to one scale, and frames as depth."""
    scale = _SIDE / max(1, largest)
    width, height = max(2.0, bucket["width"] * scale), max(2.0, bucket["height"] * scale)
    frames = bucket["num_frames"]
    depth = _DEPTH * (frames - 1) / max(1, longest - 1) if frames > 1 else 0.0
    x, y = 1.0, _BOX_HEIGHT - 1 - height
    parts = []
    if depth:
        right, top = x + width, y - depth
        parts.append(
            f'<path d="M{x:.1f} {y:.1f}l{depth:.1f} {-depth:.1f}h{width:.1f}v{height:.1f}'
            f'l{-depth:.1f} {depth:.1f}z" class="fill-pale"/>'
            f'<path d="M{right:.1f} {y:.1f}L{right + depth:.1f} {top:.1f}" class="edge"/>'
        )
    parts.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="fill-1"/>'
    )
    size = f"{frames} frames, {bucket['width']}x{bucket['height']}"
    return svg.picture(
        _BOX_WIDTH, _BOX_HEIGHT, f"<title>{svg.text(size)}</title>{''.join(parts)}", "box"
    )


def bar(value: float, most: float, colour: str = "1") -> Markup:
    """Draw one bar without words, for a cell of a table on the data page."""
    length = _BAR_WIDTH * min(1.0, value / most) if most > 0 else 0.0
    return svg.picture(
        *(_BAR_WIDTH, _BAR_HEIGHT),
        f'<rect width="{_BAR_WIDTH}" height="{_BAR_HEIGHT}" class="fill-rule"/>'
        f'<rect width="{length:.1f}" height="{_BAR_HEIGHT}" class="fill-{colour}"/>',
        "cell",
    )


def cut(share: float) -> Markup:
    """Draw a bar for a picture whose cropped-away share is the paler end."""
    return svg.picture(
        *(_BAR_WIDTH // 2, _BAR_HEIGHT),
        f'<rect width="{_BAR_WIDTH // 2}" height="{_BAR_HEIGHT}" class="fill-warn cut"/>'
        f'<rect width="{_BAR_WIDTH // 2 * (1 - share):.1f}" height="{_BAR_HEIGHT}" '
        'class="fill-good"/>',
        "cell",
    )


def histogram(found: Histogram) -> Markup:
    """Draw a histogram of clips' values, and below it a lane per stage with the values it takes."""
    edges, most = found.edges, max([1, *found.counts])
    low, high = edges[0], edges[-1]
    room = _WIDTH - 2 * _LEFT

    def x(value: float) -> float:
        return _LEFT + room * min(1.0, max(0.0, (value - low) / (high - low)))

    top = f"{most:,} clips"
    parts = [
        f'<text x="{_WIDTH - _LEFT}" y="{_TOP - 4}" text-anchor="end" class="pale">{top}</text>',
        f'<line x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="{_TOP}" y2="{_TOP}" class="most"/>',
    ]
    overlay = found.spans[0].counts if len(found.spans) == 1 else None
    for place, ((left, right), count) in enumerate(zip(pairwise(edges), found.counts, strict=True)):
        said = f"{_short(left)} to {_short(right)}: {count:,} clips"
        parts.append(_column(x(left), x(right), count / most, "pale", said))
        if overlay is not None and overlay[place]:
            parts.append(_column(x(left), x(right), overlay[place] / most, "1", said))
    base = _HEIGHT + 0.5
    parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="{base}" y2="{base}" class="rule"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + share * (high - low)
        anchor = "start" if not share else "end" if share == 1 else "middle"
        parts.append(
            f'<text x="{x(value):.1f}" y="{_HEIGHT + 14}" text-anchor="{anchor}" class="pale">'
            f"{_short(value)}</text>"
        )
    height = _HEIGHT + 22
    for span in found.spans:
        y = height + 3
        said = f"{span.stage}: {_short(span.low)} to {_short(span.high)}"
        # A stage whose clips all have one value is still visible.
        length = max(2.0, x(span.high) - x(span.low))
        parts.append(
            f'<rect x="{x(span.low):.1f}" y="{y}" width="{length:.1f}" height="10" '
            f'class="fill-{colour(span.place)}"><title>{svg.text(said)}</title></rect>'
            f'<circle cx="{x(span.mean):.1f}" cy="{y + 5}" r="3" class="mean"/>'
        )
        height += _LANE
    return svg.picture(_WIDTH, height, "".join(parts), "histogram")


def _column(left: float, right: float, share: float, colour: str, said: str) -> str:
    height = (_HEIGHT - _TOP) * share
    width = max(0.6, right - left - 0.6)
    return (
        f'<rect x="{left:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" '
        f'height="{max(height, 0.8 if share else 0):.1f}" class="fill-{colour}">'
        f"<title>{svg.text(said)}</title></rect>"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def strip(found: StageStrip, current: int | None) -> Markup:
    """Draw the stages' shares of the batches as stacked areas, with a line at the current batch.

    It is as wide as the page, so horizontal positions are percentages.
    """
    # Neighbouring spans with equal shares become one rectangle.
    num_spans, first, parts = len(found.shares[0]), 0, list[str]()
    columns = list(zip(*found.shares, strict=True))
    while first < num_spans:
        end = first + 1
        while end < num_spans and columns[end] == columns[first]:
            end += 1
        top = 0.0
        for place, share in enumerate(columns[first]):
            if share > 0:
                said = f"{found.names[place]}: {share:.0%} of the batches"
                parts.append(
                    f'<rect x="{100 * first / num_spans:.3f}%" y="{_STRIP_HEIGHT * top:.2f}" '
                    f'width="{100 * (end - first) / num_spans:.3f}%" '
                    f'height="{_STRIP_HEIGHT * share:.2f}" class="fill-{colour(place)}">'
                    f"<title>{svg.text(said)}</title></rect>"
                )
            top += share
        first = end
    parts.append(_end_label("0%", "start", "batch 0"))
    parts.append(_end_label("100%", "end", f"{found.end:,}"))
    if current is not None:
        share = min(current, found.end) / found.end
        at = f"{100 * share:.2f}%"
        parts += [
            f'<line x1="{at}" x2="{at}" y1="0" y2="{_STRIP_HEIGHT + 4}" class="{kind}"/>'
            for kind in ("halo", "now")
        ]
        anchor = "end" if share > 0.5 else "start"
        parts.append(_end_label(at, anchor, f"the run is at batch {current:,}", _STRIP_HEIGHT + 29))
    height = _STRIP_HEIGHT + (36 if current is not None else 20)
    return Markup(  # noqa: S704 - made of numbers and of what `svg.text` returned
        f'<svg class="stages" width="100%" height="{height}" role="img">{"".join(parts)}</svg>'
    )


def _end_label(x: str, anchor: str, text: str, y: int = _STRIP_HEIGHT + 15) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="pale">{svg.text(text)}</text>'


def counted_bars(
    rows: Sequence[tuple[str, int]], colour: str = "1", first: str | None = None
) -> Markup:
    """Draw a bar per group of clips with its count; `first` is another colour for the first bar."""
    return charts.stacks(
        [
            charts.Stack(
                name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…",
                [svg.Bar(name, count, said, first if first and not place else colour)],
                said,
            )
            for place, (name, count) in enumerate(rows)
            for said in (f"{count:,}",)
        ],
        label_width=150,
        room=110,
        width=_WIDTH,
        kind="bars",
    )
