"""The picture of a sweep: its map has the losses that were found, and its curves are those of the training chosen."""

import functools

import numpy as np
import pytest
from planted_runs import layers_of

from tristep.trainer import Sweep
from tristep.viz import SweepView, ill_conditioned_bowl, simulate
from tristep.viz.scene import Heatmap, Line, Points, Text


def _sweep(steps=6, seeds=(0, 1, 2), **axes):
    axes = {name: tuple(values) for name, values in axes.items()} | {"seeds": seeds}
    shape = tuple(map(len, axes.values()))
    rng = np.random.default_rng(5)
    losses = rng.uniform(0.1, 2.0, (*shape, steps)).astype(np.float32)
    return Sweep(axes, losses, 2)


def test_the_map_has_the_medians_and_marks_the_least():
    sweep = _sweep(wd=(0.0, 0.01), learning_rate=(0.001, 0.01, 0.1))
    scene = SweepView(sweep).scene()
    (image,) = layers_of(scene, Heatmap, 0)
    expected = np.median(sweep.losses[..., -2:].mean(axis=-1), axis=-1)
    np.testing.assert_allclose(image.values, expected, rtol=1e-6)
    up, across = np.unravel_index(expected.argmin(), expected.shape)
    star = next(points for points in layers_of(scene, Points, 0) if points.marker == "star")
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
    (curve, *_) = (line for line in layers_of(SweepView(sweep).scene(), Line, 0) if line.name)
    assert curve.y.min() == np.float32(least)


def test_curves_are_those_of_the_training_chosen():
    sweep = _sweep(wd=(0.0, 0.01), learning_rate=(0.001, 0.01, 0.1), momentum=(0.0, 0.9))
    view = SweepView(sweep)
    scene = view.scene()
    state = scene.state(learning_rate=2, wd=1, momentum=0)
    lines = {line.name: line for line in layers_of(scene, Line, 1)}
    for i in range(3):
        found = lines[f"seed {i}"].chosen("y", state)
        np.testing.assert_allclose(found, sweep.losses[1, 2, 0, i], rtol=1e-6)
    (image,) = layers_of(scene, Heatmap, 0)
    expected = np.median(sweep.losses[:, :, 0, :, -2:].mean(axis=-1), axis=-1)
    np.testing.assert_allclose(image.chosen("values", state), expected, rtol=1e-6)
    ring = next(points for points in layers_of(scene, Points, 0) if points.marker == "ring")
    assert (ring.chosen("x", state)[0], ring.chosen("y", state)[0]) == (2, 1)
    click = scene.panels[0].click
    assert (click.control, click.other) == ("learning_rate", "wd")
    assert view.figure(learning_rate=1).axes
    # The best is marked for each choice.
    star = next(points for points in layers_of(scene, Points, 0) if points.marker == "star")
    for k in range(2):
        final = np.median(sweep.losses[:, :, k, ..., -2:].mean(axis=-1), axis=-1)
        up, across = np.unravel_index(final.argmin(), (2, 3))
        chosen = scene.state(momentum=k)
        assert (star.chosen("x", chosen).tolist(), star.chosen("y", chosen).tolist()) == ([across], [up])


def test_one_setting_is_a_curve_and_none_a_training():
    sweep = _sweep(learning_rate=(0.001, 0.01, 0.1))
    scene = SweepView(sweep).scene()
    (line,) = layers_of(scene, Line, 0)
    final = sweep.losses[..., -2:].mean(axis=-1)
    np.testing.assert_allclose(line.y, np.median(final, axis=-1), rtol=1e-6)
    alone = SweepView(_sweep(steps=4)).scene()
    assert len(alone.panels) == 1
    assert len(layers_of(alone, Line)) == 3


def test_trainings_that_failed_are_holes_and_counted():
    sweep = _sweep(seeds=(0,), wd=(0.0, 0.01), learning_rate=(0.1, 10.0))
    sweep.losses[:, 1, 0, 3:] = np.nan
    view = SweepView(sweep)
    (image,) = layers_of(view.scene(), Heatmap, 0)
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
        (image,) = layers_of(scene, Heatmap, 0)
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
    line = layers_of(SweepView(sweep).scene(), Line, 1)[0]
    assert line.y.shape[-1] <= 512
    assert line.y[0, 0] == pytest.approx(sweep.losses[0, 0, :10].mean(), rel=1e-6)


CONDITION = 25.0
KNOWN = ((1 - CONDITION**0.5) / (1 + CONDITION**0.5)) ** 2  # Polyak (1964): the momentum and the rate of the fastest descent
FASTEST = (2 / (1 + CONDITION**0.5)) ** 2
RATES = [round(k * FASTEST / 9, 6) for k in range(1, 14)]
MOMENTA = [round(k * KNOWN / 5, 6) for k in range(11)]


def _iteration(name, rate, momentum, curvature):
    """What a step makes of (w_t, w_t-1), where the gradient is `curvature` times w."""
    shrink = 1 - rate * curvature
    top = (
        [1 + momentum - rate * curvature, -momentum] if name == "momentum" else [(1 + momentum) * shrink, -momentum * shrink]
    )
    return np.array([top, [1.0, 0.0]])


@functools.cache
def _bowl(name):
    """Trajectories on a bowl, and of its iterations in float64 spectral radius, angle, first and last step to be there."""
    found = simulate(
        ill_conditioned_bowl(CONDITION),
        name,
        (-1.8, 0.3),
        120,
        learning_rates=RATES,
        sweep={"momentum": MOMENTA},
    )
    radius, swings, sooner, later = np.zeros((4, len(MOMENTA), len(RATES)))
    for at in np.ndindex(radius.shape):
        eigenvalues, heights = [], np.zeros(121)
        for curvature, start in ((1.0, -1.8), (CONDITION, 0.3)):
            matrix = _iteration(name, RATES[at[1]], MOMENTA[at[0]], curvature)
            eigenvalues += np.linalg.eigvals(matrix).tolist()
            ways, power = [], np.array([start, start])
            for _ in range(121):
                ahead = MOMENTA[at[0]] * (power[0] - power[1]) if name == "nag" else 0.0  # where it takes the gradient
                ways.append(power[0] + ahead)
                power = matrix @ power
            heights += curvature / 2 * np.square(ways)
        radius[at] = np.abs(eigenvalues).max()
        swings[at] = max(np.abs(np.angle(each)) for each in eigenvalues if abs(each) > 1e-9)
        for steps, share in ((sooner, 1.01e-6), (later, 0.99e-6)):  # rounding decides between them
            high = np.flatnonzero(heights > share * heights[0])[-1]
            steps[at] = high + 1 if high < 120 else np.nan
    return found, radius, swings, sooner, later


@pytest.mark.parametrize("name", ["momentum", "nag"])
def test_paths_on_a_bowl_converge_swing_and_diverge_as_the_eigenvalues_say(name):
    found, radius, swings, sooner, later = _bowl(name)
    shape = radius.shape
    settled = np.nan_to_num(found.settled.reshape(shape), nan=121)
    assert (np.nan_to_num(sooner, nan=121) <= settled).all()
    assert (settled <= np.nan_to_num(later, nan=121)).all()
    sure = np.abs(np.log(radius)) * 120 > 3  # so much more than the first steps can hide
    assert sure.mean() > 0.8
    np.testing.assert_array_equal((found.growth.reshape(shape) > 1)[sure], (radius > 1)[sure])
    assert (found.turns.reshape(shape)[swings == 0] == 0).all()
    assert (found.turns.reshape(shape)[swings > 0.1] > 0).all()
    assert min((swings == 0).sum(), (swings > 0.1).sum(), (radius > 1).sum()) >= 5


def test_the_map_of_a_bowl_has_its_best_where_theory_has_it_and_its_borders():
    found, radius, _, _, steps = _bowl("momentum")
    view = SweepView(found)
    scene = view.scene()
    (image,) = layers_of(scene, Heatmap, 0)
    np.testing.assert_allclose(image.values[np.isfinite(steps)], steps[np.isfinite(steps)], atol=1)
    assert (image.values[np.isnan(steps) & (radius < 0.99)] == 120).all()  # which has only been slow
    assert np.isnan(image.values[radius > 1.05]).all()
    star = next(points for points in layers_of(scene, Points, 0) if points.marker == "star")
    across, up = int(star.x[0]), int(star.y[0])
    assert image.values[up, across] == np.nanmin(image.values)
    assert max(abs(across - 8), abs(up - 5)) <= 2
    assert np.unravel_index(found.growth.argmin(), steps.shape) == (5, 8)  # in the long run it is where theory has it
    assert np.nanmin(image.values[0]) > 3.5 * np.nanmin(image.values)  # of those without momentum
    # Steps diverge above 2 (1 + momentum) / curvature, and turn back above (1 - sqrt(momentum))^2 / curvature.
    turning, growing = layers_of(scene, Line, 0)
    rate, momentum = _places(growing)
    np.testing.assert_allclose(rate[momentum < 0.8], 2 * (1 + momentum[momentum < 0.8]) / CONDITION, atol=FASTEST / 9)
    rate, momentum = _places(turning)
    np.testing.assert_allclose(rate, (1 - np.sqrt(momentum)) ** 2 / CONDITION, atol=FASTEST / 9)
    assert f"learning rate {RATES[across]:.3g}" in view.describe()


def _places(line):
    """The rates and momenta at the points of a line of the map."""
    known = np.isfinite(line.x)
    rate, momentum = (
        np.interp(way[known], range(len(values)), values) for way, values in ((line.x, RATES), (line.y, MOMENTA))
    )
    return rate, momentum


def test_the_path_is_the_one_that_is_pointed_at():
    trajectories = simulate(
        "himmelblau", ["momentum", "nag"], steps=12, learning_rates=[1e-3, 1e-2, 1.0], sweep={"momentum": [0.0, 0.9]}
    )
    view = SweepView(trajectories)
    scene = view.scene()
    state = scene.state(optimizer=1, momentum=0, learning_rate=1, step=3)
    (path,) = (line for line in layers_of(scene, Line, 1) if line.name == "path")
    x, y = scene.drawn(path, state)
    np.testing.assert_array_equal(np.stack([x, y], axis=-1), trajectories.paths[1, 1, 0, :4])
    (losses,) = layers_of(scene, Line, 2)
    np.testing.assert_allclose(losses.chosen("y", state), trajectories.losses[1, 1, 0], rtol=1e-6)
    click = scene.panels[0].click
    assert (click.control, click.other) == ("learning_rate", "momentum")
    (words,) = layers_of(scene, Text, 3)
    assert words.chosen("texts", scene.state(learning_rate=2, momentum=1)) == "the loss grows"
    assert view.figure(optimizer=1).axes


def test_two_optimizers_and_rates_alone_are_a_map_too():
    trajectories = simulate("himmelblau", ["sgd", "adam"], steps=20, learning_rates=[1e-3, 1e-2, 0.1])
    scene = SweepView(trajectories, by="final").scene()
    (image,) = layers_of(scene, Heatmap, 0)
    np.testing.assert_array_equal(image.values, trajectories.losses[:, :, 0, -1])
    assert [words for _, words in scene.panels[0].y.ticks] == ["sgd", "adam"]
    assert len(SweepView(simulate("beale", "sgd", steps=5)).scene().panels) == 3
