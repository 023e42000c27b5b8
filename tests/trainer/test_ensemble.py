"""Trainings side by side: each must be what it is alone, to the bit, by an `Updater` of its own.

A sweep of them is a path of test_paths.py.
"""

import pytest
import torch
from ensembles import RATES, SHAPES, assert_equal, both, rated

from tristep import optimizer
from tristep.kernels import rules
from tristep.trainer.lr_scheduler import FactorScheduler

NAMES = [name for name in optimizer.registered() if optimizer.registered()[name].__module__.startswith("tristep")]


def shapes_for(name):
    return [shape for shape in SHAPES if len(shape) == 2] if name == "groupadagrad" else SHAPES


@pytest.mark.sample(6)
@pytest.mark.sample(1, "cpu")
@pytest.mark.sample(1, "triton")
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_stacked_as_alone(name, engine, device):
    steps = 2 if engine == "triton" and device.type == "cpu" else 5
    assert_equal(*both(rated(name), shapes_for(name), steps, engine, device=device))


def test_packed_states_as_alone():
    assert_equal(*both(rated("adam", state_dtype="8bit"), shapes=((64, 80), (7,)), steps=3))


@pytest.mark.parametrize("kind", [True, "remainder", "split8"])
def test_16_bits_as_alone(kind):
    many, *others = both(rated("adamw", multi_precision=kind), dtype=torch.bfloat16)
    assert_equal(many, *others)
    assert many.updaters[0].masters


def test_kinds_side_by_side():
    """Different rules, one of whole tensors, one by hand, one that looks at all tensors."""

    class ByHand(optimizer.Optimizer):
        def create_state(self, index, weight):
            return torch.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            state.mul_(0.9).add_(grad)
            weight.sub_(self._get_lr(index) * state)

    def make():
        names = ("adam", "sgd", "muon", "prodigy", "adam", "sgd", "sgd")
        made = [optimizer.create(name, learning_rate=0.01 * (i + 1)) for i, name in enumerate(names)]
        return [*made, ByHand(learning_rate=0.1)]

    many, together, _, apart = both(make, ((4, 3), (8,), (4, 4)))
    assert many.launches == 5  # Muon has one for vectors
    for ours, theirs in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("steps", [3, 60, pytest.param(300, marks=pytest.mark.sample(0))])
def test_rows_of_coming_steps_are_those_of_single_steps(steps):
    """Bias corrections are computed for many steps at once; a schedule, and a branch in user code, forbid that."""

    class Late(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": lr if t < 40 else 0.5 * lr}

    class Slower(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": lr / t}

    def make():
        made = [optimizer.Adam(rate) for rate in RATES] + [optimizer.AdamW(rate, wd=0.1) for rate in RATES]
        made += [optimizer.Adam(0.1, beta1=beta, beta2=0.9 + 0.1 * beta) for beta in (0.5, 0.7, 0.9)]
        made += [kind(learning_rate=rate) for kind in (Late, Slower) for rate in RATES]
        return [*made, optimizer.Adam(lr_scheduler=FactorScheduler(step=2, factor=0.5, base_lr=0.05))]

    assert_equal(*both(make, ((2,),), steps))


def test_stacks_of_trainings_in_turns_are_taken_apart():
    """Those of one kind are no slice of a stack where two kinds take turns unevenly."""
    kinds = ("adam", "adam", "sgd", "adam", "sgd")

    def make():
        return [optimizer.create(kind, learning_rate=0.01 * (i + 1)) for i, kind in enumerate(kinds)]

    many, *others = both(make, ((4,), (2, 2)))
    assert_equal(many, *others)
    assert many.launches == 2
