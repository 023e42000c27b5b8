"""Views of recorded runs as curves: losses and rates, updates against weights, and what single weights do.

Also what all views of runs have in common: the base class, and the arrays that they draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..trainer.arguments import choice
from .record import Curve, Recorder, Run, RunSet, Series, diagnose
from .record.series import POINTS
from .record.statistics import quantiles, smoothed
from .scene import Axis, Band, Control, Layer, Line, Panel, Points, RefLine, Scene, Text
from .view import View

__all__ = ["LossView", "RunView", "UpdateRatioView", "WeightsView"]

Runs = Recorder | Run | RunSet | Iterable[Recorder | Run]
LARGEST = 3e38  # what a scene's numbers can hold
WIDTHS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)  # of averages, in steps
MOST_ROWS = 64  # tensors that can be told apart
TARGET = (3e-4, 1e-3, 3e-3)  # of the update ratio: the usual advice is 1e-3, within half a decade
SOLID_GREY = 15  # the number of a line
MOST_NAMED = 8  # lines that can be told apart by their colours


class RunView(View):
    """A view of one or several runs, that takes what is new of those that are still being recorded.

    Args:
        runs: a `Recorder`, a `Run`, a `RunSet`, or several recorders and runs.
        **settings: as for `View`.

    Raises:
        TypeError, ValueError: there is none, or something else is among them.
    """

    def __init__(self, runs: Runs, **settings: Any) -> None:
        self._recorders, self.runs = _checked_runs(runs)
        self._said: tuple[int, str] | None = None  # how long the runs were, and what was to be said then
        self._kept: tuple[Any, Any] | None = None  # what a panel was made of, and the panel
        super().__init__(**settings)

    @property
    def run(self) -> Run:
        """The first run."""
        return self.runs[0]

    def describe(self) -> str:
        """What there is to be seen, and what looks wrong, in sentences."""
        self._take_in(wait=True)
        return self._words()

    def _take_in(self, wait: bool) -> bool:
        return take_in(self._recorders, wait)

    def _words(self) -> str:
        lines = []
        for run in self.runs:
            lines.append(f"{run.name}: {_described(run)}")
            lines += [f"- {note}" for note in diagnose(run)]
        return "\n".join(lines)

    def description(self) -> str:
        """As `describe`, but of a live run up to a twentieth of its length ago, as each frame of a picture has it."""
        length = sum(run.last_step or 0 for run in self.runs)
        if self._said is None or not self._said[0] <= length <= 1.05 * self._said[0]:
            self._said = length, self._words()
        return self._said[1]

    def title(self, what: str) -> str:
        """What stands above the picture: what it shows, and of which runs, where these have names of their own."""
        names = [run.name for run in self.runs]
        if names == ["run"]:
            return what
        return f"{what}: {', '.join(names) if len(names) <= 4 else f'{len(names)} runs'}"

    def _kept_panel(self, make: Callable[[Run, Rows], Panel | None], rows: Rows) -> Panel | None:
        """A panel of histograms, which come seldom, made anew only when there are more."""
        number = sum(map(len, self.run.histograms.values()))
        if self._kept is None or self._kept[0] != number:
            self._kept = number, make(self.run, rows)
        return self._kept[1]


class OneRunView(RunView):
    """A view of one run.

    Args:
        run: a `Recorder` or a `Run`.
        **settings: as for `View`.

    Raises:
        TypeError: it is neither.
    """

    def __init__(self, run: Recorder | Run, **settings: Any) -> None:
        super().__init__([_checked_run(run)], **settings)


class LossView(RunView):
    """Losses of one or several runs, and below them their learning rates.

    Each is drawn twice: faint as it was, with the smallest and largest values of steps that share a point, and strong, as
    the exponentially weighted average of each step and those before it, on a log scale the geometric one. Crosses at the
    bottom stand for steps whose loss is not finite, thin lines for new epochs where a scalar "epoch" was recorded. A
    learning rate holds until the next one takes its place.

    Args:
        runs: a `Recorder`, a `Run`, a `RunSet`, or several recorders and runs.
        scalars: names of the scalars to draw; a run may lack some.
        smoothing: how many steps back the weight in the average is 1 / e, at first, >= 0. None follows from the number of
            values of the longest curve: half its square root, but at least a fiftieth and at most a twentieth of it. A
            slider sets it.
        scale: "log" or "linear", of the losses; with "log" it is linear while no loss is above 0.
        axis: "step", "epoch" or "seconds": the last two where scalars of these names were recorded.
        **settings: as for `View`.

    Raises:
        TypeError, ValueError: an argument that does not fit.

    Example:
        >>> from tristep.viz import LossView, Run
        >>> run = Run("adam")
        >>> for step in range(1, 101):
        ...     run.add_scalars(step, {"loss": 1 / step, "learning_rate": 0.1})
        >>> print(LossView(run).describe())
        adam: 100 steps, loss from 1 to 0.01
    """

    def __init__(
        self,
        runs: Runs,
        scalars: Sequence[str] = ("loss",),
        *,
        smoothing: float | None = None,
        scale: str = "log",
        axis: str = "step",
        **settings: Any,
    ) -> None:
        self.scalars = (scalars,) if isinstance(scalars, str) else tuple(scalars)
        if not self.scalars:
            raise ValueError("scalars is empty: there is nothing to draw")
        if smoothing is not None and not smoothing >= 0:
            raise ValueError(f"smoothing={smoothing!r}: must be a number of steps, 0 or more")
        self._smoothing = smoothing
        self.scale = choice("scale", scale, ("log", "linear"))
        self.axis = choice("axis", axis, ("step", "epoch", "seconds"))
        super().__init__(runs, **settings)
        if self.axis not in self._axes():
            raise ValueError(f"axis={axis!r}: no scalar of this name was recorded, so it must be 'step'")

    def on_control(self, name: str, value: Any, index: int) -> None:
        """Another horizontal axis."""
        if name == "axis":
            self.axis = value
            super().refresh()

    def scene(self) -> Scene:
        """The picture as data."""
        widths, index = self._widths()
        control = Control("smoothing", "smoothing", widths, index, unit="steps")
        layers: list[Layer] = []
        limits: list[np.ndarray] = []
        ends: list[np.ndarray] = []
        crosses: list[tuple[np.ndarray, int]] = []
        several = len(self.scalars) > 1
        known = [(run, scalar, run.scalars.get(scalar, Series())) for run in self.runs for scalar in self.scalars]
        curves = {i: series.curve() for i, (_, _, series) in enumerate(known) if len(series)}
        above_zero = any(((curve.mean > 0) & (curve.mean < LARGEST)).any() for curve in curves.values())
        scale = self.scale if above_zero else "linear"
        for i, curve in curves.items():
            run, scalar, _ = known[i]
            x = self._along(run, curve)
            means = smoothed(curve.mean, [width / _steps_per_point(curve) for width in widths], scale)
            name = scalar if len(self.runs) == 1 else f"{run.name}, {scalar}" if several else run.name
            if (curve.low < curve.high).any():
                layers.append(Band(x, _drawable(curve.low), _drawable(curve.high), style=i, alpha=0.12))
            layers.append(Line(x, _drawable(curve.mean), style=i, width=0.6, alpha=0.35))
            marker = int(np.isfinite(curve.mean).sum()) == 1
            layers.append(Line(x, _drawable(means), name=name, style=i, by=("smoothing",), marker=marker))
            limits.append(means[index])
            limits.append(_percentiles(curve.mean))
            ends.append(x[[0, -1]])
            if (bad := curve.nonfinite > 0).any():
                crosses.append((x[bad], i))
        if not limits:
            return _empty(f"no {' or '.join(map(repr, self.scalars))} recorded yet", self.description())
        reach = Axis.over(self.axis, *ends, margin=0.01)
        vertical = Axis.over(", ".join(self.scalars), *limits, scale=scale, margin=0.06)
        bottom = _share(vertical, 0.02)
        for k, (x, i) in enumerate(crosses):
            name = "" if k else "not finite"
            layers.append(Points(x, np.full(len(x), bottom), marker="cross", size=5, style=i, name=name))
        epochs = self._epoch_marks()
        if epochs is not None:
            layers.append(RefLine(epochs, style="grid", name="epochs"))
        rates = self._rates()
        panels = [Panel(reach if not rates else replace(reach, label=""), vertical, layers)]
        if rates:
            values = [np.asarray(rate.y) for rate in rates]
            panels.append(Panel(reach, _from_zero("learning rate", *values), rates, row=1))
        controls = [control]
        if len(axes := self._axes()) > 1:
            controls.append(Control("axis", "over", axes, axes.index(self.axis), "choice", remote=True))
        return Scene(
            panels,
            self.title("Loss" if self.scalars == ("loss",) else "Scalars"),
            controls,
            height=5.1 if rates else 4.1,
            heights=(3, 1) if rates else (),
            description=self.description(),
        )

    def _widths(self) -> tuple[list[float], int]:
        """Widths of averages to choose from, in steps, and which is chosen."""
        longest = max((run.last_step or 0 for run in self.runs), default=0)
        known = {float(width) for width in WIDTHS if width <= max(longest / 10, 1)}
        if self._smoothing is None:
            curves = [run.scalars[name] for run in self.runs for name in self.scalars if len(run.scalars.get(name, ()))]
            points = max(map(len, curves), default=1)
            # Enough for a trend to stand out of the noise, and in a long run for the line to be smooth.
            wanted = min(max(points**0.5 / 2, points / 50), points / 20) * max(longest / points, 1)
            return sorted(known), sorted(known).index(min(known, key=lambda width: abs(np.log(max(width, 0.5) / wanted))))
        widths = sorted(known | {float(self._smoothing)})
        return widths, widths.index(float(self._smoothing))

    def _axes(self) -> list[str]:
        return ["step", *(name for name in ("epoch", "seconds") if all(name in run.scalars for run in self.runs))]

    def _along(self, run: Run, curve: Curve) -> np.ndarray:
        steps = (curve.first + curve.last) / 2
        if self.axis == "step":
            return steps
        known = run.scalars[self.axis].curve()
        at, values = (known.first + known.last) / 2, known.mean
        begins = np.flatnonzero(np.diff(values, prepend=values[0] - 1) > 0)
        if self.axis == "epoch" and begins.size > 1 and (values == np.floor(values)).all():
            # Numbers of epochs: within one, time goes on.
            at, values = at[begins], values[begins]
            length = (at[-1] - at[0]) / (values[-1] - values[0])
            at, values = np.append(at, at[-1] + length), np.append(values, values[-1] + 1)
        return np.interp(steps, at, values)

    def _epoch_marks(self) -> np.ndarray | None:
        """The steps at which the first run that knows began an epoch, unless these are too many to be seen."""
        if self.axis != "step":
            return None
        for run in self.runs:
            if "epoch" in run.scalars and len(run.scalars["epoch"]):
                curve = run.scalars["epoch"].curve()
                begins = np.flatnonzero(np.diff(np.floor(curve.low)) > 0) + 1
                return curve.first[begins] if 0 < begins.size <= 60 else None
        return None

    def _rates(self) -> list[Line]:
        found = []
        for i, run in enumerate(self.runs):
            series = run.scalars.get("learning_rate")
            if series is not None and len(series):
                curve = series.curve()
                x, y = held(self._along(run, curve), _drawable(curve.mean))
                found.append(Line(x, y, style=i * len(self.scalars), width=1.4))
        return found


class UpdateRatioView(OneRunView):
    """How much each step changes each tensor: the norm of the update over that of the weight.

    About 1e-3 is what training that goes well usually has; a band shows half a decade around it. Up to 8 tensors are drawn
    each by itself. Of more the middle 80 % are a band, and those farthest from 1e-3 over the later half are named.

    Args:
        run: a `Recorder` or a `Run`.
        **settings: as for `View`.

    Raises:
        TypeError: it is neither.
    """

    def scene(self) -> Scene:
        """The picture as data."""
        panel = ratio_panel(self.run)
        if panel is None:
            return _empty("no update ratios recorded yet", self.description())
        return Scene([panel], self.title("How far each update moves its tensor"), description=self.description())

    def _words(self) -> str:
        """What there is to be seen, and what looks wrong, in sentences."""
        worst = [f"{name} {ratio:.1g}" for name, ratio in _worst(self.run)[:5]]
        return super()._words() + (f"\nfarthest from 1e-3: {', '.join(worst)}" if worst else "")


class WeightsView(OneRunView):
    """Norms of a tensor, of its gradient and of its update over the steps, the angle between these two, and single weights.

    A choice says which tensor; above 64 tensors they are put together by module. Single weights are there of tensors
    of which the recorder followed some (see `Recorder`'s `weights`).

    Args:
        run: a `Recorder` or a `Run`.
        **settings: as for `View`.

    Raises:
        TypeError: it is neither.
    """

    def scene(self) -> Scene:
        """The picture as data."""
        rows = Rows(self.run)
        followed = {name: series for name, series in self.run.weights.items() if len(series)}
        panels: list[Panel] = []
        norms = norm_panel(self.run, rows)
        if norms is not None:
            panels.append(norms)
        cosine = self.run.tensors.get("cosine")
        if cosine is not None and len(cosine):
            x, means = cosine.means()
            line = Line(x, _drawable(rows.of("cosine", means).T), by=("layer",))
            across = Axis.over("step", x, margin=0.01)
            vertical = Axis("cosine of gradient and update", -1.05, 1.05)
            panels.append(Panel(across, vertical, [RefLine([0.0], "y", style="grid"), line]))
        if followed:
            panels.append(self._followed(followed, rows))
        if not panels:
            return _empty("no weights recorded yet", self.description())
        placed = [replace(panel, column=i) for i, panel in enumerate(panels)]
        first = next((rows.row_of(name) for name in followed), 0)
        layer = Control("layer", "tensor", rows.names, first, "choice")
        title = self.title("Weights, gradients and updates")
        return Scene(placed, title, [layer], width=4.2 * len(placed), height=3.9, description=self.description())

    def _followed(self, followed: Mapping[str, Series], rows: Rows) -> Panel:
        layers: list[Layer] = []
        ends, values = [], []
        most = 0
        for name, series in followed.items():
            curve, row = series.curve(), rows.row_of(name)
            ends += [curve.first[:1], curve.last[-1:]]
            values.append(curve.mean)
            for k in range(min(series.shape[0], MOST_NAMED)):
                y = np.full((len(rows.names), len(curve.first)), np.nan)
                y[row] = _drawable(curve.mean[:, k])
                label = "" if k < most else f"followed weight {k + 1}"
                layers.append(Line(_middle(curve), y, by=("layer",), style=k, name=label))
            most = max(most, min(series.shape[0], MOST_NAMED))
        return Panel(Axis.over("step", *ends, margin=0.01), Axis.over("single weights", *values), layers)


class Rows:
    """The tensors of a run as rows of a picture: each by itself, or put together by module where they are many.

    Attributes:
        names: of the rows.
    """

    def __init__(self, run: Run) -> None:
        keys = _groups(run.parameters)
        self.names = list(dict.fromkeys(keys))
        self._parameters = run.parameters
        numbers = {name: i for i, name in enumerate(self.names)}
        self._row = np.array([numbers[key] for key in keys], dtype=np.int64)
        self._single = len(self.names) == len(keys)
        self._members = (self._row[:, None] == np.arange(len(self.names))).astype(np.float64)

    def row_of(self, parameter: str) -> int:
        """The row that a parameter is in."""
        return int(self._row[self._parameters.index(parameter)])

    def of(self, quantity: str, values: np.ndarray) -> np.ndarray:
        """[n, n_parameters, ...] as [n, n_rows, ...]: norms are those of all tensors together, counts sums, others means."""
        values = np.asarray(values, dtype=np.float64)
        if self._single:
            return values
        there = np.isfinite(values)
        if there.all():
            filled, number = values, self._members.sum(axis=0).reshape(-1, *[1] * (values.ndim - 2))
        else:
            filled, number = np.where(there, values, 0.0), self._sums(there)
        if quantity.endswith("_norm"):
            found = np.sqrt(self._sums(filled**2))
        elif quantity.endswith("_absmax") or quantity == "update_ratio":
            order = np.argsort(self._row, kind="stable")
            starts = np.searchsorted(self._row[order], np.arange(len(self.names)))
            found = np.fmax.reduceat(np.where(there, values, -np.inf)[:, order], starts, axis=1)
        else:
            found = self._sums(filled)
            if not quantity.endswith(("_nonfinite", "_histogram")):
                found = found / np.maximum(number, 1)
        return np.where(number > 0, found, np.nan)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.tensordot(values.astype(np.float64, copy=False), self._members, (1, 0)), -1, 1)


def held(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve of values of which each holds until the next one: level, with a step where it changes.

    Where it changes too often for the points that a curve may have, steps are too small to be seen, and it stays as it is.
    """
    changes = np.flatnonzero((y[1:] != y[:-1]) & ~(np.isnan(y[1:]) & np.isnan(y[:-1]))) + 1
    if len(x) < 2 or 2 * len(changes) + 2 > POINTS:
        return x, y
    at = np.concatenate([x[:1], np.repeat(x[changes], 2), x[-1:]])
    return at, np.repeat(y[np.append(0, changes)], 2)


def norm_panel(run: Run, rows: Rows) -> Panel | None:
    """Norms of a row's weights, gradients and updates; None where there is none."""
    layers: list[Layer] = []
    ends, values = [], []
    for i, what in enumerate(("weight", "gradient", "update")):
        series = run.tensors.get(f"{what}_norm")
        if series is None or not len(series):
            continue
        x, means = series.means()
        y = _drawable(rows.of(f"{what}_norm", means).T)
        layers.append(Line(x, y, by=("layer",), style=i, name=f"norm of the {what}", marker=len(x) == 1))
        ends.append(x[[0, -1]])
        values.append(y)
    if not layers:
        return None
    scale = "log" if any((each > 0).any() for each in values) else "linear"
    return Panel(Axis.over("step", *ends, margin=0.01), Axis.over("norm", *values, scale=scale), layers)


def ratio_panel(run: Run) -> Panel | None:
    """Update ratios of the tensors; None where there is none."""
    series = run.tensors.get("update_ratio")
    if series is None or not len(series):
        return None
    x, ratios = series.means(512 if series.shape[0] > MOST_NAMED else POINTS)
    across = Axis.over("step", x[[0, -1]], margin=0.01)
    layers: list[Layer] = [
        Band([across.low, across.high], [TARGET[0]] * 2, [TARGET[2]] * 2, style="quiet", alpha=0.13, name="usual"),
    ]
    positive = np.where((ratios > 0) & np.isfinite(ratios), ratios, np.nan)
    shown = dict(_worst(run))
    marker = len(x) == 1
    if ratios.shape[1] > MOST_NAMED:
        low, middle, high = quantiles(positive, (0.1, 0.5, 0.9))
        layers.append(Band(x, low, high, style=SOLID_GREY, name="80 % of tensors"))
        layers.append(Line(x, middle, style=SOLID_GREY, width=1.2, name="median", marker=marker))
        names = list(shown)[:5]
    else:
        names = run.parameters
    for i, name in enumerate(names):
        layers.append(
            Line(x, _drawable(positive[:, run.parameters.index(name)]), style=i, width=1.2, name=name, marker=marker)
        )
    vertical = Axis.over("update norm / weight norm", positive, np.array([1e-4, 1e-2]), scale="log")
    return Panel(across, vertical, layers)


def _worst(run: Run) -> list[tuple[str, float]]:
    """Tensors by how far their median ratio over the later half is from 1e-3, the farthest first."""
    series = run.tensors.get("update_ratio")
    if series is None or not len(series):
        return []
    _, ratios = series.means()
    late = ratios[len(ratios) // 2 :]
    late = np.where(late > 0, late, np.nan)
    (typical,) = quantiles(late.T, (0.5,))
    order = sorted(np.flatnonzero(np.isfinite(typical)), key=lambda i: -abs(np.log10(typical[i] / TARGET[1])))
    return [(run.parameters[i], float(typical[i])) for i in order]


def take_in(recorders: Iterable[Recorder], wait: bool) -> bool:
    """Take what these have recorded into their runs, all of it if this may wait for a device; whether that was all."""
    for recorder in recorders:
        if wait:
            recorder.flush()
        else:
            recorder.look()
    return not any(recorder.pending for recorder in recorders)


def _checked_run(run: Any) -> Recorder | Run:
    if isinstance(run, (Recorder, Run)):
        return run
    names = [each.name for each in run] if isinstance(run, RunSet) else []
    hint = f": give one of its runs, such as runs[{names[0]!r}]" if names else ""
    raise TypeError(f"run must be a Recorder or a Run, got {type(run).__name__}{hint}")


def _checked_runs(runs: Any) -> tuple[list[Recorder], list[Run]]:
    given = [runs] if isinstance(runs, (Recorder, Run)) else list(runs) if isinstance(runs, Iterable) else None
    if given is None or not all(isinstance(each, (Recorder, Run)) for each in given):
        wrong = runs if given is None else next(each for each in given if not isinstance(each, (Recorder, Run)))
        raise TypeError(f"runs must be a Recorder, a Run, a RunSet or several of these, got {type(wrong).__name__}")
    if not given:
        raise ValueError("runs is empty: there is nothing to draw")
    recorders = [each for each in given if isinstance(each, Recorder)]
    return recorders, [each.run if isinstance(each, Recorder) else each for each in given]


def _described(run: Run) -> str:
    last = run.last_step or 0
    words = ["1 step" if last == 1 else f"{last:,} steps"]
    for name in ("loss", *(name for name in run.scalars if name not in ("loss", "learning_rate", "epoch", "seconds"))):
        series = run.scalars.get(name)
        values = np.zeros(0) if series is None else series.curve().mean
        values = values[np.isfinite(values)]
        if values.size:
            words.append(f"{name} from {values[0]:.3g} to {values[-1]:.3g}")
    return ", ".join(words)


def _steps_per_point(curve: Curve) -> float:
    return max(float(curve.last[-1] - curve.first[0]) / max(len(curve.first) - 1, 1), 1.0)


def _middle(curve: Curve) -> np.ndarray:
    middle: np.ndarray = (curve.first + curve.last) / 2
    return middle


def _drawable(values: np.ndarray) -> np.ndarray:
    """What a scene can hold: the rest is left out."""
    values = np.asarray(values, dtype=np.float64)
    return np.where(np.abs(values) < LARGEST, values, np.nan)


def _percentiles(values: np.ndarray) -> np.ndarray:
    """Nearly the smallest and the largest, so that a single outlier does not set the scale."""
    there = values[np.abs(values) < LARGEST]
    return np.percentile(there, [0.5, 99.5]) if there.size else there


def _share(axis: Axis, share: float) -> float:
    """The value this far up an axis."""
    if axis.scale == "log":
        return float(axis.low * (axis.high / axis.low) ** share)
    return axis.low + (axis.high - axis.low) * share


def _from_zero(label: str, *values: np.ndarray) -> Axis:
    largest = max((float(np.nanmax(each)) for each in values if np.isfinite(each).any()), default=0.0)
    return Axis(label, 0.0, 1.08 * largest if largest > 0 else 1.0)


def _empty(words: str, description: str) -> Scene:
    """A scene that says why there is nothing in it."""
    layer = Text(words, 0.5, 0.5, align="center", size=11, style="quiet")
    return Scene([Panel(Axis("", 0, 1), Axis("", 0, 1), [layer], frame=False)], height=2.0, description=description)


def _groups(names: Sequence[str]) -> list[str]:
    """For each name that of its group, such that there are at most 64: its own, its module's, or that of a part of names."""
    if len(names) <= MOST_ROWS:
        return list(names)
    parts = [name.split(".") for name in names]
    deepest = max(map(len, parts))
    for depth in range(deepest - 1, 0, -1):
        keys = [".".join(part[:depth]) if len(part) > depth else ".".join(part[:-1]) or part[0] for part in parts]
        if len(set(keys)) <= MOST_ROWS and len(set(keys)) > 1:
            return keys
    size = -(-len(names) // MOST_ROWS)
    chunks = [names[i : i + size] for i in range(0, len(names), size)]
    return [f"{chunk[0]} ... {chunk[-1]}" if len(chunk) > 1 else chunk[0] for chunk in chunks for _ in chunk]
