"""SweepView: the losses of a sweep as a map over two settings, and the curves of a selected training run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...trainer import Sweep
from ...trainer.validation import instance
from ..scene import Axis, Band, Click, Control, Heatmap, Layer, Line, Panel, Points, RefLine, Scene, Text, level_lines
from ..simulate import Trajectories
from .functions import function_layers, function_panel, loss_above, loss_panel, plane_of
from .run_table import MOST_IN_LEGEND, with_table
from .series import words_panel
from .trajectories import moments_of
from .view import View

__all__ = ["SweepView"]

MOST = 512  # the largest number of points of a curve; each training run has one
ENOUGH = 0.1  # the fraction of paths that must settle for a map of their numbers of steps
MOST_TABLED = 400  # trainings whose curves the table offers, besides the selected one
TICKS = 9  # the largest number of labels along a side of the map
SHAPE = 1.5  # how much wider than high the panel of a path is


class SweepView(View):
    """A map of the final losses of a sweep with its best point marked, and the loss of one training run over its steps.

    The map's sides are the learning rate and the first other setting that was varied. A click on the map, a drag across it,
    or its sliders select the training run. If the sweep varies only one setting, a curve replaces the map; further settings
    have a choice each. With several seeds, the map shows medians, and the curves of all seeds are drawn. The loss axes end a
    fifth above the largest initial loss, so that diverging runs leave room for the others; the description says how many
    runs go beyond. With more than 8 trainings, and at most 400, a table chooses further ones whose curves are drawn.

    For trajectories on a function of two variables, the map shows the number of steps until the loss above the minimum is a
    millionth of its initial value, or the final loss if few paths reach that. Lines on the map bound the regions where paths
    turn back and where losses grow, and the selected path is drawn beside it.

    Args:
        sweep: a `Sweep`, as `tristep.sweep` returns it; or `Trajectories`, as `simulate` returns them, from one start, with
            several learning rates or a sweep.
        by: the quantity of the map: "final" or "lowest" loss, or the name of a score. For trajectories also "steps", which
            is their default if more than a tenth of the paths settle; else the default is "final".
        **others: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `sweep` is something else.
        ValueError: the trajectories have several starts, or `sweep` has no finite value of `by`.

    Example:
        >>> from tristep import viz
        >>> settings = {"learning_rates": [0.05, 0.1, 0.15], "sweep": {"momentum": [0.0, 0.4, 0.8]}}
        >>> found = viz.simulate(viz.ill_conditioned_bowl(25), "momentum", **settings)
        >>> viz.SweepView(found).sweep.best("steps")
        {'optimizer': 'momentum', 'momentum': 0.4, 'learning_rate': 0.1}
    """

    def __init__(
        self,
        sweep: Sweep | Trajectories,
        by: str | None = None,
        **others: Any,
    ) -> None:
        self.trajectories = sweep if isinstance(sweep, Trajectories) else None
        if isinstance(sweep, Trajectories):
            if len(sweep.starts) != 1:
                raise ValueError(f"sweep has paths from {len(sweep.starts)} starts: simulate from one")
            sweep = _as_sweep(sweep)
            by = ("steps" if np.isfinite(sweep.scores["steps"]).mean() > ENOUGH else "final") if by is None else by
        instance("sweep", sweep, Sweep, "a Sweep, as tristep.sweep gives it, or Trajectories, as simulate does")
        varied = [name for name, values in sweep.axes.items() if name != "seeds" and len(values) > 1]
        self.sweep, self.by = sweep, "final" if by is None else by
        self._best = sweep.best(self.by)  # raises if there is none
        self._table = sweep._table(self.by)  # [*axes]
        self._medians = _ordered(self._table)[..., (self._table.shape[-1] - 1) // 2]  # over seeds
        order = sorted(varied, key=lambda name: (name != "learning_rate", name == "optimizer", varied.index(name)))
        self._across, self._up = [*order, None, None][:2]
        self._further = [name for name in varied if name not in order[:2]]
        super().__init__(**others)

    def scene(self) -> Scene:
        best = self._best
        names = [name for name in (*self._further, self._up, self._across) if name is not None]
        controls = [
            Control(
                name,
                _in_words(name),
                list(map(_word, self.sweep.axes[name])),
                self.sweep.axes[name].index(best[name]),
                kind="choice" if name in self._further else "slider",
            )
            for name in names
        ]
        panels = [] if self._across is None else [self._map() if self._up is not None else self._line(best)]
        heights: tuple[float, ...] = ()
        if self.trajectories is None:
            panels.append(self._curves(names))
        else:
            moments = moments_of(self.trajectories.steps)
            controls.append(Control("step", "step", moments, len(moments) - 1, kind="play"))
            panels += self._path(names, self.trajectories, len(panels))
            heights = (1.5, 1, 0.16)
        scene = Scene(
            panels,
            self._title(),
            controls,
            width=11 if names else 7,
            height=4.8 if self.trajectories is None else 7.2,
            widths=(1.1, 1) if names else (),
            heights=heights,
            description=self.describe(),
        )
        if self.trajectories is not None or self._table.size > MOST_TABLED:
            return scene
        runs, values = self._runs(), self._table.reshape(-1)
        columns: dict[str, Any] = {
            _in_words(name): [float(each) if isinstance(each := run[name], (int, float)) else str(each) for run in runs]
            for name, several in self.sweep.axes.items()
            if len(several) > 1
        }
        columns[self.by] = values.tolist()
        return with_table(
            scene, [f"training {k + 1}" for k in range(len(runs))], columns, values.tolist(), self.by != "accuracy"
        )

    def describe(self) -> str:
        """Return the best value and its settings, and how many runs diverge, in sentences."""
        best = self._best
        value = float(self._medians[self.sweep.at(**best)[:-1]])
        point = ", ".join(
            f"{_in_words(name)} {_word(each)}" for name, each in best.items() if len(self.sweep.axes[name]) > 1
        )
        words = f"{self._title()}: the best {self._measure()} is {value:.4g}" + (f", at {point}." if point else ".")
        if self.trajectories is not None:
            growth, turns = self.trajectories.growth, self.trajectories.turns
            lost, turned = int((growth > 1).sum()), int(((growth <= 1) & (turns > 0)).sum())
            return f"{words} Of {growth.size} losses {lost} grow; of the other paths {turned} turn back on the way."
        lost = int((~np.isfinite(self._medians)).sum())
        with np.errstate(invalid="ignore"):
            beyond = int((self._means()[1] > self._top()).any(axis=-1).sum())
        if beyond:
            number = self.sweep.losses[..., 0].size
            words += f" {beyond} of {number} trainings go beyond a loss of {self._top():.3g}, where the picture ends."
        return words + (f" {lost} of {self._medians.size} trainings have ended without a finite number." if lost else "")

    def _title(self) -> str:
        if self.trajectories is not None:
            return f"{', '.join(self.trajectories.names)} on {self.trajectories.function.name}"
        return f"A sweep of {self.sweep.losses[..., 0].size} trainings, {self.sweep.losses.shape[-1]} steps each"

    def _measure(self) -> str:
        titles = {"final": "loss of the last epoch", "lowest": "least loss of a batch", "loss": "loss on the held-out data"}
        if self.trajectories is not None:
            steps = f"number of steps to a millionth of the first loss (at most {self.trajectories.steps})"
            titles = {"final": "loss at the end", "lowest": "least loss on the way", "steps": steps}
        return titles.get(self.by, f"{self.by} on the held-out data")

    def _of_axes(self, names: Sequence[str], table: np.ndarray) -> np.ndarray:
        """Move the axes `names` of a table [*axes without seeds, ...] to the front and drop the other axes, of length 1."""
        n = len(self.sweep.axes) - 1
        moved = np.moveaxis(table, [list(self.sweep.axes).index(name) for name in names], range(len(names)))
        return moved.reshape(moved.shape[: len(names)] + moved.shape[n:])

    def _top(self) -> float:
        """Return the largest loss drawn, a fifth above the largest loss before any update."""
        first = self.sweep.losses[..., 0].astype(np.float64)
        first = first[np.isfinite(first)]
        highest = float(first.max()) if first.size else np.inf
        return highest + 0.2 * abs(highest)

    def _shown(self, values: np.ndarray) -> np.ndarray:
        """Return the values that set the limits of colours and axes: losses up to `_top`, or all if there are none."""
        if self.by not in ("final", "lowest", "loss"):
            return values
        shown = np.where(values <= self._top(), values, np.nan)
        return shown if np.isfinite(shown).any() else values

    def _means(self) -> tuple[np.ndarray, np.ndarray]:
        """Return curves of at most 512 points: their steps [n], and means [*axes, n], NaN where a loss is not finite."""
        losses = self.sweep.losses
        steps, width = losses.shape[-1], -(-losses.shape[-1] // MOST)
        ends = np.arange(0, steps, width)
        number = (ends + np.minimum(ends + width, steps) - 1) / 2 + 1
        means = np.add.reduceat(losses.astype(np.float64), ends, axis=-1) / np.diff([*ends, steps])
        return number, np.where(np.isfinite(means), means, np.nan)

    def _scale(self, values: np.ndarray) -> str:
        finite = values[np.isfinite(values)]
        return "log" if finite.size and (finite > 0).all() and self.by != "accuracy" else "linear"

    def _map(self) -> Panel:
        assert self._across is not None
        assert self._up is not None
        names = [*self._further, self._up, self._across]
        values = self._of_axes(names, self._medians)
        borders: list[Layer] = []
        if self.trajectories is not None:
            growth, turns = self._of_trajectories(names, self.trajectories.growth, self.trajectories.turns)
            if self.by == "steps":  # paths that neither settle nor diverge are slow
                values = np.where(np.isnan(values) & (growth <= 1), self.trajectories.steps, values)
            height = np.clip(np.log10(np.maximum(growth, 1e-300)), -1, 1)
            if "optimizer" not in (self._up, self._across):
                borders = [
                    self._border("beyond this line, paths turn back", turns, 0.5, style="quiet"),
                    self._border("beyond this line, the loss grows", height, 0.0, style="ink"),
                ]
        sides = [self.sweep.axes[name] for name in (self._across, self._up)]
        (nx, ny), by = map(len, sides), tuple(self._further)
        scale = self._scale(values)
        shown = self._shown(values)
        limits = Heatmap(shown.reshape(-1, nx), [0, 1], [0, 1], scale=scale).limits
        image = Heatmap(values, [-0.5, nx - 0.5], [-0.5, ny - 0.5], scale=scale, limits=limits, label=self._measure(), by=by)
        ordered = np.nan_to_num(-values if self.by == "accuracy" else values, nan=np.inf).reshape(*values.shape[:-2], -1)
        least = np.unravel_index(ordered.argmin(axis=-1), (ny, nx))
        best = np.where(np.isfinite(ordered.min(axis=-1)), least[::-1], np.nan)[..., None]
        star = Points(best[0], best[1], style="ink", marker="star", size=12, words=["best"], by=by)
        # The selected training run, to which the curves belong.
        selected = Points(
            np.broadcast_to(np.arange(nx)[None, :, None], (ny, nx, 1)),
            np.broadcast_to(np.arange(ny)[:, None, None], (ny, nx, 1)),
            style="ink",
            marker="ring",
            size=18,
            by=(self._up, self._across),
        )
        return Panel(
            _side(self._across, sides[0]),
            _side(self._up, sides[1]),
            [image, *borders, selected, star],
            legend="",
            click=Click(control=self._across, along="x", other=self._up),
            rows=3 if self.trajectories is not None else 1,
        )

    def _border(self, name: str, tables: np.ndarray, level: float, style: str) -> Line:
        """Return the level lines of tables [*further settings, rows, columns] at a level."""
        rows, columns = tables.shape[-2:]
        lines = [level_lines(range(columns), range(rows), table, [level]) for table in tables.reshape(-1, rows, columns)]
        longest = max(len(x) for x, _ in lines)
        padded = np.full((len(lines), 2, longest), np.nan)
        for line, room in zip(lines, padded, strict=True):
            room[:, : len(line[0])] = line
        padded = padded.reshape(*tables.shape[:-2], 2, longest)
        return Line(padded[..., 0, :], padded[..., 1, :], name=name, style=style, by=tuple(self._further))

    def _of_trajectories(self, names: Sequence[str], *tables: np.ndarray) -> list[np.ndarray]:
        """Return tables [n_optimizers, n_values, n_starts, ...] at the first start, with the axes `names` in front."""
        shape = self.sweep.shape[:-1]
        return [self._of_axes(names, table[:, :, 0].reshape(*shape, *table.shape[3:])) for table in tables]

    def _path(self, names: Sequence[str], trace: Trajectories, column: int) -> list[Panel]:
        """Return the panels of the selected path, of its losses, and of a text about it."""
        growth, turns, settled, paths = self._of_trajectories(names, trace.growth, trace.turns, trace.settled, trace.paths)
        (losses,) = self._of_trajectories(names, trace.losses)
        by = tuple(names)
        steps = np.arange(trace.steps + 1)
        way = Line(paths[..., 0], paths[..., 1], name="path", style=1, by=by, upto="step", head=True, marker=True, width=1)
        plane = plane_of(trace.function, SHAPE)
        words = np.empty(growth.shape, dtype=object)
        for at in np.ndindex(growth.shape):
            how = "turns back on its way" if turns[at] else "never turns back"
            end = f"there after {settled[at]:.0f} steps" if settled[at] >= 0 else f"not there after {trace.steps} steps"
            words[at] = "the loss grows" if growth[at] > 1 else f"{how}, {end}"
        curve = Line(steps, loss_above(losses, trace), style=1, by=by, upto="step")
        return [
            function_panel(plane, [*function_layers(trace.function, plane), way], column=column),
            loss_panel(trace, losses, [curve], row=1, column=column),
            words_panel(Text(words, 0.5, 0.5, by=by, align="center", style="ink"), row=2, column=column),
        ]

    def _line(self, best: dict[str, Any]) -> Panel:
        assert self._across is not None
        values = self.sweep.axes[self._across]
        table = _ordered(self._table.reshape(len(values), -1))  # only the axis of seeds has several values too
        middle, x = table[:, (table.shape[1] - 1) // 2], np.arange(len(values))
        layers: list[Layer] = (
            [Band(x, table[:, 0], np.nanmax(table, axis=1, initial=-np.inf, where=np.isfinite(table)))]
            if (table.shape[1] > 1)
            else []
        )
        layers.append(Line(x, middle, marker=True, name=self._measure()))
        k = values.index(best[self._across])
        layers.append(Points([k], [middle[k]], style="ink", marker="star", size=12, words=["best"]))
        layers.append(RefLine(x[:, None], by=(self._across,), style="quiet"))
        scale = self._scale(table)
        click = Click(control=self._across, along="x")
        return Panel(
            _side(self._across, values), Axis.over(self._measure(), self._shown(table), scale=scale), layers, click=click
        )

    def _runs(self) -> list[dict[str, Any]]:
        """Return the settings of each training, in the order of the table of values."""
        return [dict(zip(self.sweep.axes, each, strict=True)) for each in itertools.product(*self.sweep.axes.values())]

    def _name(self, run: Mapping[str, Any]) -> str:
        return ", ".join(f"{_in_words(name)} {_word(each)}" for name, each in run.items() if len(self.sweep.axes[name]) > 1)

    def _curves(self, names: Sequence[str]) -> Panel:
        number, means = self._means()
        scale = "log" if np.nanmin(means, initial=np.inf) > 0 else "linear"
        layers: list[Layer] = []
        seeds = self.sweep.axes["seeds"]
        has_table = MOST_IN_LEGEND < self._table.size <= MOST_TABLED
        for i, seed in enumerate(seeds):
            y = self._of_axes(names, means[..., i, :])
            name = f"seed {seed}" if len(seeds) > 1 else "training loss"
            is_alone = len(seeds) == 1 and has_table
            look: dict[str, Any] = {"style": "ink", "width": 2.6} if is_alone else {"style": i}
            layers.append(Line(number, y, name=name, by=tuple(names), **look))
        if has_table:
            for k, (run, losses) in enumerate(zip(self._runs(), means.reshape(-1, len(number)), strict=True)):
                layers.append(Line(number, losses, name=self._name(run), style=k, width=1.0, run=k))
        top = self._top()
        axis = Axis.over("loss of a batch", np.where(means <= top, means, np.nan), [top], scale=scale)
        return Panel(
            Axis("step", 0, self.sweep.losses.shape[-1]),
            axis,
            layers,
            title="the training pointed at" + ", and those chosen" * has_table if names else "",
            column=int(bool(names)),
        )


def _as_sweep(result: Trajectories) -> Sweep:
    axes: dict[str, tuple[Any, ...]] = {"optimizer": result.names}
    for name in result.values[0]:
        each = [value[name] for value in result.values]
        axes[name] = tuple(value for i, value in enumerate(each) if value not in each[:i])
        if len(each) % len(axes[name]):
            raise ValueError(f"sweep has a value of {name} twice: {', '.join(map(_word, axes[name]))}")
    axes["seeds"] = (0,)
    shape = tuple(map(len, axes.values()))
    return Sweep(axes, result.losses.reshape(*shape, -1), 1, {"steps": result.settled.reshape(shape)})


def _ordered(table: np.ndarray) -> np.ndarray:
    """Sort along the last axis; values that are not finite become NaN and come last."""
    return np.sort(np.where(np.isfinite(table), table, np.nan), axis=-1)


def _side(name: str, values: Sequence[Any]) -> Axis:
    every = -(-len(values) // TICKS)
    ticks = [(i, _word(value)) for i, value in enumerate(values) if i % every == 0]
    return Axis(_in_words(name), -0.5, len(values) - 0.5, ticks=ticks)


def _in_words(name: str) -> str:
    return "weight decay" if name == "wd" else name.replace("_", " ")


def _word(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
