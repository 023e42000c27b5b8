"""Smooth recorded values, and take their quantiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["quantiles", "smoothed"]

LARGEST = 1e38  # larger values count as non-finite


def smoothed(x: np.ndarray, values: np.ndarray, widths: Sequence[float]) -> np.ndarray:
    """Return moving averages [n_widths, n]: weighted means of the values [n] around each point.

    Weights fall as 1 - u**2 from 1 at the point to 0 at the edge of the window, half a width away. At the ends, where a mean
    would lag behind, a line is fitted to the values and evaluated at the point, so values on a straight line never change;
    if that is not above 0 where the mean is, as for losses that fall to 0, the value itself is taken, or for one of 0 the
    smallest positive value in the window. Non-finite values are ignored, and are NaN in the result. A value with no other in
    its window stays as it is.

    `x` [n] increases; widths are in units of `x`, each >= 0.

    Source: local linear regression, Fan and Gijbels (1996), "Local Polynomial Modelling and Its Applications".
    """
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    n = len(x)
    finite = np.abs(values) < LARGEST
    result = np.where(finite, values, np.nan)[None].repeat(len(widths), axis=0)
    filled = np.where(finite, values, 0.0)
    for i, width in enumerate(widths):
        half = width / 2
        s0, s1, s2, t0, t1 = finite.astype(np.float64), *np.zeros((4, n))
        positive = np.where(filled > 0, filled, np.inf)
        least = positive.copy()
        for d in range(1, n):
            u = (x[d:] - x[:-d]) / half if half else np.ones(0)
            if not (u < 1).any():
                break
            weight = np.maximum(1 - u * u, 0.0) * (finite[d:] & finite[:-d])
            rise = weight * (filled[d:] - filled[:-d])
            first, second, slope = weight * u, weight * u * u, rise * u
            for total, one, sign in ((s0, weight, 1), (s1, first, -1), (s2, second, 1), (t0, rise, -1), (t1, slope, 1)):
                total[:-d] += one
                total[d:] += sign * one
            near = weight > 0
            np.minimum(least[:-d], positive[d:], out=least[:-d], where=near)
            np.minimum(least[d:], positive[:-d], out=least[d:], where=near)
        det = s0 * s2 - s1 * s1
        mean = filled + np.divide(t0, s0, out=np.zeros(n), where=s0 > 0)
        fitted = filled + np.divide(s2 * t0 - s1 * t1, det, out=np.zeros(n), where=det > 1e-9 * s0 * s0)
        instead = np.where(filled > 0, filled, np.minimum(mean, least))
        averaged = np.where((fitted <= 0) & (mean > 0), instead, fitted)
        result[i] = np.where(s0 > 1, averaged, result[i])
    return result


def quantiles(values: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return quantiles [n_shares, n] of each row of [n, m], without interpolation and without NaN.

    `shares` are in [0, 1]; 0.5 is the median. Rows without a number have NaN.
    """
    ordered = np.sort(values, axis=1)  # NaN comes last
    number = (~np.isnan(values)).sum(axis=1)
    places = np.rint(np.multiply.outer(np.asarray(shares), np.maximum(number - 1, 0))).astype(np.int64)
    return ordered[np.arange(len(values)), places] if values.shape[1] else np.full((len(shares), len(values)), np.nan)
