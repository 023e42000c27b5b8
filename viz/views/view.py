"""View: the base class of all views.

It shows a scene with the best renderer available, and passes the user's input to the view's methods. The output of a widget
always includes a PNG and the text, so that a page without a kernel, such as a code host's, still shows the picture.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...trainer.serialization import files
from ...trainer.validation import choice, instance, refuse_arguments
from ..render.notebook import JUPYTER, UNKNOWN
from ..render.renderers import Capabilities, canvas_module, capabilities
from ..scene import Scene
from ..style import THEMES
from .budget import FrameBudget
from .cells import replace_in_cell
from .display import Display

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..render.matplotlib import Figure

__all__ = ["View"]

WIDGET = "application/vnd.jupyter.widget-view+json"


class View(ABC):
    """The base class of pictures that notebooks show: a view on the last line of a cell is displayed.

    A subclass implements `scene`, which returns the current picture as a `Scene`; the widget, figure, page and text are made
    from it. The constructor does not call it. The methods named "on_..." are called on the user's input; they change the
    view and then call `refresh`. They may run in a thread other than the one that made the view, one at a time. The view is
    redrawn once, when they return.

    A widget keeps its view alive. `close` closes the widgets; rerunning the cell that showed them, or making another view of
    the same name, closes them too. A view without widgets is garbage-collected when nothing refers to it.

    Args:
        name: identifies the view; an open view of the same name is closed. None replaces no view.
        theme: the theme of static pictures, "light" or "dark"; a canvas follows the theme of its page.
        budget: limits how often and for how long the view is redrawn; None is `FrameBudget()`.
        **unknown: refused, with the names of the arguments that the view has.

    Attributes:
        display: the `Display` that holds the open widgets, which `refresh` redraws.

    Raises:
        TypeError: there is no such argument.
        ValueError: `theme` is not "light" or "dark".

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

    instead_of: ClassVar[Mapping[str, str]] = {}  # what to write for arguments that users expect, but the view has not

    def __init__(
        self, *, name: str | None = None, theme: str = "light", budget: FrameBudget | None = None, **unknown: Any
    ) -> None:
        if unknown:
            hint = self.instead_of.get(next(iter(unknown)), "")
            refuse_arguments(type(self).__name__, unknown, _arguments_of(type(self)), hint)
        self.name, self.theme = name, choice("theme", theme, THEMES)
        self.display = Display(self, budget if budget is not None else FrameBudget())
        self._shared: Scene | None = None  # the scene that all parts of one output show
        if name is not None:
            replaced = _NAMED.get(name)
            if replaced is not None:
                replaced.close()
            _NAMED[name] = self

    @abstractmethod
    def scene(self) -> Scene:
        """Return the current picture as data, which every renderer can draw."""

    def describe(self) -> str:
        """Return a description of the current picture in words, with its most important numbers."""
        return self._now().description

    def figure(self, **state: int) -> Figure:
        """Draw the current picture as a matplotlib figure.

        Args:
            **state: the index of each control's value, by the control's name; a control left out has its initial value.

        Returns:
            The figure. Its attribute `axes` lists the axes in the order of the scene's panels.
        """
        from ..render.matplotlib import draw

        return draw(self._now(), state, self.theme)

    def widget(self) -> Any:
        """Open and return a notebook widget that shows the view, drawn by the best renderer available.

        Without a canvas, the user enters a position as two numbers and presses a button, and cannot drag points.

        Raises:
            ModuleNotFoundError: ipywidgets, or the anywidget that this notebook needs, is not installed.
        """
        available = capabilities()
        renderer = available.renderer if available.renderer in ("canvas", "ipywidgets") else available.widget_renderer
        if renderer is None:
            missing = "ipywidgets" if available.ipywidgets is None else "anywidget"
            raise ModuleNotFoundError(f"a widget needs {missing} here: pip install 'tristep[notebook]'", name=missing)
        with self.display.drawing():
            return self.display.open(renderer, self._now())

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write the view as an HTML page that is interactive without a kernel or a network, and return its path.

        The page leaves out controls and buttons that need Python. The file is replaced atomically.

        Args:
            path: the file to write.

        Raises:
            FileNotFoundError: the folder of `path` does not exist.
            ModuleNotFoundError: anywidget is not installed.
        """
        path = Path(path)
        with self._sharing() as scene:
            page = canvas_module().page(scene.to_bytes(), scene.title or type(self).__name__, self.describe())
        files.replace("path", path, lambda file: file.write(page.encode("utf-8", "backslashreplace")))
        return path

    def refresh(self) -> None:
        """Redraw all open widgets; call it whenever the data has changed, however often.

        It draws at once if the frame budget allows it, or in response to the user's input. Otherwise it draws as soon as the
        budget allows and the kernel's event loop is free; if the loop is busy, the next call or `catch_up` draws.
        """
        self.display.refresh()

    def catch_up(self) -> None:
        """Draw now if `refresh` has postponed a frame; call it when no more data will come."""
        self.display.catch_up()

    @property
    def cost(self) -> float:
        """The fraction of the recent time that was spent drawing, from 0 to 1."""
        return self.display.budget.cost

    def close(self) -> None:
        """Close all widgets of the view, which can be shown again."""
        self.display.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_in(self, wait: bool) -> bool:
        """Fetch data recorded since the last call; for subclasses of `View` to override.

        Args:
            wait: whether to wait for a device until all data has arrived.

        Returns:
            Whether all data recorded so far is in the view.
        """
        return True

    def is_live(self) -> bool:
        """Return whether more data will come, so that the axes leave room for it; for subclasses to override."""
        return True

    def picture_seconds(self) -> float:
        """Return how many seconds old the picture in a saved notebook may be; 0.0 renews it after every cell."""
        return 0.0

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a context manager inside which the data that this view shows does not change."""
        return nullcontext()

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop that draws postponed frames while it runs; None is the loop in which the view was made."""
        return None

    def on_control(self, name: str, value: Any, index: int) -> None:  # noqa: B027
        """Handle a remote control set to `value`, which is number `index` of its values."""

    def on_button(self, name: str) -> None:  # noqa: B027
        """Handle a press of the button `name`."""

    def on_click(self, event: str, x: float, y: float) -> None:  # noqa: B027
        """Handle a click at (x, y), in axis units, in a panel whose `Click` names this event."""

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:  # noqa: B027
        """Handle a drag to (x, y), in axis units, of point `number` of the `Points` whose `drag` is this event."""

    def on_entry(self, name: str, text: str) -> None:  # noqa: B027
        """Handle `text` typed into the field of the control `name`."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict[str, Any], dict[str, Any]]:
        # No HTML: pages without widgets would show it instead of the picture.
        renderer = capabilities().renderer
        with_widget = renderer in ("canvas", "ipywidgets")
        with self._sharing():
            data, about = self._picture(with_widget) if renderer != "text" else ({"text/plain": self._plain_text()}, {})
            if with_widget:
                widget_data, widget_about = self._widget_of_cell()
                data, about = data | widget_data, about | widget_about
        return data, about

    def _plain_text(self) -> str:
        return self.describe() or f"<{type(self).__name__}>"

    def _picture(self, with_widget: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the MIME bundle of a PNG and the description, and its metadata."""
        # With a widget the picture is only a fallback in the notebook's file, so half as many bytes are enough.
        png, about = self.figure()._repr_png_(1.0 if with_widget else 1.5)
        return {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": self._plain_text()}, {"image/png": about}

    def _widget_of_cell(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the bundle and metadata, which Colab needs, of a new widget that replaces this cell's earlier ones."""
        widget = self.widget()
        replace_in_cell(self.display, widget)
        bundle = widget._repr_mimebundle_()
        data, about = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {WIDGET: data[WIDGET]}, about

    def _display_(self) -> Any:
        """Return the object that marimo shows: an anywidget, a matplotlib figure or a text."""
        renderer = capabilities().renderer
        if renderer == "text":
            return self.describe()
        return self.widget() if renderer == "canvas" else self.figure()

    def _ipython_display_(self) -> None:
        """Show the widget and, as a separate output, the picture, which remains in a saved notebook.

        In a notebook that is reopened without its kernel, a widget's output shows an error message, whatever else it holds.
        """
        if not _keeps_outputs_apart(capabilities()):
            raise NotImplementedError  # tells IPython to use _repr_mimebundle_
        from IPython.display import display

        if capabilities().renderer not in ("canvas", "ipywidgets"):
            data, about = self._repr_mimebundle_()
            display(data, metadata=about, raw=True)
            return
        with self._sharing():
            data, _ = self._widget_of_cell()
            self.display.widgets[-1].hide_picture()
            # The widget first, as the picture takes longer; without a description, which would not be updated.
            display(data | {"text/plain": ""}, raw=True)
            self.display.pictures.add(self.display, *self._picture(with_widget=True))

    def _now(self) -> Scene:
        """Return the scene shared by the current output, or else a new one with all recorded data."""
        if self._shared is not None:
            return self._shared
        self.take_in(wait=True)
        scene: Any = self.scene()
        instance(f"what {type(self).__name__}.scene() returns", scene, Scene, "a Scene")
        return self.display.chosen(scene)

    @contextmanager
    def _sharing(self) -> Iterator[Scene]:
        """Return a context manager inside which all outputs show the same scene, the current one."""
        with self.display.drawing():
            previous, self._shared = self._shared, self._now()
            try:
                yield self._shared
            finally:
                self._shared = previous


def _arguments_of(kind: type[View]) -> list[str]:
    """Return the names of the arguments of a view's constructor, and of those that it passes on to `View`."""
    parameters = inspect.signature(kind).parameters | inspect.signature(View).parameters
    return [each.name for each in parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]


_NAMED: weakref.WeakValueDictionary[str, View] = weakref.WeakValueDictionary()


def _keeps_outputs_apart(notebook: Capabilities) -> bool:
    """Return whether the notebook is shown, or would be shown once opened, by JupyterLab or a front end built like it."""
    return notebook.kernel and notebook.front_end in (JUPYTER, UNKNOWN)
