"""Curves over the updates of a run: losses with the learning rates next to them, and schedules by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch
from matplotlib.textpath import TextPath
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..record.statistics import LARGEST, smoothed
from ..style import GRID, INK, QUIET, Figure, line_style, quieten

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
    """Loss curves of several runs on a log scale, next to each run's learning rate.

    A curve is drawn twice: faint as it is, and as the average of a window of updates around each, geometric on the log
    scale, which follows the trend at the ends; the axis says how wide it is. Labels stand at the right in the order of the
    curves' ends.

    Args:
        losses: by the run's name, its loss at every update, [n_updates]. Values that are not finite leave gaps, and so do
            those that are not above 0, unless none is: then the scale is linear.
        learning_rates: by name, the rate of every update, for some or all of the runs; None leaves them out.
        notes: by name, words to be put below it.
        title: what stands above; empty for nothing.
        xlabel, ylabel: what the axes say.
        smoothing: the width of the window in updates, >= 1; 1 draws the losses as they are. None takes a twentieth of the
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
        smoothing = min(max(longest // 20, 1), MOST_SMOOTHING)
    if not 1 <= smoothing <= MOST_SMOOTHING:
        raise ValueError(f"smoothing={smoothing!r}: must be from 1 to {MOST_SMOOTHING} updates")

    # All lengths below are in inches.
    label_width = max(_text_width(curves, NAME), _text_width((notes or {}).values(), NOTE))
    height = max(5.2, 1.2 + 0.58 * len(curves))
    left, bottom, right, top = 0.9, 0.6, 6.3, height - (0.7 if title else 0.4)
    rates_left = right + 0.65 + label_width + 0.15
    figure = Figure(rates_left + (1.75 if rates else 0.0), height)
    axes = _add_axes(figure, left, bottom, right, top)
    logarithmic = any(((curve > 0) & (curve < LARGEST)).any() for curve in curves.values())
    width, scale = smoothing if smoothing > 1 else 0, "log" if logarithmic else "linear"
    averages = {name: smoothed(np.arange(len(curve)), curve, [width], scale)[0] for name, curve in curves.items()}
    if width:
        ylabel = f"{ylabel}, strong: average of {width} updates"
    if logarithmic:
        _set_log_scale(axes, np.concatenate(list(averages.values())))
    ends = {}
    for i, (name, curve) in enumerate(curves.items()):
        updates = np.arange(1, len(curve) + 1)
        style = line_style(i)
        if smoothing > 1:
            axes.plot(updates, curve, color=style["color"], linewidth=0.5, alpha=0.18, label=f"_{name}, raw")
        axes.plot(updates, averages[name], linewidth=1.8, marker=_marker(curve), label=name, **style)
        ends[name] = _end(updates, averages[name], above=0.0 if logarithmic else -np.inf)
    _finish(axes, longest, xlabel, ylabel)

    # The labels, highest curve first; each has a row of its own, with the learning rate at its end.
    order = sorted(curves, key=lambda name: -ends[name][1])
    row_height = (top - bottom) / len(order)
    for row, name in enumerate(order):
        style = line_style(list(curves).index(name))
        middle = top - (row + 0.5) * row_height
        _label(figure, axes, ends[name], (right + 0.3, middle), name, (notes or {}).get(name, ""), style)
        if name in rates:
            reach = min(0.3 * row_height, 0.5)
            small = _add_axes(figure, rates_left, middle - reach, rates_left + 1.15, middle + reach)
            _draw_small_rate(small, rates[name], longest, style["color"])
    if rates:
        _text(figure, rates_left, top + 0.06, "learning rate", color=INK, fontsize=10, va="bottom")
    if title:
        _text(figure, 0.12, height - 0.18, title, color=INK, fontsize=13, fontweight="bold", va="top")
    figure.alt = _words(title, ylabel, ends)
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

    # All lengths below are in inches.
    label_width = _text_width(curves, NAME)
    left, bottom, right, top, height = 0.9, 0.55, 6.3, 3.1 if title else 3.4, 3.6
    gap = 0.27
    if len(curves) * gap > top - bottom:
        height += len(curves) * gap - (top - bottom)
        top = bottom + len(curves) * gap
    figure = Figure(right + 0.65 + label_width + 0.15, height)
    axes = _add_axes(figure, left, bottom, right, top)
    ends = {}
    for i, (name, curve) in enumerate(curves.items()):
        updates = np.arange(1, len(curve) + 1)
        axes.plot(updates, curve, linewidth=1.8, marker=_marker(curve), label=name, **line_style(i))
        ends[name] = _end(updates, curve)
    finite = np.concatenate(list(curves.values()))
    largest = float(finite[np.isfinite(finite)].max(initial=0.0))
    limit = 1.06 * largest if largest > 0 else 1.0
    axes.set_ylim(0, limit)
    _finish(axes, longest, xlabel, ylabel)

    order = sorted(curves, key=lambda name: ends[name][1])
    wanted = [bottom + (top - bottom) * min(ends[name][1] / limit, 1.0) for name in order]
    for name, middle in zip(order, _spread(wanted, gap, bottom, top), strict=True):
        _label(figure, axes, ends[name], (right + 0.3, middle), name, "", line_style(list(curves).index(name)))
    if title:
        _text(figure, 0.12, height - 0.15, title, color=INK, fontsize=12, fontweight="bold", va="top")
    figure.alt = _words(title, ylabel, ends)
    return figure


MOST_SMOOTHING = 1000  # updates; the average's cost grows with its width
NAME = FontProperties(size=10.5, weight="bold")
NOTE = FontProperties(size=8.5)


def _words(title: str, ylabel: str, ends: Mapping[str, tuple[float, float]]) -> str:
    """A figure in words."""
    return ". ".join(
        filter(None, [title, f"{ylabel} at the end: " + ", ".join(f"{n} {y:.4g}" for n, (_, y) in ends.items())])
    )


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


def _end(updates: np.ndarray, curve: np.ndarray, above: float = -np.inf) -> tuple[float, float]:
    """Where a curve ends: its last finite point above a value; at the top if it has none."""
    there = np.flatnonzero(np.isfinite(curve) & (curve > above))
    return (float(updates[there[-1]]), float(curve[there[-1]])) if there.size else (0.0, np.inf)


def _set_log_scale(axes: Axes, averages: np.ndarray) -> None:
    """A log scale over the averages; raw values far below may leave the picture."""
    low, high = float(np.nanmin(averages)) / 2, float(np.nanmax(averages)) * 1.5
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(axes: Axes, longest: int, xlabel: str, ylabel: str) -> None:
    axes.set(xlim=(0, longest), xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    quieten(axes)


def _marker(curve: np.ndarray) -> str:
    """A line through one point would not be seen."""
    return "o" if np.isfinite(curve).sum() == 1 else ""


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
    inches = figure.dpi_scale_trans
    if np.isfinite(end[1]):
        leader = ConnectionPatch(end, place, axes.transData, inches, color=style["color"], linewidth=0.7, alpha=0.6)
        figure.add_artist(leader)
    figure.add_artist(Line2D([x, x + 0.27], [y, y], linewidth=1.8, label=name, transform=inches, **style))
    x, lift = x + 0.35, 0.02 if note else 0.0
    align = "bottom" if note else "center_baseline"
    _text(figure, x, y + lift, name, color=style["color"], fontproperties=NAME, va=align)
    if note:
        _text(figure, x, y - lift, note, color=QUIET, fontproperties=NOTE, va="top")


def _draw_small_rate(axes: Axes, rates: np.ndarray, longest: int, colour: str) -> None:
    updates = np.arange(1, len(rates) + 1)
    axes.fill_between(updates, rates, color=colour, alpha=0.15, linewidth=0)
    axes.plot(updates, rates, color=colour, linewidth=1.4)
    peak = float(np.nanmax(rates)) if np.isfinite(rates).any() else 0.0
    axes.set(xlim=(0, longest), ylim=(0, 1.15 * peak if peak > 0 else 1))
    axes.yaxis.tick_right()
    axes.set_yticks([0, peak] if peak > 0 else [0], labels=["0", f"{peak:.3g}"] if peak > 0 else ["0"])
    axes.set_xticks([])
    quieten(axes, size=8)
    axes.spines["left"].set_visible(False)


def _add_axes(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes between these edges, in inches from the figure's lower left corner."""
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, bottom / height, (right - left) / width, (top - bottom) / height))


def _text(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    """Words at a place given in inches. Dollar signs are dollar signs."""
    figure.text(x, y, text, transform=figure.dpi_scale_trans, parse_math=False, **style)


def _text_width(texts: Iterable[str], font: FontProperties) -> float:
    """The widest of some texts, in inches."""
    return max((TextPath((0, 0), text, prop=font).get_extents().x1 / 72 for text in texts if text.strip()), default=0.0)


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
