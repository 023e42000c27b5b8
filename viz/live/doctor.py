"""The report of `%viz_doctor`: installed packages, the chosen renderer, and whether the front end answers."""

from __future__ import annotations

import importlib.metadata
import sys

from IPython.display import display

from ..render.notebook import COLAB, has_front_end, in_notebook, request
from ..render.renderers import VARIABLE, Capabilities, capabilities

__all__ = ["doctor_report", "show_ping"]

RENDERERS = {
    "canvas": "the best of four: drawn in the browser",
    "ipywidgets": "the second of four: pictures with core widgets",
    "matplotlib": "the third of four: a picture",
    "text": "the last of four: words",
}
PACKAGES = ("tristep", "torch", "matplotlib", "IPython", "ipykernel", "ipywidgets", "anywidget", "jupyter_client")


def doctor_report() -> list[str]:
    lines, missing = [], []
    for package in PACKAGES:
        version = _version(package)
        lines.append(f"{package:16} {version or 'missing'}")
        if version is None:
            missing.append(package)
    kernel = in_notebook()
    lines.append(f"{'python':16} {sys.version.split()[0]}")
    lines.append(f"{'kernel':16} {'of Jupyter' if kernel else 'none: this is no notebook'}")
    if kernel:
        subshell = request().get("header", {}).get("subshell_id")
        lines.append(f"{'subshell':16} {subshell or 'none: this cell came by the main shell'}")
        front_end = "a notebook that can answer" if has_front_end() else "none that marks its cells: views are pictures"
        lines.append(f"{'front end':16} {front_end}")
    lines.append(f"{'training runs':16} {'in the background' if has_front_end() else 'in the cell'} with mode='auto'")
    current = capabilities()
    lines.append(f"{'views':16} {current.renderer}, {RENDERERS[current.renderer]}; shown by {current.front_end}")
    lines.append(f"{'because':16} {current.reason}")
    better = _better(current)
    if better is not None:
        lines.append(f"{'better':16} {better}")
    if "ipykernel" not in missing and str(_version("ipykernel")).startswith("7.0."):
        lines.append("ipykernel 7.0 loses what threads print: pip install -U ipykernel")
    return lines


def _better(current: Capabilities) -> str | None:
    """Return advice on how to get a better renderer; None if the best one is in use."""
    if current.renderer == "canvas":
        return None
    if "chosen by" in current.reason:
        return f"viz.set_renderer('auto') takes the best one here, where {VARIABLE} is not set"
    if current.ipywidgets is None or current.anywidget is None:
        return "pip install 'tristep[notebook]', then restart the kernel and reload the page"
    if current.front_end == COLAB:
        return "from google.colab import output; output.enable_custom_widget_manager() says what is wrong; then restart"
    return "open a notebook in JupyterLab, Notebook 7, Voilà or marimo"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


PING = """
export default {
  render({ model, el }) {
    const begun = performance.now();
    el.textContent = "The front end is here; Python has not answered yet.";
    model.on("msg:custom", () => {
      const spent = (performance.now() - begun).toFixed(0);
      el.textContent = `The front end reached Python and got an answer after ${spent} ms.`;
    });
    model.send({ kind: "ping" });
  },
};
"""


def show_ping() -> None:
    """Show a widget that measures a round trip to Python; does nothing without anywidget."""
    try:
        import anywidget
    except ModuleNotFoundError:
        return
    widget = anywidget.AnyWidget(_esm=PING)
    widget.on_msg(lambda _, content, buffers: widget.send({"kind": "pong"}))
    display(widget)
