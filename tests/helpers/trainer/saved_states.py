"""Trainers whose states are saved, for tests."""

import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer, lr_scheduler, rule
from tristep.kernels import reduction, tl
from tristep.trainer.optimizer import Optimizer, RuleOptimizer

SHAPES = {"body": (3, 5), "scale": (), "head": (70,), "nothing": (0, 2)}

MATRICES = {"body": (3, 5), "column": (4, 1), "row": (1, 70), "nothing": (0, 2)}


@reduction
def squares(w, g, state, hyper):
    return (g * g,)


@squares.finish
def largest(sums, kept, hyper):
    (largest,) = kept
    (square,) = sums
    return (tl.maximum(0.75 * largest, square),)


@rule(reduction=squares)
def cautious(w, g, state, hyper, sums):
    """m <- momentum m + g / sqrt(n), n the largest |g|^2 so far, which decays;  w <- w - lr m."""
    (mom,) = state
    lr, momentum = hyper
    (largest,) = sums
    mom = momentum * mom + g / tl.sqrt(largest + 1.0)
    return w - lr * mom, (mom,)


class Cautious(RuleOptimizer):
    """An optimizer whose rule keeps a number for each tensor."""

    rule = cautious

    def __init__(self, momentum=0.0, **kwargs):
        self.momentum = momentum
        super().__init__(**kwargs)


class Averaged(Optimizer):
    """An optimizer in MXNet's form, whose state is nested: a tuple with None, a tensor and a list."""

    def __init__(self, decay=0.5, **kwargs):
        super().__init__(**kwargs)
        self.decay, self.total = decay, 0.0

    def create_state(self, index, weight):
        return None, torch.zeros_like(weight), [torch.zeros((), dtype=torch.int64, device=weight.device)]

    def update(self, index, weight, grad, state):
        self._update_count(index)
        _, mean, counter = state
        counter[0] = counter[0] + 1
        self.total += 1.0
        mean.mul_(self.decay).add_(grad * self.rescale_grad)
        weight.sub_(self._get_lr(index) / float(counter[0]) * mean)


def make_params(dtype=torch.float32, device="cpu", shapes=SHAPES):
    return {name: Parameter(torch.randn(shape, device=device).to(dtype)) for name, shape in shapes.items()}


def twins_of(params):
    return {name: Parameter(param.detach().clone()) for name, param in params.items()}


def make_gradients(params):
    return {name: torch.randn_like(param) for name, param in params.items()}


def take_step(trainer, params, gradients, batch_size=2):
    for name, param in params.items():
        param.grad = gradients[name].clone().to(param.dtype)
    trainer.step(batch_size)


def are_equal(params, others):
    return all(torch.equal(param, others[name]) for name, param in params.items())


def by_file(trainer, other, tmp_path):
    trainer.save_states(tmp_path / "a.states")
    other.load_states(tmp_path / "a.states")


def by_dict(trainer, other, tmp_path):
    other.load_state_dict(trainer.state_dict())


WAYS = pytest.mark.parametrize("way", [by_file, by_dict], ids=["file", "dict"])


def check_refused(trainer, params, everything, load, error, message):
    params = list(params.values())
    before = everything(trainer, params)
    with pytest.raises(error, match=message):
        load()
    assert everything(trainer, params) == before


def make_trained():
    """A trainer after two steps, and its parameters."""
    params = make_params(shapes={"body": (2, 3), "head": (2,)})
    trainer = Trainer(params, "adam", {"wd": 0.1, "lr_scheduler": lr_scheduler.FactorScheduler(5, 0.5, base_lr=0.1)})
    for _ in range(2):
        take_step(trainer, params, make_gradients(params))
    return trainer, params
