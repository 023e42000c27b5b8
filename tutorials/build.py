"""Makes the notebooks: runs each tutorial's .py and writes the .ipynb next to it, with what it printed and drew.

    python tutorials/build.py                      all of them
    python tutorials/build.py 01_first_steps.py    some of them
    python tutorials/build.py --keep-outputs       with new texts only: code must be the same, and is not run

Write in the .py; the .ipynb is for readers, and a test fails where the two differ. Two things are in the .ipynb only: a cell
that installs what is missing, and a link to Colab, as soon as [project.urls] of pyproject.toml has a `Repository` on GitHub.

A view gives a widget, and a picture with words. The picture is kept: code hosts show it, and so does JupyterLab until the
cell is run, which then shows the widget. A widget that is stored has no kernel behind it, and takes megabytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import jupytext
import nbformat
from nbclient import NotebookClient

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"


INSTALL = """\
# Does nothing where all is there, and else installs it, as in Colab or Kaggle.
from importlib.util import find_spec

if not all(find_spec(name) for name in ("tristep", "anywidget", "matplotlib", "sklearn")):
    %pip install --quiet '{package}'"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the notebooks.")
    parser.add_argument("names", nargs="*", help="files of this folder; left out: all tutorials")
    parser.add_argument("--keep-outputs", action="store_true", help="run nothing; code must be the same")
    arguments = parser.parse_args()
    for source in [FOLDER / name for name in arguments.names] or sorted(FOLDER.glob("[0-9]*.py")):
        target = source.with_suffix(".ipynb")
        nbformat.write(renew(source) if arguments.keep_outputs else run(source), target)
        print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB")


def repository() -> str | None:
    """The address of the repository, if pyproject.toml has one."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str | None = project.get("urls", {}).get("Repository")
    return address


def cells(source: Path, address: str | None) -> nbformat.NotebookNode:
    """The tutorial as a notebook that has not been run.

    Args:
        source: its .py.
        address: of the repository on GitHub. None: there is no link to Colab, and what is installed is the checkout around
            the notebook.
    """
    notebook = jupytext.read(source)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # else random each time, which is noise in a diff
    package = "..[demo]" if address is None else f"tristep[demo] @ git+{address}"
    install = nbformat.v4.new_code_cell(INSTALL.format(package=package), id="install")
    if address is not None:
        place = f"{urlsplit(address).path.strip('/').removesuffix('.git')}/blob/main/tutorials/{source.stem}.ipynb"
        notebook.cells[0].source += f"\n\n[Open in Colab](https://colab.research.google.com/github/{place})"
    notebook.cells.insert(1, install)
    return notebook


def renew(source: Path) -> nbformat.NotebookNode:
    """The tutorial with the outputs that its notebook has. Raises ValueError where they are not of this code."""
    notebook = cells(source, repository())
    before = {cell.id: cell for cell in nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, 1):
        cell.execution_count = count
        if cell.id == "install":
            continue  # it gives none
        if cell.id not in before or before[cell.id].source != cell.source:
            raise ValueError(f"{source.name}: the code of {cell.id} is not what has been run; run it without --keep-outputs")
        cell.outputs = before[cell.id].outputs
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def run(source: Path) -> nbformat.NotebookNode:
    """The tutorial as a notebook that has been run, in an empty folder: a reader may have nothing but the .ipynb.

    Raises CellExecutionError where a cell fails.
    """
    notebook = cells(source, repository())
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=300,  # seconds for a cell
            kernel_name="python3",
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,  # else the pieces of what a cell prints depend on how fast it does so
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        for output, after in zip(list(outputs), [*outputs, {}][1:], strict=True):
            if output.get("name") == "stdout":  # in a first run
                lines = output.text.splitlines(keepends=True)
                output.text = "".join(line for line in lines if not line.startswith("tristep: compiling for the CPU"))
            compiled = output.get("name") == "stdout" and not output.text
            if compiled or (WIDGET in output.get("data", {}) and "image/png" in after.get("data", {})):
                outputs.remove(output)
    notebook.metadata.language_info = {"name": "python"}  # else with the version of the interpreter
    return notebook


if __name__ == "__main__":
    main()
