"""Trajectories, learning rates and traced updates against a Trainer on one point, and known functions."""

import functools
import math
import os

import numpy as np
import pytest
import torch

from tristep import Trainer, optimizer
from tristep.kernels import rules
from tristep.trainer.loops.ensemble import JointRows
from tristep.trainer.lr_scheduler import CosineScheduler, FactorScheduler
from tristep.viz import (
    FUNCTIONS,
    Function,
    noisy_ravine,
    search_ranges,
    simulate,
    trace_updates,
    tune_learning_rates,
)
from tristep.viz.simulate import Simulation, ill_conditioned_bowl
from tristep.viz.simulate.trajectories import checked_starts

NAMES = [name for name in optimizer.registered() if optimizer.registered()[name].__module__.startswith("tristep")]


def by_trainer(on, name, arguments, start, steps):
    """The path of one point, float32 [steps + 1, 2], as a Trainer takes it, and the losses."""
    point = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    trainer = Trainer([point], name, arguments)
    path, losses = [point.detach().clone()], []
    for _ in range(steps):
        value, point.grad = on.value_and_gradient(point.detach())
        losses.append(value)
        trainer.step(1)
        path.append(point.detach().clone())
    losses.append(on(point.detach()))
    return torch.stack(path).numpy(), torch.stack(losses).numpy()


def assert_same_path(ours, theirs):
    """Equal as long as they are finite."""
    finite = np.isfinite(theirs).all(axis=-1)
    assert finite[:2].all()
    np.testing.assert_array_equal(ours[finite], theirs[finite])


@pytest.mark.usefixtures("few_steps")
@pytest.mark.sample(16)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "groupadagrad"])
def test_every_optimizer_as_a_trainer_steps_it(name):
    on, starts = FUNCTIONS["himmelblau"], [(1.0, -2.0), (-3.0, 0.5), (0.25, 4.0)]
    arguments = {"wd": 0.01} if "wd" in {s.name for s in search_ranges(name)} else {}
    trajectories = simulate(on, {name: {"optimizer": optimizer.registered()[name], **arguments}}, starts, steps=6)
    for s, start in enumerate(starts):
        path, losses = by_trainer(on, name, arguments, start, 6)
        assert_same_path(trajectories.paths[0, 0, s], path)
        np.testing.assert_allclose(trajectories.losses[0, 0, s], losses, rtol=1e-6)


def test_all_values_together_as_one_by_one():
    """Rates, a sweep, schedules, options that look at whole tensors, and labels: each path is that of its own Trainer."""
    on, starts, rates = FUNCTIONS["rosenbrock"], [(-1.2, 1.0), (0.5, -0.5)], [1e-4, 1e-3, 3e-3]
    candidates = {
        "sgd": {},
        "with momentum": {"optimizer": "sgd", "momentum": 0.9},
        "adam": {"lr_scheduler": CosineScheduler(max_update=20, base_lr=1.0)},
        "clipped": {"optimizer": "sgd", "clip_norm": 1.0},
        "lamb": {},
    }
    trajectories = simulate(on, candidates, starts, 20, learning_rates=rates, sweep={"wd": [0.0, 0.1]})
    assert trajectories.names == tuple(candidates)
    assert trajectories.paths.shape == (5, 6, 2, 21, 2)
    assert trajectories.losses.shape == (5, 6, 2, 21)
    assert trajectories.paths.dtype == trajectories.losses.dtype == trajectories.starts.dtype == np.float32
    assert [value["wd"] for value in trajectories.values] == [0.0] * 3 + [0.1] * 3
    for o, (label, given) in enumerate(candidates.items()):
        for v, value in enumerate(trajectories.values):
            arguments = {k: each for k, each in given.items() if k != "optimizer"} | {"wd": value["wd"]}
            if label == "adam":
                arguments["lr_scheduler"] = CosineScheduler(max_update=20, base_lr=value["learning_rate"])
            else:
                arguments["learning_rate"] = value["learning_rate"]
                assert trajectories.learning_rates[o, v] == value["learning_rate"]
            for s, start in enumerate(starts):
                path, _ = by_trainer(on, given.get("optimizer", label), arguments, start, 20)
                assert_same_path(trajectories.paths[o, v, s], path)


def test_gradient_descent_on_a_bowl_is_known_in_closed_form():
    """Each coordinate shrinks by 1 - rate * curvature at every step; beyond 2 / curvature it grows."""
    rates = [0.002, 0.01, 0.019, 0.021]
    trajectories = simulate(ill_conditioned_bowl(100), ["sgd"], (1.0, 1.0), 60, learning_rates=rates)
    t = np.arange(61)
    for path, rate in zip(trajectories.paths[0, :, 0], rates, strict=True):
        np.testing.assert_allclose(path[:, 0], (1 - rate) ** t, rtol=1e-5)
        np.testing.assert_allclose(path[:, 1], (1 - 100 * rate) ** t, rtol=1e-3, atol=1e-6)
    assert simulate(ill_conditioned_bowl(100), ["sgd"], (1.0, 1.0), 60, learning_rates=[0.019, 0.03]).diverged.tolist() == [
        [[False], [True]]
    ]


def test_relative_rates():
    trajectories = simulate(
        "beale", {"adam": {"learning_rate": 0.1}, "sgd": {}}, learning_rates=[0.5, 2.0], relative=True, steps=3
    )
    np.testing.assert_allclose(trajectories.learning_rates, [[0.05, 0.2], [0.005, 0.02]])
    schedule = FactorScheduler(step=100, base_lr=0.4)
    trajectories = simulate("beale", {"sgd": {"lr_scheduler": schedule}}, learning_rates=[0.5], relative=True, steps=3)
    np.testing.assert_allclose(trajectories.learning_rates, [[0.2]])


class Own(optimizer.RuleOptimizer):
    """A user-defined rule, not registered."""

    rule = rules.sgd


def signs(point, gradient, state, lr):
    """A plain callable with a state of its own: steps by sign that become shorter."""
    state["n"] = state.get("n", 0) + 1
    return point - lr * gradient.sign() / state["n"]


def test_others_join_the_race():
    """torch's optimizers, plain callables, instances and classes, in addition to ours."""
    on = FUNCTIONS["beale"]
    candidates = {
        "ours": {"optimizer": "adam", "learning_rate": 0.01},
        "torch": functools.partial(torch.optim.Adam, lr=0.01),
        "class": torch.optim.SGD,
        "callable": signs,
        "instance": optimizer.SGD(0.001, momentum=0.9),
        "own": Own,
        "sgd": {},
    }
    starts = [(1.0, 1.5), (2.0, -1.0)]
    trajectories = simulate(on, candidates, starts, 15, learning_rates=[0.01, 0.001])
    np.testing.assert_allclose(trajectories.paths[0], trajectories.paths[1], rtol=1e-4)
    np.testing.assert_allclose(trajectories.paths[2], trajectories.paths[6], rtol=1e-4)
    np.testing.assert_array_equal(trajectories.paths[5], trajectories.paths[6])
    np.testing.assert_allclose(trajectories.learning_rates, [[0.01, 0.001]] * 7)
    path = np.array(starts[0], np.float32)
    for n in range(1, 16):
        _, gradient = on.value_and_gradient(torch.from_numpy(path))
        path = path - np.float32(0.001) * np.sign(gradient.numpy()) / n
    np.testing.assert_allclose(trajectories.paths[3, 1, 0, -1], path, rtol=1e-5)
    given = candidates["instance"]
    assert (given.lr, given.num_update) == (0.001, 0)


def test_noise_is_the_same_for_all_and_for_each_seed():
    on = noisy_ravine(0.5, seed=4)
    trajectories = simulate(on, {"a": {"optimizer": "sgd"}, "b": {"optimizer": "lamb"}, "c": torch.optim.SGD}, steps=10)
    again = simulate(on, {"a": {"optimizer": "sgd"}}, steps=10)
    np.testing.assert_array_equal(trajectories.paths[0], again.paths[0])
    assert not np.array_equal(simulate(on, ["sgd"], steps=10, seed=1).paths[0], trajectories.paths[0])
    # What a step of plain gradient descent took in addition to the gradient.
    steps = np.diff(trajectories.paths[0, 0, 0], axis=0) / -trajectories.learning_rates[0, 0]
    _, gradient = on.value_and_gradient(torch.from_numpy(trajectories.paths[0, 0, 0, :-1]))
    many = simulate(on, ["sgd"], np.tile(on.start, (4000, 1)), steps=2).paths[0, 0]
    noise = np.diff(many[:, :2], axis=1)[:, 0] / -0.01 - gradient[0].numpy()
    assert noise.std() == pytest.approx(0.5, rel=0.05)
    assert abs(noise.mean()) < 0.03
    # Against torch's own SGD, which got the same noise.
    torchs = simulate(on, {"c": functools.partial(torch.optim.SGD, lr=0.01)}, steps=10).paths[0, 0, 0]
    np.testing.assert_allclose(steps, np.diff(torchs, axis=0) / -0.01, rtol=1e-3, atol=1e-3)


def test_divergence():
    steep = Function("steep", "exp(x) + y**2", xlim=(-1, 1), ylim=(-1, 1))
    trajectories = simulate(steep, {"sgd": {}}, [(5.0, 0.0), (0.0, 1.0)], 50, learning_rates=[1.0, 0.01])
    assert trajectories.diverged[0].tolist() == [[True, False], [False, False]]
    assert np.isnan(tune_learning_rates(ill_conditioned_bowl(100), ["sgd"], learning_rates=[5.0, 9.0]).best[0])


def test_tuned_learning_rates():
    found = tune_learning_rates(ill_conditioned_bowl(10), {"sgd": {}, "adam": {}}, (1.0, 1.0), 100)
    # The best constant rate of gradient descent is 2 / (1 + 10), if one looks from afar enough.
    assert found.best[0] == pytest.approx(2 / 11, rel=0.2)
    assert found.learning_rates.shape == (41,)
    assert found.losses.shape == (2, 41, 1)
    assert np.isinf(found.losses[0, found.learning_rates > 0.25, 0]).all()
    assert found.losses[1].min() == found.losses[1][found.learning_rates == found.best[1]]
    final = found.trajectories.losses[0, :, 0, -1]
    good = ~found.trajectories.diverged[0, :, 0]
    np.testing.assert_array_equal(found.losses[0, good, 0], final[good])


def test_a_leap_out_of_the_map_and_back_is_no_good_rate():
    """RMSProp's first step is of sqrt(10) rates; far outside, gradients are so large that it comes back in small ones."""
    found = tune_learning_rates("himmelblau", ["rmsprop"], np.random.default_rng(0).uniform(-5, 5, (9, 2)))
    away = np.abs(found.trajectories.paths[0]).max(axis=(2, 3)) / 5  # half of the map
    there = ~found.trajectories.diverged[0]
    np.testing.assert_array_equal(np.isinf(found.losses[0]), (away > 2) | ~there)
    final = np.median(np.where(there, found.trajectories.losses[0, :, :, -1], np.inf), axis=-1)
    assert found.learning_rates[final.argmin()] > 1  # it would have won
    assert found.best[0] < 0.1
    beyond = tune_learning_rates("himmelblau", ["sgd"], (20.0, 0.0), learning_rates=[1e-6])
    assert np.isfinite(beyond.losses).all()


def test_each_element_of_a_gradient_has_its_own_noise_where_both_are_equal():
    """Of (x + y)**2 they are the same array."""
    where = Function("valley", "(x + y)**2", noise=0.5)
    paths = simulate(where, {"sgd": {"learning_rate": 0.01}}, np.zeros((200, 2)), 1).paths[0, 0]
    noise = paths[:, 1] / -0.01
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.25
    assert noise.std(axis=0) == pytest.approx([0.5, 0.5], rel=0.2)


def test_quartiles_over_noise():
    starts = [noisy_ravine().start] * 8
    found = tune_learning_rates(noisy_ravine(2.0), ["sgd"], starts, steps=50, learning_rates=[0.01, 0.1])
    assert found.losses.shape == (1, 2, 8)
    assert len(set(found.losses[0, 0].tolist())) == 8
    expected = np.quantile(found.losses, [0.25, 0.5, 0.75], axis=-1, method="inverted_cdf").transpose(1, 2, 0)
    np.testing.assert_array_equal(found.quartiles, expected)


def test_traced_updates_of_adam_are_those_of_the_paper():
    """Kingma & Ba (2015), algorithm 1, in float64."""
    found = trace_updates("beale", {"optimizer": "adam", "learning_rate": 0.1}, (1.0, 1.5), 5)
    mean, var = np.zeros(2), np.zeros(2)
    for t in range(5):
        value, gradient = FUNCTIONS["beale"].value_and_gradient(torch.from_numpy(found.points[t]))
        g = gradient.double().numpy()
        np.testing.assert_allclose(found.gradients[t], g, rtol=1e-6)
        assert found.losses[t] == pytest.approx(value.item())
        mean, var = 0.9 * mean + 0.1 * g, 0.999 * var + 0.001 * g * g
        np.testing.assert_allclose(found.states["mean"][t + 1], mean, rtol=1e-5)
        np.testing.assert_allclose(found.states["var"][t + 1], var, rtol=1e-5)
        rate = 0.1 * math.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        np.testing.assert_allclose(found.updates[t], -rate * mean / (np.sqrt(var) + 1e-8), rtol=1e-4)
        np.testing.assert_allclose(found.preconditioners[t], rate / (np.sqrt(var) + 1e-8), rtol=1e-4)


def test_traced_updates_of_others():
    found = trace_updates("beale", {"optimizer": "sgd", "momentum": 0.5}, steps=3)
    assert found.preconditioners is None
    assert found.points.shape == (4, 2)
    np.testing.assert_allclose(found.states["mom"][1:], found.updates, rtol=1e-4)
    assert trace_updates("beale", "prodigy").states["d"].shape == (2,)
    found = trace_updates("beale", "adagrad")
    np.testing.assert_allclose(found.preconditioners[0], 0.01 / np.abs(found.gradients[0]), rtol=1e-3)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", NAMES)
def test_sliders_move_within_what_the_constructor_takes(name):
    """All positions are accepted, the default is one of them, and what is just outside of hard limits is not a position."""
    klass = optimizer.registered()[name]
    for setting in search_ranges(name):
        assert setting.default in setting.values
        assert list(setting.values) == sorted(set(setting.values))
        assert (setting.low, setting.high) == (setting.values[0], setting.values[-1])
        assert len(setting.values) >= 2
        for value in setting.values:
            made = klass(**{setting.name: value})
            own = made.lr if setting.name == "learning_rate" else getattr(made, setting.name, value)
            assert own == value
        if setting.scale == "below one":
            with pytest.raises(ValueError, match=f"{setting.name}=1.0"):
                klass(**{setting.name: 1.0})


@pytest.mark.parametrize(
    "optimizers",
    [["sgd", "adam", "lion"], {"adam": {"lookahead": 3}, "lamb": {}}, {"torch": torch.optim.Adam, "adam": {}}],
)
def test_a_simulation_runs_from_another_start_as_a_new_one_does(optimizers):
    simulation = Simulation("noisy_ravine", optimizers, 12, learning_rates=[0.5, 2.0], relative=True, seed=3)
    for start in ((1.0, 2.0), (-2.0, 0.5), [(0.5, 0.5), (1.0, 2.0)], (1.0, 2.0)):
        found = simulation.run(start)
        own = simulate("noisy_ravine", optimizers, start, 12, learning_rates=[0.5, 2.0], relative=True, seed=3)
        assert found.paths.tobytes() == own.paths.tobytes()
        assert found.losses.tobytes() == own.losses.tobytes()
        np.testing.assert_array_equal(found.learning_rates, own.learning_rates)


def test_a_simulation_that_was_interrupted_starts_anew(monkeypatch):
    """While hyper-parameters are computed, and between two steps."""
    expected = simulate("rosenbrock", ["adam"], steps=4).paths
    simulation, form = Simulation("rosenbrock", ["adam"], steps=4), JointRows.form
    calls = []

    def interrupted(rows, rule, number=None):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return form(rows, rule, number)

    monkeypatch.setattr(JointRows, "form", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulation.run()
    walk = simulation.walk(checked_starts(simulation.function, None))
    next(walk), next(walk)
    walk.close()
    assert np.array_equal(simulation.run().paths, expected)


@pytest.mark.parametrize("engine", ["cpu", "eager", "triton"])
def test_every_engine_takes_the_steps_of_torch(engine):
    if engine == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton computes on the CPU in its interpreter only")
    optimizers = {"ours": {"optimizer": "adam", "learning_rate": 0.1}, "torch": functools.partial(torch.optim.Adam, lr=0.1)}
    simulation = Simulation("rosenbrock", optimizers, steps=20, engine=engine)
    for start in ((-1.2, 1.0), (0.5, -0.5)):  # the second time with what the first has made
        ours, peer = simulation.run(start).paths[:, 0, 0]
        np.testing.assert_allclose(ours, peer, rtol=1e-4, atol=1e-5)
