"""A scene in JupyterLab: keys, clicks, updates while training goes on, colours of the notebook's theme."""

import pytest

LEFT, RIGHT = "\ue012", "\ue014"

SCENE = """
import numpy as np
from tristep.viz.render.canvas import SceneWidget
from tristep.viz.scene import Axis, Button, Click, Control, Line, Panel, Points, Scene

rate = Control("rate", "learning rate", [0.01, 0.1, 1.0], 1)
x = np.linspace(0, 10, 100)

def scene(height, title="paths"):
    curves = Line(x, [height * np.exp(-r * x) for r in rate.values], by=("rate",), name="loss")
    panel = Panel(Axis("x", 0, 10), Axis("y", 0, 10), [curves], click=Click(event="start"))
    return Scene([panel], title=title, controls=[rate], buttons=[Button("stop", "Stop")], description="A loss falls.")
"""


@pytest.fixture
def book(shared):
    """A notebook that knows what a scene is."""
    opened = shared()
    opened.run(SCENE)
    return opened


@pytest.mark.sample(0)  # the quick tier shows scenes without a notebook
def test_keys_change_the_picture_and_a_click_tells_python_where(book, browser):
    code = """
    import ipywidgets
    said = ipywidgets.Label("nothing yet")
    widget = SceneWidget(scene(8).to_bytes(), lambda event: setattr(said, "value", repr(event)))
    widget
    """
    book.run(code)
    book.run("said")
    book.run("second = SceneWidget(scene(3, 'a second view').to_bytes())\nsecond")
    canvas = browser.find(".tristep-picture canvas")
    slider = browser.find(".tristep input[type=range]")
    before = browser.digest()
    browser.keys(slider, RIGHT)
    assert browser.digest() != before
    assert slider.get_attribute("aria-valuetext") == "1"
    book.says(r"'kind': 'control', 'name': 'rate', 'index': 2")
    browser.keys(slider, LEFT)
    assert browser.digest() == before
    from selenium.webdriver.common.action_chains import ActionChains

    browser.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(browser.driver).move_to_element_with_offset(canvas, 20, 0).click().perform()
    event = eval(book.says(r"\{'kind': 'click'[^}]*\}")[0])
    assert event["name"] == "start"
    assert 4 < event["x"] < 7
    assert 4 < event["y"] < 7
    browser.find("button[data-button=stop]").click()
    book.says(r"\{'kind': 'button', 'name': 'stop'\}")
    browser.keep("jupyterlab")
    book.run("widget.close(); second.close()")


@pytest.mark.sample(0)
def test_a_running_task_changes_the_picture_and_leaves_the_controls_alone(book, browser):
    code = """
    import asyncio
    import time
    widget = SceneWidget(scene(8, "step 0").to_bytes())
    steps = 0

    async def train():
        global steps
        shown = 0.0
        while True:
            steps += 1
            if time.monotonic() > shown + 0.1:
                widget.payload = scene(2 + steps % 7, f"step {steps}").to_bytes()
                shown = time.monotonic()
            await asyncio.sleep(0)

    task = asyncio.create_task(train())
    widget
    """
    book.run(code)
    slider = browser.find(".tristep input[type=range]")
    browser.keys(slider, RIGHT)
    first = int(book.says(r"step (\d+)")[1])
    book.says(rf"step (?!{first}\b)\d+")
    assert browser.run("return arguments[0].isConnected", slider)
    assert slider.get_attribute("aria-valuetext") == "1"
    assert browser.run("return document.activeElement === arguments[0]", slider)
    browser.keep("jupyterlab-task")
    book.run("task.cancel(); widget.close()")
