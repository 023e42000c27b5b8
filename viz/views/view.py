"""View: what all views have in common.

It shows a scene by the best renderer there is, and hands on what a person does with it. An output of a widget always has a
PNG and the text too, so that a page without a kernel, such as a code host's, still shows the picture.
"""

from __future__ import annotations

import asyncio
import base64
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...trainer.checkpoint import files
from ..render.characters import in_characters
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
    """Something to look at. As the last line of a cell it is shown.

    A subclass makes a `Scene` of what is to be seen now; everything else follows from that. Methods whose names begin with
    "on_" are called when a person does something; they change the view and end in `refresh`. They may be called in another
    thread than the one that made the view, one at a time. What is to be seen then is drawn once, when they return.

    A widget keeps its view alive. `close` ends both, and so does running the cell again that showed it, or making another
    view of the same name. A view without a widget goes when nothing refers to it.

    Args:
        name: which other view it replaces; None: none.
        theme: of pictures, "light" or "dark"; a canvas has the theme of its page.
        budget: how often and for how long it is redrawn.

    Attributes:
        display: its open widgets, which `refresh` redraws.

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
        self.display = Display(self, budget if budget is not None else FrameBudget())
        self._shared: Scene | None = None  # the one that the parts of an output are made of
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

    def __str__(self) -> str:
        """What `print` shows in a terminal: the picture in characters, and the words."""
        with self._sharing() as scene:
            return f"{in_characters(scene)}\n\n{self.describe()}"

    def figure(self, **state: int) -> Figure:
        """A matplotlib figure; its axes are in `axes`, in the order of the scene's panels.

        Args:
            state: by the name of a control the index of its value; those left out are as at first.
        """
        from ..render.matplotlib import draw

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
            missing = "ipywidgets" if found.ipywidgets is None else "anywidget"
            raise ModuleNotFoundError(f"a widget needs {missing} here: pip install 'tristep[notebook]'", name=missing)
        with self.display.drawing():
            return self.display.open(renderer, self._now())

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that is interactive without kernel and network: whole, or not at all.

        Controls and buttons that need Python are left out.

        Raises:
            FileNotFoundError: there is no such folder.
            ModuleNotFoundError: anywidget is not installed.
        """
        path = Path(path)
        with self._sharing() as scene:
            page = canvas_module().page(scene.to_bytes(), scene.title or type(self).__name__, self.describe())
        files.replace("path", path, lambda file: file.write(page.encode("utf-8", "backslashreplace")))
        return path

    def refresh(self) -> None:
        """Draw what is to be seen now in all widgets that are open; to be called when data has changed, as often as it does.

        It is done at once if the frame budget allows it, or if a person has done something. Else it is done as soon as the
        budget allows, where the kernel's event loop is free then; where it is not, by the next call or by `catch_up`.
        """
        self.display.refresh()

    def catch_up(self) -> None:
        """Draw now what `refresh` has put off, if it has; to be called when no more data will come."""
        self.display.catch_up()

    @property
    def cost(self) -> float:
        """The share of the time that drawing has lately taken, from 0 to 1."""
        return self.display.budget.cost

    @property
    def unseen(self) -> float:
        """For how many seconds no page has told that it got what was drawn; 0 while one does, and where none can tell.

        A page that is hidden behind others tells, too; one that has been closed does not. Widgets without a canvas cannot.
        """
        return self.display.unseen

    def close(self) -> None:
        """Close all widgets. The view can be shown again."""
        self.display.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_in(self, wait: bool) -> bool:
        """Take in what is new of what this view shows, all of it if it may wait for a device.

        Returns:
            Whether that was all.
        """
        return True

    def is_live(self) -> bool:
        """Whether there will be more of what is to be seen now, for which axes get room."""
        return True

    def picture_seconds(self) -> float:
        """For how long the picture in a saved notebook may show what was; 0: until a cell has been run."""
        return 0.0

    def at_rest(self) -> AbstractContextManager[None]:
        """A context in which what this view shows does not change."""
        return nullcontext()

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that draws what is put off, as long as it runs; None: the one in which the view was made."""
        return None

    def on_control(self, name: str, value: Any, index: int) -> None:  # noqa: B027
        """A control of which Python is told has been set to its value of this index."""

    def on_button(self, name: str) -> None:  # noqa: B027
        """A button has been pressed."""

    def on_click(self, event: str, x: float, y: float) -> None:  # noqa: B027
        """A place has been chosen in a panel whose `Click` has this event; x and y are on its axes."""

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:  # noqa: B027
        """A point of the `Points` that have this event as `drag` has been moved to this place."""

    def on_entry(self, name: str, text: str) -> None:  # noqa: B027
        """Something has been typed into the field of the control of this name."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict[str, Any], dict[str, Any]]:
        # No HTML: it would be preferred to the picture where there are no widgets.
        renderer = capabilities().renderer
        with_widget = renderer in ("canvas", "ipywidgets")
        with self._sharing():
            data, about = self._picture(with_widget) if renderer != "text" else ({"text/plain": self._plain_text()}, {})
            if with_widget:
                own, own_about = self._widget_of_cell()
                data, about = data | own, about | own_about
        return data, about

    def _plain_text(self) -> str:
        return self.describe() or f"<{type(self).__name__}>"

    def _picture(self, with_widget: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """A PNG and the words."""
        # Behind a widget the picture is kept in the file of the notebook, where half as many bytes are better.
        png, about = self.figure()._repr_png_(1.0 if with_widget else 1.5)
        return {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": self._plain_text()}, {"image/png": about}

    def _widget_of_cell(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """A new widget, in place of those that this cell showed before; Colab has its scripts from what is about it."""
        widget = self.widget()
        replace_in_cell(self.display, widget)
        bundle = widget._repr_mimebundle_()
        data, about = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {WIDGET: data[WIDGET]}, about

    def _display_(self) -> Any:
        """What marimo shows: it takes a widget of anywidget, a figure of matplotlib or a text as such."""
        renderer = capabilities().renderer
        if renderer == "text":
            return self.describe()
        return self.widget() if renderer == "canvas" else self.figure()

    def _ipython_display_(self) -> None:
        """Show the widget, and the picture as an output of its own, which is what is left of both in a saved notebook.

        Where a notebook is opened again without its kernel, a widget is an error message, whatever else its output holds.
        """
        if not _keeps_outputs_apart(capabilities()):
            raise NotImplementedError  # by which IPython is told to ask for the bundle
        from IPython.display import display

        if capabilities().renderer not in ("canvas", "ipywidgets"):
            data, about = self._repr_mimebundle_()
            display(data, metadata=about, raw=True)
            return
        with self._sharing():
            data, _ = self._widget_of_cell()
            self.display.widgets[-1].hide_picture()
            # Before the picture, which takes longer; and without words, which would stay as they are.
            display(data | {"text/plain": ""}, raw=True)
            self.display.pictures.add(self.display, *self._picture(with_widget=True))

    def _now(self) -> Scene:
        if self._shared is not None:
            return self._shared
        self.take_in(wait=True)
        return self.scene()

    @contextmanager
    def _sharing(self) -> Iterator[Scene]:
        """The scene as it is now, which until the end is the one that all see."""
        with self.display.drawing():
            before, self._shared = self._shared, self._now()
            try:
                yield self._shared
            finally:
                self._shared = before


_NAMED: weakref.WeakValueDictionary[str, View] = weakref.WeakValueDictionary()


def _keeps_outputs_apart(found: Capabilities) -> bool:
    """Whether the page, or what a notebook becomes without one, is built as JupyterLab builds it."""
    return found.kernel and found.front_end in (JUPYTER, UNKNOWN)
