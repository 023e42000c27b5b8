"""Trainings side by side: steps one after the other and rows of several, errors that change nothing, restarts."""

import numpy as np
import pytest
import torch
from ensembles import RATES, assert_equal, both, rated

from tristep import optimizer
from tristep.kernels import rules
from tristep.trainer import Ensemble
from tristep.trainer.loops.ensemble import make_optimizer
from tristep.trainer.lr_scheduler import FactorScheduler
from tristep.trainer.optimizer.updater import Updater


def test_the_same_gradients_with_other_numbers():
    weights, gradients = torch.zeros(2, 2), torch.ones(2, 2)
    many = Ensemble(rated("sgd", (1.0, 2.0))(), [weights])
    many.step([gradients])
    gradients.fill_(10.0)
    many.step()
    assert weights.tolist() == [[-11.0, -11.0], [-22.0, -22.0]]


def test_a_class_that_cannot_compute_with_arrays():
    """Branches and functions of `math` refuse arrays; results that differ must be noticed."""

    class Branching(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": lr if lr > 0.05 else 2 * lr}

    class Wrong(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": float(np.max(lr))}

    class OfArray(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": np.asarray(lr) ** 2}

    for kind in (Branching, Wrong, OfArray):
        many, *others = both(lambda kind=kind: [kind(learning_rate=rate) for rate in RATES], ((4, 3), (8,)))
        assert_equal(many, *others)
        assert many.launches == 1


def test_nothing_has_changed_where_an_optimizer_refuses():
    weights, gradients = torch.ones(4, 3), [torch.ones(4, 3)]
    optimizers = [
        optimizer.Nadam(0.1),
        optimizer.Nadam(0.2),
        optimizer.Ftrl(lr_scheduler=lambda t: 0.1 if t < 2 else 0.0),
        optimizer.Ftrl(learning_rate=0.5),
    ]
    many = Ensemble(optimizers, [weights])
    many.step(gradients)
    before, carried = weights.clone(), [each.host_state() for each in optimizers]
    with pytest.raises(ValueError, match="a learning rate of 0"):
        many.step(gradients)
    assert torch.equal(before, weights)
    assert [each.host_state() for each in optimizers] == carried
    assert [each.num_update for each in optimizers] == [1] * 4
    optimizers[2].lr_scheduler = None
    many.step(gradients)  # and goes on as if nothing had been
    alone = torch.ones(3)
    own = optimizer.Nadam(0.1)
    plan = Updater(own).make_plan([0], [alone])
    plan.step([torch.ones(3)])
    plan.step([torch.ones(3)])
    assert torch.equal(weights[0], alone)


def test_make_optimizer_copies_schedules():
    schedule = FactorScheduler(step=2, base_lr=0.5)
    one, two = (make_optimizer("sgd", {"lr_scheduler": schedule, "learning_rate": rate}) for rate in (0.1, 0.2))
    assert (one.rate_at(1), two.rate_at(1), schedule.base_lr) == (0.1, 0.2, 0.5)
