"""Functions of two variables in views, and the optimizers that run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...trainer.presets import label, plainer
from ..scene import Axis, Layer, Line, Panel, Points, surface_layers
from ..simulate import Function, Trajectories

__all__ = [
    "On",
    "function_layers",
    "function_panel",
    "has_rate",
    "loss_above",
    "loss_label",
    "loss_panel",
    "plainer_ones",
    "rounded",
    "starts_around",
    "ways",
    "with_rate",
]

GRID = 161  # points of a surface along each side
LEAST = 1e-12  # of losses on a log scale
On = str | Function | Callable[[torch.Tensor], torch.Tensor]


def function_layers(where: Function, xlim: tuple[float, float], ylim: tuple[float, float]) -> list[Layer]:
    x, y = np.linspace(*xlim, GRID), np.linspace(*ylim, GRID)
    points = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1))
    with torch.no_grad():
        height = where(points).numpy()
    stars: list[Layer] = []
    if where.minima:
        words = [f"minimum {minimum.value:.4g}" for minimum in where.minima]
        stars.append(
            Points(
                [m.x for m in where.minima], [m.y for m in where.minima], style="ink", marker="star", size=10, words=words
            )
        )
    return [*surface_layers(x, y, height), *stars]


def function_panel(where: Function, layers: Sequence[Layer], **others: Any) -> Panel:
    return Panel(Axis("x", *where.xlim), Axis("y", *where.ylim), layers, **others)


def loss_above(losses: np.ndarray, trajectories: Trajectories) -> np.ndarray:
    """Some of the losses of trajectories, above the least there is."""
    height = losses.astype(np.float64) - trajectories.least
    return np.where(np.isfinite(height), np.maximum(height, LEAST), np.nan)


def loss_axis(trajectories: Trajectories, losses: np.ndarray) -> Axis:
    """With room for all of these, but for what is far above the losses at the start or hardly above the least."""
    height = loss_above(losses, trajectories)
    highest = 100 * np.nanmax(height[..., 0])
    return Axis.over(loss_label(trajectories.function), np.clip(height, 1e-9, max(highest, 1e-8)), scale="log")


def ways(trajectories: Trajectories, labels: Mapping[str, str], values: Any, by: tuple[str, ...] = ()) -> list[list[Line]]:
    """The paths of all optimizers from the first start, and their losses, up to the control "step".

    Args:
        labels: what the legend calls each.
        values: which of the values that were varied, one or a slice.
        by: the control that chooses one of a slice.
    """
    found: list[list[Line]] = [[], []]
    for i, name in enumerate(trajectories.names):
        path, losses = trajectories.paths[i, values, 0], loss_above(trajectories.losses[i, values, 0], trajectories)
        for lines, x, y in ((found[0], path[..., 0], path[..., 1]), (found[1], np.arange(trajectories.steps + 1), losses)):
            lines.append(Line(x, y, name=labels[name], style=i, by=by, upto="step", head=lines is found[0]))
    return found


def loss_panel(trajectories: Trajectories, losses: np.ndarray, layers: Sequence[Layer], **others: Any) -> Panel:
    """Losses over the steps, on an axis with room for some of them."""
    return Panel(Axis("step", 0, trajectories.steps), loss_axis(trajectories, losses), layers, **others)


def loss_label(where: Function) -> str:
    return "f(x, y) above its minimum" if where.minima else "f(x, y) above the least seen"


def plainer_ones(optimizers: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """What a legend calls optimizers, with the plainer one whose steps one takes here; and the same as a note."""
    found = {name: plainer(name, given) for name, given in optimizers.items()}
    labels = {name: label(name, other) for name, other in found.items()}
    same = ", ".join(f"{name} takes the steps of {other}" for name, other in found.items() if other)
    return labels, [f"On two variables {same}: what is different elsewhere is not in this picture."] if same else []


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def has_rate(given: Any) -> bool:
    return isinstance(given, Mapping) and "learning_rate" in given


def with_rate(given: Any, rate: float, label: str | None = None) -> Any:
    """What is to run, at this rate."""
    own: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"optimizer": given}
    if label is not None and "optimizer" not in own:
        own["optimizer"] = label
    return own | {"learning_rate": rate}


def starts_around(where: Function, n: int, seed: int, start: Sequence[float] | None = None) -> np.ndarray:
    """A start, by default the function's, and others within a sixth of the drawn part around it: [n, 2]."""
    spread = [(high - low) / 12 for low, high in (where.xlim, where.ylim)]
    drawn = np.random.default_rng(seed).uniform(-1, 1, (n, 2)) * spread
    drawn[0] = 0
    return (np.asarray(where.start if start is None else start) + drawn).astype(np.float32)
