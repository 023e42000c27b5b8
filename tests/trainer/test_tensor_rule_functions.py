"""What a user's function of whole tensors may do: what it changes or returns by mistake, under a Trainer."""

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer
from tristep.kernels import tensor_rule
from tristep.optimizer import RuleOptimizer


@tensor_rule
def in_place(w, g, state, hyper):
    """SGD with momentum, in operations that write to the gradient."""
    (mean,) = state
    (lr,) = hyper
    g.mul_(lr)
    mean = mean * 0.5 + g
    return w - mean, (mean,)


@tensor_rule
def sometimes(w, g, state, hyper):
    (lr,) = hyper
    if g.sum() > 5:
        g.mul_(0.0)
    return w - lr * g, ()


def made(rule):
    return type("Made", (RuleOptimizer,), {"rule": rule})(learning_rate=0.5)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_function_that_writes_to_the_gradient_changes_its_copy(batch_size):
    """Numbers as torch's, and gradients as they were, with batch sizes for which there is a copy anyway and others."""
    weights = [Parameter(torch.ones(3, 2)), Parameter(torch.ones(4))]
    theirs = [Parameter(weight.detach().clone()) for weight in weights]
    trainer = Trainer(weights, made(in_place))
    sgd = torch.optim.SGD(theirs, lr=0.5, momentum=0.5)
    for step in range(3):
        for weight, their in zip(weights, theirs, strict=True):
            weight.grad = torch.full_like(weight, step + 1.0)
            their.grad = weight.grad / batch_size
        trainer.step(batch_size)
        sgd.step()
        for weight, their in zip(weights, theirs, strict=True):
            assert (weight.grad == step + 1.0).all()
            torch.testing.assert_close(weight, their)


def test_a_gradient_that_is_written_to_unexpectedly_is_an_error():
    weight = Parameter(torch.ones(2))
    trainer = Trainer([weight], made(sometimes))
    weight.grad = torch.ones(2)
    trainer.step(1)
    weight.grad = torch.full((2,), 3.0)
    with pytest.raises(RuntimeError, match="'sometimes' has changed a gradient in place, which it has not done before"):
        trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


@tensor_rule
def one_row(w, g, state, hyper):
    (mean,) = state
    (lr,) = hyper
    return w - lr * g, ((mean + g)[:1],)


@tensor_rule
def small_weight(w, g, state, hyper):
    (lr,) = hyper
    return (w - lr * g)[0], ()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (one_row, r"'one_row' has returned mean with shape \(1, 2\): its shape is \(3, 2\)"),
        (small_weight, r"'small_weight' has returned w with shape \(2,\): its shape is \(3, 2\)"),
    ],
)
def test_states_and_weights_of_other_shapes_are_refused(rule, message):
    weights = [Parameter(torch.ones(3, 2)) for _ in range(2)]
    trainer = Trainer(weights, made(rule))
    for weight in weights:
        weight.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match=message):
        trainer.step(1)
    np.testing.assert_array_equal(torch.stack(weights).detach(), np.ones((2, 3, 2)))
