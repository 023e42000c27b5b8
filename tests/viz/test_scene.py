"""Scenes: what they refuse, what a control chooses, and what a browser gets."""

import json
import struct

import numpy as np
import pytest

from tristep.viz.scene import Axis, Button, Click, Control, Heatmap, Line, Panel, RefLine, Scene, Text
from tristep.viz.style import THEMES

RATE = Control("rate", "learning rate", [0.1, 0.2, 0.3], index=1)
STEP = Control("step", "step", [0, 2, 4, 6])


def _scene(*layers, controls=(RATE, STEP), click=None, **settings):
    return Scene([Panel(Axis("x", 0, 1), Axis("y", 0, 1), layers, click=click)], controls=controls, **settings)


def test_controls_choose_among_arrays_in_the_order_in_which_they_are_named():
    y = np.arange(3 * 4 * 5).reshape(3, 4, 5)
    line, mark = Line(np.arange(5), y, by=("rate", "step")), RefLine([[0.1], [0.2], [0.3]], by=("rate",))
    scene = _scene(line, mark)
    np.testing.assert_array_equal(line.chosen("y", scene.state()), y[1, 0])
    np.testing.assert_array_equal(line.chosen("y", scene.state(rate=2, step=3)), y[2, 3])
    np.testing.assert_array_equal(line.chosen("x", scene.state(rate=2)), np.arange(5))
    assert mark.chosen("at", scene.state(rate=2)) == np.float32(0.3)
    # A line may end at the point whose number is the value of a control.
    line = Line(np.arange(10), np.arange(10) ** 2, upto="step")
    np.testing.assert_array_equal(_scene(line).drawn(line, {"rate": 0, "step": 2}), [[0, 1, 2, 3, 4], [0, 1, 4, 9, 16]])


def test_steps_of_long_runs_are_exact():
    steps = np.arange(2**24 - 2, 2**24 + 3)
    line, losses = Line(steps, np.linspace(1, 1e-9, 5)), Line([0, 1], [1e30, 0.1])
    np.testing.assert_array_equal(line.x, steps)
    assert [array.dtype for array in (line.y, losses.x, losses.y)] == [np.float32] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axis("x", 0, 1, "log"), "above 0 on a log scale"),
        (lambda: Line([0, 1], [0], name="sgd"), "Line 'sgd': x has 2 points and y has 1, must be as many"),
        (lambda: _scene(controls=(RATE,), buttons=[Button("rate", "go")]), "two controls or buttons of the name 'rate'"),
        (
            lambda: _scene(Line([0], [[0], [1]], by=("rate",))),
            r"y has shape \(2, 1\), but its controls",
        ),
        (lambda: _scene().state(wd=1), "'wd' is no control of this picture. There are 'rate', 'step'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_axis_has_room_for_all_finite_values():
    axis = Axis.over("loss", [1.0, np.nan], [[3.0, np.inf]], margin=0.1)
    assert (axis.low, axis.high) == pytest.approx((0.8, 3.2))
    axis = Axis.over("loss", [0.0, 0.01, -3.0, 100.0], scale="log", margin=0.25)
    assert (axis.low, axis.high) == pytest.approx((1e-3, 1e3))
    assert Axis.over("nothing").low < Axis.over("nothing").high
    assert Axis.over("one", [0.0]).low < 0 < Axis.over("one", [0.0]).high


def test_limits_of_colours_are_found():
    assert Heatmap([[1.0, np.nan, 4.0]], [0, 1], [0, 1]).limits == (1.0, 4.0)
    low, high = Heatmap([[0.0, 0.01, 10.0]], [0, 1], [0, 1], scale="log").limits
    assert (low, high) == pytest.approx((0.01, 10.0))
    low, high = Heatmap([[2.0, 2.0]], [0, 1], [0, 1]).limits
    assert low < 2.0 < high


def test_a_browser_gets_all_of_it():
    y = np.arange(15, dtype=np.float32).reshape(3, 5)
    x = np.arange(5)
    line = Line(x, y, by=("rate",), name="sgd", style=2)
    shared = Line(line.x, y[0], style="ink")
    image = Heatmap(np.array([[0, 3]], dtype=np.uint8), [0, 1], [0, 1])
    scene = _scene(
        line, shared, image, Text(["p", "q", "ü"], 0, 0, by=("rate",)), click=Click("rate"), description="A picture."
    )
    payload = scene.to_bytes()
    (length,) = struct.unpack_from("<I", payload)
    header = json.loads(payload[4 : 4 + length])
    start = -(-(4 + length) // 8) * 8

    def array(place):
        about = header["arrays"][place["array"]]
        assert about["start"] % 8 == 0
        count = int(np.prod(about["shape"]))
        return np.frombuffer(payload, about["dtype"], count, start + about["start"]).reshape(about["shape"])

    first, second, third, fourth = header["panels"][0]["layers"]
    assert (first["kind"], first["name"], first["style"], first["by"]) == ("line", "sgd", 2, ["rate"])
    np.testing.assert_array_equal(array(first["x"]), x)
    np.testing.assert_array_equal(array(first["y"]), y)
    assert second["x"] == first["x"]  # an array that two layers have is sent once
    np.testing.assert_array_equal(array(third["values"]), [[0, 3]])
    assert header["arrays"][third["values"]["array"]]["dtype"] == "uint8"
    assert {theme: colours[:6] for theme, colours in third["colours"].items()} == dict.fromkeys(THEMES, "440154")  # viridis
    assert fourth["texts"] == ["p", "q", "ü"]
    click = {"control": "rate", "along": "x", "other": None, "event": None, "does": ""}
    assert header["panels"][0]["click"] == click
    assert header["controls"][0]["values"] == [0.1, 0.2, 0.3]
    assert header["description"] == "A picture."
    for theme, colours in THEMES.items():
        assert header["style"][theme]["background"] == colours.background
        assert header["style"][theme]["colours"] == list(colours.colours)
    assert header["style"]["dashes"][:2] == [[], [4.5, 2.5]]
