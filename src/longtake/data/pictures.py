"""Draws what `longtake data show` tells in charts: buckets, and the spread of a score.

Plain data in, PNG files out; each is written aside and renamed when whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray
from PIL import Image

from longtake.config import Bucket
from longtake.drawing import INK, PALE_INK, PAPER, RULE, SERIES, figure_text
from longtake.errors import DataError
from longtake.fsio import atomic_write

_MAX_DRAWN = 1e290  # beyond it, differences are not finite
MAX_DOTS = 4000
"""Different clip sizes that are drawn; of more, the most frequent ones."""
BARE = "#cfd3d8"
"""The colour of what is not trained on."""


@figure_text()
def buckets_picture(
    path: Path,
    shapes: Sequence[Bucket],
    choices: NDArray[np.integer],
    clip_sizes: NDArray[np.integer],
    clip_frames: NDArray[np.integer],
    *,
    kept: Sequence[int] | None = None,
    dropped: Mapping[str, int] | None = None,
    stride: int = 1,
    title: str = "",
) -> None:
    """Draw which clips go where: sizes against buckets, clips per bucket, lengths.

    Args:
        path: the PNG file to write.
        shapes: the buckets, at least one.
        choices: [N] index of each clip's bucket; -1: dropped.
        clip_sizes: [N, 2] height and width of each clip in pixels.
        clip_frames: [N] frames of each clip.
        kept: clips of each bucket that an epoch trains on; by default all that chose it.
        dropped: how many clips no bucket takes, by reason.
        stride: source frames from one trained frame to the next.
        title: what is written above it.

    Raises:
        DataError: the file cannot be written.
    """
    assert shapes
    assert len(choices) == len(clip_sizes) == len(clip_frames)
    colours = _colours(shapes)
    bars = [
        _bucket_bar(shape, colours[i], clip_sizes[choices == i], None if kept is None else kept[i])
        for i, shape in enumerate(shapes)
    ]
    bars += [_Bar(reason, n, n, f"{n:,}", BARE) for reason, n in (dropped or {}).items()]
    figure = Figure(figsize=(15, max(6.5, 3.2 + 0.42 * len(bars))), dpi=110, layout="constrained")
    figure.set_facecolor(PAPER)
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=14, weight="bold")
    grid = figure.add_gridspec(2, 2, height_ratios=(max(1.3, 0.42 * len(bars) + 0.6), 2.2))
    _draw_sizes(figure.add_subplot(grid[:, 0]), shapes, colours, choices, clip_sizes)
    _draw_bars(figure.add_subplot(grid[0, 1]), bars)
    below = grid[1, 1].subgridspec(1, 2, width_ratios=(1, 2.4))
    _draw_to_scale(figure.add_subplot(below[0]), shapes, colours)
    _draw_lengths(figure.add_subplot(below[1]), shapes, clip_frames, stride)
    save_picture(figure, path)


def _colours(shapes: Sequence[Bucket]) -> list[str]:
    sizes = list(dict.fromkeys((shape.height, shape.width) for shape in shapes))
    return [SERIES[sizes.index((shape.height, shape.width)) % len(SERIES)] for shape in shapes]


def _draw_sizes(
    axes: Axes,
    shapes: Sequence[Bucket],
    colours: Sequence[str],
    choices: NDArray[np.integer],
    sizes: NDArray[np.integer],
) -> None:
    """Clips as dots and buckets as corners, over width and height.

    Both axes are logarithmic, so that equal aspect ratios lie on parallel lines: how far a dot is
    from its bucket's line is how much is cut.
    """
    _prepare(axes, "Sizes: a clip off its bucket's line is cropped", "width (pixels)", "height")
    different, counts = np.unique(np.column_stack([sizes, choices]), axis=0, return_counts=True)
    chance = np.random.default_rng(0).random(len(counts))  # among the equally frequent
    most = np.lexsort((chance, -counts))[:MAX_DOTS]
    different, counts = different[most], counts[most]
    dots = [colours[choice] if choice >= 0 else PALE_INK for choice in different[:, 2]]
    area = 12 + 240 * np.sqrt(counts / max(1, len(sizes)))
    axes.scatter(different[:, 1], different[:, 0], s=area, c=dots, alpha=0.45, linewidths=0)
    for shape, colour in dict(zip(map(_size, shapes), colours, strict=True)).items():
        height, width = shape
        axes.axline(
            (width, height), (2 * width, 2 * height), color=colour, linewidth=0.9, alpha=0.7
        )
        axes.plot(width, height, "s", color=PAPER, markeredgecolor=colour, markeredgewidth=2, ms=9)
        axes.annotate(
            f"{width}x{height}",
            (width, height),
            (9, -4),
            textcoords="offset points",
            va="top",
            color=colour,
            weight="bold",
            path_effects=[withStroke(linewidth=3, foreground=PAPER)],
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _write_plain_numbers(axes.xaxis)
    _write_plain_numbers(axes.yaxis)
    extent = np.concatenate([sizes, [_size(shape) for shape in shapes]])
    axes.set_xlim(extent[:, 1].min() / 1.5, extent[:, 1].max() * 1.8)
    axes.set_ylim(extent[:, 0].min() / 1.5, extent[:, 0].max() * 1.5)


def _draw_to_scale(axes: Axes, shapes: Sequence[Bucket], colours: Sequence[str]) -> None:
    """The buckets' pictures over each other, all in one scale."""
    for shape, colour in zip(shapes, colours, strict=True):
        axes.add_patch(
            Rectangle(
                (0, 0), shape.width, shape.height, fill=False, edgecolor=colour, linewidth=1.6
            )
        )
    largest = max(max(_size(shape)) for shape in shapes)
    axes.set(xlim=(-0.03 * largest, 1.03 * largest), ylim=(-0.03 * largest, 1.03 * largest))
    axes.set(aspect="equal", xticks=[], yticks=[], facecolor=PAPER)
    axes.set_title("Buckets to scale", loc="left", color=INK, fontsize=11)
    axes.spines[:].set_visible(False)


def _size(shape: Bucket) -> tuple[int, int]:
    return shape.height, shape.width


@dataclass(frozen=True)
class _Bar:
    """One line of the bar chart; `solid` of the `length` clips are trained on."""

    label: str
    length: int
    solid: int
    note: str
    colour: str


def _bucket_bar(shape: Bucket, colour: str, sizes: NDArray[np.integer], kept: int | None) -> _Bar:
    taken = len(sizes)
    note = f"{taken:,}"
    if kept is not None and kept < taken:
        note += f", {kept:,} trained"
    if taken:
        note += f"; {_share_cut(sizes, shape):.0%} of the picture cut"
    label = f"{_frames(shape.num_frames)}, {shape.width}x{shape.height}"
    return _Bar(label, taken, taken if kept is None else kept, note, colour)


def _frames(count: int) -> str:
    return f"{count} frame" if count == 1 else f"{count} frames"


def _share_cut(sizes: NDArray[np.integer], shape: Bucket) -> float:
    ratio = (sizes[:, 1] / sizes[:, 0]) * (shape.height / shape.width)
    return float(1 - np.minimum(ratio, 1 / ratio).mean())


def _draw_bars(axes: Axes, bars: Sequence[_Bar]) -> None:
    _prepare(axes, "Clips in each bucket, and dropped ones", "", "")
    _count_clips(axes.xaxis)
    beside = axes.get_yaxis_transform()
    for row, bar in enumerate(bars):
        axes.barh(row, bar.length, color=bar.colour, alpha=0.3, height=0.62)
        axes.barh(row, bar.solid, color=bar.colour, height=0.62)
        axes.text(1.02, row, bar.note, transform=beside, va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(max(3, len(bars)) - 0.5, -0.5)


def _draw_lengths(
    axes: Axes, shapes: Sequence[Bucket], clip_frames: NDArray[np.integer], stride: int
) -> None:
    """How long clips are, and how long they must be."""
    _prepare(axes, "Lengths: left of a bucket's line is too short for it", "frames", "")
    _count_clips(axes.yaxis)
    spans = sorted({(shape.num_frames - 1) * stride + 1 for shape in shapes})
    shown = np.concatenate([clip_frames, spans])
    lowest, highest = int(shown.min()), int(shown.max())
    if highest > 4 * lowest:
        axes.set_xscale("log")
        _write_plain_numbers(axes.xaxis)
        bins = list(np.geomspace(lowest / 1.1, highest * 1.1, 60))
    else:
        bins = _bins(np.array([lowest - 2, highest + 2], dtype=np.float64))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.hist(clip_frames, bins=bins, color=BARE)
    for index, span in enumerate(spans):
        axes.axvline(span, color=INK, linewidth=1)
        place = (span, 1 - 0.1 * (index % 3))
        axes.annotate(f" {span}", place, xycoords=("data", "axes fraction"), va="top", color=INK)


@figure_text()
def histogram_picture(
    path: Path,
    name: str,
    values: NDArray[np.float64],
    stages: Sequence[tuple[str, NDArray[np.float64]]] = (),
) -> None:
    """Draw how a score is spread over all clips, and below that over those of each stage.

    Dotted lines are means.

    Args:
        path: the PNG file to write.
        name: of the score.
        values: [N] of all clips; NaN: unknown, counted below the axis.
        stages: name and values of each stage's clips.

    Raises:
        DataError: the file cannot be written.
    """
    known = _drawable(values)
    drawn = [("all clips", known), *((stage, _drawable(some)) for stage, some in stages)]
    figure = Figure(figsize=(10, 2.4 + 1.7 * len(drawn)), dpi=110, layout="constrained")
    figure.set_facecolor(PAPER)
    rows = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    bins = _bins(known)
    for index, (axes, (stage, some)) in enumerate(zip(rows, drawn, strict=True)):
        _prepare(axes, _title(stage, some), "", "")
        _count_clips(axes.yaxis)
        axes.hist(known, bins=bins, color=BARE)
        if index and len(some):
            colour = SERIES[(index - 1) % len(SERIES)]
            axes.hist(some, bins=bins, color=colour, alpha=0.8)
        if len(some):
            axes.axvline(some.mean(), color=INK, linewidth=1.2, linestyle=":")
    unknown = len(values) - len(known)
    rows[-1].set_xlabel(name + (f" (unknown of {unknown:,} clips)" if unknown else ""), color=INK)
    save_picture(figure, path)


def _drawable(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(values[~np.isnan(values)], -_MAX_DRAWN, _MAX_DRAWN)


def _title(stage: str, values: NDArray[np.float64]) -> str:
    mean = f", mean {values.mean():.3g}" if len(values) else ""
    return f"{stage}: {len(values):,}{mean}"


def _bins(values: NDArray[np.float64]) -> list[float]:
    """Edges of bins; whole numbers of a small range get one bin each."""
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if low > high:
        return [0.0, 1.0]
    if 0 < high - low < 1 / _MAX_DRAWN:
        return [low - 0.5, high + 0.5]
    if high - low <= 80 and np.array_equal(values, np.round(values)):
        return list(np.arange(low, high + 2) - 0.5)
    return list(np.histogram_bin_edges(values, 60))


def _write_plain_numbers(axis: Axis) -> None:
    """512 instead of 2^9, as logarithmic axes have it."""
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _count_clips(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_label_text("clips", color=INK)


def _prepare(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_facecolor(PAPER)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_picture(picture: Figure | Image.Image, path: Path) -> None:
    """Write a PNG file, aside first and renamed when whole.

    Raises:
        DataError: it cannot be written.
    """
    try:
        with atomic_write(path) as aside:
            if isinstance(picture, Figure):
                picture.savefig(aside, format="png")
            else:
                picture.save(aside, format="PNG")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
