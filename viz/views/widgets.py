"""The widgets by which views are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..render.notebook import watch_cell
from ..render.renderers import installed_version
from ..scene import Scene

__all__ = ["OpenWidget", "canvas_module", "open_widget"]


@dataclass(frozen=True)
class OpenWidget:
    """A widget on a page, and how it comes to show another scene."""

    widget: Any
    show: Callable[[Scene, bool], object]  # whether it shows the same, some steps later
    tells: bool  # whether it tells that a page has got what it shows
    pictured: Callable[[], object]  # an output with a picture follows, which is not to be seen as long as the widget is
    cell_is_gone: Callable[[], bool] = field(default_factory=watch_cell)  # with which marimo's page has dropped the widget

    @property
    def is_open(self) -> bool:
        """Whether a page may still show it."""
        return self.widget.comm is not None and not self.cell_is_gone()


def open_widget(renderer: str, scene: Scene, receive: Callable[[dict[str, Any]], None], theme: str) -> OpenWidget:
    """A widget of the renderer "canvas" or "ipywidgets"; `receive` gets what a person does with it."""
    return _open_canvas(scene, receive) if renderer == "canvas" else _open_box(scene, receive, theme)


def _open_canvas(scene: Scene, receive: Callable[[dict[str, Any]], None]) -> OpenWidget:
    widget = canvas_module().SceneWidget(scene.to_bytes(), receive)
    show = lambda scene, live: setattr(widget, "payload", scene.to_bytes())  # noqa: E731
    return OpenWidget(widget, show, True, lambda: setattr(widget, "pictured", True))


def _open_box(scene: Scene, receive: Callable[[dict[str, Any]], None], theme: str) -> OpenWidget:
    from ..render.ipywidgets import SceneBox

    widget = SceneBox(scene, receive, theme)
    return OpenWidget(widget, widget.show, False, widget.hide_picture)


def canvas_module() -> Any:
    """The module of the canvas.

    Raises:
        ModuleNotFoundError: anywidget is not installed.
    """
    if installed_version("anywidget") is None:
        raise ModuleNotFoundError("drawing in a browser needs anywidget: pip install 'tristep[notebook]'", name="anywidget")
    return import_module("..render.canvas", __package__)
