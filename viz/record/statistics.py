"""Average recorded values over steps, and take their quantiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .series import Curve

__all__ = ["quantiles", "trailing_means"]

LARGEST = 1e38  # larger values count as non-finite


def trailing_means(curve: Curve, widths: Sequence[float]) -> np.ndarray:
    """Return what a picture calls "average of n steps", float64 [n_widths, n]: the mean of a scalar's last n steps.

    At each point of the curve it is the mean of the values recorded in the last n steps, its own among them: of all values
    so far before step n, and of its own alone where no other is as near. A block that begins before these steps counts with
    its share in them. Non-finite values are ignored, and NaN in the result. Widths are in steps, each >= 0.
    """
    first, last, values = (np.asarray(each, dtype=np.float64) for each in (curve.first, curve.last, curve.mean))
    n, points = len(last), np.arange(len(last))
    finite = np.abs(values) < LARGEST
    # How many values a point has: all blocks as many, but the last one, which may have begun only now.
    number = (last - first) / (np.median(first[1:] - last[:-1]) if n > 1 else 1.0) + 1
    number = np.minimum(number, np.median(number)) - np.asarray(curve.nonfinite)
    weights = np.where(finite, np.maximum(number, 1.0), 0.0)
    filled = weights * np.where(finite, values, 0.0)
    result = np.full((len(widths), n), np.nan)
    for i, width in enumerate(widths):
        begin = last - width
        oldest = np.minimum(np.searchsorted(last, begin, side="right"), points)
        share = np.minimum((last[oldest] - begin) / (last[oldest] - first[oldest] + 1), 1.0)
        share[oldest == points] = 1.0
        total, weight = (share * each[oldest] + _sums(each, oldest + 1, points + 1) for each in (filled, weights))
        result[i, finite] = total[finite] / weight[finite]
    return result


def _sums(values: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the sums of values[start:stop], each on its own, so that a huge value rounds only the sums that have it."""
    sums = np.add.reduceat(np.append(values, 0.0), np.stack([start, stop], axis=1).ravel())[::2]
    return np.where(start < stop, sums, 0.0)


def quantiles(values: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return quantiles [n_shares, n] of each row of [n, m], without interpolation and without NaN.

    `shares` are in [0, 1]; 0.5 is the median. Rows without a number have NaN.
    """
    ordered = np.sort(values, axis=1)  # NaN comes last
    number = (~np.isnan(values)).sum(axis=1)
    places = np.rint(np.multiply.outer(np.asarray(shares), np.maximum(number - 1, 0))).astype(np.int64)
    return ordered[np.arange(len(values)), places] if values.shape[1] else np.full((len(shares), len(values)), np.nan)
