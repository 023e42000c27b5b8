"""Every view shows its picture and its controls at once on a screen of 1280 x 900; fields, listings and grey buttons."""

from functools import cache

import numpy as np
import pytest
from every_view import every_view
from planted_runs import make_run
from scene_cases import ENTER, RIGHT, one

from tristep import viz
from tristep.viz.scene import Button, Control, Line

WIDE, HIGH = 1000, 700  # pixels of an output in JupyterLab on such a screen, and what its menus and the input leave of them
SIZE = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.width, box.height]"


@cache
def _views():
    """One of each kind, with as much as it may have."""
    run, other = make_run(name="adam"), make_run(name="lion")
    deep = viz.Run("deep", [f"layers.{k}.weight" for k in range(200)])
    for each in (run, other):
        each.add_scalars(each.last_step + 1, {"loss": 0.01, "val_loss": 0.02, "accuracy": 0.9, "val_accuracy": 0.8})
    for step in range(1, 6):
        deep.add_tensors([step], {name: np.full((1, 200), float(step)) for name in ("gradient_norm", "weight_norm")})
    return every_view(run, other) | {"200 tensors": viz.TensorHeatmap(deep)}


@pytest.fixture
def sized(stage):
    """A function that gives the screen a size in pixels, at a zoom, and the stage a width."""

    def give(wide, high, stage_wide, zoom=1.0):
        screen = {"width": wide, "height": high, "deviceScaleFactor": zoom, "mobile": False}
        stage.browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        width = "document.body.style.margin = 0; document.getElementById('stage').style.width = `${arguments[0]}px`"
        stage.browser.run(width, stage_wide)
        return stage

    yield give
    stage.browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_each_view_fits_the_screen(sized):
    stage, high = sized(1280, 900, WIDE), {}
    for name, view in _views().items():
        stage.show(view.scene())
        wide, high[name] = stage.browser.run(SIZE, ".tristep")
        assert wide <= WIDE, name
        assert stage.browser.run(SIZE, ".tristep-picture canvas")[1] > 250, name  # nor is it a stamp
        stage.browser.keep(f"screen-{name.replace(' ', '-')}")
    assert {name: height for name, height in high.items() if height > HIGH} == {}


def test_python_gets_what_is_typed_and_a_button_that_does_nothing_is_grey(stage):
    controls = [
        Control("f", "f(x, y) =", ["x**2"], kind="text", remote=True),
        Control("beta", "beta1", [0.5, 0.9, 0.99], 1, remote=True, typed=True),
    ]

    def scene(enabled, message=""):
        made = one(Line([0, 1], [0, 1]), controls=controls, buttons=[Button("go", "Go", enabled)])
        return viz.Scene(made.panels, controls=controls, buttons=made.buttons, message=message)

    stage.show(scene(False))
    function, beta = (stage.browser.find(f"input[data-typed={name}]") for name in ("f", "beta"))
    assert (function.accessible_name, beta.accessible_name) == ("f(x, y) =", "beta1")
    stage.browser.run("arguments[0].select()", beta)
    beta.send_keys("0.93", ENTER)
    assert stage.sent("entry") == [{"kind": "entry", "name": "beta", "text": "0.93"}]
    button = stage.browser.find("button[data-button=go]")
    button.click()
    assert (button.get_attribute("aria-disabled"), stage.sent("button")) == ("true", [])
    # What is being typed stays while the picture changes, and so does the focus.
    function.send_keys("+ y")
    stage.update(scene(True, "0.93 is used"))
    assert function.get_attribute("value") == "x**2+ y"
    assert beta.get_attribute("value") == "0.9"
    assert stage.browser.run("return document.activeElement === arguments[0]", function)
    status = stage.browser.find(".tristep-message")
    assert (status.text, status.aria_role) == ("0.93 is used", "status")
    button.click()
    assert stage.sent("button") == [{"kind": "button", "name": "go"}]
    assert stage.sent("entry")[-1]["text"] == "x**2+ y"  # it has been left
    # The slider shows its value in the field.
    stage.browser.keys(stage.browser.find("input[data-control=beta]"), RIGHT)
    assert beta.get_attribute("value") == "0.99"
