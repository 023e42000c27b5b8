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
    view = LRFinderView({"sgd": _found("sgd"), "adam 2": _found("adam", 1.0), "adam 3": _found("adam", suggestions={})})
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
