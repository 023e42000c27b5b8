"""Choose the renderer that shows views: the user's choice, or the best one that is likely to work here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...trainer.validation import choice
from .notebook import COLAB, MARIMO, TERMINAL, UNKNOWN, enable_colab_widgets, guess_front_end

__all__ = ["Capabilities", "canvas_module", "capabilities", "installed_version", "set_renderer"]

RENDERERS = ("auto", "canvas", "ipywidgets", "matplotlib", "text")
NEEDS = {"canvas": ("anywidget", "ipywidgets"), "ipywidgets": ("ipywidgets",)}
VARIABLE = "TRISTEP_VIZ"  # the environment variable that chooses the renderer, unless `set_renderer` does
_chosen: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """The front end, packages and renderer with which this process shows views; see `capabilities`.

    Args:
        front_end: the front end, as far as can be seen from inside, such as "Colab" or "a terminal".
        kernel: whether the code runs in a kernel, of Jupyter or marimo.
        ipywidgets, anywidget: the installed versions; None if missing.
        renderer: the renderer in use.
        reason: why this renderer is in use.
    """

    front_end: str
    kernel: bool
    ipywidgets: str | None
    anywidget: str | None
    renderer: str
    reason: str

    @property
    def widget_renderer(self) -> str | None:
        """The best widget renderer that works here, "canvas" or "ipywidgets"; None if neither does."""
        return _best_widgets(self.front_end, self.ipywidgets, self.anywidget)[0]

    def __str__(self) -> str:
        versions = f"ipywidgets {self.ipywidgets or 'missing'}, anywidget {self.anywidget or 'missing'}"
        return f"{self.renderer}: {self.reason} ({self.front_end}, {versions})"


def canvas_module() -> Any:
    if installed_version("anywidget") is None:
        raise ModuleNotFoundError("drawing in a browser needs anywidget: pip install 'tristep[notebook]'", name="anywidget")
    return import_module(".canvas", __package__)


def set_renderer(renderer: str | None) -> None:
    """Choose the renderer of all views.

    Args:
        renderer: "canvas" draws in the browser (needs anywidget); "ipywidgets" shows matplotlib's pictures with core
            widgets; "matplotlib" shows a PNG; "text" shows the description; "auto" chooses the best one that is likely to
            work here. None means the value of the environment variable TRISTEP_VIZ, or "auto" without it.

    Raises:
        ValueError: the renderer does not exist.
        ModuleNotFoundError: a package that it needs is not installed.
    """
    if renderer is not None:
        _check_renderer("renderer", renderer)
    global _chosen
    _chosen = renderer


def capabilities() -> Capabilities:
    """Return the front end, the installed widget packages, and the renderer that follows from them.

    In Colab this turns on the manager of custom widgets.

    Raises:
        ValueError: TRISTEP_VIZ is set to a renderer that does not exist.
        ModuleNotFoundError: a package that the renderer of TRISTEP_VIZ needs is not installed.
    """
    front_end, kernel = guess_front_end()
    ipywidgets, anywidget = installed_version("ipywidgets"), installed_version("anywidget")
    chosen, reason = _chosen, "chosen by set_renderer()"
    if chosen is None:
        chosen, reason = os.environ.get(VARIABLE, "auto"), f"chosen by {VARIABLE}"
        _check_renderer(VARIABLE, chosen)
    best, why = _best_widgets(front_end, ipywidgets, anywidget)
    if chosen == "auto":
        if front_end == TERMINAL:
            chosen, reason = "text", "a terminal shows text only"
        elif not kernel:
            chosen, reason = "matplotlib", "no kernel runs this, which widgets would need"
        else:
            chosen, reason = best or "matplotlib", why
    elif chosen == "ipywidgets" and front_end == MARIMO:
        chosen, reason = "matplotlib", f"ipywidgets was {reason}, but marimo shows no core widgets"
    return Capabilities(front_end, kernel, ipywidgets, anywidget, chosen, reason)


def _best_widgets(front_end: str, ipywidgets: str | None, anywidget: str | None) -> tuple[str | None, str]:
    """Return the best widget renderer for a front end and versions, or None, and the reason in words."""
    if ipywidgets is None:
        return None, "ipywidgets is missing"
    if anywidget is None:
        if front_end == MARIMO:
            return None, "anywidget is missing, and marimo shows no core widgets"
        return "ipywidgets", "anywidget is missing"
    installed = f"anywidget {anywidget} is there"
    if front_end == COLAB:
        if not enable_colab_widgets():
            return "ipywidgets", "Colab's manager of custom widgets could not be turned on"
        return "canvas", f"{installed}, and Colab's manager of custom widgets is on"
    if front_end == UNKNOWN:
        return "canvas", f"{installed}, and a picture follows for a page that shows no widgets"
    return "canvas", f"{installed}, and {front_end} shows its widgets"


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it cannot be imported."""
    try:
        return str(import_module(name).__version__)
    except ImportError:
        return None


def _check_renderer(argument: str, renderer: str) -> None:
    choice(argument, renderer, RENDERERS)
    for needed in NEEDS.get(renderer, ()):
        if installed_version(needed) is None:
            raise ModuleNotFoundError(
                f"{argument}={renderer!r} needs {needed}: pip install 'tristep[notebook]'", name=needed
            )
