"""Draws what a run's numbers did over its steps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from longtake.errors import RunError
from longtake.fsio import atomic_write

LOG_SCALE_RATIO = 20.0
"""From this quotient of the largest and the smallest loss on, the loss axis is logarithmic."""

_RAW, _SMOOTH, _INK, _GRID = "#a9bfd8", "#1f4e8c", "#22252a", "#e4e4df"


def loss_plot(
    steps: Sequence[int],
    losses: Sequence[float],
    path: Path,
    *,
    title: str,
    smoothed: bool = True,
) -> None:
    """Write a PNG of the loss over the steps: every value pale, their running mean dark.

    Losses that are no finite number leave a gap. The file is written aside and renamed.

    Raises:
        RunError: the file cannot be written.
    """
    assert 0 < len(steps) == len(losses), f"{len(steps)} steps and {len(losses)} losses"
    values = np.asarray(losses, dtype=np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if smoothed:
        axes.plot(steps, values, color=_RAW, linewidth=0.8, label="each step")
        axes.plot(steps, smooth(values), color=_SMOOTH, linewidth=1.8, label="running mean")
        axes.legend(frameon=False, labelcolor=_INK)
    else:
        axes.plot(steps, values, color=_SMOOTH, linewidth=1.2)
    axes.set_yscale(axis_scale(values))
    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel("global step (optimizer updates)", color=_INK)
    axes.set_ylabel("velocity loss (mean square)", color=_INK)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a running mean over about a 25th of the curve, of the same length.

    The window is centred, so that the mean does not lag behind a falling loss, and shrinks at both
    ends. NaN values count for nothing; a window of nothing else gives NaN.
    """
    reach = len(values) // 50
    weights = np.hanning(2 * reach + 3)[1:-1]  # without the two zeros at its ends
    known = ~np.isnan(values)
    total = np.convolve(np.where(known, values, 0.0), weights, mode="same")
    weight = np.convolve(known.astype(np.float64), weights, mode="same")
    means = np.full(len(values), np.nan)
    np.divide(total, weight, out=means, where=weight > 1e-9)
    return means


def axis_scale(values: NDArray[np.float64]) -> str:
    """Return "log" for positive values that span a factor of `LOG_SCALE_RATIO`, else "linear"."""
    finite = values[~np.isnan(values)]
    wide = len(finite) and finite.min() > 0 and finite.max() / finite.min() >= LOG_SCALE_RATIO
    return "log" if wide else "linear"


def _save(figure: Figure, path: Path) -> None:
    try:
        with atomic_write(path) as aside:
            figure.savefig(aside, format="png")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}.") from error
