"""Which renderer shows views: the best one that is likely to work here, or the one that was chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module

from .notebook import COLAB, MARIMO, TERMINAL, UNKNOWN, enable_colab_widgets, guess_front_end

__all__ = ["Capabilities", "capabilities", "installed_version", "set_renderer"]

RENDERERS = ("auto", "canvas", "ipywidgets", "matplotlib", "text")
NEEDS = {"canvas": ("anywidget", "ipywidgets"), "ipywidgets": ("ipywidgets",)}
VARIABLE = "TRISTEP_VIZ"  # of the environment: the renderer where `set_renderer` has not said one
_chosen: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """What there is to show views with.

    Args:
        front_end: where this runs, as far as can be seen from inside.
        kernel: whether a kernel runs it, of Jupyter or marimo.
        ipywidgets, anywidget: their versions; None where they are missing.
        renderer: what shows views.
        reason: why.
    """

    front_end: str
    kernel: bool
    ipywidgets: str | None
    anywidget: str | None
    renderer: str
    reason: str

    @property
    def widget_renderer(self) -> str | None:
        """The best renderer by widgets that works here; None if none does."""
        return _best_widgets(self.front_end, self.ipywidgets, self.anywidget)[0]

    def __str__(self) -> str:
        versions = f"ipywidgets {self.ipywidgets or 'missing'}, anywidget {self.anywidget or 'missing'}"
        return f"{self.renderer}: {self.reason} ({self.front_end}, {versions})"


def set_renderer(renderer: str | None) -> None:
    """Choose what shows views from now on.

    Args:
        renderer: "canvas" draws in the browser (anywidget), "ipywidgets" has the pictures of matplotlib with core widgets,
            "matplotlib" is a PNG, "text" is the description; "auto" is the best one that is likely to work here. None: the
            one in the environment variable TRISTEP_VIZ, else "auto".

    Raises:
        ValueError: there is no such renderer.
        ModuleNotFoundError: what it needs is not installed.
    """
    if renderer is not None:
        _check_renderer("renderer", renderer)
    global _chosen
    _chosen = renderer


def capabilities() -> Capabilities:
    """What was found to show views with, and the renderer that follows from it.

    In Colab this turns on its manager of custom widgets.

    Raises:
        ValueError: TRISTEP_VIZ is set to something that is no renderer.
        ModuleNotFoundError: what the renderer of TRISTEP_VIZ needs is not installed.
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
    """The best renderer by widgets for this front end and these versions, if there is one, and why it is that one."""
    if ipywidgets is None:
        return None, "ipywidgets is missing"
    if anywidget is None:
        if front_end == MARIMO:
            return None, "anywidget is missing, and marimo shows no core widgets"
        return "ipywidgets", "anywidget is missing"
    there = f"anywidget {anywidget} is there"
    if front_end == COLAB:
        if not enable_colab_widgets():
            return "ipywidgets", "Colab's manager of custom widgets could not be turned on"
        return "canvas", f"{there}, and Colab's manager of custom widgets is on"
    if front_end == UNKNOWN:
        return "canvas", f"{there}, and a picture follows for a page that shows no widgets"
    return "canvas", f"{there}, and {front_end} shows its widgets"


def installed_version(name: str) -> str | None:
    """The version of a library; None if it cannot be imported."""
    try:
        return str(import_module(name).__version__)
    except ImportError:
        return None


def _check_renderer(argument: str, renderer: str) -> None:
    if renderer not in RENDERERS:
        raise ValueError(f"{argument}={renderer!r}: must be one of {', '.join(map(repr, RENDERERS))}")
    for needed in NEEDS.get(renderer, ()):
        if installed_version(needed) is None:
            raise ModuleNotFoundError(
                f"{argument}={renderer!r} needs {needed}: pip install 'tristep[notebook]'", name=needed
            )
