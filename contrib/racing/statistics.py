"""Bootstrap intervals of means and ratios over few seeds."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

RESAMPLES = 9999  # of the bootstrap, each drawn with replacement


def ratio_interval(ours: Any, theirs: Any, level: float = 0.95) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios `ours / theirs`, and the lower and upper end of its interval.

    Args:
        ours, theirs: [n], above 0 and finite; numbers at the same place are from the same seed.
        level: the confidence level, in (0, 1).
    """
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))
    low, high = mean_interval(logs, level)
    return math.exp(logs.mean()), math.exp(low), math.exp(high)


def mean_interval(values: Any, level: float = 0.95) -> tuple[float, float]:
    """Return the ends of the expanded percentile interval of a mean, by the bootstrap; NaN for fewer than 2 values.

    The percentiles of means of resampled values give intervals that are too short: those at 95 % hold the mean of 5 normal
    values in 85 % of cases. So percentiles further out are taken, which hold it in 92 %; of 10 values in 94 %, but of 3,
    which are resampled in few ways, in 75 %.

    Args:
        values: [n].
        level: the share of intervals that are to hold the true mean, in (0, 1).

    Source: Hesterberg (2015), "What Teachers Should Know About the Bootstrap", The American Statistician 69: tails of
    size Phi(-sqrt(n / (n - 1)) t), with Student's quantile t of n - 1 degrees of freedom.
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile((1 + level) / 2, n - 1))
    drawn = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    low, high = np.quantile(values[drawn].mean(axis=1), [tail, 1 - tail])
    return float(low), float(high)


def t_quantile(p: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for p in [0.5, 1) and an integer number of degrees of freedom.

    Source: Abramowitz & Stegun (1964), Handbook of Mathematical Functions, 26.7.3 and 26.7.4, solved by bisection.
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _share_within(middle, freedom) < 2 * p - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    """Return the probability of Student's t distribution between -t and t = sqrt(freedom) tan(angle)."""
    term, total = (math.cos(angle) if freedom % 2 else 1.0), 0.0
    for k in range(1 if freedom % 2 else 0, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if freedom % 2 else total
