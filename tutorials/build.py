"""Makes the notebooks: runs each tutorial's .py and writes the .ipynb next to it, with what it printed and drew.

    python tutorials/build.py                      all of them
    python tutorials/build.py 01_first_steps.py    some of them

Write in the .py; the .ipynb is for readers, and a test fails where the two differ.

A view gives a widget, and a picture with words. The picture is kept: code hosts show it, and so does JupyterLab until the
cell is run, which then shows the widget. A widget that is stored has no kernel behind it, and takes megabytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"


def main(names: list[str]) -> None:
    sources = [FOLDER / name for name in names] or sorted(FOLDER.glob("[0-9]*.py"))
    for source in sources:
        target = source.with_suffix(".ipynb")
        nbformat.write(run(source), target)
        print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB")


def run(source: Path) -> nbformat.NotebookNode:
    """The tutorial as a notebook that has been run. Raises CellExecutionError where a cell fails."""
    notebook = jupytext.read(source)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # else random each time, which is noise in a diff
    client = NotebookClient(
        notebook,
        timeout=300,  # seconds for a cell
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,  # else the pieces of what a cell prints depend on how fast it does so
        resources={"metadata": {"path": str(source.parent)}},
    )
    client.execute()
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        with_picture = {output.data["text/plain"] for output in outputs if "image/png" in output.get("data", {})}
        for output in list(outputs):
            data = output.get("data", {})
            if WIDGET in data and data.get("text/plain") in with_picture:
                outputs.remove(output)
    notebook.metadata.language_info = {"name": "python"}  # else with the version of the interpreter
    return notebook


if __name__ == "__main__":
    main(sys.argv[1:])
