"""Ticks and their labels, as many as fit on an axis."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axis import Axis as AxesAxis
from matplotlib.axis import XAxis
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullLocator

from ...scene import Axis
from .text import legible, put, shortened, text_width

__all__ = ["set_ticks"]

TURN = 40  # the rotation of labels that are too long, in degrees
NUMERIC = re.compile(r"[-+−0-9.,e%kMG ]*")


def set_ticks(axis: AxesAxis, spec: Axis, length: float) -> None:
    """Set as many ticks on a matplotlib axis as fit on its length, in inches."""
    axis.set_minor_locator(NullLocator())
    if spec.ticks is not None:
        _set_given_ticks(axis, spec, length)
        return
    axis.set_major_locator(_Round(steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(_Numbers())


class _Round(MaxNLocator):
    """Round numbers, as many as the axis has room for; on a logarithmic axis powers of ten, or 1, 2 and 5 times these."""

    # matplotlib's `LogLocator` labels powers of ten alone: an axis over less than a decade would have one number or none.

    def tick_values(self, low: float, high: float) -> Any:
        axis: Any = self.axis
        most = max(2, min(axis.get_tick_space() // (2 if isinstance(axis, XAxis) else 1), 9))
        if axis.get_scale() != "log" or not 0 < low < high:
            self.set_params(nbins=most)
            return super().tick_values(low, high)
        space = np.log10(high / low) / (2 * most)  # between two labels, in decades
        if np.floor(np.log10(high)) - np.ceil(np.log10(low)) >= 3:
            return LogLocator(numticks=most + 1).tick_values(low, high)
        kept = _apart([value for k in (1, 5, 2) for value in _times(k, low, high)], space)
        if len(kept) > 1:
            return np.array(kept)
        self.set_params(nbins=most)
        inside = [value for value in super().tick_values(low, high) if low <= value <= high]
        kept = _apart(inside, space)
        return np.array(kept if len(kept) > 1 else [*inside[:1], *inside[-1:]])


def _times(k: int, low: float, high: float) -> list[float]:
    """Return the products of `k` and powers of ten from `low` to `high`."""
    powers = range(math.ceil(math.log10(low / k) - 1e-9), math.floor(math.log10(high / k) + 1e-9) + 1)
    return [float(f"{k}e{power}") for power in powers]


def _apart(values: Sequence[float], space: float) -> list[float]:
    """Return the values that are at least so many decades from each other, the first ones first, in order."""
    kept: list[float] = []
    for value in values:
        if all(abs(math.log10(value / other)) >= space for other in kept):
            kept.append(value)
    return sorted(kept)


def _set_given_ticks(axis: AxesAxis, spec: Axis, length: float) -> None:
    """Set the axis's own labels at their values: rotated on a short axis, and thinned out if they still do not fit."""
    assert spec.ticks is not None
    figure: Any = axis.axes.figure
    across = isinstance(axis, XAxis)
    scaled = np.log10 if spec.scale == "log" else np.asarray
    low, high = float(scaled(spec.low)), float(scaled(spec.high))
    ticks = sorted((value, words) for value, words in spec.ticks if spec.low <= value <= spec.high)
    places = [length * (float(scaled(value)) - low) / (high - low) for value, _ in ticks]
    width, height = figure.get_size_inches()
    cell = axis.axes.get_subplotspec()
    room = 0.3 * width * (1.0 if across or cell is None else cell.get_position(figure).width)
    words = [shortened(figure, text, room, 9) for _, text in ticks]
    needed = [0.15] * len(words)
    turned = False
    if across:
        needed = [text_width(figure, text, 9) + 0.08 for text in words]
        turned = not _fit(places, needed) and not all(NUMERIC.fullmatch(text) for text in words)
        if turned:
            words = [shortened(figure, text, 0.35 * height, 9) for _, text in ticks]
            needed = [0.24] * len(words)
    every = next((n for n in range(1, len(ticks) + 1) if _fit(places[::n], needed[::n])), 1)
    axis.set_ticks([value for value, _ in ticks][::every], labels=list(map(legible, words[::every])))
    for label, text in zip(axis.get_ticklabels(), words[::every], strict=True):
        put(label, text)
        if across:
            label.set(rotation=TURN if turned else 0, rotation_mode="anchor" if turned else "default")
            label.set(ha="right" if turned else "center", va="center" if turned else "top")


def _fit(places: Sequence[float], needed: Sequence[float]) -> bool:
    """Return whether labels of these lengths, centred at these increasing positions, do not overlap."""
    ends = list(zip(places, needed, strict=True))
    return all(b - a >= (one + other) / 2 for (a, one), (b, other) in pairwise(ends))


class _Numbers(Formatter):
    """A formatter of short tick labels, all with powers of ten if one would be long without them."""

    def __call__(self, value: float, pos: Any = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Any) -> list[str]:
        words = [f"{value:.10g}" for value in values]
        if any("e" in word or len(word.lstrip("-")) > 6 for word in words):
            parts = [f"{value:.9e}".partition("e") for value in values]
            words = [f"{float(mantissa):.10g}e{int(power)}" if float(mantissa) else "0" for mantissa, _, power in parts]
        return [word.replace("-", "−") for word in words]
