"""What each layer and axis of a scene looks like, asked of matplotlib's own objects and of single pixels."""

from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
from drawn_scenes import NAN, UNIT, one_panel, pixel_at, words_of
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.quiver import Quiver

from tristep.viz.render.matplotlib import Picture, draw
from tristep.viz.scene import Arrows, Axis, Band, Control, Heatmap, Line, Panel, Points, RefLine, Scene, Text
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


def test_axes_reach_from_and_to_what_is_asked_in_either_direction_with_equal_units_if_asked():
    axes = draw(one_panel(x=Axis("x", 0.01, 100, "log"), y=Axis("row", 0, 6, upwards=False))).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert (axes.get_xlim(), axes.get_ylim()) == ((0.01, 100), (6, 0))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "row")
    axes = draw(one_panel(x=Axis("x", -2, 2), y=Axis("y", 0, 1), panel={"equal": True})).axes[0]
    (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
    assert x1 - x0 == pytest.approx(y1 - y0)


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (Axis("y", -1, 1), ["−1", "−0.75", "−0.5", "−0.25", "0", "0.25", "0.5", "0.75", "1"]),
        (Axis("y", 0, 3e-5), ["0", "5e−6", "1e−5", "1.5e−5", "2e−5", "2.5e−5", "3e−5"]),
        (Axis("y", 0, 3e6), ["0", "5e5", "1e6", "1.5e6", "2e6", "2.5e6", "3e6"]),
        (Axis("y", 1e-3, 10, "log"), ["0.001", "0.01", "0.1", "1", "10"]),
        (Axis("y", 0.1, 10, "log"), ["0.1", "0.2", "0.5", "1", "2", "5", "10"]),
        (Axis("y", 2.1, 2.9, "log"), [f"{value / 10:g}" for value in range(21, 30)]),
        (Axis("y", 0, 3, ticks=[(0.5, "$a"), (1.5, "b$c$"), (9, "beyond")]), ["$a", "b$c$"]),
    ],
)
def test_ticks_say_few_round_numbers_or_what_they_are_told(axis, words):
    figure = draw(one_panel(y=axis, height=2.9))
    figure.draw_without_rendering()
    shown = [(tick.get_loc(), tick.label1.get_text()) for tick in figure.axes[0].yaxis.get_major_ticks()]
    assert [text for place, text in shown if axis.low <= place <= axis.high] == words


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


def test_colours_have_a_bar_with_their_limits_and_label():
    image = Heatmap([[0.01, 1.0]], [0, 1], [0, 1], scale="log", label="update / weight")
    (axes,) = draw(one_panel(image)).axes
    (bar,) = axes.child_axes
    assert (bar.get_ylabel(), bar.get_yscale()) == ("update / weight", "log")
    assert bar.get_ylim() == pytest.approx((0.01, 1))
    assert bar.get_position().height == pytest.approx(axes.get_position().height)
    top = pixel_at(bar.figure, 0.5, 0.97, bar)
    np.testing.assert_allclose(top, 255 * np.array(mpl.colormaps["viridis"](0.97)[:3]), atol=8)
    assert not draw(one_panel(Heatmap([[0.01, 1.0]], [0, 1], [0, 1]))).axes[0].child_axes


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


def test_points_on_the_edge_are_whole_and_those_beyond_it_absent():
    (points,) = draw(one_panel(Points([0, 0.1, 1, 2], [0, 0.1, 1, 0.5], size=9, marker="dot"))).axes[0].lines
    np.testing.assert_allclose(points.get_xydata(), [[0, 0], [0.1, 0.1], [1, 1]], rtol=1e-6)
    assert not points.get_clip_on()
    assert (points.get_linestyle(), points.get_markersize()) == ("None", 9)


def test_arrows_reach_from_their_places_by_their_amounts_on_any_axis():
    arrows = Arrows([0.1, NAN, 1], [0.2, 0.2, 0.9], [9.9, 1, 0], [0, 0, -0.7], style=2, width=3)
    figure = draw(one_panel(arrows, x=Axis("x", 0.01, 100, "log")))
    axes = figure.axes[0]
    (quiver,) = (each for each in axes.collections if isinstance(each, Quiver))
    assert quiver.N == 2
    colour = 255 * np.array(to_rgb(THEMES["light"].colours[2]))
    for x, y in ((0.12, 0.2), (1, 0.2), (8.5, 0.2), (1, 0.88), (1, 0.5), (1, 0.23)):
        np.testing.assert_allclose(pixel_at(figure, x, y), colour, atol=3)
    for x, y in ((0.08, 0.2), (12, 0.2), (1, 0.95), (1, 0.16)):
        assert pixel_at(figure, x, y).min() > 200


def test_marks_cross_the_panel_and_labels_avoid_each_other():
    places = [0.5, 0.501, 0.502, 0.97]
    layers = [RefLine([place], label=f"at {place}") for place in places] + [
        RefLine([0.4], "y", label="low"),
        RefLine([NAN, 7], label="out"),
    ]
    figure = draw(one_panel(*layers))
    axes = figure.axes[0]
    for line, place in zip(axes.lines, places, strict=False):
        np.testing.assert_allclose(line.get_xdata()[:2], [place, place], rtol=1e-6)
        np.testing.assert_array_equal(line.get_ydata()[:2], [0, 1])
    renderer = figure.canvas.get_renderer()
    shown = [text for text in axes.texts if text.get_visible()]
    assert [text.get_text() for text in shown] == [*(f"at {place}" for place in places), "low"]
    boxes = [text.get_window_extent(renderer) for text in shown]
    assert not any(a.padded(-0.5).overlaps(b.padded(-0.5)) for a, b in combinations(boxes, 2))
    inside = axes.get_window_extent(renderer).padded(1)
    assert all(inside.contains(*box.min) and inside.contains(*box.max) for box in boxes)


def test_words_stand_where_they_are_told_and_a_dollar_is_a_dollar():
    words = Text("costs $1 or $2", 0.5, 0.25, align="center", size=12)
    axes = draw(one_panel(words, Text("w -= lr * g", 0, 1, fixed=True, style=3), panel={"frame": False})).axes[0]
    first, second = axes.texts
    assert (first.get_text(), first.get_ha(), first.get_size()) == ("costs $1 or $2", "center", 12)
    assert first.get_position() == (0.5, 0.25)
    assert not first.get_parse_math()
    assert second.get_fontfamily() == ["DejaVu Sans Mono"]
    assert second.get_color() == THEMES["light"].colours[3]
    assert not axes.axison


def test_long_words_are_broken_and_long_code_is_made_smaller():
    long = "many words that do not fit into so narrow a panel at all, and so are broken"
    layers = Text(long, 0, 0.7), Text(f"{long}\n  indented", 0, 0.2, fixed=True)
    words, code = draw(one_panel(*layers, width=3, height=3, panel={"frame": False})).axes[0].texts
    assert words.get_text().replace("\n", " ") == long
    assert "\n" in words.get_text()
    assert code.get_text() == f"{long}\n  indented"
    assert code.get_size() == pytest.approx(0.6 * 9)


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


def test_legends_of_panels_stand_above_these():
    lines = [Line([0, 1], [0, 1], name=name, style=0) for name in ("loss", "weight")]
    panels = [Panel(*UNIT, [line], column=i, legend="") for i, line in enumerate(lines)]
    figure = draw(Scene(panels, "title"))
    figure.canvas.draw()
    for axes, name in zip(figure.axes, ("loss", "weight"), strict=True):
        (words,) = (text for text in words_of(figure) if text.get_text() == name)
        box, words = axes.get_window_extent(), words.get_window_extent()
        assert box.y1 < words.y0 < box.y1 + 30
        assert box.x0 - 60 < words.x0 < box.x1
