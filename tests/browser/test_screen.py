"""Every view shows its picture and its controls at once on a screen of 1280 x 900; fields, listings and grey buttons."""

import textwrap
from functools import cache
from unittest.mock import ANY

import numpy as np
import pytest
from every_view import every_view
from planted_runs import make_run
from scene_cases import ENTER, RIGHT, one

from tristep import viz
from tristep.viz.scene import Button, Control, Line, Listing

WIDE, HIGH = 1000, 700  # pixels of an output in JupyterLab on such a screen, and what its menus and the input leave of them
SCREEN = {"width": 800, "height": 600, "deviceScaleFactor": 1.0, "mobile": False}
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


# The panels of the others stand one below the other where a page is narrow.
SMALL = ("LiveView", "LossView", "Playground", "TrajectoryView", "SweepView", "ScheduleView", "LossPlaneView", "WeightsView")


def test_a_picture_and_its_sliders_fit_a_small_screen(sized):
    """800 x 600 pixels, which are also those of 1,200 x 900 at 150 %: a notebook's cell has some 640 of them, and 500."""
    stage, high = sized(800, 600, 640, 1.5), {}
    for name in SMALL:
        stage.show(_views()[name].scene())
        wide, picture = stage.browser.run(SIZE, ".tristep-picture canvas")
        assert wide > 500, name  # the plane of losses is as high as it is wide
        assert picture > 220, name
        high[name] = stage.browser.run(SIZE, ".tristep-body")[1]
        stage.browser.keep(f"small-{name}")
    assert {name: height for name, height in high.items() if height > 470} == {}


# With the picture at the top of the box that scrolls: is the first slider seen, and what of it is met; and how wide it is.
REACHED = """
const root = document.querySelector(arguments[0]), slider = root.querySelector("input[type=range]");
if (!slider) return null;
root.querySelector(".tristep-picture").scrollIntoView();
const { left, top, width, height } = slider.getBoundingClientRect();
return [document.elementFromPoint(left + width / 2, top + height / 2) === slider, width];
"""
SMALL_TARGETS = """
return [...document.querySelectorAll(".tristep button, .tristep input, .tristep select, .tristep summary")]
  .filter((each) => each.offsetHeight && each.getBoundingClientRect().height < 44).map((each) => each.outerHTML);
"""


def test_on_a_phone_sliders_stay_on_the_screen_and_have_room_for_a_finger(sized):
    stage = sized(360, 700, 360)
    stage.browser.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        for name in ("TrajectoryView", "Playground", "Dashboard", "LossView"):
            stage.show(_views()[name].scene())
            stage.browser.pixels()
            is_reached, wide = stage.browser.run(REACHED, ".tristep")
            assert is_reached, name
            assert wide > 100, name
            assert stage.browser.run(SMALL_TARGETS) == [], name
            stage.browser.keep(f"phone-{name}")
    finally:
        stage.browser.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_a_view_fits_the_box_that_scrolls_around_it_and_a_long_slider_gets_the_width(sized):
    stage = sized(1280, 900, WIDE)
    stage.browser.run("Object.assign(document.getElementById('stage').style, {maxHeight: '560px', overflow: 'auto'})")
    stage.show(viz.Playground("beale", "adam", steps=100).scene())
    assert stage.browser.run(SIZE, ".tristep")[1] <= 560
    assert stage.browser.run(SIZE, "input[data-control=step]")[0] > 200


def test_a_view_takes_the_width_of_its_cell(sized):
    stage = sized(1920, 1000, 1812)
    for name in ("LiveView", "LossView", "Dashboard", "Playground"):
        stage.show(_views()[name].scene())
        wide, _ = stage.browser.run(SIZE, ".tristep-picture canvas")
        beside, _ = stage.browser.run(SIZE, ".tristep-controls") if name == "Playground" else (0, 0)
        assert wide + beside > 0.95 * 1812, name
        assert stage.browser.run(SIZE, ".tristep")[1] < 0.8 * 1000, name
        stage.browser.keep(f"wide-{name}")


@pytest.mark.sample(0)
@pytest.mark.parametrize("renderer", ["canvas", "ipywidgets"])
def test_views_fit_jupyterlab(shared, browser, renderer):
    browser.driver.set_window_size(1280, 900)
    try:
        book = shared()
        book.run(f"from tristep import viz\nviz.set_renderer({renderer!r})")
        made = """
        import numpy as np
        run = viz.Run("adam", ["a.weight", "a.bias"])
        for step in range(1, 41):
            run.add_scalars(step, {"loss": 2 / step, "learning_rate": 0.1, "val_loss": 3 / step, "accuracy": step / 45})
            run.add_tensors([step], {"gradient_norm": np.array([[step, 2.0 * step]]), "weight_norm": np.ones((1, 2))})
        """
        book.run(textwrap.dedent(made))
        for number, code in enumerate(
            (
                'viz.Playground("beale", "adam", steps=20)',
                'viz.TrajectoryView("beale", ["sgd", "adam"], steps=20)',
                "viz.Dashboard(run)",
                "viz.TensorHeatmap([run, run])",
                "viz.LossView(run)",
                'viz.ScheduleView("cosine", 100, loss=run)',
            )
        ):
            cell = f"fits{number}"
            book.run(code, cell)
            shown = f"[data-cell={cell}] " + (".tristep-picture canvas" if renderer == "canvas" else "img.widget-image")
            browser.find(shown)
            output = f"[data-cell={cell}] .jp-OutputArea-output"
            browser.until(lambda output=output: browser.run(SIZE, output)[1] > 250, "the view")
            assert browser.run(SIZE, output)[1] <= HIGH, code
            browser.keep(f"lab-{renderer}-{number}")
            if renderer == "canvas":
                browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SCREEN)
                browser.until(lambda shown=shown: browser.run(SIZE, shown)[0] < 700, "the narrow picture")
                assert browser.run(REACHED, f"[data-cell={cell}]") in (None, [True, ANY]), code
                browser.keep(f"lab-small-{number}")
                browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.driver.set_window_size(1400, 1100)


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


def test_a_listing_is_folded_and_copied(stage):
    scene = one(Line([0, 1], [0, 1]))
    listings = [Listing("rule", "def adam():\n    ..."), Listing("code", "a < b")]
    stage.show(viz.Scene(scene.panels, listings=listings))
    lines = stage.browser.driver.find_elements("css selector", ".tristep-listing pre")
    assert [each.is_displayed() for each in lines] == [False, False]
    stage.browser.find(".tristep-listing summary").click()
    assert [each.is_displayed() for each in lines] == [True, False]
    copies = stage.browser.driver.find_elements("css selector", ".tristep-listing button")
    assert [each.accessible_name for each in copies] == ["Copy rule", "Copy code"]
    # As on a page that may use the clipboard, and on one that may not, where the lines are selected and copied.
    stage.browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    copies[0].click()
    stage.browser.until(lambda: copies[0].text == "Copied", "the words of the button")
    assert stage.browser.run("return window.copied") == "def adam():\n    ..."
    stage.browser.run(
        "navigator.clipboard.writeText = async () => { throw new Error('not allowed'); };"
        "document.addEventListener('copy', () => (window.copied = String(getSelection())))"
    )
    copies[1].click()
    stage.browser.until(lambda: copies[1].text != "Copy", "the words of the button")
    assert stage.browser.run("return String(getSelection())") == "a < b"
    stage.update(viz.Scene(scene.panels, listings=[listings[0], Listing("code", "a > b")]))
    assert lines[1].get_attribute("textContent") == "a > b"
    assert lines[0].is_displayed()  # as it was left
