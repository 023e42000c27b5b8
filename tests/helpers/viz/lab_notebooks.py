"""A server of Jupyter and notebooks that are open in it, for tests in a browser."""

import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from chromium import Browser
from notebook_servers import Server, resolved

KERNEL = os.environ.get("TRISTEP_KERNEL", "python3")
KERNEL_6 = next(iter(sorted(Path(sys.prefix).glob("ipykernel-6.*"))), None)  # a folder that `make test` fills
# The open notebook; `shell.currentWidget` is none until something has got the focus.
_BOOK = "[...(window.jupyterapp?.shell.widgets('main') ?? [])].find((each) => each.context)"


class Lab(Server):
    """A server of Jupyter on loopback, and one notebook at a time in the browser: in JupyterLab, Notebook 7 or Voilà."""

    def __init__(self, root: Path) -> None:
        settings = root / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        quiet = {"fetchNews": "false", "checkForUpdates": False}  # no network, nothing that pops up
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
        (root / "notebooks").mkdir()
        if KERNEL_6 is not None:
            paths = [str(KERNEL_6), *filter(None, [os.environ.get("PYTHONPATH")])]
            spec = {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": KERNEL_6.name,
                "language": "python",
                "env": {"PYTHONPATH": resolved(os.pathsep.join(paths))},
            }
            (root / "data" / "kernels" / KERNEL_6.name).mkdir(parents=True)
            (root / "data" / "kernels" / KERNEL_6.name / "kernel.json").write_text(json.dumps(spec))
        command = (
            "-m jupyterlab --no-browser --ip=127.0.0.1 --port={port} --port-retries=0 --allow-root "
            "--IdentityProvider.token= --ServerApp.password= --expose-app-in-browser "
            "--JupyterNotebookApp.expose_app_in_browser=True --LabApp.extension_manager=readonly "
            "--ServerApp.root_dir=notebooks"
        )
        super().__init__(root, command, "/api/status")

    def write(self, name: str, cells: list[str], kernel: str = KERNEL) -> None:
        """Write a notebook of these cells of code."""
        import nbformat

        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": kernel, "display_name": kernel}  # without it Lab asks, and waits forever
        nbformat.write(book, self.root / "notebooks" / f"{name}.ipynb")


class Notebook:
    """A notebook that is open in JupyterLab. One of a name that has been opened before has its kernel, and its variables.

    Args:
        page: what comes before its name in the address: "doc/tree" is JupyterLab, "notebooks" is Notebook 7.
    """

    def __init__(
        self, lab: Lab, browser: Browser, name: str, cells: list[str], kernel: str = KERNEL, page: str = "doc/tree"
    ) -> None:
        self.lab, self.browser, self.name, self.closed = lab, browser, name, False
        lab.write(name, cells, kernel)
        browser.driver.get(f"{lab.url}/{page}/{name}.ipynb?reset")
        ready = (
            f"const c = {_BOOK}?.context;"
            "return document.querySelector('.jp-Dialog')?.innerText ??"
            "  Boolean(c?.isReady && c.sessionContext.isReady"
            "          && c.sessionContext.session?.kernel?.connectionStatus === 'connected')"
        )
        state = Browser.until(lambda: browser.run(ready), "a kernel", 60)
        assert state is True, state
        browser.run(f"jupyterapp.shell.activateById({_BOOK}.id)")

    def run_all(self, wait: bool = True) -> None:
        """Run all cells; without waiting, those that take long go on."""
        self.browser.run(
            "window.ran = null; jupyterapp.commands.execute('notebook:run-all-cells')"
            ".then((done) => { window.ran = done; }, (error) => { window.ran = String(error); })"
        )
        if not wait:
            return
        ran = self.browser.until(
            lambda: self.browser.run("return window.ran === null ? null : [window.ran]"), "the cells", 240
        )
        assert ran == [True], f"{ran}: {self.text()}"
        complaints = self.browser.driver.find_elements(
            "css selector", "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type*='stderr']"
        )
        # A first step says that it compiles.
        assert all(each.text.startswith("tristep: compiling") for each in complaints), self.text()

    def start(self, code: str, name: str = "") -> None:
        """Run this in a new cell at the end. Elements of the cell are below `[data-cell=name]`."""
        self.browser.run(
            f"const book = {_BOOK}.content, [code, name] = arguments; window.ran = null;"
            "(async () => {"
            "  book.activeCellIndex = book.widgets.length - 1;"
            "  await jupyterapp.commands.execute('notebook:insert-cell-below');"
            "  const cell = book.activeCell;"
            "  cell.model.sharedModel.setSource(code);"
            "  cell.node.dataset.cell = name;"
            "  await book.scrollToItem(book.activeCellIndex);"
            "  await jupyterapp.commands.execute('notebook:run-cell');"
            "  return cell.model.outputs.toJSON();"
            "})().then((outputs) => { window.ran = outputs; }, (error) => { window.ran = String(error); })",
            textwrap.dedent(code).strip(),
            name,
        )

    def run(self, code: str, name: str = "", seconds: float = 60) -> str:
        """Run this as `start` does, and give what it prints when it has ended."""
        self.start(code, name)
        outputs = self.browser.until(
            lambda: self.browser.run("return window.ran === null ? null : [window.ran]"), f"the cell\n{code}", seconds
        )[0]
        assert isinstance(outputs, list), outputs
        wrong = [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"]
        assert not wrong, wrong
        return "".join("".join(each["text"]) for each in outputs if each["output_type"] == "stream")

    def outputs(self) -> list[tuple[int | None, list[dict[str, Any]]]]:
        """Of each cell how often cells had been run when it was, and what it gave, also where it is not to be seen."""
        found: list[tuple[int | None, list[dict[str, Any]]]] = self.browser.run(
            f"return {_BOOK}.content.widgets.map(({{model}}) => [model.executionCount, model.outputs.toJSON()])"
        )
        return found

    def show(self, number: int) -> str:
        """Scroll to a cell, and give what selects it."""
        self.browser.driver.execute_async_script(
            f"const book = {_BOOK}.content, [number, done] = arguments, {{node}} = book.widgets[number];"
            "node.dataset.cell = number;"
            "const show = () => {"  # a cell beyond the edge is put into the page, and then it has another height
            "  (node.querySelector('.jp-Cell-outputWrapper') ?? node).scrollIntoView();"
            "  requestAnimationFrame(() => requestAnimationFrame(done));"
            "};"
            "book.scrollToItem(number, 'start').then(show, show)",
            number,
        )
        return f"[data-cell='{number}']"

    def text(self) -> str:
        """What stands in the outputs."""
        return str(
            self.browser.run(
                "return [...document.querySelectorAll('.jp-OutputArea-output')].map(e => e.innerText).join('\\n')"
            )
        )

    def says(self, pattern: str, seconds: float = 20) -> re.Match[str]:
        """Wait until this stands in the outputs."""
        found: re.Match[str] = Browser.until(lambda: re.search(pattern, self.text()), pattern, seconds)
        return found

    def close(self) -> None:
        """Leave it, and end its kernel."""
        self.closed = True
        self.browser.driver.execute_async_script(
            f"const cb = arguments[0], c = {_BOOK}.context;c.save().then(() => c.sessionContext.shutdown()).then(cb, cb)"
        )
        self.browser.driver.get("about:blank")
