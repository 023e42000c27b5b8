"""Averages and quantiles of recorded values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["quantiles", "smoothed"]

LARGEST = 1e38  # what is beyond counts as not finite
REACH = 7  # widths; what is older weighs less than a thousandth


def smoothed(values: np.ndarray, widths: Sequence[float], scale: str = "linear") -> np.ndarray:
    """Exponentially weighted averages of each value and those before it; nothing that comes later changes them.

    Non-finite values become NaN, and are ignored.

    Args:
        values: [n].
        widths: how many values back the weight is 1 / e, each >= 0; 0 leaves the values as they are.
        scale: of the axis that they are drawn on: "linear", or "log" for geometric means, which a spike of one step does not
            turn into a hill; what is not above 0 then counts as not finite.

    Returns:
        float64 [n_widths, n].
    """
    values = np.asarray(values, dtype=np.float64)
    there = np.abs(values) < LARGEST
    if scale == "log":
        there &= values > 0
    result = np.where(there, values, np.nan)[None].repeat(len(widths), axis=0)
    filled = np.zeros(len(values))
    filled[there] = np.log(values[there]) if scale == "log" else values[there]
    for i, width in enumerate(widths):
        # Not by way of frequencies: a loss of 1e30 would reach all others by its rounding.
        reach = min(math.ceil(REACH * width), len(values))
        if reach > 0:
            weights = np.exp(-np.arange(reach) / width)
            total, weight = (np.convolve(each, weights)[: len(values)] for each in (filled, there.astype(float)))
            averages = np.divide(total, weight, out=np.full(len(values), np.nan), where=there)
            result[i] = np.exp(averages) if scale == "log" else averages
    return result


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
