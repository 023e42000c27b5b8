"""`Trainer(zero_grads=True)`: a step fills the gradients that it has used with zeros, in the same pass.

The numbers are those of a path of test_paths.py, and each engine's zeros those of kernels/test_grad_scale_and_skip.py.
"""

import pytest
import torch
from optimizer_training import ByHand

from tristep import StaleGradientError, Trainer


def parameters(device):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in ((5, 3), (1500,), ())]


def backward(params, seed):
    torch.manual_seed(seed)
    sum((param * torch.randn(param.shape).to(param)).sum() for param in params).backward()


def test_zeros_are_not_fresh(engine, device):
    params = parameters(device)
    trainer = Trainer(params, "sgd", engine=engine, zero_grads=True)
    for seed in range(4):
        backward(params, seed)
        trainer.step(1)
        with pytest.raises(StaleGradientError):
            trainer.step(1)
    backward(params[:1], 7)
    before = [param.detach().clone() for param in params]
    trainer.step(1, ignore_stale_grad=True)
    assert [torch.equal(a, b) for a, b in zip(before, params, strict=True)] == [False, True, True]


def test_autograd_knows_of_the_zeros(engine, device):
    (param,) = parameters(device)[:1]
    trainer = Trainer([param], "sgd", engine=engine, zero_grads=True)
    param.grad = torch.ones_like(param)
    result = (param.grad * torch.ones((), device=device, requires_grad=True)).sum()
    trainer.step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_sparse_gradients(device):
    for lazy in (True, False):
        net = torch.nn.Embedding(5, 2, sparse=True).to(device)
        trainer = Trainer(net, "sgd", {"learning_rate": 0.5, "lazy_update": lazy}, zero_grads=True)
        expected = net.weight.detach().clone()
        for _ in range(3):
            net(torch.tensor([1, 3], device=device)).sum().backward()
            trainer.step(1)
            expected[[1, 3]] -= 0.5
            assert not net.weight.grad.to_dense().any()
            torch.testing.assert_close(net.weight.detach(), expected)


def test_an_optimizer_by_hand(device):
    params = parameters(device)
    trainer = Trainer(params, ByHand(learning_rate=0.5), zero_grads=True)
    backward(params, 0)
    trainer.step(1)
    assert not any(param.grad.any() for param in params)
    with pytest.raises(StaleGradientError):
        trainer.step(1)


def test_a_step_in_backward_lets_gradients_go_as_ever(device):
    params = parameters(device)
    trainer = Trainer(params, "sgd", zero_grads=True)
    before = [param.detach().clone() for param in params]
    with trainer.step_in_backward(1):
        backward(params, 0)
    assert [param.grad for param in params] == [None] * 3
    assert not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))
