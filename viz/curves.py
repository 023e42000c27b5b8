"""Curves over the updates of a run: losses with the learning rates beside them, and schedules by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch

from .style import GRID, INK, QUIET, Figure, line_style, quieten

__all__ = ["plot_schedules", "plot_training"]


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
    """Loss curves of several runs on a log scale, and beside them each run's learning rate.

    A curve is drawn twice: faint as it is, and smoothed. Labels stand at the right in the order of the curves' ends.

    Args:
        losses: by the run's name, its loss at every update. Values that are not finite leave gaps.
        learning_rates: by name, the rate of every update, for some or all of the runs; None leaves them out.
        notes: by name, words to be put below it.
        title: what stands above; empty for nothing.
        xlabel, ylabel: what the axes say.
        smoothing: the width of the average in updates, >= 1; 1 draws the losses as they are. None takes a fiftieth of the
            longest run.

    Raises:
        ValueError: there is no run, a run has no loss, or names or lengths do not go together.

    Example:
        >>> from tristep import viz
        >>> figure = viz.plot_training({"sgd": [2.3, 1.1, 0.7]}, {"sgd": [0.1, 0.1, 0.05]})
        >>> figure.savefig("losses.png")  # doctest: +SKIP
    """
    curves = _checked_curves("losses", losses)
    rates = _checked_curves("learning_rates", learning_rates) if learning_rates else {}
    for argument, given in (("learning_rates", rates), ("notes", notes or {})):
        if unknown := [name for name in given if name not in curves]:
            raise ValueError(f"{argument} has {unknown[0]!r}: losses has no such run, only {', '.join(map(repr, curves))}")
    for name, rate in rates.items():
        if len(rate) != len(curves[name]):
            raise ValueError(
                f"learning_rates[{name!r}] has {len(rate)} values: losses has {len(curves[name])}, one an update"
            )
    longest = max(map(len, curves.values()))
    if smoothing is None:
        smoothing = min(max(longest // 50, 1), MOST_SMOOTHING)
    if not 1 <= smoothing <= MOST_SMOOTHING:
        raise ValueError(f"smoothing={smoothing!r}: must be from 1 to {MOST_SMOOTHING} updates")

    figure = Figure(10, max(5.2, 1.2 + 0.58 * len(curves)))
    left, bottom, right, top = 0.075, 0.11, 0.62, 0.87 if title else 0.93
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    ends = {}
    for i, (name, curve) in enumerate(curves.items()):
        updates = np.arange(1, len(curve) + 1)
        smoothed = _smoothed(curve, smoothing)
        style = line_style(i)
        if smoothing > 1:
            axes.plot(updates, curve, color=style["color"], linewidth=0.5, alpha=0.22, label=f"_{name}, raw")
        axes.plot(updates, smoothed, linewidth=1.8, label=name, **style)
        ends[name] = _end(updates, smoothed)
    _set_loss_limits(axes)
    axes.set(xlim=(0, longest), xlabel=xlabel, ylabel=ylabel)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    quieten(axes)

    # The labels, highest curve first; each has a row of its own, with the learning rate at its end.
    order = sorted(curves, key=lambda name: -ends[name][1])
    height = (top - bottom) / len(order)
    for row, name in enumerate(order):
        style = line_style(list(curves).index(name))
        middle = top - (row + 0.5) * height
        _label(figure, axes, ends[name], (right + 0.03, middle), name, (notes or {}).get(name, ""), style)
        if name in rates:
            small = figure.add_axes((0.81, middle - 0.3 * height, 0.13, 0.6 * height))
            _draw_small_rate(small, rates[name], longest, style["color"])
    if rates:
        figure.text(0.81, top + 0.01, "learning rate", color=INK, fontsize=10, va="bottom")
    if title:
        figure.text(0.012, 0.965, title, color=INK, fontsize=13, fontweight="bold", va="top")
    return figure


def plot_schedules(
    schedules: Mapping[str, Callable[[int], float] | Sequence[float]],
    n_updates: int | None = None,
    *,
    title: str = "",
    xlabel: str = "update",
    ylabel: str = "learning rate",
) -> Figure:
    """Learning rates over the updates, of schedules as they will be or of runs as they were.

    Args:
        schedules: by name, a callable from the number of updates to a rate, such as those of `tristep.lr_scheduler`, which
            is asked for the updates 1 to `n_updates`; or the rates of updates 1, 2, ... themselves.
        n_updates: how far to draw, >= 1; needed where a callable is given.
        title: what stands above; empty for nothing.
        xlabel, ylabel: what the axes say.

    Raises:
        ValueError: there is no schedule, or none of its values, or `n_updates` is missing or too small.

    Example:
        >>> from tristep import lr_scheduler, viz
        >>> warm = lr_scheduler.CosineScheduler(max_update=100, base_lr=0.5, warmup_steps=10)
        >>> figure = viz.plot_schedules({"cosine": warm}, n_updates=120)
    """
    if n_updates is not None and n_updates < 1:
        raise ValueError(f"n_updates={n_updates!r}: must be 1 or more")
    values: dict[str, Any] = {}
    for name, schedule in schedules.items():
        if not callable(schedule):
            values[name] = schedule if n_updates is None else schedule[:n_updates]
        elif n_updates is None:
            raise ValueError(f"n_updates is missing: schedules[{name!r}] is a callable, so say how far to draw it")
        else:
            values[name] = [schedule(n) for n in range(1, n_updates + 1)]
    curves = _checked_curves("schedules", values)
    longest = max(map(len, curves.values()))

    figure = Figure(8, 3.6)
    left, bottom, right, top = 0.09, 0.15, 0.78, 0.86 if title else 0.94
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    ends = {}
    for i, (name, curve) in enumerate(curves.items()):
        updates = np.arange(1, len(curve) + 1)
        axes.plot(updates, curve, linewidth=1.8, label=name, **line_style(i))
        ends[name] = _end(updates, curve)
    largest = max((np.nanmax(curve) for curve in curves.values() if np.isfinite(curve).any()), default=0.0)
    axes.set(xlim=(0, longest), ylim=(0, 1.06 * largest if largest > 0 else 1), xlabel=xlabel, ylabel=ylabel)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    quieten(axes)

    to_figure = axes.transData + figure.transFigure.inverted()
    order = sorted(curves, key=lambda name: ends[name][1])
    wanted = [float(to_figure.transform(ends[name])[1]) for name in order]
    for name, middle in zip(order, _spread(wanted, 0.075, bottom, top), strict=True):
        _label(figure, axes, ends[name], (right + 0.03, middle), name, "", line_style(list(curves).index(name)))
    if title:
        figure.text(0.015, 0.96, title, color=INK, fontsize=12, fontweight="bold", va="top")
    return figure


MOST_SMOOTHING = 500  # updates; the average's cost grows with its width


def _checked_curves(argument: str, curves: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    if not curves:
        raise ValueError(f"{argument} is empty: there is nothing to draw")
    result = {}
    for name, values in curves.items():
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1 or not array.size:
            raise ValueError(f"{argument}[{name!r}] has the shape {array.shape}: must be one number for each update")
        result[name] = array
    return result


def _smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """The average around each value, weighted by a bell of this standard deviation; gaps stay gaps and count for nothing."""
    if width <= 1:
        return values
    reach = 3 * width
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    there = np.isfinite(values)
    total = np.convolve(np.where(there, values, 0.0), bell)[reach : reach + len(values)]
    weight = np.convolve(there.astype(float), bell)[reach : reach + len(values)]
    return np.divide(total, weight, out=np.full(len(values), np.nan), where=there)


def _end(updates: np.ndarray, curve: np.ndarray) -> tuple[float, float]:
    """Where a curve ends: its last finite point; at the top if it has none."""
    there = np.flatnonzero(np.isfinite(curve))
    return (float(updates[there[-1]]), float(curve[there[-1]])) if there.size else (0.0, np.inf)


def _set_loss_limits(axes: Axes) -> None:
    """A log scale over the smoothed curves; raw values far below, of some lucky batch, may leave the picture."""
    smoothed = [np.asarray(line.get_ydata()) for line in axes.lines if not str(line.get_label()).startswith("_")]
    values = np.concatenate(smoothed)
    values = values[np.isfinite(values) & (values > 0)]
    if values.size:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(values.min() / 2, values.max() * 1.5)


def _label(
    figure: Figure,
    axes: Axes,
    end: tuple[float, float],
    place: tuple[float, float],
    name: str,
    note: str,
    style: Mapping[str, Any],
) -> None:
    """A piece of a run's line and its name, at a place in the figure, with a thin line from the end of its curve."""
    x, y = place
    if np.isfinite(end[1]):
        leader = ConnectionPatch(
            end, place, axes.transData, figure.transFigure, color=style["color"], linewidth=0.7, alpha=0.6
        )
        figure.add_artist(leader)
    figure.add_artist(Line2D([x, x + 0.028], [y, y], linewidth=1.8, label=name, **style))
    x, lift = x + 0.036, 0.004 if note else 0.0
    align = "bottom" if note else "center_baseline"
    figure.text(x, y + lift, name, color=style["color"], fontsize=10.5, fontweight="bold", va=align)
    if note:
        figure.text(x, y - lift, note, color=QUIET, fontsize=8.5, va="top")


def _draw_small_rate(axes: Axes, rates: np.ndarray, longest: int, colour: str) -> None:
    updates = np.arange(1, len(rates) + 1)
    axes.fill_between(updates, rates, color=colour, alpha=0.15, linewidth=0)
    axes.plot(updates, rates, color=colour, linewidth=1.4)
    peak = float(np.nanmax(rates)) if np.isfinite(rates).any() else 0.0
    axes.set(xlim=(0, longest), ylim=(0, 1.15 * peak if peak > 0 else 1))
    axes.yaxis.tick_right()
    axes.set_yticks([0, peak] if peak > 0 else [0], labels=["0", f"{peak:g}"] if peak > 0 else ["0"])
    axes.set_xticks([])
    quieten(axes, size=8)
    axes.spines["left"].set_visible(False)


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising positions moved apart to at least `gap`, inside [low, high] where there is room."""
    places: list[float] = []
    for position in wanted:
        places.append(max(position, places[-1] + gap) if places else max(position, low))
    limit = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places
