"""What a user's function of whole tensors may do: what it changes or returns by mistake, under a Trainer."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer
from tristep.kernels import Update, tensor_rule
from tristep.kernels.states import states_for
from tristep.optim import as_torch
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


def made(rule, **options):
    return type("Made", (RuleOptimizer,), {"rule": rule})(learning_rate=0.5, **options)


@tensor_rule
def polar(w, g, state, hyper):
    """The nearest orthogonal matrix, whose decomposition raises for NaN."""
    (mean,) = state
    (lr,) = hyper
    u, _, v = torch.linalg.svd(g)
    return w - lr * u @ v, (mean + g,)


class Polar(RuleOptimizer):
    rule = polar


PATHS = {
    "a Trainer": lambda weights: Trainer(weights, made(polar)),
    "with an average": lambda weights: Trainer(weights, made(polar, ema_decay=0.5)),
    "with limits": lambda weights: Trainer(weights, made(polar, skip_nonfinite=False, clip_norm=1e9)),
    "after another optimizer": lambda weights: Trainer(weights, [("0", "sgd", {"learning_rate": 0.5}), ("*", made(polar))]),
    "torch's interface": lambda weights: as_torch(Polar)(weights, lr=0.5),
    "two groups": lambda weights: as_torch(Polar)(
        [{"params": weights[:1], "ema_decay": 0.5}, {"params": weights[1:]}], lr=0.5
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_function_that_raises_changes_no_tensor(path, monkeypatch):
    """Neither those before it, nor counts: the repeated step is a first step. As in `half a step` of svd for NaN."""
    weights = [Parameter(torch.zeros(3, 3)) for _ in range(2)]
    stepping = PATHS[path](weights)
    step = partial(stepping.step, 1) if isinstance(stepping, Trainer) else stepping.step
    decompose, calls = torch.linalg.svd, []

    def svd(matrix):
        calls.append(matrix)
        if len(calls) == failing:
            raise torch.linalg.LinAlgError
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "svd", svd)
    failing = 1 if path == "after another optimizer" else 2
    for weight in weights:
        weight.grad = torch.eye(3)
    with pytest.raises(torch.linalg.LinAlgError):
        step()
    assert not any(weight.any() for weight in weights)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.eye(3)
        step()
    for weight in weights:
        torch.testing.assert_close(weight.detach(), -torch.eye(3), rtol=0, atol=1e-6)


@tensor_rule
def steps_in_place(w, g, state, hyper):
    (lr,) = hyper
    return w.sub_(lr * g), state


@tensor_rule(batched=True)
def averages_in_place(w, g, state, hyper):
    (mean,) = state
    (lr,) = hyper
    mean.mul_(0.5).add_(g)
    return w - lr * mean, (mean,)


@tensor_rule
def later_in_place(w, g, state, hyper):
    (mean,) = state
    (lr,) = hyper
    if mean.any():
        w.sub_(lr * g)
    return w - lr * g, (mean + g,)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("rule", "name"), [(steps_in_place, "w"), (averages_in_place, "mean")])
def test_a_function_that_changes_weights_or_states_is_refused_and_changes_none(rule, name, skips):
    weights = [Parameter(torch.ones(3, 2)) for _ in range(2)]
    states = states_for(rule, weights)
    control = torch.tensor([1.0, 1.0]) if skips else None
    run = Update(rule, [weight.detach() for weight in weights], states, grad_scale_and_skip=control)
    run.hyper[:] = [1.0, 0.5]
    for _ in range(2):
        run.bind([torch.ones(3, 2) for _ in weights])
        with pytest.raises(RuntimeError, match=f"{rule.name!r} has changed {name} in place: it must return new tensors.*No"):
            run()
    assert all((weight == 1).all() for weight in weights)
    assert not any(state.any() for row in states for state in row)


def test_a_weight_that_is_changed_in_place_at_a_later_step_is_an_error():
    weight = Parameter(torch.ones(2))
    trainer = Trainer([weight], made(later_in_place))
    weight.grad = torch.ones(2)
    trainer.step(1)
    weight.grad = torch.ones(2)
    with pytest.raises(
        RuntimeError, match="has changed w in place.* not done so before: the tensor itself has been changed"
    ):
        trainer.step(1)


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
