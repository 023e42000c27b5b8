"""What a sweep found: a map of the losses over two settings, and the curves of the training that is pointed at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...trainer import Sweep
from ..scene import Axis, Band, Click, Control, Heatmap, Layer, Line, Panel, Points, RefLine, Scene
from .view import View

__all__ = ["SweepView"]

MOST = 512  # points of a curve; there are as many curves as trainings


class SweepView(View):
    """The final losses of a sweep as a map, its best point marked, and the loss of one training over its steps.

    A click on the map, or its sliders, choose the training. With one setting varied, a curve takes the map's place; settings
    beyond two have a choice each. Where there are several seeds, the map has their medians, and the curves are all shown.
    Losses are shown up to a fifth above those that trainings began with, so that the ones that diverge leave room for the
    others; the words say how many go beyond.

    Args:
        sweep: what `tristep.sweep` gave.
        by: what the map shows: "final" or "lowest" loss, or the name of a score.
        across, up: which settings are varied along the map's sides; None takes the learning rate, and the first other one.
    """

    def __init__(
        self, sweep: Sweep, by: str = "final", *, across: str | None = None, up: str | None = None, **others: Any
    ) -> None:
        if not isinstance(sweep, Sweep):
            raise TypeError(f"sweep must be a Sweep, as tristep.sweep gives it, got {type(sweep).__name__}")
        varied = [name for name, values in sweep.axes.items() if name != "seed" and len(values) > 1]
        for name, given in (("across", across), ("up", up)):
            if given is not None and given not in varied:
                raise ValueError(
                    f"{name}={given!r}: must be one of what was varied, {', '.join(map(repr, varied)) or 'nothing'}"
                )
        self.sweep, self.by = sweep, by
        sweep.best(by)  # which says if there is none
        order = sorted(varied, key=lambda name: (name != "learning_rate", varied.index(name)))
        across = across or next((name for name in order if name != up), None)
        up = up or next((name for name in order if name != across), None)
        if across is not None and across == up:
            raise ValueError(f"across and up are both {up!r}: they must differ")
        self._across, self._up = across, up
        self._others = [name for name in varied if name not in (across, up)]
        super().__init__(**others)

    def scene(self) -> Scene:
        best = self.sweep.best(self.by)
        names = [name for name in (*self._others, self._up, self._across) if name is not None]
        controls = [
            Control(
                name,
                _in_words(name),
                list(map(_word, self.sweep.axes[name])),
                self.sweep.axes[name].index(best[name]),
                kind="choice" if name in self._others else "slider",
            )
            for name in names
        ]
        curves = self._curves(names)
        if self._across is None:
            return Scene([curves], self._title(), width=7, height=4.5, description=self.describe())
        first = self._map(best) if self._up is not None else self._line(best)
        return Scene(
            [first, curves], self._title(), controls, width=11, height=4.8, widths=(1.1, 1), description=self.describe()
        )

    def describe(self) -> str:
        best = self.sweep.best(self.by)
        table = self._table([])
        value = float(self._medians(self.sweep._table(self.by))[self.sweep.at(**best)[:-1]])
        point = ", ".join(
            f"{_in_words(name)} {_word(each)}" for name, each in best.items() if len(self.sweep.axes[name]) > 1
        )
        lost = int((~np.isfinite(table)).sum())
        words = f"{self._title()}: the best {self._measure()} is {value:.4g}" + (f", at {point}." if point else ".")
        with np.errstate(invalid="ignore"):
            beyond = int((self._means()[1] > self._top()).any(axis=-1).sum())
        if beyond:
            number = self.sweep.losses[..., 0].size
            words += f" {beyond} of {number} trainings go beyond a loss of {self._top():.3g}, where the picture ends."
        return words + (f" {lost} of {table.size} trainings have ended without a finite number." if lost else "")

    def _title(self) -> str:
        return f"A sweep of {self.sweep.losses[..., 0].size} trainings, {self.sweep.losses.shape[-1]} steps each"

    def _measure(self) -> str:
        known = {"final": "loss of the last epoch", "lowest": "least loss of a batch", "loss": "loss on the held-out data"}
        return known.get(self.by, f"{self.by} on the held-out data")

    def _table(self, names: Sequence[str]) -> np.ndarray:
        """What the map shows, medians over seeds: [*the axes of these names in this order, all others]."""
        return np.moveaxis(self._medians(self.sweep._table(self.by)), self._places(names), range(len(names)))

    @staticmethod
    def _medians(table: np.ndarray) -> np.ndarray:
        return np.sort(np.where(np.isfinite(table), table, np.nan), axis=-1)[..., (table.shape[-1] - 1) // 2]

    def _places(self, names: Sequence[str]) -> list[int]:
        return [list(self.sweep.axes).index(name) for name in names]

    def _of_axes(self, names: Sequence[str], table: np.ndarray) -> np.ndarray:
        """A table [*axes without seeds, ...] with the axes of these names in front; others have one value."""
        n = len(self.sweep.axes) - 1
        moved = np.moveaxis(table, self._places(names), range(len(names)))
        kept = moved.shape[: len(names)] + moved.shape[n:]
        return moved.reshape(kept)

    def _top(self) -> float:
        """The loss up to which the picture goes; the first losses are those before any update."""
        first = self.sweep.losses[..., 0].astype(np.float64)
        first = first[np.isfinite(first)]
        highest = float(first.max()) if first.size else np.inf
        return highest + 0.2 * abs(highest)

    def _shown(self, values: np.ndarray) -> np.ndarray:
        """The values that say where colours and axes end: those up to the top, or all if there are none."""
        if self.by not in ("final", "lowest", "loss"):
            return values
        shown = np.where(values <= self._top(), values, np.nan)
        return shown if np.isfinite(shown).any() else values

    def _means(self) -> tuple[np.ndarray, np.ndarray]:
        """The curves in at most 512 points: the number of each step, and means [*axes, n], NaN where one is not finite."""
        losses = self.sweep.losses
        steps, width = losses.shape[-1], -(-losses.shape[-1] // MOST)
        ends = np.arange(0, steps, width)
        number = (ends + np.minimum(ends + width, steps) - 1) / 2 + 1
        means = np.add.reduceat(losses.astype(np.float64), ends, axis=-1) / np.diff([*ends, steps])
        return number, np.where(np.isfinite(means), means, np.nan)

    def _scale(self, values: np.ndarray) -> str:
        known = values[np.isfinite(values)]
        return "log" if known.size and (known > 0).all() and self.by != "accuracy" else "linear"

    def _map(self, best: dict[str, Any]) -> Panel:
        assert self._across is not None
        assert self._up is not None
        names = [*self._others, self._up, self._across]
        values = self._of_axes(names, self._medians(self.sweep._table(self.by)))
        sides = [self.sweep.axes[name] for name in (self._across, self._up)]
        (nx, ny), by = map(len, sides), tuple(self._others)
        scale = self._scale(values)
        shown = self._shown(values)
        limits = Heatmap(shown.reshape(-1, nx), [0, 1], [0, 1], scale=scale).limits
        image = Heatmap(values, [-0.5, nx - 0.5], [-0.5, ny - 0.5], scale=scale, limits=limits, label=self._measure(), by=by)
        star = Points(
            [sides[0].index(best[self._across])],
            [sides[1].index(best[self._up])],
            style="ink",
            marker="star",
            size=12,
            words=["best"],
        )
        # Where the curves are taken from.
        here = Points(
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
            [image, here, star],
            title=self._measure(),
            click=Click(control=self._across, along="x", other=self._up),
        )

    def _line(self, best: dict[str, Any]) -> Panel:
        assert self._across is not None
        values = self.sweep.axes[self._across]
        table = self._of_axes([self._across], self.sweep._table(self.by)[..., None]).reshape(len(values), -1)
        table = np.sort(np.where(np.isfinite(table), table, np.nan), axis=-1)
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

    def _curves(self, names: Sequence[str]) -> Panel:
        number, means = self._means()
        scale = "log" if np.nanmin(means, initial=np.inf) > 0 else "linear"
        layers: list[Layer] = []
        seeds = self.sweep.axes["seed"]
        for i, seed in enumerate(seeds):
            y = self._of_axes(names, means[..., i, :])
            name = f"seed {seed}" if len(seeds) > 1 else "training loss"
            layers.append(Line(number, y, name=name, style=i, by=tuple(names)))
        top = self._top()
        axis = Axis.over("loss of a batch", np.where(means <= top, means, np.nan), [top], scale=scale)
        return Panel(
            Axis("step", 0, self.sweep.losses.shape[-1]),
            axis,
            layers,
            title="the training pointed at" if names else "",
            column=int(bool(names)),
        )


def _side(name: str, values: Sequence[Any]) -> Axis:
    return Axis(_in_words(name), -0.5, len(values) - 0.5, ticks=[(i, _word(value)) for i, value in enumerate(values)])


def _in_words(name: str) -> str:
    return "weight decay" if name == "wd" else name.replace("_", " ")


def _word(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
