"""Outputs of views in notebook cells: a rerun cell replaces its widgets, and static pictures are kept up to date."""

from __future__ import annotations

import atexit
import base64
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..render.notebook import current_shell, request
from ..scene import Scene

__all__ = ["CellPictures", "replace_in_cell"]

SOON = 5.0  # seconds until the first renewal of a picture; each later interval doubles, up to the limit given to `renew`
MOST_PICTURES = 8  # pictures of one view that are kept up to date
# By cell id: the id of its execution, and the pairs (display, widget) that it shows.
_in_cells: dict[str, tuple[str, list[tuple[weakref.ref[Any], weakref.ref[Any]]]]] = {}
_pictured: weakref.WeakSet[Any] = weakref.WeakSet()


class CellPictures:
    """The static pictures below a view's widgets, for readers whose page shows no widgets.

    They are separate outputs: in a notebook that is reopened without its kernel, a widget's output shows an error message,
    whatever else it holds. `theme` is "light" or "dark"; `clock` returns the time in seconds.
    """

    def __init__(self, theme: str, clock: Callable[[], float]) -> None:
        self._theme, self._clock = theme, clock
        self._added = self._renewed = 0.0  # times
        self._outputs: deque[str] = deque(maxlen=MOST_PICTURES)
        self._shown: Scene | None = None

    def add(self, display: Any, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show a picture of the scene of `display`, and renew it after each run of a cell.

        `data` and `metadata` are the MIME bundle of the picture.
        """
        from IPython.display import display as show

        self._outputs.append(uuid.uuid4().hex)
        show(data, metadata=metadata, raw=True, display_id=self._outputs[-1])
        self._shown, self._added = display.shown, self._clock()
        self._renewed = self._added
        if not _pictured:
            events = getattr(current_shell(), "events", None)
            if events is not None:
                events.register("post_run_cell", _after_cell)
            atexit.register(_at_exit)
        _pictured.add(display)

    def renew(self, scene: Scene | None, seconds: float = 0.0) -> None:
        """Redraw the pictures with `scene` if they are older than `seconds`; recently added pictures are renewed earlier."""
        if not self._outputs or scene is None or scene is self._shown:
            return
        now = self._clock()
        if now - self._renewed < min(seconds, max(SOON, self._renewed - self._added)):
            return
        from IPython.display import update_display

        from ..render.matplotlib import draw

        self._shown, self._renewed = scene, now
        png, about = draw(scene, {}, self._theme)._repr_png_(1.0)
        data = {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": scene.description}
        for output in self._outputs:
            update_display(data, metadata={"image/png": about}, raw=True, display_id=output)


def replace_in_cell(display: Any, widget: Any) -> None:
    """Close the widgets that an earlier run of the current cell showed, and register `widget` of the `Display` `display`."""
    parent = request()
    cell = parent.get("metadata", {}).get("cellId")
    if cell is None:
        return
    run = parent["header"]["msg_id"]
    last_run, shown = _in_cells.get(cell, (run, []))
    if last_run != run:
        for old_display, old_widget in shown:
            closing, closed = old_display(), old_widget()
            if closing is not None and closed is not None:
                closing.close_widget(closed)
        shown = []
    _in_cells[cell] = (run, [*shown, (weakref.ref(display), weakref.ref(widget))])


def _after_cell(*_: object) -> None:
    for display in list(_pictured):
        display.renew_pictures()


def _at_exit() -> None:
    """Renew all pictures; a kernel that shuts down can still update its notebook."""
    for display in list(_pictured):
        display.pictures.renew(display.shown)
