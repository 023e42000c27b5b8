"""What each layer and axis of a scene looks like, asked of matplotlib's own objects and of single pixels."""

from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from drawn_scenes import NAN, one_panel, pixel_at, words_of
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm, to_rgb

from tristep.viz.render.matplotlib import Picture, draw
from tristep.viz.scene import Axis, Band, Control, Heatmap, Line, Panel, Scene
from tristep.viz.style import THEMES, line_style


def test_lines_have_their_data_colour_dashes_and_dots():
    first, second = Line([0, 1, 2], [3, 2, 1], style=1, width=2.5), Line([0, 1], [1, 1], style="quiet", alpha=0.5)
    single, marked = Line([0.5], [0.5]), Line([0, 1], [0, 1], marker=True)
    for theme in THEMES:
        lines = draw(one_panel(first, second, single, marked), theme=theme).axes[0].lines
        line, other = lines[:2]
        np.testing.assert_array_equal(line.get_xydata(), [[0, 3], [1, 2], [2, 1]])
        assert (line.get_color(), line.get_linewidth()) == (line_style(1, theme)["color"], 2.5)
        assert line.get_linestyle() == "--"
        assert (other.get_color(), other.get_alpha(), other.get_linestyle()) == (THEMES[theme].quiet, 0.5, "-")
        assert [line.get_marker() for line in lines] == ["", "", "o", "o"]


def test_the_head_is_the_last_finite_point_that_is_drawn():
    step = Control("step", "step", [0, 1, 2, 3])
    scene = one_panel(Line([0, 0.2, 0.4, 0.6], [0.1, 0.5, NAN, 0.7], upto="step", head=True), controls=[step])
    line, head = draw(scene, {"step": 2}).axes[0].lines
    assert len(line.get_xdata()) == 3
    np.testing.assert_allclose(head.get_xydata(), [[0.2, 0.5]])


def test_a_point_between_gaps_is_drawn():
    scene = one_panel(Line([0, 0.2, 0.4, 0.6, 0.8], [NAN, 0.5, NAN, 0.7, 0.8]))
    (line,) = draw(scene).axes[0].lines
    assert (line.get_marker(), line.get_markevery()) == ("o", [1])


@pytest.mark.parametrize("height", [1.6, 2.2, 4.0])
@pytest.mark.parametrize("reach", [(0.013, 0.95), (0.2, 2.4), (0.21, 0.48), (0.3, 0.95), (1e-4, 1.0)])
def test_labels_of_a_short_logarithmic_axis_do_not_touch(reach, height):
    scene = Scene([Panel(Axis("x", 0, 1), Axis("y", *reach, "log"), [Line([0, 1], [*reach])])], height=height)
    figure = draw(scene)
    figure.canvas.draw()
    axis = figure.axes[0].yaxis
    boxes = [
        label.get_window_extent()
        for label, at in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
        if reach[0] <= at <= reach[1]
    ]
    assert len(boxes) >= 2
    assert all(one.y1 <= other.y0 for one, other in pairwise(sorted(boxes, key=lambda box: box.y0)))


def test_axes_reach_from_and_to_what_is_asked_in_either_direction_with_equal_units_if_asked():
    axes = draw(one_panel(x=Axis("x", 0.01, 100, "log"), y=Axis("row", 0, 6, upwards=False))).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert (axes.get_xlim(), axes.get_ylim()) == ((0.01, 100), (6, 0))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "row")
    axes = draw(one_panel(x=Axis("x", -2, 2), y=Axis("y", 0, 1), panel={"equal": True})).axes[0]
    (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
    assert x1 - x0 == pytest.approx(y1 - y0)


def test_pixels_of_an_image_have_the_palette_s_colours():
    values = np.array([[1, 10, 100], [1000, NAN, 0]])
    image = Heatmap(values, [1e-2, 10], [0, 2], scale="log", limits=(1, 1000))
    figure = draw(one_panel(image, x=Axis("x", 1e-2, 10, "log"), y=Axis("y", 0, 2)))
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            expected = (
                255 * np.array(mpl.colormaps["viridis"](LogNorm(1, 1000)(value))[:3]) if value > 0 else [255, 255, 255]
            )
            np.testing.assert_allclose(pixel_at(figure, 10 ** (-1.5 + column), row + 0.5), expected, atol=2)


def test_a_band_leaves_gaps_and_one_down_to_0_goes_on_below_a_log_axis():
    low, high = [0.1, 0.2, NAN, 0.1, 0.1], [0.5, 0.6, 0.5, 0.5, 0.5]
    figure = draw(one_panel(Band(np.linspace(0, 1, 5), low, high, style=1, alpha=1)))
    (band,) = (each for each in figure.axes[0].collections if isinstance(each, PolyCollection))
    first, second = band.get_paths()
    np.testing.assert_allclose(first.vertices[:4], [[0, 0.1], [0.25, 0.2], [0.25, 0.6], [0, 0.5]], rtol=1e-6)
    assert second.vertices[:, 0].min() == 0.75
    np.testing.assert_allclose(pixel_at(figure, 0.1, 0.4), 255 * np.array(to_rgb(THEMES["light"].colours[1])), atol=2)
    np.testing.assert_allclose(pixel_at(figure, 0.5, 0.45), [255, 255, 255])
    figure = draw(one_panel(Band([0, 1], [0, 0], [0.1, 0.1], alpha=1), y=Axis("y", 1e-6, 1, "log")))
    np.testing.assert_allclose(pixel_at(figure, 0.5, 2e-6), 255 * np.array(to_rgb(THEMES["light"].colours[0])), atol=2)
    assert tuple(pixel_at(figure, 0.5, 0.2)) == (255, 255, 255)


def test_a_legend_of_a_panel_has_its_lines_values_where_a_control_is():
    step, width = Control("step", "step", [0, 4, 9], 2), Control("width", "width", [1, 2], 0, texts=["one", "two"])
    line = Line([0, 5, 10], [[3.0, 2.0, NAN], [6.0, 4.0, 0.5]], by=("width",), name="loss", legend_by="width")
    late = Line([5, 10], [1.0, 2.0], name="late", style=1)
    scene = one_panel(line, late, x=Axis("x", 0, 10), y=Axis("y", 0, 6), controls=[step, width], panel={"legend": "step"})
    said = {
        (i, k): [scene.named(each, {"step": i, "width": k}, "step") for each in (line, late)]
        for i in range(3)
        for k in range(2)
    }
    assert said[0, 0] == ["loss (one) 3", "late –"]
    assert said[1, 1] == ["loss (two) 6", "late –"]
    assert said[2, 1] == ["loss (two) 4", "late 1"]
    picture = Picture(scene)
    for (i, k), words in said.items():
        picture.show(state={"step": i, "width": k})
        assert set(words) <= {text.get_text() for text in words_of(picture.figure)}
    with pytest.raises(ValueError, match="a legend is to show values at 'epoch': there is no such control"):
        one_panel(line, controls=[width], panel={"legend": "epoch"})
