"""ActivationsView: what the layers of a network give, over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..record import Run
from ..scene import Axis, Band, Control, Layer, Line, Panel
from .heatmap import OF_LAYERS, TensorHeatmap
from .rows import Rows
from .run_view import Runs, checked_runs
from .series import drawable

__all__ = ["ActivationsView"]


class ActivationsView(TensorHeatmap):
    """A heat map of the layers' outputs over the steps, with mean and deviation of the outputs of a selected layer below.

    A row for each layer shows the share of zeros in its output, the mean or the deviation; rows, colours, groups of more
    than 64 layers and several runs are as in `TensorHeatmap`. A layer of ReLUs whose share of zeros reaches 1 is dead, and
    `diagnose` says so. Deviations that grow or shrink from layer to layer come from the start; see `tristep.initializer`.

    Args:
        runs: a `Recorder` with `activations`, a `Run`, `LiveLoop` or `RunSet` of such recorders, or an iterable of them, all
            with the same layers.
        quantity: the quantity shown initially: "activation_zeros", "activation_mean" or "activation_std".
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `runs` is or contains something else.
        ValueError: `runs` is empty, a run has no activations, its runs have different layers, or `quantity` is unknown.

    Example:
        >>> import torch, tristep
        >>> from torch import nn
        >>> from tristep import viz
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
        >>> recorder = viz.Recorder(trainer, activations=net)
        >>> net(torch.ones(16, 4)).sum().backward()
        >>> trainer.step(16)
        >>> recorder.step()
        >>> recorder.run.layers
        ['0 (Linear)', '1 (ReLU)', '2 (Linear)']
        >>> view = viz.ActivationsView(recorder)
    """

    quantities = OF_LAYERS
    row_is, heading = "layer", "Outputs of layers over steps"

    def __init__(self, runs: Runs, quantity: str = "activation_zeros", **settings: Any) -> None:
        recorders, recorded = checked_runs(runs)
        found = [run.activations for run in recorded if run.activations is not None]
        if len(found) < len(recorded):
            lacking = next(run.name for run in recorded if run.activations is None)
            raise ValueError(f"runs: {lacking!r} has no activations: record them by Recorder(..., activations=net)")
        super().__init__(found, quantity, **settings)
        self._recorders = recorders

    def _detail(self, run: Run, rows: Rows, kinds: Sequence[Control]) -> Panel | None:
        x, means = run.tensors["activation_mean"].means(rows.points(512))
        _, deviations = run.tensors["activation_std"].means(rows.points(512))
        middle = rows.of_choices("activation_mean", means).T
        around = rows.of_choices("activation_std", deviations).T
        low, high = middle - around, middle + around
        layers: list[Layer] = [
            Band(x, drawable(low), drawable(high), by=("layer",), style=0, name="one deviation around it"),
            Line(x, drawable(middle), by=("layer",), style=0, name="mean of the outputs", marker=len(x) == 1),
        ]
        finite = [np.where(np.isfinite(each), each, np.nan) for each in (low, high)]
        return Panel(Axis.over("step", x[[0, -1]], margin=0.01), Axis.over("output", *finite), layers)
