"""The notebook that runs this code, as far as can be seen from inside: shell, kernel, front end and event loop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = [
    "current_kernel",
    "current_shell",
    "guess_front_end",
    "has_front_end",
    "in_notebook",
    "request",
    "running_event_loop",
]

COLAB, TERMINAL, JUPYTER, UNKNOWN = "Colab", "a terminal", "Jupyter", "a kernel without a known front end"


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

    JupyterLab, Notebook and VS Code send the cell's id with it; nbclient and papermill do not.
    """
    return bool(request().get("metadata", {}).get("cellId")) or (in_notebook() and "google.colab" in sys.modules)


def request() -> Mapping[str, Any]:
    """The message that made the kernel run this; empty where there is no kernel."""
    get_parent = getattr(current_kernel(), "get_parent", None)
    return {} if get_parent is None else get_parent("shell") or {}


def guess_front_end() -> tuple[str, bool]:
    """A guess at what shows the output, and whether there is a kernel."""
    shell = current_shell()
    if shell is None:
        return "no notebook", False
    if not in_notebook():
        return TERMINAL, False
    if "google.colab" in sys.modules:
        return COLAB, True
    if sys.platform == "emscripten":
        return "JupyterLite", True
    if "__vsc_ipynb_file__" in shell.user_ns or "VSCODE_PID" in os.environ:
        return "VS Code", True
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "Kaggle", True
    if "JPY_SESSION_NAME" in os.environ:
        return JUPYTER, True
    return UNKNOWN, True
