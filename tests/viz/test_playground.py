"""Optimizers to be played with: what the pictures show, against torch's optimizers and closed forms."""

from itertools import product

import numpy as np
import pytest
import torch
from torch_paths import torch_path

import tristep
from tristep.viz import (
    Function,
    Playground,
    SensitivityView,
    SweepView,
    TrajectoryView,
    function,
    rule_source,
    search_ranges,
    simulate,
    tune_learning_rates,
)
from tristep.viz.scene import Arrows, Heatmap, Line, Points

BOWL = Function("bowl", "(x**2 + 10 * y**2) / 2", (-2, 2), (-2, 2), start=(1.5, 1.0), minima=((0.0, 0.0, 0.0),))
RACERS = {"sgd": {"learning_rate": 0.05}, "adam": {"learning_rate": 0.1}}


def _lines(panel):
    return {layer.name: layer for layer in panel.layers if isinstance(layer, Line) and layer.name}


def _sgd_path(rate, steps, **settings):
    return torch_path(lambda points: torch.optim.SGD(points, rate, **settings), BOWL, BOWL.start, steps)


def test_ways_are_those_of_the_optimizers_at_the_rate_and_up_to_the_step_of_the_sliders():
    factors = (0.1, 1.0, 10.0)
    view = TrajectoryView(BOWL, RACERS, steps=30, factors=factors)
    scene = view.scene()
    assert view.best == {"sgd": 0.05, "adam": 0.1}
    plane, curves = scene.panels[:2]
    for (k, factor), (name, make) in product(enumerate(factors), {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}.items()):
        expected = torch_path(lambda points: make(points, factor * view.best[name]), BOWL, BOWL.start, 30)  # noqa: B023
        x, y = scene.drawn(_lines(plane)[name], scene.state(rate=k, step=30))
        np.testing.assert_allclose(np.stack([x, y], axis=1), expected, rtol=2e-4, atol=2e-5, err_msg=f"{name}, {factor}")
        losses = scene.drawn(_lines(curves)[name], scene.state(rate=k, step=30))[1]
        exact = (expected[:, 0] ** 2 + 10 * expected[:, 1] ** 2) / 2
        np.testing.assert_allclose(losses, np.maximum(exact, 1e-12), rtol=2e-3, atol=1e-8, err_msg=f"{name}, {factor}")
        for panel in (plane, curves):
            assert len(scene.drawn(_lines(panel)[name], scene.state(rate=k, step=7))[0]) == 8
    assert view.figure(step=7).axes


def test_without_a_rate_each_has_its_own_best_and_who_diverged_is_said():
    view = TrajectoryView(BOWL, ["sgd", "adam"], steps=40, factors=(1.0,))
    # Gradient descent on this bowl converges fastest at 2 / (1 + 10) and not at all from 2 / 10 on.
    assert view.best["sgd"] == pytest.approx(2 / 11, rel=0.2)
    starts = np.asarray(BOWL.start) + np.zeros((1, 2))
    assert tune_learning_rates(BOWL, ["sgd"], starts, 40).best[0] < 0.2
    words = view.describe()
    assert f"sgd at rate {view.best['sgd']:.3g}" in words
    assert f"{view.trajectories.losses[0, 0, 0, -1]:.4g}" in words
    assert "diverged" not in words
    beyond = TrajectoryView(BOWL, {"sgd": {"learning_rate": 5.0}}, steps=50, factors=(1.0,))
    assert "diverged" in beyond.describe()
    assert beyond.figure()


def test_a_click_and_a_drag_move_the_start():
    view = TrajectoryView(BOWL, RACERS, steps=20, factors=(1.0,))
    before = view.trajectories.paths.copy()
    view.on_click("start", -1.0, 0.5)
    (start,) = (layer for layer in view.scene().panels[0].layers if isinstance(layer, Points) and layer.drag)
    assert (start.x.tolist(), start.y.tolist()) == ([-1.0], [0.5])
    assert view.trajectories.paths[:, 0, 0, 0].tolist() == [[-1.0, 0.5]] * 2
    view.on_click("other", 0.0, 0.0)
    assert view.trajectories.paths[0, 0, 0, 0].tolist() == [-1.0, 0.5]
    view.on_drag("start", 0, *BOWL.start)
    assert view.trajectories.paths.tobytes() == before.tobytes()


@pytest.mark.parametrize("name", ["saddle", "styblinski_tang", "noisy_ravine"])
def test_every_named_function_has_its_picture(name):
    view, where = TrajectoryView(name, RACERS, steps=10, factors=(1.0,)), function(name)
    panel = view.scene().panels[0]
    (surface,) = (layer for layer in panel.layers if isinstance(layer, Heatmap))
    corners = [(panel.x.low, panel.y.low), (panel.x.high, panel.y.high)]
    with torch.no_grad():
        low, high = where(torch.tensor(corners, dtype=torch.float64)).tolist()
    assert float(surface.values[-1, -1] - surface.values[0, 0]) == pytest.approx(high - low, rel=1e-4, abs=1e-3)


def test_x_and_y_have_one_scale_and_fill_their_panel():
    simulated = simulate("noisy_ravine", "sgd", steps=5, learning_rates=[0.1, 0.2])
    for view, k in ((TrajectoryView("saddle", steps=5), 0), (Playground("beale", steps=5), 0), (SweepView(simulated), 1)):
        axes = view.figure().axes[k]
        cell, frame = axes.get_position(original=True).size, axes.get_position().size
        (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
        assert x1 - x0 == pytest.approx(y1 - y0), view
        assert min(np.divide(frame, cell)) > 0.85, view
    thread = Function("thread", "x**2 + y**2", xlim=(0, 1000), ylim=(-1, 1), start=(1.0, 0.0))
    panel = TrajectoryView(thread, "sgd", steps=5).scene().panels[0]
    assert (panel.equal, panel.y.low, panel.y.high) == (False, -1, 1)


def test_sensitivity_shows_medians_and_the_best_rate():
    view = SensitivityView(BOWL, ["sgd", "adam"], starts=5, steps=60)
    found, (panel,) = view.found, view.scene().panels
    sgd = _lines(panel)["sgd"]
    there = np.isfinite(sgd.y)
    np.testing.assert_allclose(sgd.y[there], np.maximum(found.quartiles[0, there, 1], 1e-12), rtol=1e-6)
    assert not there[found.learning_rates > 0.25].any()  # it diverges from 2 / 10 on
    stars = [layer.x for layer in panel.layers if isinstance(layer, Points)]
    np.testing.assert_allclose(np.concatenate(stars), found.best, rtol=1e-6)
    assert f"sgd: best {found.quartiles[0, :, 1].min():.4g} at {found.best[0]:.3g}" in view.describe()


@pytest.mark.parametrize("optimizer", ["nag", "momentum", "signum", "lbsgd", "lion", "adam", "ademamix"])
@pytest.mark.parametrize("start", [(1.5, 1.0), (-1.5, -1.0)])
def test_an_arrow_shows_the_average_of_gradients_whatever_an_optimizer_keeps_of_it(optimizer, start):
    view = Playground(BOWL, optimizer, (), start, 6, settings={"learning_rate": 1e-3})
    scene = view.scene()
    arrows = [layer for layer in scene.panels[0].layers if isinstance(layer, Arrows)]
    layers = [layer for layer in arrows if layer.name.startswith("down its average")]
    assert layers, [layer.name for layer in arrows]
    for layer in layers:
        # Of few short steps all gradients point nearly in one direction, and so does their average.
        for k in range(6):
            x, y = (float(layer.chosen(name, scene.state(step=k))[0]) for name in ("dx", "dy"))
            down = -np.asarray(view.trace.gradients[k])
            assert np.dot((x, y), down) / np.hypot(x, y) / np.hypot(*down) > 0.95, (layer.name, k)


def test_arrows_point_where_the_quantities_do():
    view = Playground(BOWL, "adam", against=(), steps=25, settings={"learning_rate": 0.1, "beta1": 0.8})
    scene = view.scene()
    arrows = {layer.name: layer for layer in scene.panels[0].layers if isinstance(layer, Arrows)}
    moments = next(control for control in scene.controls if control.name == "step").values
    for k in (0, 3, 20):
        state = scene.state(step=k)
        at = view.trace.points[moments[k]]
        expected = {"down the gradient (direction)": -np.array([at[0], 10 * at[1]])}
        expected["update (direction)"] = view.trace.points[moments[k] + 1] - at
        for name, vector in expected.items():
            layer = arrows[name]
            assert [layer.chosen("x", state)[0], layer.chosen("y", state)[0]] == pytest.approx(at, abs=1e-6)
            shown = np.array([layer.chosen("dx", state)[0], layer.chosen("dy", state)[0]])
            np.testing.assert_allclose(shown / np.linalg.norm(shown), vector / np.linalg.norm(vector), atol=2e-3)
    # The average of gradients, by hand.
    mean = np.zeros(2)
    for t in range(4):
        mean = 0.8 * mean + 0.2 * np.array([1.0, 10.0]) * view.trace.points[t]
    layer = next(layer for name, layer in arrows.items() if "mean" in name)
    shown = np.array([layer.chosen("dx", scene.state(step=3))[0], layer.chosen("dy", scene.state(step=3))[0]])
    np.testing.assert_allclose(shown / np.linalg.norm(shown), -mean / np.linalg.norm(mean), atol=1e-3)


def test_numbers_and_rule_are_there_to_read():
    view = Playground(BOWL, "adam", against=("sgd",), steps=25, settings={"learning_rate": 0.1})
    scene = view.scene()
    (numbers,), (source,) = scene.panels[2].layers, scene.listings
    text = str(numbers.chosen("texts", scene.state(step=2)))
    row = next(line for line in text.split("\n") if line.startswith("gradient")).split()[1:]
    assert [float(each) for each in row] == pytest.approx(view.trace.points[2] * [1, 10], rel=1e-3)
    assert text.split()[:2] == ["update", "3"]
    assert "def adam(w, g, state, hyper):" in source.text
    assert list(_lines(scene.panels[0])) == ["adam", "sgd"]


@pytest.mark.parametrize(("name", "peer", "beta"), [("adam", torch.optim.Adam, 0.9), ("adagrad", torch.optim.Adagrad, 0.0)])
def test_scaled_by_is_the_step_over_what_it_follows(name, peer, beta):
    """Torch's step, against it: over the average of gradients where the optimizer keeps one, or over the gradient."""
    scene = Playground(BOWL, name, (), steps=6, settings={"learning_rate": 0.1}).scene()
    path, average = torch_path(lambda points: peer(points, 0.1), BOWL, BOWL.start, 6), np.zeros(2)
    (numbers,) = scene.panels[2].layers
    for k in range(6):
        average = beta * average + (1 - beta) * path[k] * [1, 10]
        text = str(numbers.chosen("texts", scene.state(step=k)))
        row = next(line for line in text.split("\n") if line.startswith("scaled by")).split()[2:]
        assert [float(each) for each in row] == pytest.approx((path[k] - path[k + 1]) / average, rel=2e-3)


def test_sliders_act_on_the_optimizer():
    view = Playground(BOWL, "adam", against=("sgd",), steps=25)
    controls = {control.name: control for control in view.scene().controls}
    assert {"setting learning_rate", "setting beta1", "setting beta2", "setting epsilon"} <= set(controls)
    beta1 = controls["setting beta1"]
    assert beta1.values[beta1.index] == 0.9
    assert beta1.remote
    before = view.trajectories.paths.copy()
    index = beta1.values.index(0.5)
    view.on_control("setting beta1", 0.5, index)
    assert view.settings == {"beta1": 0.5}
    assert not np.array_equal(view.trajectories.paths[0], before[0])
    assert np.array_equal(view.trajectories.paths[1], before[1])
    now = {control.name: control for control in view.scene().controls}["setting beta1"]
    assert now.values[now.index] == 0.5
    rate = controls["setting learning_rate"]
    view.on_control("setting learning_rate", rate.values[3], 3)
    assert view.best["adam"] == pytest.approx(rate.values[3])
    view.on_button("best")
    assert "learning_rate" not in view.settings


def test_function_and_optimizer_are_chosen():
    view = Playground("saddle", "adam", steps=20)
    names = {control.name: control for control in view.scene().controls}
    view.on_control("function", "beale", names["function"].values.index("beale"))
    assert view.function is function("beale")
    assert view.trajectories.paths[0, 0, 0, 0] == pytest.approx(function("beale").start)
    view.on_control("optimizer", "lion", names["optimizer"].values.index("lion"))
    assert view.trajectories.names == ("lion", "sgd")
    assert "def lion" in view.scene().listings[0].text
    view.on_control("setting gone", 1.0, 0)  # of an optimizer that has been left
    assert view.trajectories.names == ("lion", "sgd")
    # Those that are others with a momentum are among the choices, and have it.
    view = Playground(BOWL, "nag", steps=10)
    (choice,) = (control for control in view.scene().controls if control.name == "optimizer")
    assert (choice.values[choice.index], view.settings) == ("nag", {"momentum": 0.9})
    view.on_control("optimizer", "momentum", choice.values.index("momentum"))
    assert view.settings == {"momentum": 0.9}
    expected = simulate(BOWL, {"momentum": {"learning_rate": view.best["momentum"]}}, steps=10).paths[0, 0]
    np.testing.assert_array_equal(view.trajectories.paths[0, 0], expected)


def plain_step(point, gradient, state, lr):
    return point - lr * gradient


def test_a_rule_of_ones_own_joins():
    @tristep.rule
    def own_step(w, g, state, hyper):
        (lr,) = hyper
        return w - lr * g, ()

    class OwnStep(tristep.optimizer.RuleOptimizer):
        rule = own_step

    view = Playground(BOWL, OwnStep, against=("sgd",), steps=10, settings={"learning_rate": 0.05})
    np.testing.assert_allclose(view.trajectories.paths[0, 0, 0], _sgd_path(0.05, 10), rtol=1e-4, atol=1e-6)
    assert "def own_step" in view.scene().listings[0].text


def test_a_plain_function_joins_at_its_best_rate_or_at_a_given_one():
    view = TrajectoryView(BOWL, {"ours": plain_step, "sgd": {}}, steps=20, factors=(0.5, 1.0))
    assert view.best["ours"] == view.best["sgd"]
    np.testing.assert_allclose(view.trajectories.paths[0], view.trajectories.paths[1], rtol=1e-4, atol=1e-6)
    at_rate = {"ours": {"optimizer": plain_step, "learning_rate": 0.05}, "torch": torch.optim.SGD}
    view = TrajectoryView(BOWL, at_rate, steps=20, factors=(0.5, 1.0))
    for factor, paths in zip((0.5, 1.0), view.trajectories.paths[0, :, 0], strict=True):
        np.testing.assert_allclose(paths, _sgd_path(0.05 * factor, 20), rtol=1e-4, atol=1e-6)


def test_where_no_minimum_is_known_losses_are_above_the_least_of_all():
    unknown = Function("bowl", BOWL.expression, BOWL.xlim, BOWL.ylim, BOWL.start)
    view = TrajectoryView(unknown, RACERS, steps=30, factors=(1.0,))
    scene, losses = view.scene(), view.trajectories.losses[:, 0, 0].astype(np.float64)
    for name, expected in zip(RACERS, losses - losses.min(), strict=True):
        shown = scene.drawn(_lines(scene.panels[1])[name], scene.state())[1]
        np.testing.assert_allclose(shown, np.maximum(expected, 1e-12), rtol=1e-5)


def test_a_name_means_the_same_everywhere():
    torchs = {"momentum": {"momentum": 0.9}, "nag": {"momentum": 0.9, "nesterov": True}}
    names = list(torchs)
    paths = simulate(BOWL, names, steps=40, learning_rates=[0.02]).paths[:, 0, 0]
    for name, path in zip(names, paths, strict=True):
        np.testing.assert_allclose(path, _sgd_path(0.02, 40, **torchs[name]), rtol=1e-4, atol=1e-5)
        settings = {"learning_rate": 0.02}
        for view in (
            TrajectoryView(BOWL, {name: settings}, steps=40, factors=(1.0,)),
            TrajectoryView(BOWL, {"a": {"optimizer": name.upper(), **settings}}, steps=40, factors=(1.0,)),
            Playground(BOWL, name, (), steps=40, settings=settings),
        ):
            np.testing.assert_array_equal(view.trajectories.paths[0, 0, 0], path)
        assert {setting.name: setting.default for setting in search_ranges(name)}["momentum"] == 0.9
        assert "def " in rule_source(name)
    found = simulate(BOWL, {"nag": {"momentum": 0.5}, "sgd": {"momentum": 0.5}, "momentum": {"momentum": 0.5}}, steps=9)
    np.testing.assert_array_equal(found.paths[1], found.paths[2])  # what is given counts
    assert not np.array_equal(found.paths[0], found.paths[1])


def test_a_function_of_x_and_y():
    expected = TrajectoryView("x**2 + 3 * y**2", RACERS, steps=9)

    def named(x, y, scale=3):
        return x**2 + scale * y**2

    for given, title in ((lambda x, y: x**2 + 3 * y**2, "f(x, y)"), (named, "named")):
        view = TrajectoryView(given, RACERS, steps=9)
        np.testing.assert_allclose(view.trajectories.paths, expected.trajectories.paths, rtol=1e-5, atol=1e-6)
        assert view.scene().title == title
        assert np.isfinite(Playground(given, "sgd", steps=3).trace.losses).all()
    assert Function("flat in y", lambda x, y: x**2)(torch.tensor([[3.0, 1.0]])).item() == 9
    assert TrajectoryView(BOWL, RACERS, np.array([[1.0, 2.0]]), 3).trajectories.starts.tolist() == [[1.0, 2.0]]
    of_points = simulate(lambda p: p[..., 0] ** 2 + 3 * p[..., 1] ** 2, RACERS, steps=9).paths
    np.testing.assert_allclose(of_points, expected.trajectories.paths[:, 20:21], rtol=1e-5, atol=1e-6)
