"""Ticks and their labels, as many as fit on an axis."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axis import Axis as AxesAxis
from matplotlib.axis import XAxis
from matplotlib.ticker import Formatter, Locator, LogLocator, MaxNLocator, NullLocator

from ...scene import Axis
from .figure import Figure
from .text import legible, put, shortened, text_width

__all__ = ["TURN", "Ticks", "choose_ticks", "set_ticks"]

TURN = math.radians(40)  # the rotation of labels that are too long

NUMERIC = re.compile(r"[-+−0-9.,e%kMG ]*")


class Ticks(NamedTuple):
    """Ticks of an axis: their values, their labels, and whether the labels are rotated."""

    values: list[float]
    words: list[str]
    turned: bool = False


def set_ticks(axis: AxesAxis, spec: Axis, length: float) -> None:
    """Set as many ticks on a matplotlib axis as fit on its length, in inches."""
    axis.set_minor_locator(NullLocator())
    across = isinstance(axis, XAxis)
    if spec.ticks is not None:
        figure: Any = axis.axes.figure
        _set_given_ticks(axis, _given_ticks(figure, spec, length, across))
        return
    axis.set_major_locator(_locator(spec, length, across))
    axis.set_major_formatter(_Numbers())


def choose_ticks(figure: Figure, spec: Axis, length: float, across: bool) -> Ticks:
    """Return the ticks that `set_ticks` sets on an axis."""
    if spec.ticks is not None:
        return _given_ticks(figure, spec, length, across)
    reach = 1e-9 * (spec.high - spec.low)
    values = [float(value) for value in _locator(spec, length, across).tick_values(spec.low, spec.high)]
    values = [value for value in values if spec.low - reach <= value <= spec.high + reach]
    return Ticks(values, _Numbers().format_ticks(values))


def _locator(spec: Axis, length: float, across: bool) -> Locator:
    most = int(np.clip(length / (0.75 if across else 0.36), 2, 9))
    spread = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])
    decades = np.log10(spec.high / spec.low) if spec.scale == "log" else 0.0
    if decades >= 0.7 and 3 * decades <= most + 1:
        return LogLocator(subs=(1, 2, 5), numticks=100)
    if decades >= 0.7 and np.floor(np.log10(spec.high)) - np.ceil(np.log10(spec.low)) >= 1:
        return LogLocator(subs=(1,), numticks=most + 1)
    return spread


def _given_ticks(figure: Figure, spec: Axis, length: float, across: bool) -> Ticks:
    """Return the axis's own labels at their values: rotated on a short axis, and thinned out if they still do not fit."""
    assert spec.ticks is not None
    scaled = np.log10 if spec.scale == "log" else np.asarray
    low, high = float(scaled(spec.low)), float(scaled(spec.high))
    ticks = sorted((value, words) for value, words in spec.ticks if spec.low <= value <= spec.high)
    places = [length * (float(scaled(value)) - low) / (high - low) for value, _ in ticks]
    width, height = figure.get_size_inches()
    turned = False
    words = [shortened(figure, text, 0.3 * width, 9) for _, text in ticks]
    needed = [0.15] * len(words)
    if across:
        needed = [text_width(figure, text, 9) + 0.08 for text in words]
        turned = not _fit(places, needed) and not all(NUMERIC.fullmatch(text) for text in words)
        if turned:
            words = [shortened(figure, text, 0.35 * height, 9) for _, text in ticks]
            needed = [0.24] * len(words)
    every = next((n for n in range(1, len(ticks) + 1) if _fit(places[::n], needed[::n])), 1)
    return Ticks([float(value) for value, _ in ticks][::every], words[::every], turned)


def _set_given_ticks(axis: AxesAxis, ticks: Ticks) -> None:
    axis.set_ticks(ticks.values, labels=list(map(legible, ticks.words)))
    for label, words in zip(axis.get_ticklabels(), ticks.words, strict=True):
        put(label, words)
        if isinstance(axis, XAxis):
            turn = (
                {"rotation": math.degrees(TURN), "ha": "right", "va": "center"}
                if ticks.turned
                else {"rotation": 0, "ha": "center", "va": "top"}
            )
            label.set(rotation_mode="anchor" if ticks.turned else "default", **turn)


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
