"""TensorHeatmap: a quantity of all tensors over all steps in one picture, and the histograms of a selected tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ...trainer.validation import choice
from ..record import Curve, Run
from ..record.diagnosis import nonfinite_gradients
from ..scene import Axis, Click, Control, Heatmap, Layer, Panel, Points, Scene, Text
from .rows import Rows
from .run_view import Runs, RunView
from .series import MARKS, NOWHERE_FINITE, apart, drawable, empty_scene
from .weights import bad_gradients, norm_panel

__all__ = ["TensorHeatmap", "heat_panels", "histogram_panel"]

COLUMNS = 256  # of an image at most
HISTORY = 128  # columns of the histograms', of which there is one image for each tensor
# Quantities by their names in a run; whether their colours have a log scale, and what they are called.
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


class TensorHeatmap(RunView):
    """A quantity of each tensor, in rows, over the steps, as colours; and the histograms over time of one of them.

    A click on a row, or the choice "tensor", shows its histograms below, where some were recorded, and else its norms.
    Colours reach from the first to the 99th percentile; of steps that share a cell the largest value is shown, and of
    cosines and shares the mean. Where a norm is exactly 0, as of a gradient that nothing reaches, cells are grey. Crosses on
    empty cells stand for gradients that are not finite, one for several side by side. More than 64 tensors are put together
    by module. Several runs are side by side, with the same colours.

    Args:
        runs: a `Recorder`, a `Run`, a `RunSet`, or several recorders and runs, of the same tensors.
        quantity: which one to show at first: "gradient_norm", "weight_norm", "update_norm", "update_ratio",
            "gradient_absmax", "cosine", "gradient_zeros" or "weight_unchanged".
        **settings: as for `View`.

    Raises:
        TypeError, ValueError: an argument that does not fit.
    """

    def __init__(self, runs: Runs, quantity: str = "gradient_norm", **settings: Any) -> None:
        self.quantity = choice("quantity", quantity, QUANTITIES)
        super().__init__(runs, **settings)
        if other := next((run for run in self.runs if list(run.parameters) != list(self.run.parameters)), None):
            raise ValueError(
                f"runs: {other.name!r} has other tensors than {self.run.name!r}, so that no row would be the same"
            )

    def scene(self) -> Scene:
        """The picture as data."""
        rows = Rows(self.run)
        runs = [run for run in self.runs if any(len(run.tensors.get(name, ())) for name in QUANTITIES)]
        quantities = [name for name in QUANTITIES if runs and all(len(run.tensors.get(name, ())) for run in runs)]
        if not quantities:
            return self.said(empty_scene("no tensors recorded yet"))
        first = quantities.index(self.quantity) if self.quantity in quantities else 0
        heats, bar = heat_panels(runs, rows, quantities)
        words = [QUANTITIES[name][1] for name in quantities]
        controls = [Control("quantity", "colours", words, first, "choice")] if bar is not None else []
        controls.append(Control("layer", "tensor", rows.names, 0, "choice"))
        details = [self._kept_panel(histogram_panel, rows, run) or norm_panel(run, rows) for run in runs]
        upper, lower, n = _height(len(rows.names)), 2.2 if any(details) else 0.0, len(runs)
        panels = [replace(heat, column=k) for k, heat in enumerate(heats)]
        panels += [] if bar is None else [replace(bar, column=n)]
        label = ""
        for k, (detail, heat) in enumerate(zip(details, heats, strict=True)):
            if detail is None:
                continue
            layers = [*detail.layers]
            if isinstance(image := layers[0], Heatmap) and (bar is not None or k + 1 < n):
                # Its bar is made like the one above, which would else be as far away as this one's words are wide.
                layers[0], label = replace(image, label=""), image.label if bar is not None else ""
            # The same step below each other.
            panels.append(replace(detail, row=1, column=k, x=heat.x, layers=layers))
        if label:
            panels.append(replace(_bar([["0.0001", "0.01", "1"]], [label], lower), row=1, column=n))
        scene = Scene(
            panels,
            self.title("Tensors over steps"),
            controls,
            width=9.0 if n == 1 else 11.0,
            height=upper + lower + 0.3,
            widths=(*[1.0] * n, 0.17 if n == 1 else 0.16 * n) if bar is not None else (),
            heights=(upper, lower) if lower else (),
        )
        return self.said(scene)


def heat_panels(runs: list[Run], rows: Rows, quantities: list[str]) -> tuple[list[Panel], Panel | None]:
    """The image of each run, and where a control "quantity" chooses one of several a bar that says what its colours mean."""
    edges = [_steps_of(run, quantities) for run in runs]
    images: list[list[np.ndarray]] = [[] for _ in runs]
    zeros: list[list[np.ndarray]] = [[] for _ in runs]
    limits = []
    for name in quantities:
        logarithmic, cells = QUANTITIES[name][0], []
        for run, own in zip(runs, edges, strict=True):
            curve = run.tensors[name].curve()
            columns = _columns(curve, curve.high if logarithmic else curve.mean, own, largest=logarithmic)
            cells.append(rows.of(name, columns).T)
        limits.append(_limits(cells, logarithmic))
        for image, zero, each in zip(images, zeros, cells, strict=True):
            image.append(_scaled(each, *limits[-1], logarithmic))
            zero.append((each == 0) & logarithmic)
    panels = [
        _heat_panel(run, rows, quantities, image, zero, own, limits, is_last=run is runs[-1])
        for run, image, zero, own in zip(runs, images, zeros, edges, strict=True)
    ]
    if len(runs) > 1:
        panels = [replace(panel, title=run.name) for panel, run in zip(panels, runs, strict=True)]
    if len(quantities) == 1:
        return panels, None
    values = [
        [f"{_value(share, *ends, QUANTITIES[name][0]):.2g}" for share in (0.0, 0.5, 1.0)]
        for name, ends in zip(quantities, limits, strict=True)
    ]
    return panels, _bar(values, [QUANTITIES[name][1] for name in quantities], _height(len(rows.names)), by=("quantity",))


def _steps_of(run: Run, quantities: list[str]) -> np.ndarray:
    """Edges of columns that have all that was recorded of these."""
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
    """Images of quantities in shares of the way from the first colour to the last; the last one of several has the bar."""
    n = len(rows.names)
    reach = edges[[0, -1]], [-0.5, n - 0.5]
    if len(quantities) == 1:
        logarithmic, label = QUANTITIES[quantities[0]]
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
        layers.append(replace(grey, name="exactly 0"))  # on a log scale 0 has no colour
    x, y = _bad_cells(run, rows, edges)
    if x.size:
        layers.append(Points(x, y, marker="cross", size=5, style=1, name="not finite"))
    if not any(np.isfinite(image).any() for image in images):
        layers.append(NOWHERE_FINITE)
    chosen = [edges[0] + 0.012 * (edges[-1] - edges[0])]
    layers.append(Points(chosen, [[i] for i in range(n)], marker="ring", size=7, style="ink", by=("layer",)))
    ticks = [(i, _shortened(rows.names[i])) for i in range(0, n, -(-n // 32))]
    down = Axis("", -0.5, n - 0.5, ticks=ticks, upwards=False)
    return Panel(Axis("step", *edges[[0, -1]].tolist()), down, layers, click=Click("layer", "y"))


def _height(n_rows: int) -> float:
    """Of the image with its words, in inches."""
    return min(max(2.2, 0.17 * n_rows + 0.8), 3.6)


def _bar(values: list[list[str]], labels: list[str], height: float, by: tuple[str, ...] = ()) -> Panel:
    """The colours from the first to the last, with a label and three values for each of what is chosen."""
    inch = 1 / (height - 0.7)  # as a share of the panel, without the words below
    steps, top = np.linspace(0.0, 1.0, 256)[:, None], 1 - 0.4 * inch
    layers: list[Layer] = [Heatmap(steps, [0.0, 0.12], [0.0, top], limits=(0.0, 1.0))]
    for k, place in enumerate((0.05 * inch, top / 2, top - 0.05 * inch)):
        texts = [row[k] for row in values]
        layers.append(Text(texts if by else texts[0], 0.2, place, by=by, size=8, style="quiet"))
    layers.append(Text(labels if by else labels[0], 0.0, 1 - 0.17 * inch, by=by, size=8, style="ink"))
    return Panel(Axis("", 0, 1), Axis("", 0, 1), layers, column=1, frame=False)


def histogram_panel(run: Run, rows: Rows) -> Panel | None:
    """Histograms over the steps of the row that the control "layer" chooses; None where there are none."""
    what = next((name for name in ("gradient", "update", "weight") if _has(run, f"{name}_histogram")), None)
    if what is None:
        return None
    curve = run.histograms[f"{what}_histogram"].curve()
    edges = _edges(float(curve.first[0]), float(curve.last[-1]), min(len(curve.first), HISTORY))
    counts = rows.of(f"{what}_histogram", _columns(curve, curve.mean, edges))
    total = counts.sum(axis=2, keepdims=True)
    shares = np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    shares[shares == 0] = np.nan
    cells = shares.transpose(1, 2, 0)
    powers = np.log10(run.edges)  # cells are of equal height on these
    low, high = float(2 * powers[0] - powers[1]), float(2 * powers[-1] - powers[-2])
    reach, label = (edges[[0, -1]], [low, high]), "share of elements"
    image = Heatmap(drawable(cells), *reach, limits=(1e-4, 1.0), scale="log", label=label, by=("layer",))
    ticks = [(power, f"{10.0**power:g}".replace("e-0", "e-")) for power in range(math.ceil(low), math.floor(high) + 1, 2)]
    across, down = Axis("step", *edges[[0, -1]].tolist()), Axis(f"absolute value in the {what}", low, high, ticks=ticks)
    return Panel(across, down, [image, *bad_gradients(run, rows, across, down)])


def _has(run: Run, name: str) -> bool:
    return len(run.histograms.get(name, ())) > 0 and len(run.edges) > 1


def _edges(start: float, stop: float, count: int) -> np.ndarray:
    """Edges between columns of which the first has the first step in its middle, and the last one the last."""
    half = 0.5 * (stop - start) / (count - 1) if count > 1 else 0.5
    edges: np.ndarray = np.linspace(start - half, stop + half, count + 1)
    return edges


def _columns(curve: Curve, values: np.ndarray, edges: np.ndarray, largest: bool = False) -> np.ndarray:
    """Values [n, ...] of a curve's points as those of columns: means, or the largest, or of an empty one what was before."""
    count = len(edges) - 1
    column = np.clip(np.searchsorted(edges, (curve.first + curve.last) / 2, side="right") - 1, 0, count - 1)
    met, starts = np.unique(column, return_index=True)
    if len(met) == len(values):
        found = values
    elif largest:
        ends = np.append(starts[1:], len(values))
        found = values[starts]
        for k in range(1, int((ends - starts).max())):  # quicker than reduceat, which goes through each tensor by itself
            np.fmax(found, values[np.minimum(starts + k, ends - 1)], out=found)
    else:
        there = np.isfinite(values)
        number = np.add.reduceat(there, starts, axis=0)
        total = np.add.reduceat(np.where(there, values, 0.0), starts, axis=0)
        found = np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)
    return found[np.clip(np.searchsorted(met, np.arange(count), side="right") - 1, 0, len(met) - 1)]


def _limits(several: list[np.ndarray], logarithmic: bool) -> tuple[float, float]:
    """The values of the first and the last colour of all these cells; their logarithms where the scale is one."""
    cells = np.concatenate([each.ravel() for each in several])
    known = cells[np.isfinite(cells) & ((cells > 0) if logarithmic else True)]
    if logarithmic:
        known = np.log10(known)
    low, high = np.percentile(known, [1, 99]) if known.size else (0.0, 1.0)
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    return float(low), float(high)


def _scaled(cells: np.ndarray, low: float, high: float, logarithmic: bool) -> np.ndarray:
    """Cells as shares of the way from the first colour to the last."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log10(cells) if logarithmic else cells
        shares = np.clip((values - low) / (high - low), 0.0, 1.0)
    return np.where(np.isnan(cells) | np.isposinf(cells), np.nan, shares)


def _value(share: Any, low: float, high: float, logarithmic: bool) -> Any:
    value = low + share * (high - low)
    return 10.0**value if logarithmic else value


def _bad_cells(run: Run, rows: Rows, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where to mark gradients that are not finite: columns' middles, and rows. Neighbours have one mark for all."""
    found = nonfinite_gradients(run)
    if found is None or not found[1].any():
        return np.zeros(0), np.zeros(0)
    curve, bad = found
    cells = rows.of("gradient_nonfinite", _columns(curve, bad.astype(np.float64), edges, largest=True)).T > 0
    middles = (edges[:-1] + edges[1:]) / 2
    marks = [apart(middles[row], (edges[-1] - edges[0]) / MARKS) for row in cells]
    return np.concatenate(marks), np.repeat(np.arange(len(marks), dtype=np.float64), list(map(len, marks)))


def _shortened(name: str, longest: int = 28) -> str:
    return name if len(name) <= longest else f"{name[: longest // 2 - 1]}…{name[-(longest // 2) :]}"
