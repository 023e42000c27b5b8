"""The picture of a sweep: its map has the losses that were found, and its curves are those of the training chosen."""

import numpy as np
import pytest

from tristep.trainer import Sweep
from tristep.viz import SweepView
from tristep.viz.scene import Heatmap, Line, Points


def _sweep(steps=6, seeds=(0, 1, 2), **axes):
    axes = {name: tuple(values) for name, values in axes.items()} | {"seed": seeds}
    shape = tuple(map(len, axes.values()))
    rng = np.random.default_rng(5)
    losses = rng.uniform(0.1, 2.0, (*shape, steps)).astype(np.float32)
    return Sweep(axes, losses, 2)


def _layers(panel, kind):
    return [layer for layer in panel.layers if isinstance(layer, kind)]


def test_the_map_has_the_medians_and_marks_the_least():
    sweep = _sweep(wd=(0.0, 0.01), learning_rate=(0.001, 0.01, 0.1))
    scene = SweepView(sweep).scene()
    (image,) = _layers(scene.panels[0], Heatmap)
    expected = np.median(sweep.losses[..., -2:].mean(axis=-1), axis=-1)
    np.testing.assert_allclose(image.values, expected, rtol=1e-6)
    up, across = np.unravel_index(expected.argmin(), expected.shape)
    star = next(points for points in _layers(scene.panels[0], Points) if points.marker == "star")
    assert (star.x.tolist(), star.y.tolist()) == ([across], [up])
    assert scene.state() == {"wd": up, "learning_rate": across}
    assert [words for _, words in scene.panels[0].x.ticks] == ["0.001", "0.01", "0.1"]
    words = SweepView(sweep).describe()
    assert f"{expected.min():.4g}" in words
    assert f"learning rate {sweep.axes['learning_rate'][across]:.3g}" in words


def test_of_two_seeds_all_say_the_loss_of_the_better_one():
    sweep = _sweep(seeds=(0, 1), learning_rate=(0.001, 0.01, 0.1))
    least = sweep.losses[..., -2:].mean(axis=-1).min()
    assert f"is {least:.4g}, at learning rate {sweep.best()['learning_rate']:.3g}." in SweepView(sweep).describe()
    assert repr(sweep).endswith(f"best learning_rate={sweep.best()['learning_rate']}: {least:.4g}>")
    (curve, *_) = (line for line in _layers(SweepView(sweep).scene().panels[0], Line) if line.name)
    assert curve.y.min() == np.float32(least)


def test_curves_are_those_of_the_training_chosen():
    sweep = _sweep(wd=(0.0, 0.01), learning_rate=(0.001, 0.01, 0.1), momentum=(0.0, 0.9))
    view = SweepView(sweep, across="wd", up="momentum")
    scene = view.scene()
    state = scene.state(learning_rate=2, wd=1, momentum=0)
    lines = {line.name: line for line in _layers(scene.panels[1], Line)}
    for i in range(3):
        found = lines[f"seed {i}"].chosen("y", state)
        np.testing.assert_allclose(found, sweep.losses[1, 2, 0, i], rtol=1e-6)
    (image,) = _layers(scene.panels[0], Heatmap)
    expected = np.median(sweep.losses[:, 2, :, :, -2:].mean(axis=-1), axis=-1).T
    np.testing.assert_allclose(image.chosen("values", state), expected, rtol=1e-6)
    ring = next(points for points in _layers(scene.panels[0], Points) if points.marker == "ring")
    assert (ring.chosen("x", state)[0], ring.chosen("y", state)[0]) == (1, 0)
    click = scene.panels[0].click
    assert (click.control, click.other) == ("wd", "momentum")
    assert view.figure(learning_rate=1).axes


def test_one_setting_is_a_curve_and_none_a_training():
    sweep = _sweep(learning_rate=(0.001, 0.01, 0.1))
    scene = SweepView(sweep).scene()
    (line,) = _layers(scene.panels[0], Line)
    final = sweep.losses[..., -2:].mean(axis=-1)
    np.testing.assert_allclose(line.y, np.median(final, axis=-1), rtol=1e-6)
    (alone,) = SweepView(_sweep(steps=4)).scene().panels
    assert len(_layers(alone, Line)) == 3


def test_trainings_that_failed_are_holes_and_counted():
    sweep = _sweep(seeds=(0,), wd=(0.0, 0.01), learning_rate=(0.1, 10.0))
    sweep.losses[:, 1, 0, 3:] = np.nan
    view = SweepView(sweep)
    (image,) = _layers(view.scene().panels[0], Heatmap)
    assert np.isfinite(image.values).tolist() == [[True, False], [True, False]]
    assert "2 of 4 trainings have ended without a finite number" in view.describe()
    assert view.figure()


@pytest.mark.parametrize("settings", [{"wd": (0.0, 0.01)}, {}], ids=["a map", "a line"])
def test_trainings_that_diverge_leave_room_for_the_others(settings):
    sweep = _sweep(steps=100, **settings, learning_rate=(0.01, 0.1, 10.0))
    step = np.arange(100)
    sweep.losses[:] = 2.3 * np.exp(-step / 40)
    sweep.losses[..., 1, :, :] *= np.exp(-step / 80)
    sweep.losses[..., 2, :, :] = np.minimum(2.3 * 1.3**step, 1e9)
    sweep.losses[..., 2, 0, 50:] = np.nan
    view = SweepView(sweep)
    scene = view.scene()
    drawn = [panel for panel in scene.panels if panel.y.label == "loss of a batch"]
    assert drawn[0].y.scale == "log"
    assert 2.3 < drawn[0].y.high < 4
    assert drawn[0].y.low < sweep.losses[..., 1, :, :].min()
    if settings:
        (image,) = _layers(scene.panels[0], Heatmap)
        final = sweep.losses[..., -2:].mean(axis=-1)[..., 0]
        np.testing.assert_allclose(image.limits, [final[0, 1], final[0, 0]], rtol=1e-5)
        assert image.values[0, 2] > 1e6  # which has the last colour
    else:
        assert scene.panels[0].y.high < 2.3
    n = 6 if settings else 3
    assert f" {n} of {3 * n} trainings go beyond a loss of 2.76, where the picture ends." in view.describe()
    sweep.losses[..., 2, :, :] = 2.0
    assert "beyond" not in view.describe()


def test_a_long_training_is_drawn_in_few_points():
    sweep = _sweep(steps=5000, seeds=(0,), learning_rate=(0.1, 0.2))
    line = _layers(SweepView(sweep).scene().panels[1], Line)[0]
    assert line.y.shape[-1] <= 512
    assert line.y[0, 0] == pytest.approx(sweep.losses[0, 0, :10].mean(), rel=1e-6)


def test_bad_input_is_named():
    sweep = _sweep(learning_rate=(0.1, 0.2))
    with pytest.raises(ValueError, match="across='wd'"):
        SweepView(sweep, across="wd")
    with pytest.raises(ValueError, match="by='accuracy'"):
        SweepView(sweep, by="accuracy")
    with pytest.raises(TypeError, match="Sweep"):
        SweepView([1, 2])
