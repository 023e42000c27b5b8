"""Names in any script: a font that has their signs, or boxes and one warning."""

import warnings

import numpy as np
import pytest
from drawn_scenes import rendered
from matplotlib import font_manager

from tristep.viz.render.matplotlib import Picture, draw
from tristep.viz.scene import Axis, Control, Heatmap, Line, Panel, RefLine, Scene, Text


def scene_of(words):
    """The words in every place that has some."""
    axis = Axis(words, 0, 1, ticks=[(0.5, words)])
    layers = [Line([0, 1], [0, 1], name=words), RefLine([0.5], label=words), Text(words, 0.1, 0.2)]
    panels = [
        Panel(axis, axis, [*layers, Text(words, 0.1, 0.3, fixed=True)], title=words),
        Panel(axis, axis, [Heatmap([[1.0, 2.0]], [0, 1], [0, 1], label=words)], column=1),
    ]
    return Scene(panels, words, [Control("a", words, [1, 2])], notes=[words], width=12, height=5)


@pytest.mark.parametrize("words", ["速度 🚀", "学習率 قيمة", "a\u200db\ufe0f\x07c", "\ud83d half"])
@pytest.mark.parametrize("quick", [False, True])
def test_signs_that_no_font_has_are_boxes_and_one_warning_says_so(words, quick):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        if quick:
            Picture(scene_of(words)).png()
        else:
            draw(scene_of(words)).png(50)
    # None where Python has said it before; matplotlib makes Python forget what it has said.
    assert len({str(each.message) for each in caught}) <= 1
    assert not any("Glyph" in str(each.message) for each in caught)


def test_the_warning_says_what_helps():
    with pytest.warns(UserWarning, match="no installed font has all signs .* such as Noto Sans CJK"):
        draw(scene_of("訓練"))


def test_a_font_that_has_a_sign_is_found(tmp_path):
    sign = "\u9b31"
    file = tmp_path / "boxes.ttf"
    _font(sign, file)
    font_manager.fontManager.addfont(file)
    try:
        for make in (lambda: draw(scene_of(sign)), lambda: Picture(scene_of(sign)).figure):
            shown = rendered(make())
            # Of this font each letter is a black square: nothing else in the picture is black on so many pixels.
            assert (shown.max(axis=2) < 45).sum() > 8 * 60
    finally:
        font_manager.fontManager.ttflist[:] = [each for each in font_manager.fontManager.ttflist if each.fname != str(file)]


def test_what_every_font_has_is_drawn_as_before():
    figure = draw(scene_of("Größe αβ — naïve"))
    assert figure.axes[0].get_title("left") == "Größe αβ — naïve"
    assert np.ptp(rendered(figure)) > 200


def _font(sign, file):
    """Write a font that has a square for a sign, and nothing else."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    def square(size):
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for corner in ((0, size), (size, size), (size, 0)):
            pen.lineTo(corner)
        pen.closePath()
        return pen.glyph()

    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder([".notdef", "square"])
    font.setupCharacterMap({ord(sign): "square"})
    font.setupGlyf({".notdef": square(10), "square": square(900)})
    font.setupHorizontalMetrics({".notdef": (500, 0), "square": (1000, 0)})
    font.setupHorizontalHeader(ascent=900, descent=-100)
    font.setupNameTable({"familyName": "Squares of a test", "styleName": "Regular"})
    font.setupOS2(sTypoAscender=900, usWinAscent=900, usWinDescent=100)
    font.setupPost()
    font.save(file)
