"""Tutorials in JupyterLab, as a reader runs them: from top to bottom without an error, and then their first slider."""

from pathlib import Path

import nbformat
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "tutorials"
LEFT, RIGHT = "\ue012", "\ue014"
WIDGET = "application/vnd.jupyter.widget-view+json"
VIEWS = {"01": 3, "02": 6, "06": 3}  # how many live views these have at least
TUTORIALS = [path for path in sorted(FOLDER.glob("*.ipynb")) if path.name[:2] in VIEWS]


@pytest.mark.sample(0)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_its_views_live(notebook, browser, path):
    source = nbformat.read(path, as_version=4)
    book = notebook(*[cell.source for cell in source.cells if cell.cell_type == "code"])
    book.run_all()
    cells = book.outputs()
    assert all(count for count, _ in cells)
    assert not [each for _, outputs in cells for each in outputs if each["output_type"] == "error"]
    views = [i for i, (_, outputs) in enumerate(cells) if any(WIDGET in each.get("data", {}) for each in outputs)]
    assert len(views) >= VIEWS[path.name[:2]]
    assert any("image/png" in each.get("data", {}) for _, outputs in cells for each in outputs)
    sliders = []
    for i in views:
        cell = book.show(i)
        canvas = f"{cell} .tristep-picture canvas"
        browser.find(canvas)
        browser.until(lambda canvas=canvas: len(np.unique(browser.pixels(canvas)[::9, ::9])) > 3, "a picture")
        browser.keep(f"tutorial-{path.name[:2]}-{i}")
        # What a live loop's slider sets is to be seen when it trains on.
        local = f"{cell} input[type=range]:not([data-control=multiplier])"
        sliders += [(i, canvas, local)] if browser.driver.find_elements("css selector", local) else []
    number, picture, local = sliders[0]
    book.show(number)
    slider = browser.find(local)
    there, back = (LEFT, RIGHT) if int(slider.get_attribute("value")) else (RIGHT, LEFT)
    before = browser.digest(picture)
    browser.keys(slider, there)
    browser.until(lambda: browser.digest(picture) != before, "another picture")
    browser.keys(slider, back)
    browser.until(lambda: browser.digest(picture) == before, "the picture of before")
