"""Layers, axes and panels for functions of two variables, and for the optimizers that run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..scene import Axis, Layer, Line, Panel, Points, surface_layers
from ..simulate import Function, Trajectories

__all__ = [
    "On",
    "Plane",
    "function_layers",
    "function_panel",
    "has_rate",
    "loss_above",
    "loss_label",
    "loss_panel",
    "plane_of",
    "rounded",
    "starts_around",
    "ways",
    "with_rate",
]

GRID = 161  # grid points along each side of a square surface
LONGEST = 4.0  # times the shorter range: where one is longer, a picture to one scale would show a thread
LEAST = 1e-12  # the smallest loss on a log scale
On = str | Function | Callable[[torch.Tensor], torch.Tensor]


class Plane(NamedTuple):
    """What a panel draws of the plane, and whether x and y have one scale, so that gradients are square to level lines."""

    xlim: tuple[float, float]
    ylim: tuple[float, float]
    equal: bool

    @property
    def size(self) -> tuple[float, float]:
        return self.xlim[1] - self.xlim[0], self.ylim[1] - self.ylim[0]


def plane_of(where: Function, shape: float) -> Plane:
    """Return the plane of a function in a panel that is `shape` times as wide as high: to one scale, it fills the panel.

    The shorter range of the function's limits is made longer, around its middle; less than a quarter of the other, it stays.
    """
    plane = Plane(where.xlim, where.ylim, equal=True)
    wide, high = plane.size
    if max(wide, high) > LONGEST * min(wide, high):
        return plane._replace(equal=False)
    across, up = max(0.0, shape * high - wide) / 2, max(0.0, wide / shape - high) / 2
    (left, right), (low, top) = where.xlim, where.ylim
    return Plane((left - across, right + across), (low - up, top + up), equal=True)


def function_layers(where: Function, plane: Plane) -> list[Layer]:
    """Return the layers that draw a function on a plane as a surface with stars at its minima."""
    wide, high = plane.size if plane.equal else (1.0, 1.0)
    x = np.linspace(*plane.xlim, round(GRID * (wide / high) ** 0.5))
    y = np.linspace(*plane.ylim, round(GRID * (high / wide) ** 0.5))
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


def function_panel(plane: Plane, layers: Sequence[Layer], **others: Any) -> Panel:
    """Return a panel with the axes of a plane; `others` are further arguments of `Panel`."""
    return Panel(Axis("x", *plane.xlim), Axis("y", *plane.ylim), layers, equal=plane.equal, **others)


def loss_above(losses: np.ndarray, trajectories: Trajectories) -> np.ndarray:
    """Return losses minus the least loss of `trajectories`, at least 1e-12; NaN where they are not finite."""
    height = losses.astype(np.float64) - trajectories.least
    return np.where(np.isfinite(height), np.maximum(height, LEAST), np.nan)


def loss_axis(trajectories: Trajectories, losses: np.ndarray) -> Axis:
    """Return a log axis for losses; it leaves out values below 1e-9 and above 100 times the largest loss at the start."""
    height = loss_above(losses, trajectories)
    highest = 100 * np.nanmax(height[..., 0])
    return Axis.over(loss_label(trajectories.function), np.clip(height, 1e-9, max(highest, 1e-8)), scale="log")


def ways(trajectories: Trajectories, values: Any, by: tuple[str, ...] = ()) -> list[list[Line]]:
    """Return two lists of lines, the paths of all optimizers from the first start and their losses, up to control "step".

    `values` is an index or a slice of the values that were varied, and `by` the control that selects one value of a slice.
    """
    path_lines, loss_lines = list[Line](), list[Line]()
    for i, name in enumerate(trajectories.names):
        path, losses = trajectories.paths[i, values, 0], loss_above(trajectories.losses[i, values, 0], trajectories)
        look: dict[str, Any] = {"name": name, "style": i, "by": by, "upto": "step", "run": i}
        path_lines.append(Line(path[..., 0], path[..., 1], head=True, **look))
        loss_lines.append(Line(np.arange(trajectories.steps + 1), losses, **look))
    return [path_lines, loss_lines]


def loss_panel(trajectories: Trajectories, losses: np.ndarray, layers: Sequence[Layer], **others: Any) -> Panel:
    """Return a panel of losses over the steps, with a log axis that fits `losses`; `others` are arguments of `Panel`."""
    return Panel(Axis("step", 0, trajectories.steps), loss_axis(trajectories, losses), layers, **others)


def loss_label(where: Function) -> str:
    return "f(x, y) above its minimum" if where.minima else "f(x, y) above the least seen"


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def has_rate(optimizer: Any) -> bool:
    return isinstance(optimizer, Mapping) and "learning_rate" in optimizer


def with_rate(optimizer: Any, rate: float) -> Any:
    """Return the settings of an optimizer, given as a dict or an optimizer, with learning rate `rate`."""
    settings: dict[str, Any] = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
    return settings | {"learning_rate": rate}


def starts_around(where: Function, n: int, seed: int, start: Sequence[float] | None = None) -> np.ndarray:
    """Return starts [n, 2]: `start`, by default the function's, and random ones within a sixth of the plot around it."""
    spread = [(high - low) / 12 for low, high in (where.xlim, where.ylim)]
    drawn = np.random.default_rng(seed).uniform(-1, 1, (n, 2)) * spread
    drawn[0] = 0
    return (np.asarray(where.start if start is None else start) + drawn).astype(np.float32)
