"""Find out about the notebook that runs this code: its shell, kernel, front end and event loop."""

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
    """Return the event loop that runs in this thread; None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def current_shell() -> Any:
    """Return IPython's shell; None outside of IPython. Never imports IPython."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def current_kernel() -> Any:
    """Return the IPython kernel that runs this code; None outside of a kernel."""
    return getattr(current_shell(), "kernel", None)


def in_notebook() -> bool:
    return current_kernel() is not None


def has_front_end() -> bool:
    """Return whether the running code was sent by an interactive notebook, in which widgets can call back.

    JupyterLab, Notebook and VS Code send the cell's id with the code; nbclient and papermill do not. marimo has the page's
    request, except when it exports.
    """
    marimo = _marimo()
    if marimo is not None:
        return marimo.app_meta().request is not None
    return bool(request().get("metadata", {}).get("cellId")) or guess_front_end()[0] in (COLAB, VOILA)


def request() -> Mapping[str, Any]:
    """Return the message by which the front end ran this code; empty outside of a Jupyter kernel."""
    get_parent = getattr(current_kernel(), "get_parent", None)
    return {} if get_parent is None else get_parent("shell") or {}


def guess_front_end() -> tuple[str, bool]:
    """Guess the front end that shows the output. Returns its name, and whether the code runs in a kernel."""
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
    """Turn on Colab's manager of custom widgets, which loads anywidget's scripts. Returns whether that worked."""
    try:
        importlib.import_module("google.colab.output").enable_custom_widget_manager()
    except Exception as error:  # of any kind: core widgets work without the manager
        warnings.warn(
            f"Colab's manager of custom widgets could not be turned on ({error!r}); views use core widgets without a canvas",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def show_below_cell(thing: Any) -> bool:
    """Display an object among the outputs of the running cell. Returns False, and does nothing, outside of a notebook."""
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
    """Return a function that says whether marimo has since rerun or deleted the current cell; elsewhere it returns False."""
    marimo = _marimo()
    if marimo is None:
        return lambda: False
    # Never started: marimo tells only its own threads when the cell that made them is rerun or deleted.
    thread = marimo.Thread()
    return lambda: bool(thread.should_exit)


def _marimo() -> Any:
    """Return the module marimo if one of its notebooks runs this code, else None. Never imports marimo."""
    marimo = sys.modules.get("marimo")
    return marimo if marimo is not None and marimo.running_in_notebook() else None
