"""Ticks and their labels, as many as there is room for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axis import Axis as AxesAxis
from matplotlib.axis import XAxis
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullLocator

from ...scene import Axis
from .text import shortened, text_width

__all__ = ["set_ticks"]

NUMERIC = re.compile(r"[-+−0-9.,e%kMG ]*")


def set_ticks(axis: AxesAxis, spec: Axis, length: float) -> None:
    """As many ticks as there is room for on this length, in inches."""
    axis.set_minor_locator(NullLocator())
    across = isinstance(axis, XAxis)
    if spec.ticks is not None:
        _set_given_ticks(axis, spec, length)
        return
    most = int(np.clip(length / (0.75 if across else 0.36), 2, 9))
    spread = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])
    decades = np.log10(spec.high / spec.low) if spec.scale == "log" else 0.0
    if decades < 0.7:
        axis.set_major_locator(spread)
    elif 3 * decades <= most + 1:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=100))
    elif np.floor(np.log10(spec.high)) - np.ceil(np.log10(spec.low)) >= 1:
        axis.set_major_locator(LogLocator(subs=(1,), numticks=most + 1))
    else:
        axis.set_major_locator(spread)
    axis.set_major_formatter(_Numbers(spec.scale == "log"))


def _set_given_ticks(axis: AxesAxis, spec: Axis, length: float) -> None:
    """Words at their values: on a short axis turned, and where there is no room at all, every so many."""
    assert spec.ticks is not None
    figure: Any = axis.axes.figure
    scaled = np.log10 if spec.scale == "log" else np.asarray
    low, high = float(scaled(spec.low)), float(scaled(spec.high))
    ticks = sorted((value, words) for value, words in spec.ticks if spec.low <= value <= spec.high)
    places = [length * (float(scaled(value)) - low) / (high - low) for value, _ in ticks]
    width, height = figure.get_size_inches()
    turned = False
    words = [shortened(figure, text, 0.3 * width, 9) for _, text in ticks]
    needed = [0.15] * len(words)
    if isinstance(axis, XAxis):
        needed = [text_width(figure, text, 9) + 0.08 for text in words]
        turned = not _fit(places, needed) and not all(NUMERIC.fullmatch(text) for text in words)
        if turned:
            words = [shortened(figure, text, 0.35 * height, 9) for _, text in ticks]
            needed = [0.24] * len(words)
    every = next((n for n in range(1, len(ticks) + 1) if _fit(places[::n], needed[::n])), 1)
    axis.set_ticks([value for value, _ in ticks][::every], labels=words[::every])
    for label in axis.get_ticklabels():
        label.set_parse_math(False)
        if isinstance(axis, XAxis):
            turn = (
                {"rotation": 40, "ha": "right", "va": "center"} if turned else {"rotation": 0, "ha": "center", "va": "top"}
            )
            label.set(rotation_mode="anchor" if turned else "default", **turn)


def _fit(places: Sequence[float], needed: Sequence[float]) -> bool:
    """Whether words of these lengths, with their middles at these rising places, leave each other room."""
    ends = list(zip(places, needed, strict=True))
    return all(b - a >= (one + other) / 2 for (a, one), (b, other) in pairwise(ends))


class _Numbers(Formatter):
    """Numbers at ticks, in few letters: with powers of ten if one of them would be long without."""

    def __init__(self, log: bool) -> None:
        self._log = log  # there each tick is of another size, and each is written by itself

    def __call__(self, value: float, pos: Any = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Any) -> list[str]:
        words = [f"{value:.10g}" for value in values]
        if any("e" in word or len(word.lstrip("-")) > 6 for word in words):
            parts = [f"{value:.9e}".partition("e") for value in values]
            short = [f"{float(mantissa):.10g}e{int(power)}" if float(mantissa) else "0" for mantissa, _, power in parts]
            words = [a if self._log and "e" not in a and len(a) <= 6 else b for a, b in zip(words, short, strict=True)]
        return [word.replace("-", "−") for word in words]
