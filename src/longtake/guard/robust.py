"""Averages and spreads that a few wild numbers do not move."""

import math

import numpy as np

from longtake.guard.rows import Numbers

_SIGMAS = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""


def medians(values: Numbers) -> Numbers:
    """The medians of the columns of [n, ...] numbers, n > 0; several times as fast as numpy's."""
    ordered = np.sort(values, axis=0)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return np.asarray(low + (high - low) / 2)


def median(values: Numbers) -> float:
    """The median of [n] numbers, n > 0."""
    return float(medians(values))


def spread(values: Numbers, middle: float) -> float:
    """The standard deviation of [n] numbers, by their median distance from the middle."""
    return _SIGMAS * median(np.abs(values - middle))


def noise(values: Numbers) -> float:
    """The standard deviation of [n] successive numbers around their trend, n > 1.

    By the differences of neighbours, whose variance is twice that of the numbers: while a loss
    falls, its spread around one middle is many times its noise.
    """
    return _SIGMAS * median(np.abs(np.diff(values))) / math.sqrt(2)
