"""The notebook that runs this code, as far as can be seen from inside: shell, kernel, front end and event loop."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "current_kernel",
    "current_shell",
    "enable_colab_widgets",
    "guess_front_end",
    "has_front_end",
    "in_notebook",
    "request",
    "running_event_loop",
    "show_below_cell",
    "watch_cell",
]

COLAB, MARIMO, VOILA, TERMINAL = "Colab", "marimo", "Voilà", "a terminal"
JUPYTER, UNKNOWN = "Jupyter", "a kernel without a known front end"


def running_event_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def current_shell() -> Any:
    """IPython's, if it runs this. It is not imported for that."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def current_kernel() -> Any:
    """IPython's kernel, if this runs in one."""
    return getattr(current_shell(), "kernel", None)


def in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this."""
    return current_kernel() is not None


def has_front_end() -> bool:
    """Whether a person's notebook asked for what runs now, one that can send back what is done to widgets.

    JupyterLab, Notebook and VS Code send the cell's id with it; nbclient and papermill do not. marimo knows the page's
    request, unless it exports.
    """
    marimo = _marimo()
    if marimo is not None:
        return marimo.app_meta().request is not None
    return bool(request().get("metadata", {}).get("cellId")) or guess_front_end()[0] in (COLAB, VOILA)


def request() -> Mapping[str, Any]:
    """The message that made the kernel run this; empty where there is no kernel of Jupyter."""
    get_parent = getattr(current_kernel(), "get_parent", None)
    return {} if get_parent is None else get_parent("shell") or {}


def guess_front_end() -> tuple[str, bool]:
    """A guess at what shows the output, and whether there is a kernel."""
    if _marimo() is not None:
        return MARIMO, True
    shell = current_shell()
    if shell is None:
        return "no notebook", False
    if not in_notebook():
        return TERMINAL, False
    if "google.colab" in sys.modules:
        return COLAB, True
    if sys.platform == "emscripten":
        return "JupyterLite", True
    if "VOILA_PREHEAT" in os.environ:
        return VOILA, True
    if "__vsc_ipynb_file__" in shell.user_ns or "VSCODE_PID" in os.environ:
        return "VS Code", True
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "Kaggle", True
    if "JPY_SESSION_NAME" in os.environ:
        return JUPYTER, True
    return UNKNOWN, True


@functools.cache
def enable_colab_widgets() -> bool:
    """Turn on Colab's manager of custom widgets, which loads anywidget's scripts; whether it is on. It is asked once."""
    try:
        importlib.import_module("google.colab.output").enable_custom_widget_manager()
    except Exception as error:  # whatever it is, core widgets need no manager
        warnings.warn(
            f"Colab's manager of custom widgets could not be turned on ({error!r}); views use core widgets without a canvas",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def show_below_cell(thing: Any) -> bool:
    """Show this among the outputs of the cell that runs; nothing where there is no notebook. Whether there is one."""
    marimo = _marimo()
    if marimo is not None:
        marimo.output.append(thing)
    elif in_notebook():
        from IPython.display import display

        display(thing)
    else:
        return False
    return True


def watch_cell() -> Callable[[], bool]:
    """A function that tells whether marimo has run the present cell again since, or deleted it; elsewhere it says no."""
    marimo = _marimo()
    if marimo is None:
        return lambda: False
    # Never started: marimo tells its threads, and nobody else, what has happened to the cell that made them.
    thread = marimo.Thread()
    return lambda: bool(thread.should_exit)


def _marimo() -> Any:
    """The module, if a notebook of marimo runs this. It is not imported for that."""
    marimo = sys.modules.get("marimo")
    return marimo if marimo is not None and marimo.running_in_notebook() else None
