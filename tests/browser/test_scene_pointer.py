"""The scene module: clicks on the panel, points that are moved, the readout, zooming, and the keyboard's cursor."""

import numpy as np
import pytest
from chromium import rgb
from scene_cases import ENTER, ESCAPE, LIGHT, RIGHT, UP, colour_at, one

from tristep.viz.scene import Axis, Click, Control, Heatmap, Line, Points, RefLine

LOG = Axis("rate", 1e-4, 1, "log")


def test_a_click_tells_the_place_in_the_axes_units(stage):
    for x, place in ((Axis("x", -4, 4), pytest.approx(2.5, abs=0.02)), (LOG, pytest.approx(1e-2, rel=0.02))):
        scene = one(Line([0.1, 1], [0, 10]), x=x, click=Click(event="start"))
        stage.show(scene)
        stage.click(*stage.place(scene, place.expected, 7.5))
        (event,) = stage.sent("click")
        assert event == {"kind": "click", "name": "start", "x": place, "y": pytest.approx(7.5, abs=0.05)}


def test_a_click_sets_the_control_that_is_nearest(stage):
    rates = [1e-3, 1e-2, 1e-1]
    c = Control("rate", "rate", rates)
    scene = one(
        RefLine([[rate] for rate in rates], by=("rate",), style=0, width=2),
        x=LOG,
        controls=[c],
        click=Click(control="rate"),
    )
    stage.show(scene, remote=False)
    stage.click(*stage.place(scene, 0.04, 5))  # 0.04 is nearer to 0.1 by its logarithm
    assert stage.browser.find("output").text == "0.1"
    assert colour_at(stage.browser.pixels(), stage.place(scene, 0.1, 5)) == LIGHT.colours[0]
    # Dragging along the panel sets it all the way.
    (x0, y0), (x1, y1) = stage.place(scene, 0.1, 5), stage.place(scene, 1e-3, 4)
    stage.pointer(("down", x0, y0), ("move", (x0 + x1) / 2, y0), ("move", x1, y1), ("up", x1, y1))
    assert stage.browser.find("output").text == "0.001"


def test_a_click_on_a_map_sets_the_controls_of_both_its_sides(stage):
    across, up = Control("rate", "rate", ["0.1", "0.2", "0.3"]), Control("decay", "decay", ["0", "1e-3"])
    x, y = np.meshgrid(np.arange(3), np.arange(2))
    here = Points(x[..., None], y[..., None], by=("decay", "rate"), style=0, size=12)
    scene = one(
        here,
        x=Axis("rate", -0.5, 2.5),
        y=Axis("decay", -0.5, 1.5),
        controls=[across, up],
        click=Click(control="rate", along="x", other="decay"),
    )
    stage.show(scene, remote=False)
    stage.click(*stage.place(scene, 1.8, 0.7))  # nearest to (2, 1)
    assert [each.text for each in stage.browser.driver.find_elements("css selector", "output")] == ["0.3", "1e-3"]
    assert colour_at(stage.browser.pixels(), stage.place(scene, 2, 1)) == LIGHT.colours[0]


def test_points_are_moved_by_mouse_and_by_keyboard_where_there_is_python(stage):
    scene = one(Points([2, 5], [2, 5], style=0, size=12, drag="start"))
    stage.show(scene, remote=False)
    start, end = stage.place(scene, 2, 2), stage.place(scene, 4, 2.2)
    stage.pointer(("down", *start), ("move", *end), ("up", *end))
    assert colour_at(stage.browser.pixels(), start) == LIGHT.colours[0]
    stage.show(scene)
    end = stage.place(scene, 4, 8)
    stage.pointer(("down", *start), ("move", start[0] + 20, start[1]), ("move", *end), ("up", *end))
    last = stage.browser.until(lambda: [each for each in stage.sent("drag") if abs(each["y"] - 8) < 0.1], "the drop")[-1]
    assert {name: last[name] for name in ("kind", "name", "number")} == {"kind": "drag", "name": "start", "number": 0}
    assert last["x"] == pytest.approx(4, abs=0.05)
    pixels = stage.browser.pixels()
    assert colour_at(pixels, end) == LIGHT.colours[0]
    assert colour_at(pixels, start) == LIGHT.grid
    # The cursor begins in the middle, where the other point is; Enter takes it and lets it go.
    stage.browser.keys(stage.browser.find("canvas"), RIGHT, ENTER, RIGHT, RIGHT, ENTER, RIGHT)
    last = stage.browser.until(lambda: [each for each in stage.sent("drag") if each["x"] > 5.35], "the drop")[-1]
    assert last["number"] == 1
    assert last["x"] == pytest.approx(5.4, abs=0.03)  # steps of a fiftieth of the panel
    assert last["y"] == pytest.approx(5, abs=0.03)


def test_a_point_is_where_python_says_as_soon_as_it_has_answered(stage):
    """Also where nothing new is to be shown, since a point could not be moved any farther."""
    scene = one(Points([2, 5], [2, 5], style=0, size=12, drag="start"))
    stage.show(scene)
    start, end = stage.place(scene, 2, 2), stage.place(scene, 8, 2)
    stage.pointer(("down", *start), ("move", start[0] + 20, start[1]), ("move", *end))
    assert "8" in stage.browser.find(".tristep-readout").text  # which goes along
    stage.pointer(("up", *end))
    assert colour_at(stage.browser.pixels(), end) == LIGHT.colours[0]
    stage.browser.run("shown.answered()")
    pixels = stage.browser.pixels()
    assert colour_at(pixels, start) == LIGHT.colours[0]
    assert colour_at(pixels, end) == LIGHT.grid


def test_the_keyboards_cursor_clicks_and_speaks(stage):
    scene = one(Line([0, 10], [5, 5], name="loss"), click=Click(event="start"))
    stage.show(scene)
    canvas = stage.browser.find("canvas")
    stage.browser.keys(canvas, RIGHT, UP, UP, RIGHT, ENTER)
    (event,) = stage.sent("click")
    assert (event["x"], event["y"]) == (pytest.approx(5.2, abs=0.02), pytest.approx(5.4, abs=0.02))
    voice = stage.browser.run("return document.querySelector('.tristep-hidden[aria-live]').textContent")
    assert voice.startswith("loss, x ")
    stage.browser.keep("cursor")
    canvas.send_keys(ESCAPE)
    assert stage.browser.run("return document.activeElement === document.body")


def test_the_readout_names_the_nearest_line_the_cell_and_the_point(stage):
    scene = one(
        Heatmap(np.array([[1.0, 2.0], [3.0, 1234.5]]), [0, 10], [0, 10], label="loss"),
        Line([0, 5, 10], [1, 1, 2], name="Adam", style=2),
        Points([8], [8], words=["the minimum"], style=1),
        x=Axis("rate", 0, 10),
        y=Axis("row", 0, 10, ticks=[(2.5, "first layer"), (7.5, "second layer")]),
    )
    stage.show(scene)
    readout = stage.browser.find(".tristep-readout")
    stage.pointer(("move", *stage.place(scene, 4.5, 1.2)))
    assert readout.text == "Adam\nrate 5\nrow 1"
    stage.pointer(("move", *stage.place(scene, 2.5, 1.2)))  # far from both ends
    name, rate, row = readout.text.split("\n")
    assert (name, row) == ("Adam", "row 1")
    assert float(rate.split()[1]) == pytest.approx(2.5, abs=0.03)
    stage.pointer(("move", *stage.place(scene, 6, 6)))
    assert readout.text == "loss 1235\nrate 7.5\nrow second layer"
    stage.browser.keep("readout")
    stage.pointer(("move", *stage.place(scene, 8.05, 8.05)))
    assert readout.text == "the minimum\nrate 8\nrow 8"
    stage.pointer(("move", 2, 2))
    assert not readout.is_displayed()


def test_a_finger_reads_values(stage):
    driver = stage.browser.driver
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 1})
    scene = one(Line([0, 5, 10], [1, 1, 5], name="Adam", style=2))
    try:
        stage.show(scene)
        readout = stage.browser.find(".tristep-readout")
        assert stage.browser.find(".tristep-hint").text == "tap or slide: read values"

        def touch(kind, *at):
            box = stage.browser.run("const b = document.querySelector('canvas').getBoundingClientRect(); return [b.x, b.y]")
            points = [{"x": box[0] + at[0], "y": box[1] + at[1]}] if at else []
            driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", *stage.place(scene, 4.9, 1.2))
        assert readout.text == "Adam\nx 5\ny 1"
        for x, y in ((7, 1.2), (10, 5)):  # a page is scrolled by what goes up or down at first
            touch("touchMove", *stage.place(scene, x, y))
        touch("touchEnd")
        assert readout.text == "Adam\nx 10\ny 5"
        assert readout.is_displayed()
        stage.browser.keep("finger")
    finally:
        driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_a_rectangle_is_looked_at_closely_until_a_double_click(stage):
    scene = one(Line([0, 10], [5, 5], style=0, width=3), Points([2.5], [7.5], style=4, size=10))
    stage.show(scene)
    before = stage.browser.digest()
    start, end = stage.place(scene, 2, 8), stage.place(scene, 3, 7)
    stage.pointer(("down", *start), ("move", start[0] + 9, start[1] + 9), ("move", *end), ("up", *end))
    pixels = stage.browser.pixels()
    left, top, right, bottom = stage.frame()
    ink = np.nonzero((pixels == rgb(LIGHT.colours[4])).all(axis=2))
    assert ink[1].mean() == pytest.approx((left + right) / 2, abs=12)
    assert ink[0].mean() == pytest.approx((top + bottom) / 2, abs=12)
    stage.browser.keep("closer")
    middle = ((left + right) / 2, (top + bottom) / 2)
    stage.pointer(("down", *middle), ("up", *middle), ("down", *middle), ("up", *middle))
    stage.pointer(("move", 2, 2))
    assert stage.browser.digest() == before


def test_one_can_look_ever_closer_until_the_digits_end(stage):
    """Ends that differ in no digit had no ticks, and the search for them no end."""
    scene = one(Line([0, 10], [5, 5], style=0, width=3))
    stage.show(scene)
    left, top, right, bottom = stage.frame()
    for _ in range(12):
        x, y = (left + right) / 2, (top + bottom) / 2
        stage.pointer(("down", x, y), ("move", x + 9, y + 9), ("move", x + 12, y + 12), ("up", x + 12, y + 12))
        left, top, right, bottom = stage.frame()
    assert stage.browser.find(".tristep-hint button").text == "Show all again"
    assert len(stage.written()) > 4


def test_a_double_click_is_no_click(stage):
    scene = one(Line([0, 10], [5, 5], style=0, width=3), click=Click(event="start"))
    stage.show(scene)
    start, end = stage.place(scene, 2, 8), stage.place(scene, 4, 4)
    stage.pointer(("down", *start), ("move", start[0] + 9, start[1] + 9), ("move", *end), ("up", *end))
    stage.pointer(*2 * [("down", *start), ("up", *start)])
    stage.pointer(("down", *end), ("up", *end))  # the picture is whole again
    (sent,) = stage.browser.until(lambda: stage.sent("click"), "the click")
    assert [sent["x"], sent["y"]] == pytest.approx([4, 4], abs=0.05)
