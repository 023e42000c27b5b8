"""The picture of a learning-rate range test: its curve, and suggestions that lie on it."""

import numpy as np
import pytest
from planted_runs import layers_of

from tristep.trainer import LRFinder
from tristep.viz import Line, LRFinderView, Points


def _found(name="adam", shift=0.0, suggestions=None):
    rates = np.geomspace(1e-6, 1, 61)
    losses = 3 - np.clip(np.log10(rates) + 4 - shift, 0, 2) + 100 * np.clip(np.log10(rates) + 1, 0, None)
    given = {"valley": 1e-3 * 10**shift, "steep": 3e-3} if suggestions is None else suggestions
    return LRFinder(name, rates, losses + 0.1, losses, True, given)


def test_the_curve_of_one_test_with_all_suggestions():
    found = _found()
    view = LRFinderView(found)
    scene = view.scene()
    raw, smoothed = layers_of(scene, Line)
    np.testing.assert_allclose([raw.x, raw.y], [found.rates, found.losses], rtol=1e-6)
    np.testing.assert_allclose(smoothed.y, found.smoothed, rtol=1e-6)
    valley, steep = layers_of(scene, Points)
    assert (valley.name, steep.name) == ("valley 0.001", "steep 0.003")
    np.testing.assert_allclose([valley.x[0], valley.y[0]], [1e-3, 2.0], rtol=1e-6)
    panel = scene.panels[0]
    assert (panel.x.scale, panel.x.low, panel.x.high) == ("log", 1e-6, 1.0)
    assert 0.5 < panel.y.low < 1 < 3 < panel.y.high < 5  # not up to 100, where it diverges
    assert "suggestions: valley 0.001, steep 0.003" in view.describe()


def test_several_tests_in_one_picture_with_the_suggestions_of_one_rule():
    view = LRFinderView([_found("sgd"), _found("adam", 1.0), _found("adam", suggestions={})])
    assert list(view.results) == ["sgd", "adam 2", "adam 3"]
    scene = view.scene()
    assert [line.name for line in layers_of(scene, Line) if line.name] == ["sgd", "adam 2", "adam 3"]
    (rule,) = scene.controls
    assert rule.values == ["valley", "steep"]
    first, second = layers_of(scene, Points)
    assert first.chosen("x", scene.state()) == pytest.approx(1e-3)
    assert second.chosen("x", scene.state()) == pytest.approx(1e-2)
    assert second.chosen("x", scene.state(rule=1)) == pytest.approx(3e-3)
    assert second.style == next(line for line in layers_of(scene, Line) if line.name == "adam 2").style
    assert "adam 3: 61 learning rates from 1e-06 to 1, the loss became too large; suggestions: none" in view.describe()


def test_it_can_be_drawn_whatever_was_found():
    flat = LRFinder("flat", np.geomspace(1e-6, 1, 5), np.zeros(5), np.zeros(5), False, {})
    for given, n_points in (({"adam": _found()}, 2), ({"a": _found(), "b": flat}, 1), ({"flat": flat}, 0)):
        view = LRFinderView(given)
        figure = view.figure()
        figure.canvas.draw()
        (axes,) = figure.axes
        curves = [line for line in axes.lines if line.get_linestyle() != "None"]
        for found, line in zip(given.values(), curves[1::2], strict=True):  # the faint one comes before it
            np.testing.assert_allclose(line.get_xydata().T, [found.rates, found.smoothed], rtol=1e-6)
            assert axes.get_ylim()[0] < found.smoothed.min() < axes.get_ylim()[1]
        assert len(axes.lines) - len(curves) == n_points
        assert b'"label":"learning rate"' in view.scene().to_bytes()


def test_a_flat_curve_is_said_below_the_picture():
    generator = np.random.default_rng(0)
    losses = 3 + generator.standard_normal(60)
    flat = LRFinder("trained", np.geomspace(1e-6, 1, 60), losses, losses, False, {}, True)
    view = LRFinderView([_found("sgd"), flat])
    (note,) = view.scene().notes
    assert note.startswith("trained: no rate to suggest: the curve is flat: ")
    assert note in view.describe()
    assert note in " ".join(text.get_text() for text in view.figure().texts).replace("\n", " ")
    assert not LRFinderView(_found()).scene().notes


def test_what_is_no_result_is_refused():
    for given in (3, [3], {"a": 3}):
        with pytest.raises(TypeError, match=r"results must be what tristep.lr_find returned, or several, got int"):
            LRFinderView(given)
    with pytest.raises(ValueError, match="results is empty"):
        LRFinderView([])
