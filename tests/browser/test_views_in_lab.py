"""Views in JupyterLab under keys and clicks, to Python and back, by both renderers of widgets."""

import json

import numpy as np
import pytest
from chromium import rgb
from scene_cases import LEFT, LIGHT, RIGHT

BEGIN = """
import json
from tristep import viz
viz.set_renderer({renderer!r})
"""
TRAJECTORIES = """
view = viz.TrajectoryView("rosenbrock", {"sgd": {}, "adam": {}}, steps=20, factors=(0.5, 1.0, 2.0))
view
"""


@pytest.fixture
def book(shared):
    return shared()


LIMITS = "print(json.dumps([(axis.low, axis.high) for panel in view.scene().panels[:1] for axis in (panel.x, panel.y)]))"


@pytest.mark.sample(0)
def test_a_race_on_a_canvas(book, browser):
    book.run(BEGIN.format(renderer="canvas"))
    book.run(TRAJECTORIES, "view")
    canvas = "[data-cell=view] .tristep-picture canvas"
    rate = browser.find("[data-cell=view] input[data-control=rate]")
    before = browser.digest(canvas)
    browser.keys(rate, RIGHT)
    assert browser.digest(canvas) != before
    assert rate.get_attribute("aria-valuetext") == "× 2 the best"
    browser.keys(rate, LEFT)
    assert browser.digest(canvas) == before
    browser.keep("view-canvas")

    # All start where the click was, in the units of the axes, and the ring is there.
    left, top, right, bottom = browser.frame(canvas)
    column, row = left + (right - left) // 4, top + (bottom - top) // 5
    browser.click(column, row, selector=canvas)
    browser.until(lambda: browser.digest(canvas) != before, "another picture")
    start = json.loads(book.run("print(json.dumps(view.trajectories.starts[0].tolist()))"))
    (x_low, x_high), (y_low, y_high) = json.loads(book.run(LIMITS))
    x_pixel, y_pixel = (x_high - x_low) / (right - left), (y_high - y_low) / (bottom - top)
    assert start[0] == pytest.approx(x_low + (column - left) * x_pixel, abs=x_pixel)
    assert start[1] == pytest.approx(y_high - (row - top) * y_pixel, abs=y_pixel)
    starts = json.loads(book.run("print(json.dumps(view.trajectories.paths[:, :, 0, 0].tolist()))"))
    np.testing.assert_allclose(starts, np.broadcast_to(np.float32(start), (2, 3, 2)))
    pixels = browser.pixels(canvas)
    old = round(left + (-1.2 - x_low) / x_pixel), round(bottom - (1.0 - y_low) / y_pixel)
    assert [_ink_at(pixels, *place) > 10 for place in ((column, row), old)] == [True, False]
    browser.keep("view-canvas-moved")
    book.run("view.close()")


@pytest.mark.sample(0)
@pytest.mark.parametrize("renderer", ["canvas", "ipywidgets"])
def test_a_saved_notebook_shows_the_last_picture(notebook, browser, lab, renderer):
    """Without its kernel, in JupyterLab and in nbconvert's HTML without a network; a widget is an error message there."""
    nbconvert, nbformat = pytest.importorskip("nbconvert"), pytest.importorskip("nbformat")
    book = notebook(
        BEGIN.format(renderer=renderer),
        "run = viz.Run('adam')\nfor step in range(1, 9):\n    run.add_scalars(step, {'loss': 1 / step})\n"
        "view = viz.LossView(run)\nview",
        "run.add_scalars(9, {'loss': 7.0}); view.refresh(); view.catch_up()",
    )
    book.run_all()
    picture = ".jp-RenderedImage img"
    browser.find(book.show(1) + " .tristep-pictured")
    assert not browser.find(picture).is_displayed()
    book.close()
    file = lab.root / "notebooks" / f"{book.name}.ipynb"
    (_, output) = nbformat.read(file, 4).cells[1].outputs
    assert "9 steps, loss from 1 to 7" in output.data["text/plain"]

    browser.driver.get(f"{lab.url}/doc/tree/{book.name}.ipynb?reset")
    browser.until(lambda: "model not found" in book.text(), "the end of the widget")
    assert browser.find(picture).is_displayed()
    assert all("model not found" in each or "Error: widget" in each for each in browser.complaints())
    page = file.with_suffix(".html")
    page.write_text(nbconvert.HTMLExporter().from_filename(file)[0], encoding="utf-8")
    browser.driver.get(page.as_uri())
    assert browser.find(picture).is_displayed()
    browser.complaints()  # of nbconvert's page, about what it wants from a network


@pytest.mark.sample(0)
def test_a_playground(book, browser):
    book.run(BEGIN.format(renderer="canvas"))
    book.run('own = viz.Playground("rosenbrock", "adam", against=["sgd"], steps=20)\nown', "own")
    canvas = "[data-cell=own] .tristep-picture canvas"
    step = browser.find("[data-cell=own] input[data-control=step]")
    before, colour = browser.digest(canvas), rgb(LIGHT.colours[2])  # of the first arrow, down the gradient
    arrow = _places(browser.pixels(canvas), colour)
    browser.keys(step, LEFT, LEFT, LEFT)
    moved = _places(browser.pixels(canvas), colour)
    assert len(moved) > 10
    assert np.abs(moved.mean(axis=0) - arrow.mean(axis=0)).max() > 2
    browser.keys(step, RIGHT, RIGHT, RIGHT)
    assert browser.digest(canvas) == before

    # A hyper-parameter goes to Python, which runs it all again.
    beta = browser.find("[data-cell=own] input[data-control='setting beta1']")
    told = beta.get_attribute("aria-valuetext")
    browser.keys(beta, LEFT)
    browser.until(lambda: browser.digest(canvas) != before, "another picture")
    used = float(book.run("print(own.settings['beta1'])"))
    assert used == pytest.approx(float(beta.get_attribute("aria-valuetext")))
    assert used < float(told)
    browser.keep("playground")
    browser.keys(browser.find("[data-cell=own] input[data-control='setting beta1']"), RIGHT)
    browser.until(lambda: browser.digest(canvas) == before, "the picture of before")
    book.run("own.close()")


@pytest.mark.sample(0)
def test_a_race_in_core_widgets(book, browser):
    book.run(BEGIN.format(renderer="ipywidgets"))
    book.run(TRAJECTORIES, "view")
    image = "[data-cell=view] img.widget-image"
    before = browser.until(lambda: browser.image(image), "a picture")
    handle = browser.find("[data-cell=view] .noUi-handle")  # that of the rates
    browser.keys(handle, RIGHT)
    browser.until(lambda: browser.image(image) not in ("", before), "another picture")
    assert browser.find("[data-cell=view] .widget-readout").text == "× 2 the best"
    browser.keys(handle, LEFT)
    browser.until(lambda: browser.image(image) == before, "the picture of before")
    assert browser.find(image).get_attribute("title") == book.run("print(view.describe())").strip()
    # It is the picture that Python has drawn.
    png = book.run(
        "box = view.display.widgets[-1]\nimport hashlib\nprint(hashlib.sha256(box.children[0].value).hexdigest())"
    )
    assert png.strip() == before
    browser.keep("view-widgets")
    book.run("view.close()")


@pytest.mark.sample(0)
def test_frames_are_chosen_while_python_is_busy(book, browser, tmp_path):
    book.run(BEGIN.format(renderer="ipywidgets"))
    code = """
    import hashlib, pathlib
    from tristep.viz.render.ipywidgets import SceneBox
    line = viz.Line([0, 1], [[1, end] for end in (0, 0.3, 0.6)], by=("rate",))
    panel = viz.Panel(viz.Axis("step", 0, 1), viz.Axis("loss", 0, 1), [line])
    box = SceneBox(viz.Scene([panel], controls=[viz.Control("rate", "rate", [1, 2, 3])]))
    print(json.dumps([hashlib.sha256(frame.value).hexdigest() for frame in box.children[0].children]))
    """
    frames = json.loads(book.run(code))
    assert len(set(frames)) == 3
    book.run("box", "box")
    image = "[data-cell=box] img.widget-image"
    assert browser.until(lambda: browser.image(image), "a frame") == frames[0]
    free = tmp_path / "free"
    book.start(f"while not pathlib.Path({str(free)!r}).exists():\n    pass")
    handle = browser.find("[data-cell=box] .noUi-handle")
    browser.keys(handle, RIGHT, RIGHT)
    assert browser.until(lambda: browser.image(image) == frames[2], "the last frame")
    browser.keys(handle, LEFT)
    assert browser.until(lambda: browser.image(image) == frames[1], "the frame in the middle")
    assert browser.run("return window.ran") is None  # Python is still busy
    browser.keep("frames")
    free.touch()
    book.run("box.close()")


def _ink_at(pixels, column, row):
    """How many pixels of a ring there are around this one."""
    return len(_places(pixels[row - 7 : row + 8, column - 7 : column + 8], rgb(LIGHT.ink)))


def _places(pixels, colour):
    return np.argwhere((pixels == colour).all(axis=2))
