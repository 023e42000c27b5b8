"""Pages of tutorials: their notebooks as Markdown, with pages of the views that work without a kernel."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import text_pages
from latex2mathml.converter import convert
from nbclient import NotebookClient

__all__ = ["write"]

# Runs in the kernel before a tutorial. A view's page is written when its cell has ended, so that a live view has seen all.
SETUP = """
from pathlib import Path as _Path

from IPython import get_ipython as _get_ipython
from IPython.display import HTML as _HTML, display as _display
from tristep import viz as _viz

_shown = []

def _show(view):
    name = f"view-{len(_shown) + 1}.html"
    _shown.append((view, _Path(FOLDER) / name))
    _display(_HTML(f"LIVE {name}"))

def _write(result):
    for view, path in _shown:
        if not path.exists():
            view.html(path)

_viz.views.view.View._ipython_display_ = _show
_get_ipython().events.register("post_run_cell", _write)
"""
FRAME = """<iframe class="view" src="{page}" title="An interactive view" loading="lazy"
style="width: 100%; height: 560px; border: 0"></iframe>"""
# Each frame is as high as its page says that it is, also from the disk, where no page sees into another.
FITTED = """<script>
addEventListener("message", ({ data, source }) => {
  const frame = [...document.querySelectorAll("iframe.view")].find((each) => each.contentWindow === source);
  if (frame && data.tristepHeight > 0) frame.style.height = data.tristepHeight + "px";
});
</script>"""


def write(tutorials: Path, pages: Path, live: list[str]) -> list[dict[str, str]]:
    """Write a page for each tutorial; the contents.

    Args:
        tutorials: the folder with the notebooks.
        pages: where the pages go.
        live: the numbers of the tutorials that are run, or "all", or "none".
    """
    contents = []
    (pages / "tutorials").mkdir()
    for path in sorted(tutorials.glob("[0-9]*.ipynb")):
        name = path.stem
        files = pages / "tutorials" / name
        files.mkdir()
        if "all" in live or name[:2] in live:
            notebook = _run(path.with_suffix(".py"), files)
        else:
            notebook = nbformat.read(path, as_version=4)
        page = f"tutorials/{name}.md"
        shown = [cell for cell in notebook.cells if cell.get("id") != "install"]  # which is for those who run the notebook
        text = "\n\n".join(filter(None, (_cell(cell, number, files) for number, cell in enumerate(shown))))
        script = f"{FITTED}\n\n" if '<iframe class="view"' in text else ""
        text_page = text_pages.page(f"{script}{_links(text)}\n", f"tutorials/{name}.py")
        (pages / page).write_text(text_page, encoding="utf-8")
        found = re.search(r"^# (.+)$", text, re.MULTILINE)
        assert found is not None, f"{name} has no title"
        contents.append({f"{int(name[:2])}. {found[1]}": page})
    return contents


def _run(source: Path, files: Path) -> nbformat.NotebookNode:
    """A tutorial that has been run anew, whose views have become pages in this folder."""
    notebook = jupytext.read(source)
    setup = nbformat.v4.new_code_cell(SETUP.replace("FOLDER", repr(str(files))))
    notebook.cells.insert(0, setup)
    resources = {"metadata": {"path": str(source.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", coalesce_streams=True, resources=resources).execute()
    del notebook.cells[0]
    return notebook


def _cell(cell: Any, number: int, files: Path) -> str:
    if cell.cell_type == "markdown":
        return _with_formulas(cell.source.replace("<details>", '<details markdown="1">'))  # else its text stays as it is
    parts = [f"```python\n{cell.source}\n```"]
    for count, output in enumerate(cell.outputs):
        parts.append(_output(output, f"cell-{number}-{count}", files))
    return "\n\n".join(filter(None, parts))


def _with_formulas(text: str) -> str:
    """LaTeX between dollars as MathML, which browsers show without a script."""
    text = re.sub(r"\$\$(.+?)\$\$", _displayed, text, flags=re.DOTALL)
    # A line that begins with <math> would be a paragraph of its own.
    return re.sub(r"\$([^$]+?)\$", lambda match: f"<span>{convert(match[1])}</span>", text)


def _displayed(match: re.Match[str]) -> str:
    """A formula on lines of its own, which is moved sideways where the page is narrower."""
    return f'<div style="overflow-x: auto">{convert(match[1], display="block")}</div>'


def _output(output: Any, name: str, files: Path) -> str:
    """An output as Markdown: a live page, a picture, a table or text, whichever is best."""
    if output.output_type == "stream":
        return _text(output.text)
    data = output.get("data", {})
    html = data.get("text/html", "")
    if html.startswith("LIVE "):
        return FRAME.format(page=f"{files.name}/{html.removeprefix('LIVE ')}")
    if "image/png" in data:
        (files / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
        said = " ".join(data.get("text/plain", "").split())
        return f"![{re.sub(r'[][<>]', '', said)}]({files.name}/{name}.png)"
    if html:
        return f"<div>{' '.join(html.split())}</div>"
    if "text/markdown" in data:
        return str(data["text/markdown"])
    return _text(data.get("text/plain", ""))


def _text(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n")).strip("\n")  # of a progress bar the last state
    return f"```text\n{text}\n```" if text else ""


def _links(text: str) -> str:
    """Links among tutorials and to the files in docs/, as the site has them."""
    text = re.sub(r"\]\((\d\d_\w+)\.ipynb", r"](\1.md", text)
    text = re.sub(r"\]\(\.\./docs/optimizers\.md", "](../optimizers/index.md", text)
    return re.sub(r"\]\(\.\./docs/(\w+\.md)", r"](../\1", text)
