"""SceneBox: shows a scene with core ipywidgets, for notebooks without anywidget.

With one control, the browser gets all frames beforehand, so the control also works while the kernel is busy. With several,
the kernel draws a picture for each state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets
import numpy as np
import traitlets

from ..scene import Axis, Control, Heatmap, Layer, Scene
from .control_rows import ControlRows, close_all, structure_of
from .matplotlib import Picture

__all__ = ["Event", "SceneBox"]

MOST_BELOW = 4  # rows of controls below the picture; more stand next to it
HIGHEST = "490px"  # of a picture, so that its controls are on the screen with it
MOST_FRAMES = 64  # frames sent beforehand, some 40 kB each
ROOM, MOST_ROOM, MARGIN = 0.15, 0.5, 0.01  # shares of an axis: extra room when it grows, and what may be cut off
PICTURED = "tristep-pictured"
HIDING = f".jp-OutputArea-child:has(.{PICTURED}) + .jp-OutputArea-child:has(.jp-RenderedImage) {{ display: none; }}"
Event = dict[str, Any]


class SceneBox(ipywidgets.VBox):
    """A scene as a picture, with its controls below or next to it. Events are those of `render.canvas.SceneWidget`."""

    def __init__(self, scene: Scene, on_event: Callable[[Event], object] | None = None, theme: str = "light") -> None:
        super().__init__(
            layout={"flex_flow": "row wrap", "align_items": "flex-start"}
        )  # controls stand next to the picture if there is room
        self.scene, self._theme = scene, theme
        self._on_event = on_event or (lambda event: None)
        self._state = scene.state()
        self.picture: Picture | None = None
        self._drawing = threading.Lock()
        self._stale = False
        self._hiding: list[Any] = []
        local = [control for control in scene.controls if not control.remote and len(control.values) > 1]
        self._rows = self._new_rows()
        if len(local) == 1 and len(local[0].values) <= MOST_FRAMES and scene.runs is None:
            self._shown = self._frames(local[0])
        else:
            self._shown = self._image()
        self._put_together()

    def show(self, scene: Scene, live: bool = False) -> None:
        """Show another scene. A control keeps its value if both scenes have it, with as many values.

        If `live`, it is the same picture some steps later. Then an axis that grows gets extra room, so that most pictures
        can keep the axes of the one before; drawing those takes a sixth of the time.
        """
        before = {control.name: control for control in self.scene.controls}
        self._state = scene.state() | {
            control.name: self._state[control.name]
            for control in scene.controls
            if control.name in before and len(before[control.name].values) == len(control.values)
        }
        same = structure_of(scene) == structure_of(self.scene)
        self.scene = _with_room(scene, self.scene) if live else scene
        if not same:
            self._rows.close()
            self._rows = self._new_rows()
        if not isinstance(self._shown, ipywidgets.Image):  # drawing frames for every state again would take too long
            close_all(self._shown)
            self._shown = self._image()
            same = False
        if not same:
            self._put_together()
        self._rows.fill(scene, self._state)
        self._draw()

    def hide_picture(self) -> None:
        self.add_class(PICTURED)
        self._hiding = [ipywidgets.HTML(f"<style>{HIDING}</style>", layout={"display": "none"})]
        self._put_together()

    @property
    def links(self) -> list[Any]:
        return self._rows.links

    def _new_rows(self) -> ControlRows:
        return ControlRows(self.scene, self._state, self._set, self._tell)

    def _tell(self, event: Event) -> None:
        if event["kind"] == "runs":
            self.scene = self.scene.choosing(event["shown"])
            self._draw()
        self._on_event(event)

    def _put_together(self) -> None:
        rows = [*self._rows.widgets, *self._rows.about]
        if len(self._rows.widgets) > MOST_BELOW:  # side by side with the picture
            self._shown.layout.flex, self._shown.layout.min_width = "1 1 480px", "0"
            rows = [ipywidgets.VBox(rows, layout=ipywidgets.Layout(flex="0 1 330px", min_width="0"))]
        self.children = [self._shown, *rows, *self._hiding]

    def close(self) -> None:
        self._rows.close()
        for child in self.children:
            close_all(child)
        self.picture = None
        super().close()

    def _frames(self, control: Control) -> ipywidgets.Stack:
        """Draw a picture for each value of a control; the browser switches between them."""
        frames, picture = [], Picture(self.scene, self._state, self._theme)
        for index in range(len(control.values)):
            picture.show(state=self._state | {control.name: index})
            frames.append(self._framed(picture.png()))
        stack = ipywidgets.Stack(frames, selected_index=self._state[control.name])
        self.links.append(ipywidgets.jslink((self._rows.selectors[control.name], "index"), (stack, "selected_index")))
        return stack

    def _image(self) -> ipywidgets.Image:
        if self.picture is None:
            self.picture = Picture(self.scene, self._state, self._theme)
        return self._framed(self.picture.png())

    def _framed(self, png: bytes) -> ipywidgets.Image:
        width = f"{100 * self.scene.width:.0f}px"
        image = _Image(value=png, format="png", tooltip=_in_words(self.scene))
        look = {"width": width, "max_width": "100%", "height": "auto", "max_height": HIGHEST}
        image.layout = ipywidgets.Layout(**look, object_fit="contain", object_position="left top")
        return image

    def _draw(self) -> None:
        """Draw the current state. If another thread is drawing, that thread draws the latest state when it is done."""
        self._stale = True
        while self._stale and self._drawing.acquire(blocking=False):
            try:
                self._stale = False
                if self.picture is None or not isinstance(self._shown, ipywidgets.Image):
                    return
                self.picture.show(self.scene, self._state)
                with self._shown.hold_sync():  # the browser decodes the picture again at each message
                    self._shown.value = self.picture.png()
                    self._shown.tooltip = _in_words(self.scene)
            finally:
                self._drawing.release()

    def _set(self, name: str, index: int | None) -> None:
        if index is None or name not in self._state:
            return
        self._state = self._state | {name: index}
        control = next(control for control in self.scene.controls if control.name == name)
        if control.remote:
            self._on_event({"kind": "control", "name": name, "index": index})
        else:
            self._draw()


class _Image(ipywidgets.Image):
    """An image with a tooltip, which screen readers also use.

    The front end of ipywidgets 8 shows a tooltip only if the description is "", and fails without a description.
    """

    description = traitlets.Unicode("").tag(sync=True)


def _in_words(scene: Scene) -> str | None:
    return scene.description or scene.title or None


def _with_room(scene: Scene, before: Scene) -> Scene:
    """Return the scene with the axes and colour limits of the one before where it fits, else with room to grow."""
    if [[type(layer) for layer in panel.layers] for panel in scene.panels] != [
        [type(layer) for layer in panel.layers] for panel in before.panels
    ]:
        return scene
    panels = []
    for panel, old in zip(scene.panels, before.panels, strict=True):
        layers = [_recoloured(*both) for both in zip(panel.layers, old.layers, strict=True)]
        panels.append(replace(panel, x=_held(panel.x, old.x), y=_held(panel.y, old.y), layers=layers))
    return replace(scene, panels=panels)


def _held(axis: Axis, old: Axis) -> Axis:
    if replace(axis, low=old.low, high=old.high) != old:
        return axis
    (low, high), (old_low, old_high) = _on_scale(axis.scale, (axis.low, axis.high), (old.low, old.high))
    reach, old_reach = high - low, old_high - old_low
    if reach < 0.6 * old_reach:
        return axis
    # Axes have a margin, which grows with them.
    below, above = low < old_low - MARGIN * reach, high > old_high + MARGIN * reach
    if not (below or above):
        return old
    room = reach * min(max(reach / old_reach - 1, ROOM), MOST_ROOM)  # as much as it has just grown
    low, high = (low - room if below else old_low), (high + room if above else old_high)
    low, high = (10.0**low, 10.0**high) if axis.scale == "log" else (low, high)
    return replace(axis, low=float(low), high=float(high))


def _recoloured(layer: Layer, old: Layer) -> Layer:
    if not (
        isinstance(layer, Heatmap) and isinstance(old, Heatmap) and layer.limits and old.limits and layer.scale == old.scale
    ):
        return layer
    new, before = _on_scale(layer.scale, layer.limits, old.limits)
    close = np.abs(new - before).max() < ROOM * (new[1] - new[0])
    return replace(layer, limits=old.limits) if close else layer


def _on_scale(scale: str, *ends: tuple[float, float]) -> np.ndarray:
    return np.log10(ends) if scale == "log" else np.array(ends)
