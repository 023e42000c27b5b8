"""Whole pictures of scenes by matplotlib: themes, words, grids, quick redraws, threads and settings."""

import io
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
from drawn_scenes import NAN, UNIT, rendered
from PIL import Image as Pixels

from tristep.viz.render.matplotlib import Picture, draw
from tristep.viz.scene import Arrows, Axis, Band, Control, Heatmap, Line, Panel, Points, RefLine, Scene, Text

LAYERS = [f"transformer.h.{i}.mlp.c_proj.weight" for i in range(60)]


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


def test_nothing_is_cut_and_no_words_overlap():
    figure = draw(_crowded())
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


def test_a_quick_redraw_has_the_pixels_of_a_full_one():
    scene = _everything()
    picture = Picture(scene)
    for state in ({"rate": 2, "step": 19}, {}):
        picture.show(state=state)
        np.testing.assert_array_equal(_decoded(picture.png()), rendered(Picture(scene, state).figure))


@pytest.mark.sample(1)
@pytest.mark.parametrize("still", [True, False])
def test_new_data_new_limits_and_new_structures_are_followed(still):
    picture = Picture(_everything(), still=still)
    before = _decoded(picture.png())
    for scene in (_everything(1), _everything(1, high=30.0)):
        picture.show(scene)
        np.testing.assert_array_equal(_decoded(picture.png()), rendered(Picture(scene, still=still).figure))
    picture.show(_everything())
    np.testing.assert_array_equal(_decoded(picture.png()), before)


def _decoded(png):
    return np.array(Pixels.open(io.BytesIO(png)).convert("RGB"))


def _boxes_of_words(figure):
    """All words that are drawn with the pixels that they take."""
    renderer, texts = figure.canvas.get_renderer(), list(figure.texts)
    for axes in figure.axes:
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
                texts += [axis.label, *(label for label in labels if label.get_visible())]
        texts += [text for text in axes.get_children() if isinstance(text, mpl.text.Text) and text.get_visible()]
    turned = [text for text in texts if text.get_rotation() not in (0, 90)]  # their boxes are larger than they are
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text() and text not in turned]
