"""What pictures of scenes show, asked of matplotlib's own objects and of single pixels."""

import io
import threading
from itertools import combinations

import numpy as np
import pytest

mpl = pytest.importorskip("matplotlib")  # `make gpu` uses what a machine has

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.colors import LogNorm, to_rgb  # noqa: E402
from matplotlib.quiver import Quiver  # noqa: E402
from PIL import Image as Pixels  # noqa: E402

from tristep.viz.render.matplotlib import Picture, draw  # noqa: E402
from tristep.viz.scene import Arrows, Axis, Band, Control, Heatmap, Line, Panel, Points, RefLine, Scene, Text  # noqa: E402
from tristep.viz.style import THEMES, line_style  # noqa: E402

NAN = np.nan
UNIT = Axis("x", 0, 1), Axis("y", 0, 1)
LAYERS = [f"transformer.h.{i}.mlp.c_proj.weight" for i in range(60)]


def _one(*layers, x=UNIT[0], y=UNIT[1], controls=(), panel=None, **settings):
    return Scene([Panel(x, y, layers, **(panel or {}))], controls=controls, **settings)


def _everything(seed=0, high=2.0):
    """A scene with every kind of layer, two controls, two panels and a bar of colours."""
    rng = np.random.default_rng(seed)
    rate = Control("rate", "learning rate", [0.01, 0.1, 1.0], index=1)
    step = Control("step", "step", list(range(20)), index=10, kind="play")
    t = np.linspace(0, 1, 20)
    paths = [Line(rng.random((3, 20)), rng.random((3, 20)), by=("rate",), upto="step", head=True, style=i) for i in range(3)]
    named = Line(
        t, np.where((t > 0.3) & (t < 0.5), NAN, 10.0 ** (-2 + t * rng.random(20))), name="loss", style=4, marker=True
    )
    picture = Panel(
        Axis("x", 0, 1),
        Axis("y", 0, 1),
        [
            Heatmap(rng.random((3, 12, 16)), [0, 1], [0, 1], by=("rate",), label="loss", limits=(0, 1)),
            *paths,
            Points([0.5], [0.5], marker="star", style="ink", name="minimum"),
            Arrows([[0.2], [0.3], [0.4]], [0.2], [0.3], [0.1], by=("rate",), style=5, name="gradient"),
            Text(["rate 0.01", "rate 0.1", "rate 1"], 0.02, 0.95, by=("rate",)),
        ],
        title="Paths",
    )
    curves = Panel(
        Axis("time, s", 0, 1),
        Axis("loss", 1e-3, high, "log"),
        [
            Band(t, 0.5 * named.y, 2 * named.y, style=4),
            named,
            RefLine([[0.1], [0.5], [0.9]], by=("rate",), label="here", style="quiet"),
            RefLine([0.1], "y", label="target"),
        ],
        column=1,
    )
    return Scene([picture, curves], title="All of it", controls=[rate, step], width=9, height=4)


def _crowded():
    """A scene with long words wherever there are words."""
    heat = Panel(
        Axis("optimizer", 0, 6, ticks=[(i + 0.5, f"optimizer {i}") for i in range(6)]),
        Axis("", 0, 60, ticks=[(i + 0.5, name) for i, name in enumerate(LAYERS)], upwards=False),
        [
            Heatmap(
                np.arange(360.0).reshape(60, 6) + 1, [0, 6], [0, 60], scale="log", label="a long label for a bar of colours"
            )
        ],
        title="The ratio of update to weight, tensor by tensor, in a title that is longer than its panel",
        rows=2,
    )
    finder = Panel(
        Axis("learning rate", 1e-6, 10, "log"),
        Axis("a loss with a label that is far too long for so low a panel", -1e-5, 3e-5),
        [
            RefLine([10.0 ** (-2 + 0.05 * i)], label=f"suggested by rule {i}", name=f"rule number {i} of several", style=i)
            for i in range(6)
        ],
        column=1,
    )
    small = Panel(
        Axis("step", 0, 123456), Axis("weights", 2.1, 2.9, "log"), [Line([0, 1e5], [2.2, 2.8], name="w")], column=1, row=1
    )
    square = Panel(*UNIT, [Points([0, 1], [0, 1], name="corners")], column=2, rows=2, equal=True, title="A square")
    title = "A title of many words that " + "goes on and " * 12 + "ends."
    return Scene([heat, finder, small, square], title=title, width=11, height=5, widths=[2, 2, 1])


def test_lines_have_their_data_colour_and_dashes():
    first, second = Line([0, 1, 2], [3, 2, 1], style=1, width=2.5), Line([0, 1], [1, 1], style="quiet", alpha=0.5)
    for theme in THEMES:
        line, other = draw(_one(first, second), theme=theme).axes[0].lines
        np.testing.assert_array_equal(line.get_xydata(), [[0, 3], [1, 2], [2, 1]])
        assert (line.get_color(), line.get_linewidth()) == (line_style(1, theme)["color"], 2.5)
        assert line.get_linestyle() == "--"
        assert (other.get_color(), other.get_alpha(), other.get_linestyle()) == (THEMES[theme].quiet, 0.5, "-")


def test_a_line_of_one_point_and_one_with_a_marker_have_dots():
    one, marked, plain = (
        draw(_one(Line([0.5], [0.5]), Line([0, 1], [0, 1], marker=True), Line([0, 1], [0, 1]))).axes[0].lines
    )
    assert [line.get_marker() for line in (one, marked, plain)] == ["o", "o", ""]


def test_the_head_is_the_last_finite_point_that_is_drawn():
    step = Control("step", "step", [0, 1, 2, 3])
    scene = _one(Line([0, 0.2, 0.4, 0.6], [0.1, 0.5, NAN, 0.7], upto="step", head=True), controls=[step])
    line, head = draw(scene, {"step": 2}).axes[0].lines
    assert len(line.get_xdata()) == 3
    np.testing.assert_allclose(head.get_xydata(), [[0.2, 0.5]])


def test_axes_reach_from_and_to_what_is_asked_in_either_direction():
    axes = draw(_one(x=Axis("x", 0.01, 100, "log"), y=Axis("row", 0, 6, upwards=False))).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert axes.get_xlim() == (0.01, 100)
    assert axes.get_ylim() == (6, 0)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "row")


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (Axis("y", -1, 1), ["−1", "−0.5", "0", "0.5", "1"]),
        (Axis("y", 0, 3e-5), ["0", "1e−5", "2e−5", "3e−5"]),
        (Axis("y", 0, 3e6), ["0", "5e5", "1e6", "1.5e6", "2e6", "2.5e6", "3e6"]),
        (Axis("y", 1e-3, 10, "log"), ["0.001", "0.01", "0.1", "1", "10"]),
        (Axis("y", 0.1, 10, "log"), ["0.1", "0.2", "0.5", "1", "2", "5", "10"]),
        (Axis("y", 2.1, 2.9, "log"), ["2.2", "2.4", "2.6", "2.8"]),
        (Axis("y", 0, 3, ticks=[(0.5, "$a"), (1.5, "b$c$"), (9, "beyond")]), ["$a", "b$c$"]),
    ],
)
def test_ticks_say_few_round_numbers_or_what_they_are_told(axis, words):
    figure = draw(_one(y=axis, height=2.9))
    figure.draw_without_rendering()
    shown = [(tick.get_loc(), tick.label1.get_text()) for tick in figure.axes[0].yaxis.get_major_ticks()]
    assert [text for place, text in shown if axis.low <= place <= axis.high] == words


def test_pixels_of_an_image_have_the_palette_s_colours():
    values = np.array([[1, 10, 100], [1000, NAN, 0]])
    image = Heatmap(values, [1e-2, 10], [0, 2], scale="log", limits=(1, 1000))
    figure = draw(_one(image, x=Axis("x", 1e-2, 10, "log"), y=Axis("y", 0, 2)))
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            expected = (
                255 * np.array(mpl.colormaps["viridis"](LogNorm(1, 1000)(value))[:3]) if value > 0 else [255, 255, 255]
            )
            np.testing.assert_allclose(_pixel(figure, 10 ** (-1.5 + column), row + 0.5), expected, atol=2)


def test_categories_have_the_colours_of_lines_and_their_words_the_legend():
    image = Heatmap(np.array([[0, 1, -1]], np.int16), [0, 3], [0, 1], palette="categories", words=["sgd", "adam"])
    for theme, colours in THEMES.items():
        figure = draw(_one(Line([-1], [-1], name="sgd"), image, x=Axis("x", 0, 3)), theme=theme)
        expected = [colours.colours[0], colours.colours[1], colours.background]
        for column, colour in enumerate(expected):
            np.testing.assert_allclose(_pixel(figure, column + 0.5, 0.5), 255 * np.array(to_rgb(colour)), atol=1)
        assert [text.get_text() for text in figure.texts if text.get_text()] == ["sgd", "adam"]
        assert figure.artists[-1].get_facecolor()[:3] == to_rgb(colours.colours[1])


def test_colours_have_a_bar_with_their_limits_and_label():
    image = Heatmap([[0.01, 1.0]], [0, 1], [0, 1], scale="log", label="update / weight")
    axes, bar = draw(_one(image)).axes
    assert (bar.get_ylabel(), bar.get_yscale()) == ("update / weight", "log")
    assert bar.get_ylim() == pytest.approx((0.01, 1))
    assert bar.get_position().height == pytest.approx(axes.get_position().height)
    top = _pixel(bar.figure, 0.5, 0.97, bar)
    np.testing.assert_allclose(top, 255 * np.array(mpl.colormaps["viridis"](0.97)[:3]), atol=8)
    assert len(draw(_one(Heatmap([[0.01, 1.0]], [0, 1], [0, 1]))).axes) == 1


def test_a_band_leaves_gaps():
    low, high = [0.1, 0.2, NAN, 0.1, 0.1], [0.5, 0.6, 0.5, 0.5, 0.5]
    figure = draw(_one(Band(np.linspace(0, 1, 5), low, high, style=1, alpha=1)))
    (band,) = (each for each in figure.axes[0].collections if isinstance(each, PolyCollection))
    first, second = band.get_paths()
    np.testing.assert_allclose(first.vertices[:4], [[0, 0.1], [0.25, 0.2], [0.25, 0.6], [0, 0.5]], rtol=1e-6)
    assert second.vertices[:, 0].min() == 0.75
    np.testing.assert_allclose(_pixel(figure, 0.1, 0.4), 255 * np.array(to_rgb(THEMES["light"].colours[1])), atol=2)
    np.testing.assert_allclose(_pixel(figure, 0.5, 0.45), [255, 255, 255])


def test_a_band_that_reaches_down_to_0_goes_on_below_a_log_axis():
    figure = draw(_one(Band([0, 1], [0, 0], [0.1, 0.1], alpha=1), y=Axis("y", 1e-6, 1, "log")))
    np.testing.assert_allclose(_pixel(figure, 0.5, 2e-6), 255 * np.array(to_rgb(THEMES["light"].colours[0])), atol=2)
    assert tuple(_pixel(figure, 0.5, 0.2)) == (255, 255, 255)


def test_points_on_the_edge_are_whole_and_those_beyond_it_absent():
    (points,) = draw(_one(Points([0, 0.1, 1, 2], [0, 0.1, 1, 0.5], size=9, marker="dot"))).axes[0].lines
    np.testing.assert_allclose(points.get_xydata(), [[0, 0], [0.1, 0.1], [1, 1]], rtol=1e-6)
    assert not points.get_clip_on()
    assert (points.get_linestyle(), points.get_markersize()) == ("None", 9)


def test_arrows_reach_from_their_places_by_their_amounts_on_any_axis():
    arrows = Arrows([0.1, NAN, 1], [0.2, 0.2, 0.9], [9.9, 1, 0], [0, 0, -0.7], style=2, width=3)
    figure = draw(_one(arrows, x=Axis("x", 0.01, 100, "log")))
    axes = figure.axes[0]
    (quiver,) = (each for each in axes.collections if isinstance(each, Quiver))
    assert quiver.N == 2
    colour = 255 * np.array(to_rgb(THEMES["light"].colours[2]))
    for x, y in ((0.12, 0.2), (1, 0.2), (8.5, 0.2), (1, 0.88), (1, 0.5), (1, 0.23)):
        np.testing.assert_allclose(_pixel(figure, x, y), colour, atol=3)
    for x, y in ((0.08, 0.2), (12, 0.2), (1, 0.95), (1, 0.16)):
        assert _pixel(figure, x, y).min() > 200


def test_marks_cross_the_panel_and_labels_avoid_each_other():
    places = [0.5, 0.501, 0.502, 0.97]
    layers = [RefLine([place], label=f"at {place}") for place in places] + [
        RefLine([0.4], "y", label="low"),
        RefLine([NAN, 7], label="out"),
    ]
    figure = draw(_one(*layers))
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
    words, code = (
        Text("costs $1 or $2", 0.5, 0.25, align="center", size=12),
        Text("w -= lr * g", 0, 1, fixed=True, style=3),
    )
    first, second = draw(_one(words, code, panel={"frame": False})).axes[0].texts
    assert (first.get_text(), first.get_ha(), first.get_size()) == ("costs $1 or $2", "center", 12)
    assert first.get_position() == (0.5, 0.25)
    assert not first.get_parse_math()
    assert second.get_fontfamily() == ["DejaVu Sans Mono"]
    assert second.get_color() == THEMES["light"].colours[3]


def test_long_words_are_broken_and_long_code_is_made_smaller():
    long = "many words that do not fit into so narrow a panel at all, and so are broken"
    scene = _one(
        Text(long, 0, 0.7), Text(f"{long}\n  indented", 0, 0.2, fixed=True), width=3, height=3, panel={"frame": False}
    )
    words, code = draw(scene).axes[0].texts
    assert words.get_text().replace("\n", " ") == long
    assert "\n" in words.get_text()
    assert code.get_text() == f"{long}\n  indented"
    assert code.get_size() == pytest.approx(0.6 * 9)


def test_a_panel_without_frame_has_no_axes():
    axes = draw(_one(Text("words", 0, 0.5), panel={"frame": False})).axes[0]
    assert not axes.axison


def test_units_are_equally_long_if_asked():
    figure = draw(_one(x=Axis("x", -2, 2), y=Axis("y", 0, 1), panel={"equal": True}))
    axes = figure.axes[0]
    (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
    assert x1 - x0 == pytest.approx(y1 - y0)


@pytest.mark.parametrize("theme", THEMES)
def test_a_theme_gives_background_words_and_frame(theme):
    figure = draw(_everything(), theme=theme)
    colours = THEMES[theme]
    pixels = _rendered(figure)
    np.testing.assert_allclose(pixels[1, 1], 255 * np.array(to_rgb(colours.background)), atol=1)
    axes = figure.axes[1]
    assert axes.get_facecolor()[:3] == to_rgb(colours.background)
    assert axes.xaxis.label.get_color() == colours.ink
    assert axes.xaxis.get_ticklabels()[0].get_color() == colours.quiet
    assert axes.spines["left"].get_edgecolor()[:3] == to_rgb(colours.quiet)


def test_the_legend_and_the_values_of_controls_stand_in_words():
    figure = draw(_everything(), {"rate": 2})
    words = [text.get_text() for text in figure.texts]
    assert {"All of it", "minimum", "gradient", "loss", "learning rate: 1   step: 10"} == set(words)
    sample = next(line for line in figure.artists if line.get_color() == THEMES["light"].colours[4])
    assert sample.get_linestyle() == "--"
    bare = Picture(_everything(), values=False).figure
    assert "step" not in " ".join(text.get_text() for text in bare.texts)


@pytest.mark.parametrize("scene", [_everything(), _crowded()], ids=["everything", "crowded"])
def test_nothing_is_cut_and_no_words_overlap(scene):
    figure = draw(scene)
    figure.canvas.draw()
    boxes = _boxes_of_words(figure)
    assert len(boxes) > 20
    for words, box in boxes:
        assert box.x0 >= -1, words
        assert box.y0 >= -1, words
        assert box.x1 <= figure.bbox.width + 1, words
        assert box.y1 <= figure.bbox.height + 1, words
    for (words, box), (other, its) in combinations(boxes, 2):
        assert not box.padded(-1).overlaps(its.padded(-1)), (words, other)


def test_words_at_ticks_are_shortened_turned_or_left_out():
    figure = draw(_crowded())
    rows = [label.get_text() for label in figure.axes[0].yaxis.get_ticklabels()]
    assert 5 < len(rows) < 40
    assert rows[0] == LAYERS[0]
    columns = figure.axes[0].xaxis.get_ticklabels()
    assert [label.get_text() for label in columns] == [f"optimizer {i}" for i in range(6)]
    assert {label.get_rotation() for label in columns} == {40}
    narrow = draw(_one(y=Axis("", 0, 1, ticks=[(0.5, "a" * 30 + "b" * 30)]), width=4))
    (label,) = narrow.axes[0].yaxis.get_ticklabels()
    assert label.get_text().startswith("aaa")
    assert label.get_text().endswith("bbb")
    assert "…" in label.get_text()


def test_panels_have_their_shares_of_the_grid():
    panels = [Panel(*UNIT, [], rows=2), Panel(*UNIT, [], column=1), Panel(*UNIT, [], column=1, row=1)]
    first, second, third = (axes.get_position() for axes in draw(Scene(panels, widths=[3, 1], heights=[1, 2])).axes)
    assert first.width == pytest.approx(3 * second.width)
    assert third.height == pytest.approx(2 * second.height)
    assert (first.y1, first.y0) == pytest.approx((second.y1, third.y0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("theme", THEMES)
def test_a_quick_redraw_has_the_pixels_of_a_full_one(theme):
    scene = _everything()
    picture = Picture(scene, theme=theme)
    for state in ({}, {"rate": 0}, {"step": 19}, {"rate": 2, "step": 0}, {}):
        picture.show(state=state)
        np.testing.assert_array_equal(_decoded(picture.png()), _rendered(draw(scene, state, theme)))


def test_new_data_new_limits_and_new_structures_are_followed():
    picture = Picture(_everything())
    before = _decoded(picture.png())
    for scene in (_everything(1), _everything(2), _everything(2, high=30.0), _crowded(), _everything(3)):
        picture.show(scene)
        np.testing.assert_array_equal(_decoded(picture.png()), _rendered(draw(scene)))
    picture.show(_everything())
    np.testing.assert_array_equal(_decoded(picture.png()), before)


def test_what_does_not_change_is_drawn_once(monkeypatch):
    drawn = []
    full = FigureCanvasAgg.draw
    monkeypatch.setattr(FigureCanvasAgg, "draw", lambda canvas: (drawn.append(canvas), full(canvas)))
    picture = Picture(_everything())
    for step in range(20):
        picture.show(state={"step": step})
        picture.png()
    assert len(drawn) == 1
    for seed in range(1, 6):  # the data of lines that no control changes: known to move from the first change on
        picture.show(_everything(seed))
        picture.png()
    assert len(drawn) == 2


def test_the_figure_can_be_saved_after_quick_redraws():
    picture = Picture(_everything())
    picture.png()
    picture.show(state={"rate": 0})
    picture.png()
    file = io.BytesIO()
    picture.figure.savefig(file, format="png", dpi=100)
    np.testing.assert_array_equal(_decoded(file.getvalue()), _rendered(draw(_everything(), {"rate": 0})))


def test_threads_do_not_disturb_each_other():
    scene = _everything()
    expected = [_rendered(draw(scene, {"rate": rate})) for rate in range(3)]
    found = {}

    def work(rate):
        picture = Picture(scene)
        for step in (3, 10):
            picture.show(state={"rate": rate, "step": step})
            found[rate] = picture.png()

    threads = [threading.Thread(target=work, args=(rate,)) for rate in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rate in range(3):
        np.testing.assert_array_equal(_decoded(found[rate]), expected[rate])


def test_what_there_is_not_is_refused():
    with pytest.raises(ValueError, match="theme='blue': must be one of 'light', 'dark'"):
        draw(_everything(), theme="blue")
    with pytest.raises(ValueError, match="'rates' is no control"):
        draw(_everything(), {"rates": 1})


def test_settings_of_matplotlib_and_pyplot_are_left_alone():
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    Picture(_everything()).png()
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []


def _rendered(figure):
    """uint8 RGB [height, width, 3] of a full drawing."""
    figure.canvas.draw()
    return np.array(figure.canvas.buffer_rgba())[..., :3]


def _decoded(png):
    return np.array(Pixels.open(io.BytesIO(png)).convert("RGB"))


def _pixel(figure, x, y, axes=None):
    """RGB at a place: of the data, or with `axes` of these in shares."""
    pixels = _rendered(figure)
    transform = figure.axes[0].transData if axes is None else axes.transAxes
    across, upwards = transform.transform((x, y))
    return pixels[len(pixels) - 1 - int(upwards), int(across)].astype(float)


def _boxes_of_words(figure):
    """All words that are drawn with the pixels that they take."""
    renderer = figure.canvas.get_renderer()
    texts = list(figure.texts)
    for axes in figure.axes:
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                texts += [
                    tick.label1
                    for tick in axis.get_major_ticks()
                    if low <= tick.get_loc() <= high and tick.label1.get_visible()
                ]
                texts += [
                    tick.label2
                    for tick in axis.get_major_ticks()
                    if low <= tick.get_loc() <= high and tick.label2.get_visible()
                ]
                texts.append(axis.label)
        texts += [text for text in axes.get_children() if isinstance(text, mpl.text.Text) and text.get_visible()]
    turned = [text for text in texts if text.get_rotation() not in (0, 90)]  # their boxes are larger than they are
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text() and text not in turned]
