"""Trainings side by side: steps one after the other and rows of several, errors that change nothing, restarts."""

import copy

import numpy as np
import pytest
import torch
from ensembles import RATES, assert_equal, both, rated

from tristep import optimizer
from tristep.kernels import rules
from tristep.trainer import Ensemble
from tristep.trainer.ensemble import make_optimizer
from tristep.trainer.lr_scheduler import CosineScheduler, FactorScheduler
from tristep.trainer.optimizer.updater import Updater


def test_stacked_bad_input():
    made = rated("sgd", (0.1, 0.2))()
    with pytest.raises(ValueError, match=r"weights\[0\] is \(3, 2\): must be \[2, \.\.\.\]"):
        Ensemble(made, [torch.ones(3, 2)], stacked=True)
    with pytest.raises(TypeError, match=r"weights\[0\] must be a tensor.*got list"):
        Ensemble(made, [[torch.ones(2), torch.ones(2)]], stacked=True)
    with pytest.raises(ValueError, match=r"is empty"):
        Ensemble(made, [], stacked=True)
    many = Ensemble(made, [torch.ones(2, 2)], stacked=True)
    with pytest.raises(ValueError, match="2 stacks of gradients for 1"):
        many.step([torch.ones(2, 2), torch.ones(2, 2)])
    with pytest.raises(ValueError, match=r"gradients\[0\] is \(2, 3\): must be \(2, 2\)"):
        many.step([torch.ones(2, 3)])


def test_weights_that_have_moved():
    weights = [[torch.ones(4)], [torch.ones(4)]]
    many = Ensemble(rated("sgd", (0.5, 0.25))(), weights)
    gradients = [[torch.ones(4)], [torch.ones(4)]]
    many.step(gradients)
    for (weight,) in weights:
        weight.data = weight.data.clone()
    many.step(gradients)
    assert [weight.tolist() for (weight,) in weights] == [[0.0] * 4, [0.5] * 4]


def test_the_same_gradients_with_other_numbers():
    weights, gradients = [[torch.zeros(2)], [torch.zeros(2)]], [[torch.ones(2)], [torch.ones(2)]]
    many = Ensemble(rated("sgd", (1.0, 2.0))(), weights)
    with pytest.raises(RuntimeError, match="there was no step"):
        many.step()
    many.step(gradients)
    for (gradient,) in gradients:
        gradient.fill_(10.0)
    many.step()
    assert [weight.tolist() for (weight,) in weights] == [[-11.0, -11.0], [-22.0, -22.0]]


@pytest.mark.parametrize("options", [{}, {"lookahead": 2, "ema_decay": 0.9}, {"schedule": True}, {"wd": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["adam", "lamb", "muon", "nadam", "rmsprop", "schedulefreesgd", "sgd", "sgld"])
def test_steps_one_after_the_other_are_those_of_step(name, options):
    """The second way is `step`, which the tests above compare with optimizers by themselves."""
    if name == "muon" and "lookahead" in options:
        pytest.skip("of single elements only")

    def run(repeated):
        made = rated(name, **{k: v for k, v in options.items() if k != "schedule"})()
        if options.get("schedule"):
            for each, rate in zip(made, RATES, strict=True):
                each.lr_scheduler = CosineScheduler(max_update=6, base_lr=rate)
        weights = torch.linspace(-1, 1, 4 * 6).reshape(4, 3, 2).clone()
        given = torch.empty(4, 3, 2)
        many = Ensemble(made, [[row] for row in weights])
        taken = many.steps()
        for t in range(7):
            torch.cos((t + 1) * weights, out=given)
            if t == 0 or not repeated:
                many.step([[row] for row in given] if t == 0 else None)
            else:
                next(taken)
        taken.close()
        carried = [each.host_state() for each in made]
        return weights, [many.updaters[i].states[0] for i in range(4)], [each.counts for each in made], carried

    one, other = run(False), run(True)
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(a, b) for x, y in zip(one[1], other[1], strict=True) for a, b in zip(x, y, strict=True))
    assert one[2:] == other[2:]
    assert one[2][0] == {0: 7}


def test_autograd_and_optimizers_know_of_steps_when_these_end():
    weight, gradient, own = torch.ones(2, requires_grad=True), torch.ones(2), optimizer.SGD(0.5)
    many = Ensemble([own], [[weight]])
    with pytest.raises(RuntimeError, match="there was no step"):
        next(many.steps())
    many.step([[gradient]])
    taken = many.steps()
    next(taken)
    squares = (weight * weight).sum()
    next(taken)
    taken.close()
    assert own.num_update == 3
    assert weight.tolist() == [-0.5, -0.5]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_rows_that_do_not_use_the_update_count_are_computed_once():
    asked = []

    class Plain(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            asked.append(t)
            return {"lr": 0.5 * lr}

    class Late(Plain):
        def hyper(self, t, lr, wd):
            return super().hyper(t, lr, wd) if t > 2 else {}

    class First(Plain):
        def hyper(self, t, lr, wd):
            return super().hyper(t, lr, wd) | ({"wd": 0.5} if t == 1 else {})

    for kind, more in ((Plain, 0), (Late, 4), (First, 4)):
        many, *others = both(lambda kind=kind: [kind(learning_rate=rate) for rate in RATES], steps=2)
        assert_equal(many, *others)
        asked.clear()
        for _ in range(4):
            many.step()
        assert len(asked) == more


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

    for kind in (Branching, Wrong):
        many, *others = both(lambda kind=kind: [kind(learning_rate=rate) for rate in RATES])
        assert_equal(many, *others)
        assert many.launches == 1


def test_nothing_has_changed_where_an_optimizer_refuses():
    weights = [[torch.ones(3)] for _ in range(4)]
    optimizers = [
        optimizer.Nadam(0.1),
        optimizer.Nadam(0.2),
        optimizer.Ftrl(lr_scheduler=lambda t: 0.1 if t < 2 else 0.0),
        optimizer.Ftrl(learning_rate=0.5),
    ]
    many = Ensemble(optimizers, weights)
    gradients = [[torch.ones(3)] for _ in range(4)]
    many.step(gradients)
    before, carried = copy.deepcopy(weights), [each.host_state() for each in optimizers]
    with pytest.raises(ValueError, match="a learning rate of 0"):
        many.step(gradients)
    assert all(torch.equal(a, b) for (a,), (b,) in zip(before, weights, strict=True))
    assert [each.host_state() for each in optimizers] == carried
    assert [each.num_update for each in optimizers] == [1] * 4
    optimizers[2].lr_scheduler = None
    many.step(gradients)  # and goes on as if nothing had been
    alone = torch.ones(3)
    own = optimizer.Nadam(0.1)
    plan = Updater(own).make_plan([0], [alone])
    plan.step([torch.ones(3)])
    plan.step([torch.ones(3)])
    assert torch.equal(weights[0][0], alone)


def test_bad_input():
    sgd = optimizer.SGD(0.1)
    with pytest.raises(ValueError, match="2 optimizers for weights of 1"):
        Ensemble([sgd, optimizer.SGD(0.1)], [[torch.ones(1)]])
    with pytest.raises(ValueError, match="occurs twice"):
        Ensemble([sgd, sgd], [[torch.ones(1)], [torch.ones(1)]])
    with pytest.raises(ValueError, match=r"weights\[0\] is empty"):
        Ensemble([sgd], [[]])
    with pytest.raises(TypeError, match="must be an Optimizer"):
        Ensemble(["sgd"], [[torch.ones(1)]])
    many = Ensemble([sgd, optimizer.SGD(0.2)], [[torch.ones(1)], [torch.ones(1)]])
    with pytest.raises(ValueError, match="gradients of 1 trainings for 2"):
        many.step([[torch.ones(1)]])
    with pytest.raises(ValueError, match=r"gradients\[1\] are 2, weights 1"):
        many.step([[torch.ones(1)], [torch.ones(1), torch.ones(1)]])
    with pytest.raises(ValueError, match=r"weights\[1\]\[0\]"):
        many.step([[torch.ones(1)], [torch.ones(2)]])


def test_make_optimizer_copies_schedules():
    schedule = FactorScheduler(step=2, base_lr=0.5)
    one, two = (make_optimizer("sgd", {"lr_scheduler": schedule, "learning_rate": rate}) for rate in (0.1, 0.2))
    assert (one.rate_at(1), two.rate_at(1), schedule.base_lr) == (0.1, 0.2, 0.5)
    with pytest.raises(TypeError, match="has no base_lr"):
        make_optimizer("sgd", {"lr_scheduler": lambda t: 0.1, "learning_rate": 0.1})


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "lion", "rmsprop"])
def test_a_restart_gives_the_same_weights_as_at_first(name):
    starts = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    weights = starts.clone()
    together = Ensemble([optimizer.create(name, learning_rate=rate) for rate in (0.1, 0.2, 0.3)], [[row] for row in weights])
    given, found = torch.empty(3, 5), []
    for turn in range(3):
        weights.copy_(starts)
        assert turn == 0 or together.restart()
        for step in range(4 + turn):  # the later ones go on where the first have stopped
            given.copy_(weights.cos())
            together.step([[row] for row in given] if step == 0 else None)
            if step == 3:
                found.append(weights.clone())
        assert [each.num_update for each in together.optimizers] == [4 + turn] * 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_schedule_cannot_be_restarted():
    schedules = [FactorScheduler(1, 0.5, base_lr=rate) for rate in (0.1, 0.2)]
    weights = [torch.ones(2), torch.ones(2)]
    together = Ensemble([optimizer.SGD(lr_scheduler=each) for each in schedules], [[weight] for weight in weights])
    together.step([[torch.ones(2)], [torch.ones(2)]])
    assert not together.restart()
    assert together.optimizers[0].num_update == 1
