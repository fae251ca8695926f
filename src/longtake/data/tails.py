"""Statistical tests for an upper tail that is far heavier than that of another sample.

Means say little about tails: one clip in ten thousand can end a run and moves no mean. Two tests
share `FALSE_ALARMS`; in addition, both require a distance above `limit` standard deviations. Each
is made at several levels, with Bonferroni's correction for their number:

1. By ranks, for any distribution, with r = 1, 2, 4, ... If both samples are alike, each of the
   largest values of both together belongs to `after` with probability q = m / (n + m). If j values
   of `after` exceed the r-th largest of `before`, then at least j of the largest j + r - 1 values
   belong to `after`, which has the probability I_q(j, r). This negative binomial distribution
   bounds the exact negative hypergeometric one.
2. By distance, for few clips, for which ranks do not suffice. The tail of `before` is continued
   beyond its largest value as the power that Hill's estimator finds, 3 standard errors heavier:
   S(z) = S(z_1) (z / z_1)^(-1 / gamma), z from the median (Hill, "A Simple General Approach to
   Inference about the Tail of a Distribution", 1975). The number of values of `after` beyond its
   first, second, third, ... largest is then Poisson distributed. This bounds lighter tails (normal,
   exponential).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FALSE_ALARMS = 1e-3
"""Probability of a false alarm about a stage whose clips are like those of earlier stages."""
_LEVELS = 16  # number of levels of each test
_MIN_TAIL, _MAX_TAIL = 20, 1000  # clips that estimate the exponent of a tail
_MIN_EXPONENT = 0.05  # lower limit: lighter tails count as z^-20
_MOST_BEYOND_LARGEST = 7.0  # -ln 0.001: clips that an equal sample may have there


@dataclass(frozen=True)
class TailExcess:
    """The large values of one sample that are too many in comparison with another sample."""

    count: int
    least: float  # smallest of the values that are counted
    expected: float  # expected number of such values, at most, if both samples were alike
    probability: float  # probability of this many, if both samples were alike


def tail_excess(
    before: NDArray[Any], after: NDArray[Any], limit: float, false_alarms: float = FALSE_ALARMS
) -> TailExcess | None:
    """Compare the upper tails of two samples; None unless that of `after` is far higher.

    `after` is shifted down by `limit` standard deviations of `before` before they are compared.
    """
    from scipy import special  # imported here because it takes a moment, and only curricula need it

    before, after = (each[np.isfinite(each)].astype(np.float64) for each in (before, after))
    n, m = len(before), len(after)
    if not n or not m:
        return None
    kept = min(n, max(2**_LEVELS, _MAX_TAIL + 1))
    # Only the largest values are sorted: samples may have 10^8.
    largest = np.sort(np.partition(before, n - kept)[n - kept :])[::-1]
    kept = min(m, 2**_LEVELS)
    shift = limit * before.std()
    hardest = np.sort(np.partition(after, m - kept)[m - kept :])[::-1] - shift
    alpha = false_alarms / (2 * _LEVELS)
    found: list[TailExcess] = []

    def add(count: int, expected: float, probability: float) -> None:
        if probability < alpha:
            least = float(hardest[count - 1] + shift)
            found.append(TailExcess(count, least, expected, probability))

    for level in range(_LEVELS):
        rank = 2**level
        # A rank beyond the upper 5 % of a sample says nothing about its tail.
        if rank > n // 20 + 1:
            break
        threshold = float(largest[rank - 1])
        count = int(np.searchsorted(-hardest, -threshold))
        if count:
            # I_q(j, r) is the regularised incomplete beta function.
            chance = float(special.betainc(count, rank, m / (n + m)))
            add(count, rank * m / n, chance)
    # Hill's estimator uses the upper 1 %: more would bend towards the body of the distribution.
    size = min(n // 100, _MAX_TAIL)
    tail = largest[: size + 1] - np.median(before)
    if size >= _MIN_TAIL and tail[-1] > 0:
        hill = float(np.log(tail[:-1] / tail[-1]).mean())
        exponent = max(_MIN_EXPONENT, hill * (1 + 3 / math.sqrt(size)))
        for count in range(1, _LEVELS + 1):
            if count > m or hardest[count - 1] <= largest[0]:
                break
            ratio = float((hardest[count - 1] - np.median(before)) / tail[0])
            expected = _MOST_BEYOND_LARGEST * m / n * ratio ** (-1 / exponent)
            add(count, expected, float(special.gammainc(count, expected)))
    return min(found, key=lambda each: each.probability, default=None)
