"""TensorHeatmap: a quantity of all tensors over the steps as a heat map, with the histograms of a selected tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ...trainer.validation import choice
from ..record import Curve, Run
from ..record.diagnosis import nonfinite_gradients
from ..scene import Axis, Click, Control, Heatmap, Layer, Panel, Points, Scene, Text
from .rows import Rows
from .run_view import Runs, RunView
from .series import MARKS, NOWHERE_FINITE, empty_scene, thinned, words_panel
from .weights import bad_gradients, norm_panel

__all__ = ["TensorHeatmap", "heat_panels", "histogram_control", "kept_histograms"]

COLUMNS = 256  # the largest number of columns of an image
HISTORY = 128  # the largest number of columns of histograms, which have an image per tensor
# Name of a quantity in a run: (whether its colours have a log scale, its label).
QUANTITIES = {
    "gradient_norm": (True, "norm of the gradient"),
    "weight_norm": (True, "norm of the weight"),
    "update_norm": (True, "norm of the update"),
    "update_ratio": (True, "update norm / weight norm"),
    "gradient_absmax": (True, "largest value of the gradient"),
    "cosine": (False, "cosine of gradient and update"),
    "gradient_zeros": (False, "share of zeros in the gradient"),
    "weight_unchanged": (False, "share of weights that did not change"),
}
OF_LAYERS = {
    "activation_zeros": (False, "share of zeros in the outputs"),
    "activation_mean": (False, "mean of the outputs"),
    "activation_std": (True, "deviation of the outputs"),
}
_ALL = QUANTITIES | OF_LAYERS


class TensorHeatmap(RunView):
    """A heat map of a quantity over the steps with a row for each tensor, and the histograms of one tensor over the steps.

    A click on a row, or the choice "tensor", selects the tensor shown below: its histograms, or else its norms. Colours span
    the first to the 99th percentile. A cell that covers several steps shows the largest value, or the mean of cosines and
    shares. Grey cells are exactly 0, such as the norm of a gradient that is cut off. Crosses on empty cells mark gradients
    that are not finite; neighbouring cells share a cross. More than 64 tensors are grouped by module; the choice, which can
    be searched, has the single tensors too. Several runs are drawn side by side with the same colours.

    Args:
        runs: a `Recorder`, a `Run`, a `LiveLoop`, a `RunSet`, or an iterable of recorders, runs and loops, all with the same
            tensors.
        quantity: the quantity shown initially: "gradient_norm", "weight_norm", "update_norm", "update_ratio",
            "gradient_absmax", "cosine", "gradient_zeros" or "weight_unchanged".
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `runs` is or contains something else.
        ValueError: `runs` is empty, its runs have different tensors, or `quantity` is unknown.
    """

    quantities: ClassVar[Mapping[str, tuple[bool, str]]] = QUANTITIES
    row_is, heading = "tensor", "Tensors over steps"

    def __init__(self, runs: Runs, quantity: str = "gradient_norm", **settings: Any) -> None:
        self.quantity = choice("quantity", quantity, self.quantities)
        super().__init__(runs, **settings)
        if other := next((run for run in self.runs if list(run.parameters) != list(self.run.parameters)), None):
            raise ValueError(
                f"runs: {other.name!r} has other {self.row_is}s than {self.run.name!r}, so that no row would be the same"
            )

    def scene(self) -> Scene:
        rows = Rows(self.run)
        runs = [run for run in self.runs if any(len(run.tensors.get(name, ())) for name in self.quantities)]
        quantities = [name for name in self.quantities if runs and all(len(run.tensors.get(name, ())) for run in runs)]
        if not quantities:
            return self.said(empty_scene(f"no {self.row_is}s recorded yet"))
        first = quantities.index(self.quantity) if self.quantity in quantities else 0
        heats, bar = heat_panels(runs, rows, quantities)
        words = [_ALL[name][1] for name in quantities]
        controls = [Control("quantity", "colours", words, first, "choice")] if bar is not None else []
        controls.append(Control("layer", self.row_is, rows.choices, 0, "choice"))
        kinds = histogram_control(runs)
        controls += kinds
        details = [self._detail(run, rows, kinds) for run in runs]
        upper, lower, n = min(max(2.8, 0.17 * len(rows.names) + 0.8), 4.2), 2.6 if any(details) else 0.0, len(runs)
        above = int(bar is not None)  # rows: the colour bars stand above the maps, which leaves these the width
        panels = list[Panel]()
        for k, (heat, detail) in enumerate(zip(heats, details, strict=True)):
            x = heat.x if detail is None else replace(heat.x, label="")  # the panel below has it
            panels.append(replace(heat, row=above, column=2 * k, columns=2, x=x))
        if bar is not None:
            panels.append(replace(bar, columns=n))
        label = ""
        for k, (detail, heat) in enumerate(zip(details, heats, strict=True)):
            if detail is None:
                continue
            layers = [*detail.layers]
            if isinstance(image := layers[0], Heatmap) and (bar is not None or k + 1 < n):
                # A bar of its own would push the panel out of line with the one above.
                layers[0], label = replace(image, label=""), image.label if bar is not None else ""
            # The same horizontal axis, so that steps are aligned.
            panels.append(replace(detail, row=above + 1, column=2 * k, columns=2, x=heat.x, layers=layers))
        if label:
            panels.append(replace(_bar([["1", "10,000"]], [label]), column=n, columns=n))
        heights = [upper, *([lower] if lower else [])]
        scene = Scene(
            panels,
            self.title(self.heading),
            controls,
            width=9.0 if n == 1 else 11.0,
            height=(upper + lower + 0.1) * (1.0 if n == 1 else 1.25),
            heights=[0.2, *heights] if bar is not None else heights,
        )
        return self.said(scene)

    def _detail(self, run: Run, rows: Rows, kinds: Sequence[Control]) -> Panel | None:
        """Return the panel of the selected row."""
        return kept_histograms(self._kept, run, rows, kinds) or norm_panel(run, rows)


def heat_panels(runs: list[Run], rows: Rows, quantities: list[str]) -> tuple[list[Panel], Panel | None]:
    """Return a heat map for each run, and a colour bar that follows the control "quantity"; None without that control."""
    edges = [_steps_of(run, quantities) for run in runs]
    images: list[list[np.ndarray]] = [[] for _ in runs]
    zeros: list[list[np.ndarray]] = [[] for _ in runs]
    limits = []
    for name in quantities:
        logarithmic, cells = _ALL[name][0], []
        for run, run_edges in zip(runs, edges, strict=True):
            curve = run.tensors[name].curve()
            columns = _columns(curve, curve.high if logarithmic else curve.mean, run_edges, largest=logarithmic)
            cells.append(rows.of(name, columns).T)
        limits.append(_limits(cells, logarithmic))
        for image, zero, each in zip(images, zeros, cells, strict=True):
            image.append(_scaled(each, *limits[-1], logarithmic))
            zero.append((each == 0) & logarithmic)
    panels = [
        _heat_panel(run, rows, quantities, image, zero, run_edges, limits, is_last=run is runs[-1])
        for run, image, zero, run_edges in zip(runs, images, zeros, edges, strict=True)
    ]
    if len(runs) > 1:
        panels = [replace(panel, title=run.name) for panel, run in zip(panels, runs, strict=True)]
    if len(quantities) == 1:
        return panels, None
    values = [
        [f"{_value(share, *ends, _ALL[name][0]):.2g}" for share in (0.0, 1.0)]
        for name, ends in zip(quantities, limits, strict=True)
    ]
    return panels, _bar(values, [_ALL[name][1] for name in quantities], by=("quantity",))


def _steps_of(run: Run, quantities: list[str]) -> np.ndarray:
    """Return the edges of image columns over all steps at which one of the quantities was recorded."""
    curves = [run.tensors[name].curve() for name in quantities]
    start, stop = min(float(curve.first[0]) for curve in curves), max(float(curve.last[-1]) for curve in curves)
    return _edges(start, stop, min(max(len(curve.first) for curve in curves), COLUMNS))


def _heat_panel(
    run: Run,
    rows: Rows,
    quantities: list[str],
    images: list[np.ndarray],
    zeros: list[np.ndarray],
    edges: np.ndarray,
    limits: list[tuple[float, float]],
    is_last: bool,
) -> Panel:
    """Return the heat map of one run; images, zeros and limits are per quantity.

    Images have values from 0, the first colour, to 1, the last; `zeros` masks cells that are exactly 0. `edges` are the
    steps between columns. `limits` are values of the first and the last colour, as logarithms on a log scale. The last run
    has the label of the colour bar.
    """
    n = len(rows.names)
    reach = edges[[0, -1]], [-0.5, n - 0.5]
    if len(quantities) == 1:
        logarithmic, label = _ALL[quantities[0]]
        (low, high), scale = limits[0], "log" if logarithmic else "linear"
        values = _value(images[0], low, high, logarithmic)
        ends = _value(0.0, low, high, logarithmic), _value(1.0, low, high, logarithmic)
        image = Heatmap(values, *reach, limits=ends, scale=scale, label=label if is_last else "")
    else:
        image = Heatmap(np.array(images), *reach, limits=(0.0, 1.0), by=("quantity",))
    layers: list[Layer] = [image]
    if any(map(np.any, zeros)):
        cells, by = (np.array(zeros), ("quantity",)) if len(quantities) > 1 else (zeros[0], ())
        grey = Heatmap(cells.astype(np.uint8), *reach, palette="quiet", limits=(0.1, 1.0), scale="log", by=by)
        layers.append(replace(grey, name="exactly 0"))  # zeros are drawn in grey, other cells stay transparent
    x, y = _bad_cells(run, rows, edges)
    if x.size:
        layers.append(Points(x, y, marker="cross", size=5, style=1, name="not finite"))
    if not any(np.isfinite(image).any() for image in images):
        layers.append(NOWHERE_FINITE)
    chosen = [edges[0] + 0.012 * (edges[-1] - edges[0])]
    layers.append(Points(chosen, [[i] for i in rows.rows_of_choices], marker="ring", size=7, style="ink", by=("layer",)))
    down = Axis("", -0.5, n - 0.5, ticks=list(enumerate(rows.names)), upwards=False)
    return Panel(Axis("step", *edges[[0, -1]].tolist()), down, layers, click=Click("layer", "y"))


def _bar(values: list[list[str]], labels: list[str], by: tuple[str, ...] = ()) -> Panel:
    """Return a colour bar in a line, with its label and the values at its ends for each choice of the controls `by`."""
    layers: list[Layer] = [Heatmap(np.linspace(0.0, 1.0, 256)[None], [0.52, 0.82], [0.15, 0.85], limits=(0.0, 1.0))]
    low, high = ([row[k] for row in values] for k in (0, -1))
    for texts, place, align in ((low, 0.51, "right"), (high, 0.83, "left"), (labels, 0.0, "left")):
        style = "ink" if texts is labels else "quiet"
        layers.append(Text(texts if by else texts[0], place, 0.5, by=by, size=8, style=style, align=align))
    return words_panel(*layers)


def histogram_control(runs: Iterable[Run]) -> list[Control]:
    """Return the control "histogram", which selects the kind of histograms, in a list; empty if the runs have one kind."""
    kinds = list(dict.fromkeys(what for run in runs for what in _kinds(run)))
    return [Control("histogram", "histogram of the", kinds, 0, "choice")] if len(kinds) > 1 else []


def kept_histograms(cache: dict[int, tuple[int, Any]], run: Run, rows: Rows, kinds: Sequence[Control]) -> Panel | None:
    """Return the panel of histograms, with current marks of bad gradients; None if there are no histograms.

    The cache has panels by the id of the run; a panel is remade when the run has new histograms. `kinds` is the result of
    `histogram_control`.
    """
    number = sum(map(len, run.histograms.values()))
    if cache.get(id(run), (None,))[0] != number:
        cache[id(run)] = number, _histogram_panel(run, rows, [str(kind) for control in kinds for kind in control.values])
    panel: Panel | None = cache[id(run)][1]
    return panel and replace(panel, layers=[*panel.layers, *bad_gradients(run, rows, panel.x, panel.y)])


def _histogram_panel(run: Run, rows: Rows, kinds: Sequence[str] = ()) -> Panel | None:
    """Return histograms over the steps of the row that the control "layer" selects; None if there are none.

    Each bin from the smallest to the greatest recorded value has a row of equal height; the bin of zeros has more. The
    control "histogram", if any, selects one of `kinds`.
    """
    shown = list(kinds) or _kinds(run)
    if not _kinds(run):
        return None
    curves = [run.histograms[f"{what}_histogram"].curve() if what in _kinds(run) else None for what in shown]
    present = [curve for curve in curves if curve is not None]
    start, stop = min(float(curve.first[0]) for curve in present), max(float(curve.last[-1]) for curve in present)
    steps = _edges(start, stop, min(max(len(curve.first) for curve in present), rows.points(HISTORY)))
    shape = len(steps) - 1, len(rows.choices), len(run.edges) + 1
    counts = [
        np.zeros(shape) if curve is None else rows.of_choices(f"{what}_histogram", _columns(curve, curve.mean, steps))
        for what, curve in zip(shown, curves, strict=True)
    ]
    total = [np.nansum(each, axis=2, keepdims=True) for each in counts]
    shares = np.array(
        [np.divide(a, n, out=np.zeros(shape), where=(n > 0) & (a > 0)) for a, n in zip(counts, total, strict=True)]
    )
    used = np.flatnonzero(shares.any(axis=(0, 1, 2)))
    low, high = (int(used[0]), int(used[-1]) + 1) if used.size else (0, shape[2])
    zero = int(np.searchsorted(run.edges, 0.0, side="right"))
    more = (high - low) // 16 if low <= zero < high else 0  # additional rows for the bin of zeros
    bins = [*range(low, high), *[zero] * more]
    cells = np.rint(10_000 * shares[..., sorted(bins)]).astype(np.int16)
    cells[(cells == 0) & (shares[..., sorted(bins)] > 0)] = 1
    cells = cells.transpose(0, 2, 3, 1) if kinds else cells[0].transpose(1, 2, 0)
    reach, by = (steps[[0, -1]], [0, len(bins)]), ("histogram", "layer") if kinds else ("layer",)
    image = Heatmap(cells, *reach, limits=(1, 10_000), scale="log", label="elements of 10,000", by=by)
    what = "values" if kinds else f"values in the {shown[0]}"
    up = Axis(what, 0, len(bins), ticks=_bin_ticks(run.edges, low, high, zero, more))
    return Panel(Axis("step", *steps[[0, -1]].tolist()), up, [image])


def _bin_ticks(edges: np.ndarray, low: int, high: int, zero: int, more: int) -> list[tuple[float, str]]:
    """Return the ticks of an axis of the bins from `low` to `high` - 1: 0, and up to two powers of ten on either side.

    `edges` are between bins. The bin `zero` is `more` bins higher than the others.
    """

    def place(value: float) -> float | None:
        k = int(np.searchsorted(edges, value, side="right"))
        if not (low <= k < high and 0 < k < len(edges)) or np.abs(edges[[k - 1, k]]).min() < 2.0**-28:
            return None  # bins next to the zeros end at 0, which has no logarithm
        ends = np.log(np.abs(edges[[k - 1, k]]))
        return k - low + more * (k > zero) + float((np.log(abs(value)) - ends[0]) / (ends[1] - ends[0]))

    ticks = [(zero - low + (more + 1) / 2, "0")] if low <= zero < high else []
    both = {sign * 10.0**power: place(sign * 10.0**power) for power in range(-9, 1) for sign in (-1, 1)}
    decades = sorted({abs(value) for value, at in both.items() if at is not None})
    shown = decades[-1 :: -max(len(decades) // 2, 1)][:2]
    are_short = all(decade >= 1e-4 for decade in shown)
    for decade in shown:
        for value, minus in ((decade, ""), (-decade, "−")):
            if (at := both[value]) is not None:
                ticks.append((at, minus + (f"{decade:g}" if are_short else f"1e{round(np.log10(decade))}")))
    return sorted(ticks)


def _kinds(run: Run) -> list[str]:
    kinds = ("gradient", "update", "weight") if len(run.edges) > 1 else ()
    return [what for what in kinds if len(run.histograms.get(f"{what}_histogram", ()))]


def _edges(start: float, stop: float, count: int) -> np.ndarray:
    """Return the edges of `count` equal columns; the first is centred on the first step, and the last on the last step."""
    half = 0.5 * (stop - start) / (count - 1) if count > 1 else 0.5
    edges: np.ndarray = np.linspace(start - half, stop + half, count + 1)
    return edges


def _columns(curve: Curve, values: np.ndarray, edges: np.ndarray, largest: bool = False) -> np.ndarray:
    """Aggregate values [n, ...] of a curve's points in columns: means, or maxima with `largest`.

    An empty column repeats the one before it.
    """
    count = len(edges) - 1
    column = np.clip(np.searchsorted(edges, (curve.first + curve.last) / 2, side="right") - 1, 0, count - 1)
    met, starts = np.unique(column, return_index=True)
    if len(met) == len(values):
        aggregates = values
    elif largest:
        ends = np.append(starts[1:], len(values))
        aggregates = values[starts]
        for k in range(1, int((ends - starts).max())):  # quicker than reduceat, which loops over the tensors
            np.fmax(aggregates, values[np.minimum(starts + k, ends - 1)], out=aggregates)
    else:
        finite = np.isfinite(values)
        number = np.add.reduceat(finite, starts, axis=0)
        total = np.add.reduceat(np.where(finite, values, 0.0), starts, axis=0)
        aggregates = np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)
    return aggregates[np.clip(np.searchsorted(met, np.arange(count), side="right") - 1, 0, len(met) - 1)]


def _limits(several: list[np.ndarray], logarithmic: bool) -> tuple[float, float]:
    """Return the values of the first and the last colour, the 1st and 99th percentiles; as log10 if `logarithmic`."""
    cells = np.concatenate([each.ravel() for each in several])
    finite = cells[np.isfinite(cells) & ((cells > 0) if logarithmic else True)]
    if logarithmic:
        finite = np.log10(finite)
    low, high = np.percentile(finite, [1, 99]) if finite.size else (0.0, 1.0)
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    return float(low), float(high)


def _scaled(cells: np.ndarray, low: float, high: float, logarithmic: bool) -> np.ndarray:
    """Scale cells to 0 for the first colour and 1 for the last; NaN and infinity become NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log10(cells) if logarithmic else cells
        shares = np.clip((values - low) / (high - low), 0.0, 1.0)
    return np.where(np.isnan(cells) | np.isposinf(cells), np.nan, shares)


def _value(share: Any, low: float, high: float, logarithmic: bool) -> Any:
    value = low + share * (high - low)
    return 10.0**value if logarithmic else value


def _bad_cells(run: Run, rows: Rows, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of crosses that mark gradients that are not finite; neighbouring cells share a cross."""
    nonfinite = nonfinite_gradients(run)
    if nonfinite is None or not nonfinite[1].any():
        return np.zeros(0), np.zeros(0)
    curve, bad = nonfinite
    cells = rows.of("gradient_nonfinite", _columns(curve, bad.astype(np.float64), edges, largest=True)).T > 0
    middles = (edges[:-1] + edges[1:]) / 2
    marks = [thinned(middles[row], (edges[-1] - edges[0]) / MARKS) for row in cells]
    return np.concatenate(marks), np.repeat(np.arange(len(marks), dtype=np.float64), list(map(len, marks)))
