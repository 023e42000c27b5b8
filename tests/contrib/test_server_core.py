"""One parameter server, without a network: pushes, delays, DCASGD and states."""

import numpy as np
import pytest
import torch

from tristep import optimizer
from tristep.contrib.server.core import ServerCore

pytestmark = pytest.mark.sample(0)  # the quick tier runs four tests of servers

# The delayed quadratic: f(w) = sum of a w^2 / 2, and eight workers in turn, each with the weights of eight updates ago.
CURVATURES, WORKERS = np.linspace(0.25, 1.0, 4), 8


def core_of(values, name=None, workers=2, **settings):
    core = ServerCore(workers)
    core.init(values)
    if name is not None:
        core.use(optimizer.create(name, **settings))
    return core


def pulled(core, worker, keys):
    outs = [torch.full_like(core.values[key], float("nan")) for key in keys]
    core.pull(worker, keys, outs)
    return outs


def losses_of(name, steps=200, **settings):
    """The loss after each push; the weights in the end."""
    core = core_of({0: torch.ones(4)}, name, workers=WORKERS, learning_rate=0.2, **settings)
    curvatures, losses = torch.from_numpy(CURVATURES).float(), []
    weights = [pulled(core, worker, [0])[0] for worker in range(WORKERS)]
    for step in range(steps):
        worker = step % WORKERS
        core.push(worker, [0], [curvatures * weights[worker]])
        (weights[worker],) = pulled(core, worker, [0])
        losses.append(float((curvatures * core.values[0] ** 2).sum()) / 2)
    assert core.delays()[WORKERS - 1] == {WORKERS - 1: steps // WORKERS}
    return np.array(losses), core.values[0].numpy()


def losses_by_the_paper(steps=200, lamda=1.0, of_last=False):
    """Zheng et al. (2017), algorithm 2, in float64. `of_last`: one backup for all workers, as in MXNet's servers."""
    w, last, losses = np.ones(4), np.ones(4), []
    backups = [w.copy() for _ in range(WORKERS)]
    for step in range(steps):
        worker = step % WORKERS
        g = CURVATURES * backups[worker]
        backup = last if of_last else backups[worker]
        last, w = w, w - 0.2 * (g + lamda * g * g * (w - backup))
        backups[worker] = w.copy()
        losses.append((CURVATURES * w**2).sum() / 2)
    return np.array(losses), w


def test_dcasgd_compensates_the_delay_of_each_worker():
    """It is the paper's algorithm, and better than without compensation, or with the weights of the last update."""
    losses, weights = losses_of("dcasgd", lamda=1.0)
    expected, of_paper = losses_by_the_paper()
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(weights, of_paper, rtol=1e-4, atol=1e-6)
    plain, _ = losses_of("sgd")
    of_last, _ = losses_by_the_paper(of_last=True)
    assert losses.mean() < 0.25 * plain.mean()
    assert losses.mean() < 0.5 * of_last.mean()


def test_dcasgd_with_momentum_and_half_precision_keeps_what_was_pulled():
    core = core_of({0: torch.ones(3, dtype=torch.bfloat16)}, "dcasgd", learning_rate=0.5, momentum=0.5, multi_precision=True)
    grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
    core.push(0, [0], [grad])  # nobody has pulled: the first weights
    w, mom = 1 - 0.5 * 0.5, -0.5 * 0.5
    assert core.values[0].tolist() == [w] * 3
    pulled(core, 1, [0])
    core.push(0, [0], [grad])
    before, mom = w, 0.5 * mom - 0.5 * (0.5 + 0.04 * 0.25 * (w - 1))
    w += mom
    core.push(1, [0], [grad])
    mom = 0.5 * mom - 0.5 * (0.5 + 0.04 * 0.25 * (w - before))
    w += mom
    (state,) = core.states()["state"].values()
    np.testing.assert_allclose(state["master copy"].numpy(), w, rtol=1e-6)
