"""Views in Notebook 7, Voilà and marimo: a picture on a canvas, keys that change it, a loop that trains meanwhile."""

import importlib.util
import os
import re
import signal
import textwrap

import numpy as np
import pytest
from chromium import skip_or_fail
from notebook_servers import Server

LEFT, RIGHT = "\ue012", "\ue014"

VIEW = """
from tristep.viz import Axis, Control, Line, LiveLoop, Panel, Scene, View, capabilities

class Curve(View):
    def scene(self):
        power = Control("power", "power", [1, 2, 3], 1)
        line = Line([0, 1, 2], [[0, 1, 2], [0, 1, 4], [0, 1, 8]], by=("power",))
        panel = Panel(Axis("x", 0, 2), Axis("y", 0, 8), [line])
        return Scene([panel], controls=[power], description="Powers of x.")
"""
LOOP = """
def count():
    step = 0
    while True:
        step += 1
        yield {"loss": 1 / step}

loop = LiveLoop(count)
"""
PICTURES = ".tristep-picture canvas:first-child"


def needs(package):
    """Not by an import: what runs here must not be taken for a notebook."""
    if importlib.util.find_spec(package) is None:
        skip_or_fail(f"no {package} for tests in a browser: pip install {package}")


def keys_change_the_picture(browser, canvas, slider):
    """There and back again."""
    before = browser.digest(canvas)
    assert len(np.unique(browser.pixels(canvas)[::9, ::9])) > 3  # a picture
    browser.keys(slider, RIGHT)
    browser.until(lambda: browser.digest(canvas) != before, "another picture")
    browser.keys(slider, LEFT)
    browser.until(lambda: browser.digest(canvas) == before, "the picture of before")


def runs(browser):
    taken = re.compile(": running, step [1-9]")
    browser.until(lambda: taken.search("".join(browser.find_deep(PICTURES, "ariaLabel"))), "a running loop", 60)


def says_that_its_kernel_has_ended(browser):
    browser.until(lambda: browser.find_deep(".tristep-silence")[0].is_displayed(), "words about it", 60)
    (words,) = browser.find_deep(".tristep-silence", "innerText")
    assert "the kernel has ended or been restarted" in words
    buttons = browser.find_deep(".tristep-buttons button")
    assert len(buttons) >= 4
    assert {button.get_attribute("aria-disabled") for button in buttons} == {"true"}
    assert len(np.unique(browser.pixels(browser.find_deep(PICTURES)[-1])[::9, ::9])) > 3  # the last picture


@pytest.mark.sample(0)
def test_notebook_7(shared, browser):
    needs("notebook")
    book = shared(page="notebooks")
    browser.complaints()  # of what the page without a view does
    assert browser.run("return document.body.dataset.notebook") == "notebooks"
    assert "canvas: " in book.run(VIEW + "print(capabilities())")
    book.run("view = Curve()\nview")
    canvas, slider = browser.find(PICTURES), browser.find(".tristep input[type=range]")
    keys_change_the_picture(browser, canvas, slider)
    book.run(LOOP + "loop.start()\nprint(loop.mode)")
    book.says("task")
    browser.keep("notebook-7")
    book.run("loop.stop(); view.close()")


@pytest.mark.sample(0)
def test_a_view_says_that_its_kernel_has_ended_in_notebook_7(notebook, browser):
    needs("notebook")
    book = notebook(page="notebooks")
    browser.complaints()  # of what the page without a view does
    process = int(book.run(VIEW + LOOP + "import os\nloop.start()\nprint(os.getpid())"))
    runs(browser)
    os.kill(process, signal.SIGKILL)
    says_that_its_kernel_has_ended(browser)
    browser.keep("notebook-7-killed")
    browser.complaints()  # of Notebook about its kernel


@pytest.mark.sample(0)
def test_voila(lab, browser):
    needs("voila")
    lab.write("voila", [VIEW, "view = Curve()\nview", LOOP + "loop.start()\nprint(loop.mode)", "print(capabilities())"])
    browser.driver.get(f"{lab.url}/voila/render/voila.ipynb")
    slider = browser.until(
        lambda: browser.driver.find_elements("css selector", ".tristep input[type=range]"), "a slider", 60
    )
    keys_change_the_picture(browser, browser.find(PICTURES), slider[0])
    text = browser.run("return document.body.innerText")
    assert "Voilà" in text
    assert "task" in text.splitlines()
    browser.keep("voila")
    # Voilà's page has links to a network, which is not there, and extensions of Lab that do not fit: only ours counts.
    assert [each for each in browser.complaints() if each.startswith("blob:")] == []


@pytest.mark.sample(0)
@pytest.mark.parametrize("mode", ["run", "edit"])
def test_marimo(mode, browser, tmp_path):
    needs("marimo")
    (tmp_path / "config" / "marimo").mkdir(parents=True)
    (tmp_path / "config" / "marimo" / "marimo.toml").write_text("[runtime]\nauto_instantiate = true\n")
    cells = [
        "import marimo as mo\n" + VIEW,
        "view = Curve()\nview",
        "again = mo.ui.run_button(label='again')\nagain",
        "loops, seen = [], lambda: ' '.join(loop.status for loop in loops)",
        "again\n" + LOOP + "loops.append(loop)\nloop.start()\nmo.output.append(f'{loop.mode}: {seen()}')",
    ]
    functions = [f"@app.cell\ndef _():\n{textwrap.indent(cell.strip(), '    ')}\n\n\n" for cell in cells]
    (tmp_path / "app.py").write_text(f"import marimo\n\napp = marimo.App()\n\n\n{''.join(functions)}")
    server = Server(tmp_path, f"-m marimo {mode} app.py --headless --no-token --port={{port}}", "/health")

    def says(words):
        browser.until(lambda: words in "".join(browser.find_deep("#root, .tristep", "innerText")), words)

    try:
        browser.driver.get(server.url)
        slider, *_ = browser.until(lambda: browser.find_deep("[data-control=power]"), "a slider", 60)
        keys_change_the_picture(browser, browser.find_deep(PICTURES)[0], slider)
        says("task: running")  # in the background, while keys and buttons work
        (pause,) = [each for each in browser.find_deep(".tristep button") if each.text == "Pause"]
        browser.run("arguments[0].click()", pause)
        says("Resume")
        browser.keep(f"marimo-{mode}")
        (again,) = [each for each in browser.find_deep("button") if each.text == "again"]
        browser.run("arguments[0].click()", again)
        says("task: stopped running")  # nobody has the loop of a cell that has been run again
    finally:
        browser.driver.get("about:blank")
        server.end()


@pytest.mark.sample(0)
def test_a_view_says_that_its_kernel_has_ended_in_marimo(browser, tmp_path):
    needs("marimo")
    cell = textwrap.indent(f"{VIEW}{LOOP}loop.start()\nloop", "    ")
    (tmp_path / "app.py").write_text(f"import marimo\n\napp = marimo.App()\n\n\n@app.cell\ndef _():\n{cell}\n")
    server = Server(tmp_path, "-m marimo run app.py --headless --no-token --port={port}", "/health")
    try:
        browser.driver.get(server.url)
        runs(browser)
    finally:
        server.end()
    says_that_its_kernel_has_ended(browser)
    browser.keep("marimo-killed")
    browser.driver.get("about:blank")
    browser.complaints()  # of marimo about its server
