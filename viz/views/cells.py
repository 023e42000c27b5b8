"""What the cells of a notebook show of views: widgets that a cell run again replaces, pictures that are renewed."""

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

SOON = 5.0  # seconds after which a picture is renewed first, even if it may be older; then it is twice as old each time
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
        clock: what tells the time, in seconds.
    """

    def __init__(self, theme: str, clock: Callable[[], float]) -> None:
        self._theme, self._clock = theme, clock
        self._added = self._renewed = 0.0  # when
        self._outputs: deque[str] = deque(maxlen=MOST_PICTURES)
        self._shown: Scene | None = None

    def add(self, display: Any, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show a picture of the scene of a `Display`, which is renewed whenever a cell has been run."""
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
        """Let the pictures show this scene, or only if they are as old as this; those that are new are renewed earlier."""
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


def _at_exit() -> None:
    """A kernel that is shut down still tells the notebook."""
    for display in list(_pictured):
        display.pictures.renew(display.shown)
