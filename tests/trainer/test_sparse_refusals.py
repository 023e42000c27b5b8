"""Sparse gradients: which were written since the last step, and which are refused."""

import warnings

import pytest
import torch
from sparse_nets import Net, backward_of, values_of
from torch.nn import Parameter

from tristep import StaleGradientError, Trainer
from tristep.trainer.optimizer import SGD, get_updater, registered

# Those that take sparse gradients, with decay where they can.
TAKERS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}),
    "ccsgd": ("ccsgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01, "wd": 0.1}),
    "adagrad": ("adagrad", {"learning_rate": 0.1}),
    "groupadagrad": ("groupadagrad", {"learning_rate": 0.1}),
    "ftrl": ("ftrl", {"learning_rate": 0.1, "wd": 0.1}),
}


@pytest.fixture(autouse=True)
def _checked():
    """torch would like to be told whether sparse tensors are to be checked."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def _fails_and_changes_nothing(trainer, net, everything, words):
    before = everything(trainer, net.parameters())
    with pytest.raises(StaleGradientError, match=words):
        trainer.step(1)
    assert everything(trainer, net.parameters()) == before


def test_a_sparse_gradient_is_used_once(device, everything):
    net = Net().to(device)
    trainer = Trainer(net, "adam")
    words = torch.tensor([1, 1, 2], device=device)
    for _ in range(3):
        net.zero_grad()
        backward_of(net, words)
        trainer.step(1)
        _fails_and_changes_nothing(trainer, net, everything, "'embedding.weight', 'head.weight', 'head.bias'")
    backward_of(net, words)  # adds to the gradients, which makes them fresh
    trainer.step(1)
    used = net.embedding.weight.grad
    net.zero_grad()
    backward_of(net, words)
    net.embedding.weight.grad = used
    _fails_and_changes_nothing(trainer, net, everything, "for 'embedding.weight': call")
    assert trainer.optimizer.num_update == 4


def test_a_refused_step_uses_no_sparse_gradient_up(device, everything):
    net = Net().to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0})
    net.embedding(torch.tensor([2], device=device)).sum().backward()
    before = net.embedding.weight.detach().clone()
    _fails_and_changes_nothing(trainer, net, everything, "for 'head.weight'.*, 'head.bias'")
    trainer.step(1, ignore_stale_grad=True)
    before[2] -= 1
    torch.testing.assert_close(net.embedding.weight.detach(), before)
    assert trainer.optimizer.counts == {0: 1, 1: 0, 2: 0}
    now = everything(trainer, net.parameters())
    trainer.step(1, ignore_stale_grad=True)
    assert everything(trainer, net.parameters()) == now


def test_gradients_accumulate_over_backward_passes(device):
    weight = Parameter(torch.zeros(4, 2, device=device))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0})
    for rows in ([1, 1], [3, 1]):
        torch.nn.functional.embedding(torch.tensor(rows, device=device), weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse
    trainer.step(1)
    assert weight.tolist() == [[0.0, 0.0], [-3.0, -3.0], [0.0, 0.0], [-1.0, -1.0]]


def test_zeroing_makes_no_sparse_gradient_fresh(device, everything):
    net = Net().to(device)
    trainer = Trainer(net, "sgd")
    backward_of(net, torch.tensor([1], device=device))
    trainer.step(1)
    trainer.zero_grad(set_to_none=False)
    assert not net.embedding.weight.grad.to_dense().any()
    _fails_and_changes_nothing(trainer, net, everything, "'embedding.weight'")
    backward_of(net, torch.tensor([1], device=device))
    trainer.step(1)
    assert trainer.optimizer.num_update == 2


def test_those_that_take_them_are_mxnets():
    assert {name for name, klass in registered().items() if getattr(klass, "takes_sparse", False)} >= {
        name for name, _ in TAKERS.values()
    }


def test_other_sparse_layouts_are_refused(device):
    weight = torch.ones(4, 3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once in a process, that these are in beta
        gradient = torch.eye(4, 3, device=device).to_sparse_csr()
    with pytest.raises(TypeError, match=r"the gradient of '0' is sparse \(torch.sparse_csr\)"):
        get_updater(SGD())(0, gradient, weight)


def test_adagrad_decays_no_weights_with_sparse_gradients(everything, device):
    """As in MXNet."""
    net = Net().to(device)
    trainer = Trainer(net, "adagrad", {"wd": 0.1})
    backward_of(net, torch.tensor([1], device=device))
    before = everything(trainer, net.parameters())
    words = r"wd=0.1 for 'embedding.weight', whose gradient is sparse: AdaGrad does not decay such weights"
    with pytest.raises(ValueError, match=words):
        trainer.step(1)
    assert everything(trainer, net.parameters()) == before
    net.embedding.weight.wd_mult = 0.0
    trainer.step(1)
    assert trainer.optimizer.num_update == 1


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (torch.ones(3, 3).to_sparse(1), ValueError, r"the gradient of '0' is \(3, 3\) on cpu: its weight is \(4, 3\)"),
        (torch.ones(4, 3, dtype=torch.int64).to_sparse(1), TypeError, "the gradient of '0' is torch.int64: must be one of"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradient, error, message):
    weight, updater = torch.ones(4, 3), get_updater(SGD(momentum=0.5))
    with pytest.raises(error, match=message):
        updater(0, gradient, weight)
    assert weight.tolist() == [[1.0] * 3] * 4
    assert updater.optimizer.num_update == 0


def test_a_step_that_fails_leaves_rows_as_they_were(everything, device):
    broken = True

    def schedule(num_update):
        return -1.0 if broken and num_update == 2 else 1.0

    net = Net().to(device)
    trainer = Trainer(net, "sgd", {"lr_scheduler": schedule, "momentum": 0.5})
    words = torch.tensor([1, 1, 2], device=device)
    backward_of(net, words)
    trainer.step(1)
    net.zero_grad()
    backward_of(net, words)
    before = everything(trainer, net.parameters())
    with pytest.raises(ValueError, match=r"lr_scheduler\(2\)=-1.0"):
        trainer.step(1)
    assert everything(trainer, net.parameters()) == before
    broken = False
    (old,) = values_of(net.embedding.weight)
    trainer.step(1)
    assert (values_of(net.embedding.weight)[0] != old).any(axis=1).tolist() == [False, True, True] + [False] * 6
