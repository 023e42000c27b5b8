"""A figure of losses and learning rates given as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.messages import there_are
from ...trainer.validation import nonempty, number
from ..record import Curve, Series
from ..scene import Axis, Scene
from .series import middle_steps, over_steps, rate_panel, scalar_panel, smoothing_of

if TYPE_CHECKING:
    from ..render.matplotlib import Figure

__all__ = ["plot_training"]


def plot_training(
    losses: Mapping[str, Sequence[float]],
    learning_rates: Mapping[str, Sequence[float]] | None = None,
    notes: Mapping[str, str] | None = None,
    *,
    title: str = "",
    xlabel: str = "update",
    ylabel: str = "training loss",
    smoothing: int | None = None,
) -> Figure:
    """Draw the loss curves of several runs on a log scale, above their learning rates, from plain numbers.

    A curve is drawn twice: faint as given, and strong as the mean of the last n updates, whose number the legend names.
    Before update n it is the mean of all so far. `LossView` draws recorded runs in the same way.

    Args:
        losses: a dict from the name of a run to its loss at every update, [n_updates]. Crosses mark values that are not
            finite. Values that are not above 0 leave gaps; if no value is above 0, the scale is linear.
        learning_rates: a dict from the name of a run to its learning rate at every update, for some or all of the runs; None
            draws none.
        notes: a dict from the name of a run to a text below the picture.
        title: the title; empty for none.
        xlabel, ylabel: the labels of the horizontal axis and of the loss axis.
        smoothing: the number of updates to average, >= 1; 1 draws no average. None is a twentieth of the longest run.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: `losses` or a run in it is empty, `learning_rates` or `notes` has a name that `losses` lacks, the numbers
            of rates and losses of a run differ, or `smoothing` is below 1.

    Example:
        >>> from tristep import viz
        >>> figure = viz.plot_training({"sgd": [2.3, 1.1, 0.7]}, {"sgd": [0.1, 0.1, 0.05]})
        >>> figure.savefig("losses.png")  # doctest: +SKIP
    """
    curves = _curves("losses", losses)
    rates = _curves("learning_rates", learning_rates) if learning_rates else {}
    for argument, by_name in (("learning_rates", rates), ("notes", notes or {})):
        if unknown := [name for name in by_name if name not in curves]:
            raise ValueError(f"{argument} has {unknown[0]!r}: losses has no such run.{there_are(unknown[0], curves)}")
    for name in rates:
        if len(learning_rates[name]) != len(losses[name]):  # type: ignore[index]
            raise ValueError(
                f"learning_rates[{name!r}] has {len(learning_rates[name])} values: "  # type: ignore[index]
                f"losses has {len(losses[name])}, one an update"
            )
    longest = max(map(len, losses.values()))
    if smoothing is None:
        smoothing = max(longest // 20, 1)
    number("smoothing", smoothing, low=1)
    across = Axis(xlabel, 0, max(longest, 2))
    width = smoothing_of([float(smoothing) if smoothing > 1 else 0.0], 0, "update")
    panels = [scalar_panel("loss", over_steps(curves), across, width, label=ylabel)]
    if rates:
        styles = list(curves)
        drawn = [(name, curve, middle_steps(curve), styles.index(name)) for name, curve in rates.items()]
        panels.append(replace(rate_panel(drawn, across), row=1))
    texts = [f"{name}: {words}" for name, words in (notes or {}).items()]
    heights = (3.4, 1.2) if rates else ()
    scene = Scene(panels, title, [width], height=5.4 if rates else 4.4, heights=heights, notes=texts)
    return _drawn(scene, ylabel, losses)


def _curves(argument: str, named: Mapping[str, Sequence[float]]) -> dict[str, Curve]:
    curves = {}
    for name, values in nonempty(argument, named, ": there is nothing to draw").items():
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1 or not array.size:
            raise ValueError(f"{argument}[{name!r}] has the shape {array.shape}: must be one number for each update")
        series = Series()
        series.extend(np.arange(1, len(array) + 1), array)
        curves[name] = series.curve()
    return curves


def _drawn(scene: Scene, label: str, losses: Mapping[str, Sequence[float]]) -> Figure:
    """Return the scene as a figure; its alternative text has the last finite value of each curve."""
    values = {name: np.asarray(each, dtype=np.float64) for name, each in losses.items()}
    ends = {name: each[np.isfinite(each)][-1:] for name, each in values.items()}
    from ..render.matplotlib import draw

    figure = draw(scene)
    words = ", ".join(f"{name} {end[0]:.4g}" if end.size else f"{name} never finite" for name, end in ends.items())
    figure.alt = ". ".join(filter(None, [scene.alt, f"{label} at the end: {words}"]))
    return figure
