"""The battery: gradients are torch's, steps those of a loop with torch.optim, and scores what they are said to be."""

import math

import numpy as np
import pytest
import torch

import tristep
from tristep.contrib.racing.tasks import SIZE, TASKS
from tristep.trainer import BatteryResult

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test


def random(seeds=3):
    return [torch.Generator().manual_seed(seed) for seed in range(seeds)]


@pytest.mark.parametrize("name", TASKS)
def test_gradients_are_those_of_the_losses(name):
    """To rounding where there is no noise, else on average: over many seeds, and of what is seen and how it is scaled."""
    seeds = 3 if name in ("saddle", "ill_conditioned") else 20_000
    task = TASKS[name].make(random(seeds), 4)
    start = torch.randn(2, 1, SIZE).expand(2, seeds, SIZE)
    w = start.clone().requires_grad_()
    losses = task.loss(w, 2)
    assert losses.shape == (2, seeds)
    (expected,) = torch.autograd.grad(losses.sum(), w)
    found = task.gradient(start, 2)
    if seeds == 3:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return
    often = {"sparse": 30 ** -(torch.arange(SIZE) / (SIZE - 1))}.get(name, torch.ones(()))
    scale = {"changing_scale": (30 - 1 / 30) / (2 * math.log(30))}.get(name, 1.0)  # the mean of 30**u, u from -1 to 1
    torch.testing.assert_close(found.mean(1), scale * often * expected.mean(1), rtol=0.1, atol=0.15 * scale)


def test_losses_are_zero_at_the_minima_and_starts_are_far():
    points = {"saddle": torch.tensor([0.0] * 10 + [-1.0] * 10), "drifting": None}
    for name, each in TASKS.items():
        task = each.make(random(), 4)
        point = points.get(name, torch.zeros(SIZE))
        if point is not None:
            torch.testing.assert_close(task.loss(point.expand(3, SIZE), 0), torch.zeros(3))
        assert (task.loss(task.start, 0) > 1).all()


def test_the_condition_is_a_thousand():
    task = TASKS["ill_conditioned"].make(random(), 1)
    unit = torch.eye(SIZE)[:, None].expand(SIZE, 3, SIZE)
    values = torch.linalg.eigvalsh(task.gradient(unit, 0).movedim(1, 0).double())
    torch.testing.assert_close(values.flip(1), torch.logspace(0, -3, SIZE).double().expand(3, -1), rtol=1e-3, atol=1e-6)


def by_torch(name, make, seed, seeds, steps=300):
    """Steps until the mean of 20 losses stays at the target, of one training."""
    task = TASKS[name].make(random(seeds), steps)
    w = task.start.clone().requires_grad_()
    optimizer, losses = make([w]), []
    for step in range(steps):
        losses.append(task.loss(w.detach(), step)[seed].item())
        w.grad = task.gradient(w.detach(), step)
        optimizer.step()
    losses.append(task.loss(w.detach(), steps)[seed].item())
    means = np.convolve(losses, np.full(20, 1 / 20), "valid")
    above = np.flatnonzero(means > TASKS[name].target * losses[0])
    return math.inf if len(above) and above[-1] == len(means) - 1 else (above[-1] + 20 if len(above) else 19)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TASKS)
def test_steps_are_those_of_torch(name):
    rates = [0.003, 0.03, 0.3]
    found = tristep.battery(
        {"momentum": {"optimizer": "sgd", "momentum": 0.9}, "adam": {}}, [name], steps=300, seeds=2, tuning_seeds=2,
        learning_rates=rates,
    )  # fmt: skip
    makes = lambda rate: (lambda own: torch.optim.SGD(own, rate, 0.9), lambda own: torch.optim.Adam(own, rate))  # noqa: E731
    for i in range(2):
        worst = [max(by_torch(name, makes(rate)[i], seed, 4) for seed in (0, 1)) for rate in rates]
        if min(worst) < math.inf:
            assert worst[rates.index(found.chosen[i, 0])] == min(worst)
        expected = [by_torch(name, makes(found.chosen[i, 0])[i], seed, 4) for seed in (2, 3)]
        np.testing.assert_allclose(found.needed[i, 0], expected, atol=1)  # a loss may be at the target but for rounding


def test_scores():
    inf = np.inf
    needed = np.array([[[50, 40, 60], [30, inf, inf]], [[100, 100, 100], [20, 30, inf]], [[inf, inf, inf], [inf, 60, 70]]])
    result = BatteryResult(("a", "b", "c"), ("saddle", "noisy"), 100, np.ones(1), np.ones((3, 2)), needed)
    np.testing.assert_array_equal(result.medians, [[50, inf], [100, 30], [inf, 70]])
    np.testing.assert_allclose(result.scores, [[1, 0], [0.5, 1], [0, 30 / 70]])
    assert [line.split() for line in str(result).splitlines()] == [
        ["saddle", "noisy", "mean", "score"],
        ["a", "50", "-", "0.50"],
        ["b", "100", "30", "0.75"],
        ["c", "-", "70", "0.21"],
    ]
    assert repr(result) == "<battery of 2 tasks for a, b, c>"
    nobody = BatteryResult(("a",), ("saddle",), 100, np.ones(1), np.ones((1, 1)), np.full((1, 1, 3), inf))
    assert nobody.scores.tolist() == [[0.0]]


def test_presets_and_those_who_take_a_plainer_ones_steps_on_vectors():
    arguments = {"tasks": ["sparse"], "steps": 60, "seeds": 1, "tuning_seeds": 1, "learning_rates": [0.1]}
    found = tristep.battery(["momentum", "nag", "muon", "adam", "sgd"], **arguments)
    by_hand = {"a": {"optimizer": "sgd", "momentum": 0.9}, "b": {"optimizer": "nag", "momentum": 0.9}}
    np.testing.assert_array_equal(found.needed[:2], tristep.battery(by_hand, **arguments).needed)
    assert found.names == ("momentum", "nag", "muon", "adam", "sgd")
    assert found.same_as == {"muon": "adam"}
    assert [line.split("  ")[0] for line in str(found).splitlines()[1:]] == [
        "momentum",
        "nag",
        "muon (= adam)",
        "adam",
        "sgd",
    ]
    np.testing.assert_array_equal(found.needed[2], found.needed[3])


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((["adam"], ["hills"]), ValueError, "tasks='hills'.*saddle"),
        ((["adam"], []), ValueError, "tasks is empty"),
        (({"adam": {"learning_rate": 0.1}},), ValueError, "give learning_rates"),
        (({"adam": {"wd": (0.1, 0.2)}},), ValueError, "range for wd"),
        ((["adem"],), ValueError, "adem"),
    ],
)
def test_bad_input_is_named(arguments, error, said):
    with pytest.raises(error, match=said):
        tristep.battery(*arguments)
    with pytest.raises(ValueError, match="steps=5"):
        tristep.battery(["adam"], steps=5)
