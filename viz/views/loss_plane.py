"""LossPlaneView: the loss over a plane in weight space, with trajectories of training runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...trainer.validation import instance
from ..scene import Axis, Control, Layer, Line, Panel, Points, Scene, surface_layers
from ..simulate import LossPlane
from .trajectories import moments_of
from .view import View

__all__ = ["LossPlaneView"]


class LossPlaneView(View):
    """The loss over a plane in weight space as colours and level lines, with projected trajectories of training runs.

    Args:
        plane: the result of `loss_plane`.
        title: the title of the picture.
        **others: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `plane` is not a `LossPlane`.
    """

    def __init__(self, plane: LossPlane, title: str = "Loss over a plane of weights", **others: Any) -> None:
        instance("plane", plane, LossPlane, "a LossPlane, as loss_plane gives it")
        self.plane, self.title = plane, title
        super().__init__(**others)

    def scene(self) -> Scene:
        plane = self.plane
        layers: list[Layer] = surface_layers(plane.x, plane.y, plane.values, label="loss above its least value here")
        controls, curves = [], []
        last = max((int(steps[-1]) for steps in plane.steps.values()), default=0)
        if last:
            moments = moments_of(last)
            controls = [Control("step", "step", moments, len(moments) - 1, kind="play")]
        for i, (name, path) in enumerate(plane.paths.items()):
            steps = plane.steps[name]
            # The part of the path up to each value of the control; its points may be many steps apart.
            if last:
                at = np.searchsorted(steps, moments, side="right") - 1
                x, y = (np.where(np.arange(len(steps)) <= at[:, None], path[:, k], np.nan) for k in (0, 1))
                layers.append(Line(x, y, name=name, style=i, by=("step",), head=True))
                here = np.where(np.arange(len(steps)) <= at[:, None], plane.losses[name], np.nan)
                curves.append(Line(steps, here, name=name, style=i, by=("step",)))
            layers.append(Points(path[:1, 0], path[:1, 1], style="ink", marker="ring", size=5, words=[f"{name}, start"]))
        across, up = self._labels()
        panels = [
            Panel(
                Axis(across, plane.x[0], plane.x[-1]),
                Axis(up, plane.y[0], plane.y[-1]),
                layers,
                equal=True,
                columns=1,
                legend=None if curves else "",  # names stand once, above both panels
            )
        ]
        if curves:
            losses = np.concatenate(list(plane.losses.values()))
            scale = "log" if (losses[np.isfinite(losses)] > 0).all() else "linear"
            axis = Axis.over("loss on the way", losses, scale=scale)
            panels.append(Panel(Axis("step", 0, max(last, 1)), axis, curves, column=1))
        return Scene(
            panels,
            self.title,
            controls,
            width=10.5 if curves else 5.6,
            height=5.2,
            widths=(1.25, 1) if curves else (),
            description=self.describe(),
        )

    def describe(self) -> str:
        """Return the range of the loss on the plane, and the losses at the ends of each trajectory, in sentences."""
        plane = self.plane
        finite = plane.values[np.isfinite(plane.values)]
        k = int(np.nanargmin(plane.values)) if finite.size else 0
        row, column = divmod(k, len(plane.x))
        parts = [
            f"{self.title}: {len(plane.x)} by {len(plane.y)} points; the loss is from {finite.min():.4g}, at "
            f"({plane.x[column]:.3g}, {plane.y[row]:.3g}), to {finite.max():.4g}."
            if finite.size
            else f"{self.title}: the loss is nowhere finite."
        ]
        if np.isfinite(plane.explained).all():
            parts.append(f"The plane has {sum(plane.explained):.0%} of the variance of the ways on it.")
        for name, path in plane.paths.items():
            losses = plane.losses[name]
            parts.append(
                f"{name}: loss {losses[0]:.4g} at ({path[0, 0]:.3g}, {path[0, 1]:.3g}) to {losses[-1]:.4g} at "
                f"({path[-1, 0]:.3g}, {path[-1, 1]:.3g}), which is {plane.off[name][-1]:.3g} off the plane."
            )
        return " ".join(parts)

    def _labels(self) -> tuple[str, str]:
        if np.isfinite(self.plane.explained).all():
            first, second = (f"{share:.0%} of the variance" for share in self.plane.explained)
            return f"first principal direction, {first}", f"second, {second}"
        return "first random direction", "second random direction"
