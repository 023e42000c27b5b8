"""`Trainer(zero_grads=True)`: a step fills the gradients that it has used with zeros, in the same pass."""

import numpy as np
import pytest
import torch
from optimizer_training import ByHand

import tristep
from tristep import StaleGradientError, Trainer


def parameters(device, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in ((5, 3), (1500,), ())]


def backward(params, seed, factor=1.0):
    torch.manual_seed(seed)
    sum((param * torch.randn(param.shape).to(param) * factor).sum() for param in params).backward()


@pytest.mark.sample(0, "cpu")
@pytest.mark.sample(1, "triton")
@pytest.mark.parametrize("name", ["adam", "lamb", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_zeroing_by_hand(name, dtype, engine, device):
    """To 1 ulp where numba contracts other products in a loop that stores one array more; gradients keep their memory."""
    if name == "lamb" and dtype == torch.bfloat16:
        pytest.skip("the same kernel as for adam")
    options = {"learning_rate": 0.1, "multi_precision": True}
    params, peers = parameters(device, dtype), parameters(device, dtype)
    trainer = Trainer(params, name, options, engine=engine, zero_grads=True)
    peer = Trainer(peers, name, options, engine=engine)
    addresses = []
    for step in range(4):
        for part in range(2):  # two backward passes add up
            backward(params, 2 * step + part)
            backward(peers, 2 * step + part)
        trainer.step(1)
        peer.step(1)
        peer.zero_grad(set_to_none=False)
        assert not any(param.grad.any() for param in params)
        addresses.append([param.grad.data_ptr() for param in params])
    assert addresses == [addresses[0]] * 4
    torch.testing.assert_close(params, peers, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


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


def test_of_an_overflow_too(engine, device, monkeypatch):
    monkeypatch.setattr(tristep.trainer.amp, "_target_dtype", "float16")
    params = parameters(device)
    trainer = Trainer(params, "adam", engine=engine, zero_grads=True)
    tristep.amp.init_trainer(trainer)
    before = [param.detach().clone() for param in params]
    backward(params, 0, float("inf"))
    with np.errstate(all="ignore"):  # Triton's interpreter computes in NumPy, which would warn of infinities
        trainer.step(1)
    assert not any(param.grad.any() for param in params)
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))


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
