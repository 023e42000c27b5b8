"""The Trainer: a step, and copies of optimizers."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_cases import CLOSE, backward_with, values_of

import tristep
from tristep import Trainer
from tristep.trainer.optimizer import SGD


def test_the_equation_of_gluons_tutorial(engine, device):
    """After step(batch_size) a weight is w - lr / batch_size * grad."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, engine=engine)
    batch_size = 16
    for _ in range(3):
        net.zero_grad()
        net(torch.randn(batch_size, 4, device=device)).square().sum().backward()
        expected = [values_of(w)[0] - 0.1 / batch_size * values_of(w.grad)[0] for w in net.parameters()]
        trainer.step(batch_size)
        for weight, wanted in zip(values_of(*net.parameters()), expected, strict=True):
            np.testing.assert_allclose(weight, wanted, **CLOSE)


@pytest.mark.parametrize("batch_size", [1, 4, 0.5, np.int64(3), np.float32(2.5), torch.tensor(8)])
def test_the_gradient_is_divided_by_the_batch_size(params, gradients, batch_size):
    trainer = Trainer(params, "sgd", {"learning_rate": 0.3, "rescale_grad": 2.0})
    before = values_of(*params)
    backward_with(params, gradients)
    trainer.step(batch_size)
    assert trainer.optimizer.rescale_grad == pytest.approx(2.0 / float(batch_size))
    for weight, old, gradient in zip(params, before, values_of(*gradients), strict=True):
        np.testing.assert_allclose(values_of(weight)[0], old - 0.3 * 2.0 / float(batch_size) * gradient, **CLOSE)


def test_the_batch_size_may_change_from_step_to_step_and_does_not_add_up(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    for batch_size in (4, 2, 8, 1):
        before = values_of(*params)
        trainer.zero_grad()
        backward_with(params, gradients)
        trainer.step(batch_size)
        for weight, old, gradient in zip(params, before, values_of(*gradients), strict=True):
            np.testing.assert_allclose(values_of(weight)[0], old - gradient / batch_size, **CLOSE)


def test_weights_stay_leaves_without_history(params, gradients, engine):
    trainer = Trainer(params, "sgd", {"momentum": 0.9}, engine=engine)
    places = [param.data_ptr() for param in params]
    for _ in range(2):
        backward_with(params, gradients)
        trainer.step(1)
    assert all(param.is_leaf and param.requires_grad and param.grad_fn is None for param in params)
    assert [param.data_ptr() for param in params] == places


def test_backward_through_a_graph_from_before_the_step_is_refused(params, engine):
    """As with torch.optim: autograd must notice that a weight has changed."""
    loss = sum(param.square().sum() for param in params)
    loss.backward(retain_graph=True)
    Trainer(params, "sgd", engine=engine).step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_step_may_be_taken_in_any_gradient_mode(params, gradients, mode):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    before = values_of(*params)
    for _ in range(2):
        trainer.zero_grad()
        backward_with(params, gradients)
        with mode():
            trainer.step(1)
    for weight, old, gradient in zip(params, before, values_of(*gradients), strict=True):
        np.testing.assert_allclose(values_of(weight)[0], old - 2.5 * gradient, **CLOSE)


def test_gradients_may_be_clipped_between_the_halves(params, gradients):
    """torch's own clipping, on the whole gradient, then a step of plain SGD."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before = values_of(*params)
    backward_with(params, gradients)
    trainer.allreduce_grads()
    torch.nn.utils.clip_grad_norm_(params, max_norm=0.5)
    trainer.update(1)
    moved = [old - new for old, new in zip(before, values_of(*params), strict=True)]
    assert math.sqrt(sum(float((part**2).sum()) for part in moved)) == pytest.approx(0.5, rel=1e-5)


def test_it_trains_to_the_least_squares_solution(device):
    x = torch.randn(64, 3, device=device)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], device=device) + 0.3 + 0.1 * torch.randn(64, 1, device=device)
    net = torch.nn.Linear(3, 1).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.8})
    for _ in range(200):
        net.zero_grad(set_to_none=False)
        (net(x) - y).square().sum().backward()
        trainer.step(len(x))
    best = np.linalg.lstsq(np.c_[values_of(x)[0], np.ones(64)], values_of(y)[0], rcond=None)[0].ravel()
    found = np.concatenate([value.ravel() for value in values_of(net.weight, net.bias)])
    np.testing.assert_allclose(found, best, atol=1e-4)


TORCH_PEERS = {
    # Ours, and torch's. MXNet adds epsilon elsewhere, so it is made too small to matter, and decays otherwise, so wd is 0
    # wherever it is not plain.
    "sgd": ("sgd", {"learning_rate": 0.05, "wd": 0.02}, torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.02}),
    "momentum": (
        "sgd",
        {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.02},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02},
    ),
    "nag": (
        "nag",
        {"learning_rate": 0.05, "momentum": 0.9},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    ),
    "adam": (
        "adam",
        {"learning_rate": 0.01, "epsilon": 1e-12, "wd": 0.02},
        torch.optim.Adam,
        {"lr": 0.01, "eps": 1e-12, "weight_decay": 0.02},
    ),
    "adamw": (
        "adamw",
        {"learning_rate": 0.01, "epsilon": 1e-12},
        torch.optim.AdamW,
        {"lr": 0.01, "eps": 1e-12, "weight_decay": 0},
    ),
    "adagrad": ("adagrad", {"learning_rate": 0.1, "eps": 1e-14}, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-14}),
    "adadelta": ("adadelta", {"rho": 0.8, "epsilon": 1e-4}, torch.optim.Adadelta, {"lr": 1.0, "rho": 0.8, "eps": 1e-4}),
    "adamax": (
        "adamax",
        {"learning_rate": 0.01, "beta2": 0.9, "wd": 0.02},
        torch.optim.Adamax,
        {"lr": 0.01, "betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.02},
    ),
    "rmsprop": (
        "rmsprop",
        {"learning_rate": 0.01, "gamma1": 0.95, "epsilon": 1e-14},
        torch.optim.RMSprop,
        {"lr": 0.01, "alpha": 0.95, "eps": 1e-14},
    ),
    "rmsprop centered": (
        "rmsprop",
        {"learning_rate": 0.01, "gamma1": 0.95, "gamma2": 0.8, "epsilon": 1e-14, "centered": True},
        torch.optim.RMSprop,
        {"lr": 0.01, "alpha": 0.95, "eps": 1e-14, "momentum": 0.8, "centered": True},
    ),
}


@pytest.mark.parametrize("name", TORCH_PEERS)
def test_twenty_steps_like_torch_optim(name, params, engine):
    ours, kwargs, peer, peer_kwargs = TORCH_PEERS[name]
    twins = [Parameter(param.detach().double()) for param in params]  # the oracle computes in float64
    trainer, reference = Trainer(params, ours, kwargs, engine=engine), peer(twins, **peer_kwargs)
    for _ in range(20):
        gradients = [torch.randn_like(param) for param in params]
        trainer.zero_grad()
        reference.zero_grad()
        backward_with(params, gradients)
        backward_with(twins, [gradient.double() for gradient in gradients])
        trainer.step(batch_size=1)
        reference.step()
    for one, other in zip(values_of(*params), values_of(*twins), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_a_copy_counts_for_itself(params, gradients):
    optimizer = SGD()
    trainer = Trainer(params, optimizer)
    backward_with(params, gradients)
    trainer.step(1)
    copied = copy.deepcopy(optimizer)
    backward_with(params, gradients)
    trainer.step(1)
    assert (copied.num_update, optimizer.num_update) == (1, 2)
    assert (set(copied.counts.values()), set(optimizer.counts.values())) == ({1}, {2})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch looks at it
@pytest.mark.parametrize("what", ["training function", "step"])
def test_where_torch_compiles_a_trainer_steps_as_it_does_elsewhere(what):
    """As torch.optim does, whose weights are the judge."""
    ours, theirs = (torch.nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    trainer = Trainer(ours, "adam", {"learning_rate": 0.02})
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.02)
    step = torch.compile(trainer.step, backend="eager") if what == "step" else trainer.step

    def train(x):
        trainer.zero_grad()
        loss = ours(x).square().sum()
        loss.backward()
        step(1)
        return loss

    if what == "training function":
        train = torch.compile(train, backend="eager")
    for k in range(4):
        x = torch.full((2, 3), 0.5 + k)
        train(x)
        optimizer.zero_grad()
        theirs(x).square().sum().backward()
        optimizer.step()
    for weight, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)


def test_an_optimizer_belongs_to_the_last_trainer_that_was_given_it():
    """MXNet takes one for two without a word, and both count on it."""
    optimizer = tristep.optimizer.Adam()
    first, second = (torch.nn.Linear(2, 1) for _ in range(2))
    one, two = Trainer(first, optimizer), Trainer(second, optimizer)
    for net in (first, second):
        net(torch.ones(1, 2)).sum().backward()
    before = first.weight.detach().clone()
    for call in (one.step, one.update, lambda size, trainer=one: trainer.step_in_backward(size).__enter__()):
        with pytest.raises(RuntimeError, match="the Adam of this Trainer has been given to another Trainer since"):
            call(1)
    assert torch.equal(first.weight, before)
    two.step(1)
    assert optimizer.num_update == 1
    with pytest.warns(UserWarning, match="Adam has counted 1 updates for another Trainer, and counts on"):
        Trainer(first, optimizer)


class Allocations(TorchDispatchMode):
    """Counts the tensors that torch makes of nothing."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("zeros", "empty", "empty_strided", "new_empty", "full")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lion"])
def test_a_first_step_allocates_as_often_for_many_parameters_as_for_few(optimizer):
    """Else a first step of a million small ones takes hours."""
    counts = []
    for n in (5, 50):
        params = [Parameter(torch.zeros(1)) for _ in range(n)]
        for param in params:
            param.grad = torch.ones(1)
        trainer = Trainer(params, optimizer, engine="eager")
        with Allocations() as allocations:
            trainer.step(1)
        counts.append(allocations.count)
    assert counts[0] == counts[1]
