"""Averages and quantiles of recorded values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["quantiles", "smoothed"]

LARGEST = 1e38  # what is beyond counts as not finite
AROUND, STRAY = 15, np.log(8.0)  # a logarithm this far from the median of so many around it tells nothing of the trend


def smoothed(x: np.ndarray, values: np.ndarray, widths: Sequence[float], scale: str = "linear") -> np.ndarray:
    """Local averages: at each point a straight line is fitted to the values around it, and read there.

    With as much on one side as on the other that is their weighted mean. At the ends, where a mean would lag behind, the
    line follows the trend: values on a straight line stay where they are, everywhere. Weights fall as 1 - u**2 from the
    point to the edge of the window, half a width away. Non-finite values become NaN, and are ignored.

    Args:
        x: [n], where the values are, increasing.
        values: [n].
        widths: of the windows, in units of `x`, each >= 0; what reaches no other value leaves the values as they are.
        scale: of the axis that they are drawn on: "linear", or "log" for lines through the logarithms; what is not above 0
            then counts as not finite, and one value 8 times above or below the median of the 15 around it, such as the loss
            of a last batch of a few samples, for that median.

    Returns:
        float64 [n_widths, n].

    Source: local linear regression, Fan and Gijbels (1996), "Local Polynomial Modelling and Its Applications".
    """
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    n = len(x)
    there = np.abs(values) < LARGEST
    if scale == "log":
        there &= values > 0
    result = np.where(there, values, np.nan)[None].repeat(len(widths), axis=0)
    filled = np.zeros(n)
    filled[there] = values[there]
    if scale == "log" and there.any():
        filled[there] = _without_strays(np.log(values[there]))
    for i, width in enumerate(widths):
        half = width / 2
        s0, s1, s2, t0, t1 = there.astype(np.float64), *np.zeros((4, n))
        for d in range(1, n):
            u = (x[d:] - x[:-d]) / half if half else np.ones(0)
            if not (u < 1).any():
                break
            weight = np.maximum(1 - u * u, 0.0) * (there[d:] & there[:-d])
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
    padded = np.pad(logs, AROUND // 2, constant_values=np.nan)
    middle = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, AROUND), axis=1)
    return np.where(np.abs(logs - middle) > STRAY, middle, logs)


def quantiles(values: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Of each row's values that are not NaN the one that this share of them is below; NaN where there is none.

    Args:
        values: [n, m].
        shares: in [0, 1].

    Returns:
        [n_shares, n].
    """
    ordered = np.sort(values, axis=1)  # NaN comes last
    number = (~np.isnan(values)).sum(axis=1)
    places = np.rint(np.multiply.outer(np.asarray(shares), np.maximum(number - 1, 0))).astype(np.int64)
    return ordered[np.arange(len(values)), places] if values.shape[1] else np.full((len(shares), len(values)), np.nan)
