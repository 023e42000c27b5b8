"""Every view shows its picture and its controls at once on a screen of 1280 x 900; fields, listings and grey buttons."""

import json
import textwrap
from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")  # `make gpu` uses what a machine has
pytest.importorskip("anywidget")

from planted_runs import make_run
from scene_cases import DOWN, ENTER, RIGHT, one

import tristep
from tristep import viz
from tristep.viz.scene import Axis, Button, Click, Control, Line, Listing, Points

WIDE, HIGH = 1000, 700  # pixels of an output in JupyterLab on such a screen, and what its menus and the input leave of them
SIZE = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.width, box.height]"


@cache
def _views():
    """One of each kind, with as much as it may have."""
    run, other = make_run(name="adam"), make_run(name="lion")
    for each in (run, other):
        each.add_scalars(each.last_step + 1, {"loss": 0.01, "val_loss": 0.02, "accuracy": 0.9, "val_accuracy": 0.8})
    net = torch.nn.Linear(2, 1)
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})

    def step():
        trainer.zero_grad()
        loss = net(torch.ones(4, 2)).square().mean()
        loss.backward()
        trainer.step(1)
        return loss

    def steps():
        for _ in range(20):
            yield step()

    loop = viz.LiveLoop(steps, trainer=trainer, mode="block").start()
    batches = [(torch.randn(8, 2), torch.randint(0, 2, (8,))) for _ in range(3)]
    sweep = tristep.sweep(
        lambda: torch.nn.Linear(2, 2),
        torch.nn.functional.cross_entropy,
        batches,
        grid={"learning_rate": [0.01, 0.1], "wd": [0.0, 0.1]},
    )
    data = torch.ones(4, 2), torch.zeros(4, 1)
    plane = viz.loss_plane(net, torch.nn.functional.mse_loss, data, directions="filter")
    return {
        "LossPlaneView": viz.LossPlaneView(plane),
        "TrajectoryView": viz.TrajectoryView("rosenbrock", steps=20),
        "Playground": viz.Playground("beale", "adam", steps=20),
        "SensitivityView": viz.SensitivityView("beale", ["sgd", "adam"], steps=20),
        "BasinMap": viz.BasinMap("himmelblau", ["sgd"], n=8, steps=20),
        "LossView": viz.LossView([run, other]),
        "LiveView": loop.view,
        "WeightsView": viz.WeightsView(run),
        "UpdateRatioView": viz.UpdateRatioView(run),
        "TensorHeatmap": viz.TensorHeatmap(_deep_run()),
        "several heat maps": viz.TensorHeatmap([run, other]),
        "Dashboard": viz.Dashboard(run),
        "ScheduleView": viz.ScheduleView(trainer, 100, knots=[(0, 0.02), (50, 0.5), (100, 0.001)], loss=run),
        "OrthogonalizationView": viz.OrthogonalizationView(),
        "LRFinderView": viz.LRFinderView({"sgd": tristep.lr_find(trainer, step)}),
        "SweepView": viz.SweepView(sweep),
        "SweepView of trajectories": viz.SweepView(
            viz.simulate(
                viz.ill_conditioned_bowl(25),
                ["momentum", "nag"],
                steps=20,
                learning_rates=[0.02, 0.1, 0.2],
                sweep={"momentum": [0.0, 0.4, 0.8]},
            )
        ),
    }


def _deep_run():
    """A run of 200 tensors."""
    run = viz.Run("deep", [f"layers.{k}.weight" for k in range(200)])
    for step in range(1, 6):
        run.add_tensors([step], {name: np.full((1, 200), float(step)) for name in ("gradient_norm", "weight_norm")})
    return run


def test_each_view_fits_the_screen(stage):
    stage.browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    stage.browser.run(
        "document.body.style.margin = 0; document.getElementById('stage').style.width = `${arguments[0]}px`", WIDE
    )
    high = {}
    try:
        for name, view in _views().items():
            stage.show(view.scene())
            wide, high[name] = stage.browser.run(SIZE, ".tristep")
            assert wide <= WIDE
            assert stage.browser.run(SIZE, ".tristep-picture canvas")[1] > 250  # nor is it a stamp
            stage.browser.keep(f"screen-{name.replace(' ', '-')}")
    finally:
        stage.browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert {name: height for name, height in high.items() if height > HIGH} == {}


# The panels of the others stand one below the other where a page is narrow.
SMALL = ("LiveView", "LossView", "Playground", "TrajectoryView", "SweepView", "ScheduleView", "LossPlaneView", "WeightsView")


def test_a_picture_and_its_sliders_fit_a_small_screen(stage):
    """800 x 600 pixels, which are also those of 1,200 x 900 at 150 %: a notebook's cell has some 640 of them, and 500."""
    stage.browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 800, "height": 600, "deviceScaleFactor": 1.5, "mobile": False}
    )
    stage.browser.run("document.body.style.margin = 0; document.getElementById('stage').style.width = '640px'")
    high = {}
    try:
        views = _views()
        for name in SMALL:
            stage.show(views[name].scene())
            wide, picture = stage.browser.run(SIZE, ".tristep-picture canvas")
            assert wide > 500  # the plane of losses is as high as it is wide
            assert picture > 220
            high[name] = stage.browser.run(SIZE, ".tristep-body")[1]
            stage.browser.keep(f"small-{name}")
    finally:
        stage.browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert {name: height for name, height in high.items() if height > 470} == {}


def test_a_view_takes_the_width_of_its_cell(stage):
    stage.browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1920, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    stage.browser.run("document.body.style.margin = 0; document.getElementById('stage').style.width = '1812px'")
    try:
        views = _views()
        for name in ("LiveView", "LossView", "Dashboard", "Playground"):
            stage.show(views[name].scene())
            wide, _ = stage.browser.run(SIZE, ".tristep-picture canvas")
            beside, _ = stage.browser.run(SIZE, ".tristep-controls") if name == "Playground" else (0, 0)
            assert wide + beside > 0.95 * 1812, name
            assert stage.browser.run(SIZE, ".tristep")[1] < 0.8 * 1000
            stage.browser.keep(f"wide-{name}")
    finally:
        stage.browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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
                "viz.ScheduleView(knots=[(0, 0.02), (50, 0.5), (100, 0.001)], loss=run)",
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
    finally:
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
    listings = [Listing("rule", "def adam():\n    ..."), Listing("code", "a < b", folded=False)]
    stage.show(viz.Scene(scene.panels, listings=listings))
    lines = stage.browser.driver.find_elements("css selector", ".tristep-listing pre")
    assert [each.is_displayed() for each in lines] == [False, True]
    stage.browser.find(".tristep-listing summary").click()
    assert lines[0].is_displayed()
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
    stage.update(viz.Scene(scene.panels, listings=[listings[0], Listing("code", "a > b", folded=False)]))
    assert lines[1].text == "a > b"
    assert lines[0].is_displayed()  # as it was left


def test_a_double_click_or_a_key_adds_a_knot(stage):
    knots = Points([5], [5], drag="knot", size=9)
    scene = one(knots, click=Click(event="knot", double=True), x=Axis("update", 0, 10), y=Axis("rate", 0, 10))
    stage.show(scene)
    from selenium.webdriver.common.action_chains import ActionChains

    stage.click(*stage.place(scene, 2, 8))
    assert stage.sent("click") == []
    canvas = stage.browser.find("canvas")
    box = stage.browser.run("const b = arguments[0].getBoundingClientRect(); return [b.width, b.height]", canvas)
    for x, y in ((2, 8), (5, 5)):  # the second is on a knot
        at = stage.place(scene, x, y)
        mouse = ActionChains(stage.browser.driver)
        mouse.move_to_element_with_offset(canvas, round(at[0] - box[0] / 2), round(at[1] - box[1] / 2))
        mouse.double_click().perform()
    (event,) = stage.sent("click")
    assert event["name"] == "knot"
    assert [event["x"], event["y"]] == pytest.approx([2, 8], abs=0.05)
    stage.browser.keys(canvas, DOWN, DOWN, *[RIGHT] * 5, ENTER)  # from the middle, away from the knot
    event = stage.sent("click")[-1]
    assert event["x"] > 5.2
    assert json.dumps(stage.sent("drag")) == "[]"
