"""Trainings side by side and each alone, for tests."""

import torch

from tristep import optimizer
from tristep.trainer import Ensemble
from tristep.trainer.optimizer.updater import Updater

SHAPES = ((5, 3), (7,), (4, 4))
RATES = (0.1, 0.01, 0.1, 0.003)


def both(make, shapes=SHAPES, steps=5, engine=None, dtype=torch.float32, device="cpu"):
    """`Ensemble` and single updaters after the same steps, and the weights of both.

    Weights of the second shape begin at multiples of 4 bytes only.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    optimizers, others = make(), make()
    stacks = [torch.stack([weight] * len(optimizers)) for weight in start]
    together, apart = ([list(row) for row in zip(*each, strict=True)] for each in (stacks, map(torch.clone, stacks)))
    many = Ensemble(optimizers, stacks, engine)
    updaters = [Updater(each, engine) for each in others]
    plans = [updater.make_plan(range(len(start)), weights) for updater, weights in zip(updaters, apart, strict=True)]
    for _ in range(steps):
        given = [[torch.randn(s, generator=generator).to(device, dtype) for s in shapes] for _ in optimizers]
        many.step([torch.stack(column) for column in zip(*given, strict=True)])
        for plan, grads in zip(plans, given, strict=True):
            plan.step(grads)
    return many, together, updaters, apart


def assert_equal(many, together, updaters, apart):
    """All weights, states, masters, counts and what is carried on."""
    for i, (ours, theirs) in enumerate(zip(many.updaters, updaters, strict=True)):
        assert all(map(torch.equal, together[i], apart[i]))
        for k in range(len(apart[i])):
            for a, b in zip(ours.states[k], theirs.states[k], strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
        assert ours.masters.keys() == theirs.masters.keys()
        assert all(torch.equal(ours.masters[k], theirs.masters[k]) for k in ours.masters)
        assert ours.optimizer.counts == theirs.optimizer.counts
        assert ours.optimizer.num_update == theirs.optimizer.num_update
        if isinstance(ours.optimizer, optimizer.RuleOptimizer):
            assert ours.optimizer.host_state() == theirs.optimizer.host_state()


def rated(name, rates=RATES, **arguments):
    takes_rate = name != "adadelta"
    return lambda: [optimizer.create(name, **({"learning_rate": r} if takes_rate else {}), **arguments) for r in rates]
