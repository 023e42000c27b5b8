"""What the cells of a notebook show of views: widgets that a cell run again replaces, pictures that are renewed."""

from __future__ import annotations

import base64
import uuid
import weakref
from collections import deque
from typing import Any

from ..render.matplotlib import draw
from ..render.notebook import current_shell, request
from ..scene import Scene

__all__ = ["CellPictures", "replace_in_cell"]

MOST_PICTURES = 8  # outputs of a view that are kept up to date
# By cell: its run, and the displays with the widgets that it shows.
_in_cells: dict[str, tuple[str, list[tuple[weakref.ref[Any], weakref.ref[Any]]]]] = {}
_pictured: weakref.WeakSet[Any] = weakref.WeakSet()


class CellPictures:
    """The pictures below a view's widgets, which show what these show to those who have no widgets.

    They are outputs of their own: where a notebook is opened again without its kernel, a widget is an error message,
    whatever else its output holds.

    Args:
        theme: "light" or "dark".
    """

    def __init__(self, theme: str) -> None:
        self._theme = theme
        self._outputs: deque[str] = deque(maxlen=MOST_PICTURES)
        self._shown: Scene | None = None

    def add(self, display: Any, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show a picture of the scene of a `Display`, which is renewed whenever a cell has been run."""
        from IPython.display import display as show

        self._outputs.append(uuid.uuid4().hex)
        show(data, metadata=metadata, raw=True, display_id=self._outputs[-1])
        self._shown = display.shown
        if not _pictured:
            events = getattr(current_shell(), "events", None)
            if events is not None:
                events.register("post_run_cell", _after_cell)
        _pictured.add(display)

    def renew(self, scene: Scene | None) -> None:
        """Let the pictures show this scene."""
        if not self._outputs or scene is None or scene is self._shown:
            return
        from IPython.display import update_display

        self._shown = scene
        png, about = draw(scene, {}, self._theme)._repr_png_(1.0)
        data = {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": scene.description}
        for output in self._outputs:
            update_display(data, metadata={"image/png": about}, raw=True, display_id=output)


def replace_in_cell(display: Any, widget: Any) -> None:
    """Close the widgets that the same cell showed when it ran before, and remember this one, of a `Display`."""
    parent = request()
    cell = parent.get("metadata", {}).get("cellId")
    if cell is None:
        return
    run = parent["header"]["msg_id"]
    before, shown = _in_cells.get(cell, (run, []))
    if before != run:
        for old_display, old_widget in shown:
            closing, closed = old_display(), old_widget()
            if closing is not None and closed is not None:
                closing.close_widget(closed)
        shown = []
    _in_cells[cell] = (run, [*shown, (weakref.ref(display), weakref.ref(widget))])


def _after_cell(*_: object) -> None:
    for display in list(_pictured):
        display.renew_pictures()
