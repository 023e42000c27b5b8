"""Display: the widgets that show a view, and when they are redrawn."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..render.notebook import running_event_loop, watch_cell
from ..render.renderers import canvas_module
from ..scene import Scene
from .budget import FrameBudget
from .cells import CellPictures

__all__ = ["Display"]

ANSWER = object()  # a postponed frame that shows the result of the user's input


class Display:
    """The open widgets of a view; it draws their frames and passes the user's input to the view.

    `clock` returns the time in seconds; `shown` is the scene that the widgets show, None before the first one.
    """

    def __init__(self, view: Any, budget: FrameBudget) -> None:
        self.budget, self.clock = budget, time.monotonic
        self._view = weakref.ref(view)  # a view without a widget can be garbage-collected
        self._shown_view: Any = None  # keeps the view alive as long as a widget shows it
        self.shown: Scene | None = None
        self.pictures = CellPictures(view.theme, lambda: self.clock())
        self._open: list[tuple[Any, Callable[[], bool]]] = []  # each widget, and a function: has marimo dropped its cell?
        self._handling = threading.RLock()  # held while an event is handled, which may wait for a step that draws
        self._lock = threading.RLock()  # held to make and send a frame; its holder never waits for another thread
        self._event_loop = running_event_loop()
        self._chosen: list[int] | None = None  # in the table of runs; None: as the scene says
        self._answering = False  # whether an event is being handled; one frame after it serves all refreshes meanwhile
        self._at_once = False  # whether refreshes draw immediately, as the last frame
        self._late: object | None = None  # the postponed frame: ANSWER, or the token of a timer

    @property
    def view(self) -> Any:
        return self._view()

    @property
    def widgets(self) -> list[Any]:
        return [widget for widget, _ in filter(_is_open, self._open)]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context manager inside which no other thread makes or sends a frame, and the view's data is at rest."""
        with self.view.at_rest(), self._lock:
            yield

    def open(self, renderer: str, scene: Scene) -> Any:
        """Open a widget ("canvas" or "ipywidgets") that shows the view from now on; call it inside `drawing`."""
        self.shown = scene
        if renderer == "canvas":
            widget = canvas_module().SceneWidget(scene.to_bytes(), self._receive)
        else:
            from ..render.ipywidgets import SceneBox

            widget = SceneBox(scene, self._receive, self.view.theme)
        self._open.append((widget, watch_cell()))
        self._shown_view = self.view
        return widget

    def chosen(self, scene: Scene) -> Scene:
        """Return the scene with the runs that the user has chosen in its table."""
        return scene if self._chosen is None else scene.choosing(self._chosen)

    def refresh(self) -> None:
        """Draw now, or as soon as the budget allows."""
        with self.drawing():
            self._forget_closed()
            if not self._open:
                if self.budget.due():
                    self.view.take_in(wait=False)
                return
            if self._answering:
                self._late = ANSWER
            elif self._at_once or self.budget.due():
                self._draw(wait=self._at_once)
            elif self._late is None:
                self._put_off()

    def catch_up(self) -> None:
        with self.drawing():
            if self._late is None:
                return
            if self._answering:
                self._late = ANSWER
            else:
                self._draw(wait=True)

    def refresh_at_once(self) -> None:
        """Draw the current picture immediately and completely, regardless of the budget, as the last frame."""
        with self.drawing():
            previous, self._at_once = self._at_once, True
            try:
                self.view.refresh()
                self.view.catch_up()
            finally:
                self._at_once = previous

    def renew_pictures(self) -> None:
        """Redraw the static pictures below the widgets with the scene that the widgets show."""
        view = self.view
        with self._lock:
            self.pictures.renew(self.shown, 0.0 if view is None else view.picture_seconds())

    def close_widget(self, widget: Any) -> None:
        with self._lock:
            widget.close()
            self._forget_closed()

    def close(self) -> None:
        with self._lock:
            self._late = None
            for widget, _ in self._open:
                widget.close()
            self._open.clear()
            self.shown = self._shown_view = None

    def _draw(self, wait: bool) -> None:
        live = not self._at_once and self._late is not ANSWER and self.view.is_live()
        self._late = None
        self._forget_closed()
        with self.budget.frame():
            is_all = self.view.take_in(wait)
            self.shown = scene = self.chosen(self.view.scene())
            for widget, _ in self._open:
                widget.show(scene, live)
        if not is_all:
            self._put_off()
        if self.view.picture_seconds() or not self.view.is_live():
            self.renew_pictures()

    def _put_off(self) -> None:
        self._late = late = object()
        current_loop, view_loop = running_event_loop(), self.view.event_loop() or self._event_loop
        if current_loop is None:
            return
        self_or_none = weakref.ref(self)

        def catch_up() -> None:
            display = self_or_none()
            view = None if display is None or display._late is not late else display.view
            if view is not None:
                view.catch_up()

        if view_loop is None or view_loop is current_loop or not view_loop.is_running():
            current_loop.call_later(self.budget.wait(), catch_up)
        else:  # the thread of a button may end before the frame is due
            with suppress(RuntimeError):  # the loop has just been closed
                view_loop.call_soon_threadsafe(view_loop.call_later, self.budget.wait(), catch_up)

    def _forget_closed(self) -> None:
        self._open = list(filter(_is_open, self._open))
        if not self._open:
            self._shown_view = None

    def _receive(self, event: dict[str, Any]) -> None:
        """Pass an event of a widget to the view's method for it, then draw once."""
        with self._handling:
            with self._lock:  # waits for a frame that is being drawn
                previous, self._answering = self._answering, True
            try:
                self._hand_on(event)
            finally:
                with self._lock:
                    self._answering = previous
                if self._late is ANSWER:
                    self.view.catch_up()

    def _hand_on(self, event: dict[str, Any]) -> None:
        if event["kind"] == "runs":  # the page has drawn them; figures and saved pictures follow
            self._chosen = event["shown"]
            self.shown = None if self.shown is None else self.chosen(self.shown)
            return
        view, kind, name = self.view, event["kind"], event["name"]
        if kind == "button":
            view.on_button(name)
        elif kind == "click":
            view.on_click(name, event["x"], event["y"])
        elif kind == "drag":
            view.on_drag(name, event["number"], event["x"], event["y"])
        elif kind == "entry":
            view.on_entry(name, event["text"])
        elif kind == "control":
            controls = self.shown.controls if self.shown is not None else ()
            control = next((control for control in controls if control.name == name), None)
            if control is not None and event["index"] < len(control.values):
                view.on_control(control.name, control.values[event["index"]], event["index"])


def _is_open(opened: tuple[Any, Callable[[], bool]]) -> bool:
    """Return whether a page may still show the widget."""
    widget, cell_is_gone = opened
    return widget.comm is not None and not cell_is_gone()
