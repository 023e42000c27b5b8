"""The pictures of a race have the numbers that were found."""

import numpy as np
import pytest
from races import planted

from tristep.viz import RaceView
from tristep.viz.scene import Band, Line, Points, RefLine

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test


def _layers(panel, kind):
    return [layer for layer in panel.layers if isinstance(layer, kind)]


def _result():
    return planted([[40, 60, 50], [20, 20, 20], [20, None, 30]])


@pytest.mark.sample(1)
def test_curves_are_medians_with_the_range_over_seeds():
    result = _result()
    result.losses = np.random.default_rng(1).uniform(0.5, 2.0, result.losses.shape).astype(np.float32)
    result.losses[2, 1, 5:] = np.nan
    curves = RaceView(result).scene().panels[0]
    lines = {line.name: line.y for line in _layers(curves, Line)}
    np.testing.assert_array_equal(lines["a"], np.median(result.losses[0], axis=0))
    np.testing.assert_array_equal(lines["c"][5:], np.nanmax(result.losses[2], axis=0)[5:])  # the second of three
    band = _layers(curves, Band)[1]
    np.testing.assert_array_equal(band.low, result.losses[1].min(axis=0))
    np.testing.assert_array_equal(band.high, result.losses[1].max(axis=0))
    (target,) = _layers(curves, RefLine)
    assert (target.at.tolist(), target.axis) == ([1.0], "y")
    assert curves.y.label == "held-out loss"


@pytest.mark.parametrize(("k", "by"), [(0, "steps"), (1, "seconds")])
def test_ratios_have_their_intervals(k, by):
    result = _result()
    scene = RaceView(result).scene()
    state, panel = scene.state(measure=k), scene.panels[1]
    for i, name in enumerate(result.names):
        expected = result.compare(name, by)
        points, line = _layers(panel, Points)[i], _layers(panel, Line)[i]
        np.testing.assert_allclose(points.chosen("x", state), [expected.ratio], rtol=1e-6)
        np.testing.assert_allclose(line.chosen("x", state), [expected.low, expected.high], rtol=1e-6)
    assert np.isnan(points.chosen("x", state)).all()  # of c, which has not always reached the target
    assert [words for _, words in panel.y.ticks] == ["a (3 of 3)", "b (3 of 3)", "c (2 of 3)"]
    assert panel.x.low < result.compare("b", by).ratio < panel.x.high


def test_the_tuning_has_a_point_for_each_trial():
    result = _result()
    result.tuning = np.random.default_rng(2).uniform(0.5, 2.0, result.tuning.shape).astype(np.float32)
    result.tuning[0, 0] = np.nan
    panel = RaceView(result).scene().panels[2]
    dots, ring = _layers(panel, Points)[:2]
    expected = np.median(result.tuning[0, :, :, -1], axis=-1)
    np.testing.assert_allclose(dots.y[1:], expected[1:], rtol=1e-6)
    assert dots.y[0] == pytest.approx(2.4)  # it diverged: the top
    assert (ring.marker, ring.x.tolist(), ring.y.tolist()) == ("ring", [np.float32(0.2)], [np.float32(expected[1])])
    assert dots.words[1] == f"a, learning rate 0.2, weight decay 0.001: {expected[1]:.4g}"
