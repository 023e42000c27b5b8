"""View: what all views have in common. It shows a scene by the best means there is, and hands on what a person does with it.

An output of a widget always has a PNG and the text too, so that a page without a kernel, such as a code host's, still shows
the picture.
"""

from __future__ import annotations

import asyncio
import base64
import os
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trainer import files
from .render.matplotlib import draw
from .render.notebook import JUPYTER, UNKNOWN, current_shell, running_event_loop
from .render.renderers import Capabilities, capabilities, installed_version
from .scene import Scene
from .style import THEMES, Figure

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FrameBudget", "View"]

WIDGET = "application/vnd.jupyter.widget-view+json"
ANSWER = object()  # a frame that shows what a person has done


class View(ABC):
    """Something to look at. As the last line of a cell it is shown.

    A subclass makes a `Scene` of what is to be seen now; everything else follows from that. Methods whose names begin with
    "on_" are called when a person does something; they change the view and end in `refresh`. They may be called in another
    thread than the one that made the view, one at a time. What is to be seen then is drawn once, when they return.

    A widget keeps its view alive. `close` ends both, and so does running the cell again that showed it, or making another
    view of the same name. A view without a widget goes when nothing refers to it.

    Args:
        name: which other view it takes the place of; None: of none.
        theme: of pictures, "light" or "dark"; a canvas has the theme of its page.
        budget: how often and for how long it is drawn anew.

    Example:
        >>> from tristep.viz import Axis, Line, Panel, Scene, View
        >>> class Loss(View):
        ...     losses = [3.0, 2.0, 1.5]
        ...
        ...     def scene(self):
        ...         line = Line(range(1, len(self.losses) + 1), self.losses)
        ...         last = f"The loss is {self.losses[-1]} after {len(self.losses)} updates."
        ...         return Scene([Panel(Axis("update", 1, 10), Axis("loss", 0, 3), [line])], description=last)
        >>> print(Loss().describe())
        The loss is 1.5 after 3 updates.
    """

    def __init__(self, *, name: str | None = None, theme: str = "light", budget: FrameBudget | None = None) -> None:
        if theme not in THEMES:
            raise ValueError(f"theme={theme!r}: must be one of {', '.join(map(repr, THEMES))}")
        self.name, self.theme = name, theme
        self._budget = budget if budget is not None else FrameBudget()
        self._handling = threading.RLock()  # held by an event's method, which may wait for a step that draws
        self._lock = threading.RLock()  # held to make and send a frame; whoever has it waits for no other thread
        self._home_loop = running_event_loop()
        self._open: list[_Open] = []
        self._outputs: deque[str] = deque(maxlen=MOST_PICTURES)  # the names of those with a picture
        self._pictured: Scene | None = None  # what is to be seen there
        self._given: Scene | None = None  # the one that widgets show
        self._shared: Scene | None = None  # the one that the parts of an output are made of
        self._answering = False  # whether an event's method is at it; the frame that follows it is for all who ask meanwhile
        self._at_once = False  # whether what is asked for now is drawn now, and is to stay
        self._clock: Callable[[], float] = time.monotonic
        self._unseen_since: float | None = None
        self._late: object | None = None  # the frame that is put off: ANSWER, or one that a timer knows
        if name is not None:
            before = _NAMED.get(name)
            if before is not None:
                before.close()
            _NAMED[name] = self

    @abstractmethod
    def scene(self) -> Scene:
        """What is to be seen now."""

    def describe(self) -> str:
        """What there is to be seen, in words: the numbers that matter."""
        return self._now().description

    def figure(self, **state: int) -> Figure:
        """A matplotlib figure; its axes are in `axes`, in the order of the scene's panels.

        Args:
            state: by the name of a control the index of its value; those left out are as at first.
        """
        return draw(self._now(), state, self.theme)

    def widget(self) -> Any:
        """A widget that shows the view, by the best renderer that there is.

        Without a canvas, a place is chosen by two numbers and a button, and points are not dragged.

        Raises:
            ModuleNotFoundError: ipywidgets is not installed.
        """
        found = capabilities()
        renderer = found.renderer if found.renderer in ("canvas", "ipywidgets") else found.widget_renderer
        if renderer is None:
            raise ModuleNotFoundError("a widget needs ipywidgets: pip install 'tristep[notebook]'", name="ipywidgets")
        with self._drawing():
            self._given = scene = self._now()
            show = _open_canvas if renderer == "canvas" else _open_box
            opened = show(scene, self._receive, self.theme)
            self._open.append(opened)
            return opened.widget

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that is interactive without kernel and network: whole, or not at all.

        Controls and buttons that need Python are left out.

        Raises:
            FileNotFoundError: there is no such folder.
            ModuleNotFoundError: anywidget is not installed.
        """
        path = Path(path)
        with self._sharing() as scene:
            page = _canvas_module().page(scene.to_bytes(), scene.title or type(self).__name__, self.describe())
        files.replace("path", path, lambda file: file.write(page.encode()))
        return path

    def refresh(self) -> None:
        """Draw what is to be seen now in all widgets that are open; to be called when data has changed, as often as it does.

        It is done at once if the frame budget allows it, or if a person has done something. Else it is done as soon as the
        budget allows, where the kernel's event loop is free then; where it is not, by the next call or by `catch_up`.
        """
        with self._drawing():
            self._forget_closed()
            if not self._open:
                if self._budget.due():
                    self._take_in(wait=False)
                return
            if self._answering:
                self._late = ANSWER
            elif self._at_once or self._budget.due():
                self._draw(wait=self._at_once)
            elif self._late is None:
                self._put_off()

    def catch_up(self) -> None:
        """Draw now what `refresh` has put off, if it has; to be called when no more data will come."""
        with self._drawing():
            if self._late is None:
                return
            if self._answering:
                self._late = ANSWER
            else:
                self._draw(wait=True)

    @property
    def cost(self) -> float:
        """The share of the time that drawing has lately taken, from 0 to 1."""
        return self._budget.cost

    @property
    def unseen(self) -> float:
        """For how many seconds no page has told that it got what was drawn; 0 while one does, and where none can tell.

        A page that is hidden behind others tells, too; one that has been closed does not. Widgets without a canvas cannot.
        """
        return 0.0 if self._unseen_since is None else self._clock() - self._unseen_since

    def close(self) -> None:
        """Close all widgets. The view can be shown again."""
        with self._lock:
            self._late = None
            for opened in self._open:
                opened.widget.close()
            self._open.clear()
            self._given = self._unseen_since = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_control(self, name: str, value: Any, index: int) -> None:  # noqa: B027
        """A control of which Python is told has been set to its value of this index."""

    def on_button(self, name: str) -> None:  # noqa: B027
        """A button has been pressed."""

    def on_click(self, event: str, x: float, y: float) -> None:  # noqa: B027
        """A place has been chosen in a panel whose `Click` has this event; x and y are on its axes."""

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:  # noqa: B027
        """A point of the `Points` that have this event as `drag` has been moved to this place."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict[str, Any], dict[str, Any]]:
        # No HTML: it would be preferred to the picture where there are no widgets.
        renderer = capabilities().renderer
        with_widget = renderer in ("canvas", "ipywidgets")
        data: dict[str, Any] = {}
        about: dict[str, Any] = {}
        with self._sharing():
            data["text/plain"] = self.describe() or f"<{type(self).__name__}>"
            if renderer != "text":
                # Behind a widget the picture is kept in the file of the notebook, where half as many bytes are better.
                png, about["image/png"] = self.figure()._repr_png_(1.0 if with_widget else 1.5)
                data["image/png"] = base64.b64encode(png).decode("ascii")
            if with_widget:
                widget = self.widget()
                _replace_in_cell(self, widget)
                data[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        return data, about

    def _ipython_display_(self) -> None:
        """Show the widget, and the picture as an output of its own, which is what is left of both in a saved notebook.

        Where a notebook is opened again without its kernel, a widget is an error message, whatever else its output holds.
        """
        if not _keeps_outputs_apart(capabilities()):
            raise NotImplementedError  # by which IPython is told to ask for the bundle
        from IPython.display import display

        data, about = self._repr_mimebundle_()
        if WIDGET not in data:
            display(data, metadata=about, raw=True)
            return
        self._open[-1].pictured()
        picture = {name: data[name] for name in ("image/png", "text/plain")}
        display({name: data[name] for name in (WIDGET, "text/plain")}, raw=True)
        self._outputs.append(uuid.uuid4().hex)
        display(picture, metadata=about, raw=True, display_id=self._outputs[-1])
        self._pictured = self._given
        _watch_cells(self)

    def _renew_pictures(self) -> None:
        """Let the pictures below widgets, which only who has no widgets sees, show what these show."""
        with self._lock:
            if not self._outputs or self._given is None or self._given is self._pictured:
                return
            from IPython.display import update_display

            self._pictured = scene = self._given
            png, about = draw(scene, {}, self.theme)._repr_png_(1.0)
            data = {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": scene.description}
            for output in self._outputs:
                update_display(data, metadata={"image/png": about}, raw=True, display_id=output)

    def _now(self) -> Scene:
        if self._shared is not None:
            return self._shared
        self._take_in(wait=True)
        return self.scene()

    def _take_in(self, wait: bool) -> bool:
        """Take in what is new of what this view shows, all of it if it may wait for a device; whether that was all."""
        return True

    @contextmanager
    def _sharing(self) -> Iterator[Scene]:
        """The scene as it is now, which until the end is the one that all see."""
        with self._drawing():
            before, self._shared = self._shared, self._now()
            try:
                yield self._shared
            finally:
                self._shared = before

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """A context in which no other thread makes or sends a frame. What a scene has to wait for is waited for before."""
        with self._lock:
            yield

    def _draw(self, wait: bool) -> None:
        live = not self._at_once and self._late is not ANSWER and self._goes_on()
        self._late = None
        with self._budget.frame():
            is_all = self._take_in(wait)
            self._given = scene = self.scene()
            for opened in self._open:
                opened.show(scene, live)
                if opened.tells and self._unseen_since is None:
                    self._unseen_since = self._clock()
        if not is_all:
            self._put_off()
        if not self._goes_on():
            self._renew_pictures()

    def _refresh_at_once(self) -> None:
        """Draw now what is to be seen now, and as what is to stay: no frame need follow."""
        with self._drawing():
            before, self._at_once = self._at_once, True
            try:
                self.refresh()
                self.catch_up()
            finally:
                self._at_once = before

    def _goes_on(self) -> bool:
        """Whether there will be more of what is to be seen now, for which axes get room."""
        return True

    def _home(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that draws what is put off, as long as it runs."""
        return self._home_loop

    def _put_off(self) -> None:
        self._late = late = object()
        here, home = running_event_loop(), self._home()
        if here is None:
            return
        self_or_none = weakref.ref(self)

        def catch_up() -> None:
            view = self_or_none()
            if view is not None and view._late is late:
                view.catch_up()

        if home is None or home is here or not home.is_running():
            here.call_later(self._budget.wait(), catch_up)
        else:  # a button's thread comes and goes
            with suppress(RuntimeError):  # it has just been closed
                home.call_soon_threadsafe(home.call_later, self._budget.wait(), catch_up)

    def _forget_closed(self) -> None:
        self._open = [opened for opened in self._open if opened.widget.comm is not None]

    def _close_widget(self, widget: Any) -> None:
        with self._lock:
            widget.close()
            self._forget_closed()

    def _receive(self, event: dict[str, Any]) -> None:
        """Hand an event of a widget to the method that is for it."""
        self._unseen_since = None
        if event["kind"] == "seen":
            return
        with self._handling:
            with self._lock:  # which waits for a frame that is being drawn
                before, self._answering = self._answering, True
            try:
                if event["kind"] == "button":
                    self.on_button(event["name"])
                elif event["kind"] == "click":
                    self.on_click(event["name"], event["x"], event["y"])
                elif event["kind"] == "drag":
                    self.on_drag(event["name"], event["number"], event["x"], event["y"])
                elif event["kind"] == "control":
                    controls = self._given.controls if self._given is not None else ()
                    control = next((control for control in controls if control.name == event["name"]), None)
                    if control is not None and event["index"] < len(control.values):
                        self.on_control(control.name, control.values[event["index"]], event["index"])
            finally:
                with self._lock:
                    self._answering = before
                if self._late is ANSWER:
                    self.catch_up()


class FrameBudget:
    """When to draw: so many times a second at most, and never for more than a share of the time.

    Args:
        share: the most of the time that drawing may take, in (0, 1).
        most: frames per second, > 0.
        clock: what tells the time, in seconds.

    Example:
        >>> now = 0.0
        >>> budget = FrameBudget(share=0.05, clock=lambda: now)
        >>> with budget.frame():
        ...     now += 0.02  # drawing
        >>> round(budget.wait(), 6)  # 0.02 s are a twentieth of 0.4 s
        0.38
    """

    def __init__(self, share: float = 0.05, most: float = 10.0, clock: Callable[[], float] = time.perf_counter) -> None:
        if not 0 < share < 1:
            raise ValueError(f"share={share!r}: must be above 0 and below 1")
        if not most > 0:
            raise ValueError(f"most={most!r}: must be above 0 frames per second")
        self.share, self.most, self._clock = share, most, clock
        self._next = float("-inf")
        self._frames: deque[tuple[float, float]] = deque(maxlen=32)  # when they began, and how long they took

    def due(self) -> bool:
        """Whether a frame may be drawn now."""
        return self._clock() >= self._next

    def wait(self) -> float:
        """How many seconds to wait until then."""
        return max(self._next - self._clock(), 0.0)

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Around the drawing of a frame, whose time is taken."""
        begun = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self._frames.append((begun, ended - begun))
            self._next = max(begun + 1 / self.most, begun + (ended - begun) / self.share)

    @property
    def cost(self) -> float:
        """The share of the time since the first of the last 32 frames that they have taken, from 0 to 1."""
        frames = tuple(self._frames)  # another thread may add one
        if not frames:
            return 0.0
        spent, passed = sum(took for _, took in frames), self._clock() - frames[0][0]
        return min(spent / passed, 1.0) if passed > 0 else 0.0


_NAMED: weakref.WeakValueDictionary[str, View] = weakref.WeakValueDictionary()
_IN_CELLS: dict[str, tuple[str, list[tuple[weakref.ref[View], weakref.ref[Any]]]]] = {}
_DISPLAYED: weakref.WeakSet[View] = weakref.WeakSet()
MOST_PICTURES = 8  # outputs of a view that are kept up to date


@dataclass(frozen=True)
class _Open:
    """A widget on a page, and how it comes to show another scene."""

    widget: Any
    show: Callable[[Scene, bool], object]  # whether it shows the same, some steps later
    tells: bool  # whether it tells that a page has got what it shows
    pictured: Callable[[], object]  # an output with a picture follows, which is not to be seen as long as the widget is


def _open_canvas(scene: Scene, receive: Callable[[dict[str, Any]], None], _theme: str) -> _Open:
    widget = _canvas_module().SceneWidget(scene.to_bytes(), receive)
    show = lambda scene, live: setattr(widget, "payload", scene.to_bytes())  # noqa: E731
    return _Open(widget, show, True, lambda: setattr(widget, "pictured", True))


def _open_box(scene: Scene, receive: Callable[[dict[str, Any]], None], theme: str) -> _Open:
    from .render.ipywidgets import SceneBox

    widget = SceneBox(scene, receive, theme)
    return _Open(widget, widget.show, False, widget.hide_picture)


def _canvas_module() -> Any:
    if installed_version("anywidget") is None:
        raise ModuleNotFoundError("drawing in a browser needs anywidget: pip install 'tristep[notebook]'", name="anywidget")
    return import_module(".render.canvas", __package__)


def _keeps_outputs_apart(found: Capabilities) -> bool:
    """Whether the page, or what a notebook becomes without one, is built as JupyterLab builds it."""
    return found.kernel and found.front_end in (JUPYTER, UNKNOWN)


def _watch_cells(view: View) -> None:
    """Renew the view's pictures whenever a cell has been run."""
    if not _DISPLAYED:
        events = getattr(current_shell(), "events", None)
        if events is not None:
            events.register("post_run_cell", _after_cell)
    _DISPLAYED.add(view)


def _after_cell(*_: object) -> None:
    for view in list(_DISPLAYED):
        view._renew_pictures()


def _replace_in_cell(view: View, widget: Any) -> None:
    """Close the widgets that the same cell showed when it ran before, and remember this one."""
    shell = current_shell()
    get_parent = getattr(getattr(shell, "kernel", None), "get_parent", dict)
    parent: dict[str, Any] = get_parent() or {}
    cell = parent.get("metadata", {}).get("cellId")
    if cell is None:
        return
    run = parent["header"]["msg_id"]
    before, shown = _IN_CELLS.get(cell, (run, []))
    if before != run:
        for old_view, old_widget in shown:
            closing, closed = old_view(), old_widget()
            if closing is not None and closed is not None:
                closing._close_widget(closed)
        shown = []
    _IN_CELLS[cell] = (run, [*shown, (weakref.ref(view), weakref.ref(widget))])
