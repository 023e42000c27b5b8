"""`print` shows a view in a terminal: its panels in characters, and its words."""

import numpy as np
import pytest

from tristep.viz import View
from tristep.viz.scene import Axis, Control, Heatmap, Line, Panel, Points, RefLine, Scene

WIDE, HIGH = 72, 14


class Drawn(View):
    def __init__(self, *layers, x=None, y=None, controls=(), **panel):
        super().__init__()
        panels = [Panel(x or Axis("x", 0, WIDE), y or Axis("y", 0, HIGH), layers, **panel)]
        self._scene = Scene(panels, "A title", controls, description="What there is to see.")

    def scene(self):
        return self._scene


def rows(view):
    """The characters within the axes, [HIGH, WIDE], the top row first."""
    lines = [line.split("|", 1)[1] for line in str(view).splitlines() if "|" in line]
    assert len(lines) == HIGH
    return np.array([list(line.ljust(WIDE)) for line in lines])


def test_a_line_goes_through_its_points_and_its_ends_are_named():
    view = Drawn(Line([0, WIDE], [0, HIGH], style=0, name="loss"), Line([0.5, 0.5], [0, HIGH], style=1, name="other"))
    seen = rows(view)
    for row, column in zip(*np.nonzero(seen == "o"), strict=True):
        assert abs((HIGH - 1 - row) / HIGH - column / WIDE) < 1 / HIGH
    assert (seen == "o").any(axis=0)[1:].all()  # without gaps
    assert (seen[:, 0] == "x").all()
    text = str(view)
    assert text.startswith("A title\n\ny:  o loss,  x other\n14 |")
    assert text.endswith("\n\nWhat there is to see.")
    assert text.splitlines()[-3].split() == ["0", "x", "72"]


def test_gaps_controls_and_log_axes():
    rate = Control("rate", "rate", [0.1, 0.2], 1)
    line = Line([0, 10, 20, 30, 40], [[1.0] * 5, [1, 10, np.nan, 100, 1000]], by=("rate",))
    seen = rows(Drawn(line, y=Axis("loss", 1, 1e14, "log"), controls=[rate]))
    columns = np.flatnonzero((seen == "o").any(axis=0))
    assert columns.tolist() == [*range(11), *range(30, 41)]  # from 0 to 10, and from 30 to 40
    assert [HIGH - 1 - int(np.argmax(seen[:, column] == "o")) for column in (0, 10, 30, 40)] == [0, 1, 2, 3]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_value_of_zero_is_a_gap_on_a_log_axis(place):
    values = np.array([1.0, 10.0, 100.0, 1000.0, 10000.0])
    gap = np.where(np.arange(5) == place, np.nan, values)
    zero = np.where(np.arange(5) == place, 0.0, values)
    pictures = [rows(Drawn(Line(np.arange(5) * 10, each), y=Axis("loss", 1, 1e14, "log"))) for each in (gap, zero)]
    np.testing.assert_array_equal(*pictures)


@pytest.mark.parametrize("upwards", [True, False])
def test_a_map_gets_darker_with_its_values_and_has_holes(upwards):
    values = np.array([[0.0, 1.0], [np.nan, 9.0]])
    seen = rows(Drawn(Heatmap(values, [0, WIDE], [0, HIGH]), y=Axis("y", 0, HIGH, upwards=upwards)))
    low, high = (seen[HIGH // 2 :], seen[: HIGH // 2]) if upwards else (seen[: HIGH // 2], seen[HIGH // 2 :])
    half = WIDE // 2
    assert {"".join(row) for row in low} == {" " * half + "." * half}
    assert {"".join(row) for row in high} == {" " * half + "@" * half}


def test_a_map_of_categories_may_have_none():
    seen = rows(Drawn(Heatmap(np.full((2, 2), -1), [0, WIDE], [0, HIGH], palette="categories")))
    assert (seen == " ").all()


def test_points_and_straight_lines():
    seen = rows(Drawn(RefLine([20.5, 500.0]), RefLine([3.5], axis="y"), Points([40.5], [7.5], marker="star")))
    assert seen[HIGH - 8, 40] == "*"
    assert (np.delete(seen[:, 20], HIGH - 4) == "|").all()
    assert (seen[HIGH - 4] == "-").sum() >= WIDE - 1


def test_numbered_axes_have_their_words():
    text = str(Drawn(Points([1], [1]), x=Axis("rate", -0.5, 2.5, ticks=[(0, "0.1"), (1, "0.2"), (2, "0.3")])))
    assert text.splitlines()[-3].split() == ["0.1", "rate", "0.3"]
