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

ANSWER = object()  # a frame that shows what a person has done


class Display:
    """The widgets that are open of a view, and the frames that they get.

    Args:
        view: the `View` that is shown.
        budget: how often and for how long it is redrawn.
        clock: what tells the time, in seconds.

    Attributes:
        shown: the scene that the widgets show; None before the first.
        pictures: those below the widgets.
    """

    def __init__(self, view: Any, budget: FrameBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.clock = budget, clock
        self._view = weakref.ref(view)  # a view without a widget goes when nothing else refers to it
        self._shown_view: Any = None  # the same, as long as a widget shows it
        self.shown: Scene | None = None
        self.pictures = CellPictures(view.theme, lambda: self.clock())
        self._open: list[tuple[Any, Callable[[], bool]]] = []  # each widget, and whether marimo's page has dropped it
        self._handling = threading.RLock()  # held by an event's method, which may wait for a step that draws
        self._lock = threading.RLock()  # held to make and send a frame; whoever has it waits for no other thread
        self._event_loop = running_event_loop()
        self._answering = False  # whether an event's method is at it; the frame that follows it is for all who ask meanwhile
        self._at_once = False  # whether what is asked for now is drawn now, and is to stay
        self._unseen_since: float | None = None
        self._late: object | None = None  # the frame that is put off: ANSWER, or one that a timer knows

    @property
    def view(self) -> Any:
        """The `View` that is shown."""
        return self._view()

    @property
    def widgets(self) -> list[Any]:
        """The widgets that are open."""
        return [widget for widget, _ in filter(_is_open, self._open)]

    @property
    def unseen(self) -> float:
        """For how many seconds no page has told that it got what was drawn; 0 while one does, and where none can tell."""
        return 0.0 if self._unseen_since is None else self.clock() - self._unseen_since

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A context in which no other thread makes or sends a frame. What a scene has to wait for is waited for before."""
        with self.view.at_rest(), self._lock:
            yield

    def open(self, renderer: str, scene: Scene) -> Any:
        """A widget of the renderer "canvas" or "ipywidgets" that shows the view from now on; to be called in `drawing`."""
        self.shown = scene
        if renderer == "canvas":
            widget = canvas_module().SceneWidget(scene.to_bytes(), self._receive)
        else:
            from ..render.ipywidgets import SceneBox

            widget = SceneBox(scene, self._receive, self.view.theme)
        self._open.append((widget, watch_cell()))
        self._shown_view = self.view
        return widget

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
        """Draw now what has been put off, if it has."""
        with self.drawing():
            if self._late is None:
                return
            if self._answering:
                self._late = ANSWER
            else:
                self._draw(wait=True)

    def refresh_at_once(self) -> None:
        """Draw now what is to be seen now, and as what is to stay: no frame need follow."""
        with self.drawing():
            before, self._at_once = self._at_once, True
            try:
                self.view.refresh()
                self.view.catch_up()
            finally:
                self._at_once = before

    def renew_pictures(self) -> None:
        """Let the pictures below the widgets show what these show."""
        view = self.view
        with self._lock:
            self.pictures.renew(self.shown, 0.0 if view is None else view.picture_seconds())

    def close_widget(self, widget: Any) -> None:
        """Close one of them."""
        with self._lock:
            widget.close()
            self._forget_closed()

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            self._late = None
            for widget, _ in self._open:
                widget.close()
            self._open.clear()
            self.shown = self._unseen_since = self._shown_view = None

    def _draw(self, wait: bool) -> None:
        live = not self._at_once and self._late is not ANSWER and self.view.is_live()
        self._late = None
        self._forget_closed()
        with self.budget.frame():
            is_all = self.view.take_in(wait)
            self.shown = scene = self.view.scene()
            for widget, _ in self._open:
                widget.show(scene, live)
                if widget.tells and self._unseen_since is None:
                    self._unseen_since = self.clock()
        if not is_all:
            self._put_off()
        if self.view.picture_seconds() or not self.view.is_live():
            self.renew_pictures()

    def _put_off(self) -> None:
        self._late = late = object()
        here, home = running_event_loop(), self.view.event_loop() or self._event_loop
        if here is None:
            return
        self_or_none = weakref.ref(self)

        def catch_up() -> None:
            display = self_or_none()
            view = None if display is None or display._late is not late else display.view
            if view is not None:
                view.catch_up()

        if home is None or home is here or not home.is_running():
            here.call_later(self.budget.wait(), catch_up)
        else:  # a button's thread comes and goes
            with suppress(RuntimeError):  # it has just been closed
                home.call_soon_threadsafe(home.call_later, self.budget.wait(), catch_up)

    def _forget_closed(self) -> None:
        self._open = list(filter(_is_open, self._open))
        if not self._open:
            self._shown_view = None

    def _receive(self, event: dict[str, Any]) -> None:
        """Hand an event of a widget to the method that is for it."""
        self._unseen_since = None
        if event["kind"] == "seen":
            return
        with self._handling:
            with self._lock:  # which waits for a frame that is being drawn
                before, self._answering = self._answering, True
            try:
                self._hand_on(event)
            finally:
                with self._lock:
                    self._answering = before
                if self._late is ANSWER:
                    self.view.catch_up()

    def _hand_on(self, event: dict[str, Any]) -> None:
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
    """Whether a page may still show a widget."""
    widget, cell_is_gone = opened
    return widget.comm is not None and not cell_is_gone()
