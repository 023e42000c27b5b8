"""Smooth recorded values, and take their quantiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["quantiles", "smoothed"]

LARGEST = 1e38  # larger values count as non-finite
WINDOW, STRAY = 15, np.log(8.0)  # a logarithm this far from the median of its window says nothing about the trend


def smoothed(x: np.ndarray, values: np.ndarray, widths: Sequence[float], scale: str = "linear") -> np.ndarray:
    """Return smoothed values: a line is fitted to the values around each point, and evaluated at the point.

    Where the window is symmetric, this is a weighted mean. At the ends, where a mean would lag behind, the line follows the
    trend, so values on a straight line never change. Weights fall as 1 - u**2 from 1 at the point to 0 at the edge of the
    window, half a width away. Non-finite values are ignored, and are NaN in the result.

    Args:
        x: positions [n], increasing.
        values: [n].
        widths: widths of the windows in units of `x`, each >= 0. A value with no other in its window stays as it is.
        scale: "linear", or "log" to fit lines to the logarithms. With "log", values <= 0 count as non-finite, and a value 8
            times above or below the median of the 15 around it is replaced by that median before the fit; such a value is,
            for example, the loss of an epoch's last batch, if that has few samples.

    Returns:
        Smoothed values, float64 [n_widths, n].

    Source: local linear regression, Fan and Gijbels (1996), "Local Polynomial Modelling and Its Applications".
    """
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    n = len(x)
    finite = np.abs(values) < LARGEST
    if scale == "log":
        finite &= values > 0
    result = np.where(finite, values, np.nan)[None].repeat(len(widths), axis=0)
    filled = np.zeros(n)
    filled[finite] = values[finite]
    if scale == "log" and finite.any():
        filled[finite] = _without_strays(np.log(values[finite]))
    for i, width in enumerate(widths):
        half = width / 2
        s0, s1, s2, t0, t1 = finite.astype(np.float64), *np.zeros((4, n))
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
        det = s0 * s2 - s1 * s1
        moved = np.divide(s2 * t0 - s1 * t1, det, out=np.zeros(n), where=det > 1e-9 * s0 * s0)
        averaged = np.exp(filled + moved) if scale == "log" else filled + moved
        result[i] = np.where(s0 > 1, averaged, result[i])
    return result


def _without_strays(logs: np.ndarray) -> np.ndarray:
    padded = np.pad(logs, WINDOW // 2, constant_values=np.nan)
    middle = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, WINDOW), axis=1)
    return np.where(np.abs(logs - middle) > STRAY, middle, logs)


def quantiles(values: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return quantiles of each row, without interpolation and without NaN.

    Args:
        values: [n, m].
        shares: which quantiles, in [0, 1]; 0.5 is the median.

    Returns:
        [n_shares, n], NaN for rows without a number.
    """
    ordered = np.sort(values, axis=1)  # NaN comes last
    number = (~np.isnan(values)).sum(axis=1)
    places = np.rint(np.multiply.outer(np.asarray(shares), np.maximum(number - 1, 0))).astype(np.int64)
    return ordered[np.arange(len(values)), places] if values.shape[1] else np.full((len(shares), len(values)), np.nan)
