"""Parameters by name, as Gluon's collect_params gives them."""

import doctest

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer, collect_params
from tristep.trainer.step import params


def _net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def test_names_are_sorted_and_chosen_from_their_beginning():
    net = _net()
    found = collect_params(net)
    assert list(found) == ["0.bias", "0.weight", "1.bias", "1.weight", "2.bias", "2.weight"]
    assert all(found[name] is param for name, param in net.named_parameters())
    assert list(collect_params(net, ".*bias")) == ["0.bias", "1.bias", "2.bias"]
    assert list(collect_params(net, "bias")) == []
    assert list(collect_params(net, "0|2.w")) == ["0.bias", "0.weight", "2.weight"]


def test_attributes_reach_the_step_and_the_initializer():
    net = _net()
    collect_params(net, ".*bias").setattr("wd_mult", 0)
    collect_params(net, "0").setattr("lr_mult", 0.5)
    collect_params(net, "1").setattr("grad_req", "null")
    collect_params(net, "2.weight").setattr("init", "one")
    tristep.init.initialize(net, init=tristep.init.Constant(3.0), force_reinit=True)
    assert net[2].weight.tolist() == [[1.0] * 4]
    before = {name: param.detach().numpy().copy() for name, param in net.named_parameters()}
    trainer = Trainer(collect_params(net), "sgd", {"learning_rate": 1.0, "wd": 0.25})
    assert [trainer.optimizer.param_names[i] for i in range(6)] == sorted(before)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    trainer.step(1)
    moved = {name: before[name] - param.detach().numpy() for name, param in net.named_parameters()}
    expected = {"0.weight": 0.5 * 1.75, "0.bias": 0.5, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 1.25, "2.bias": 1.0}
    for name, step in expected.items():
        np.testing.assert_allclose(moved[name], step, rtol=1e-6)
    collect_params(net, "1").setattr("grad_req", "write")
    assert net[1].weight.requires_grad


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda net: collect_params(net).setattr("lr", 1), ValueError, "name='lr': must be one of 'lr_mult'"),
        (lambda net: collect_params(net).setattr("grad_req", "none"), ValueError, "grad_req='none': must be one of 'null'"),
        (lambda net: tristep.init.initialize(net, force_reinit=False), ValueError, "force_reinit=False: torch's parameters"),
    ],
)
def test_mistakes_are_named_and_change_nothing(wrong, error, message):
    net = _net()
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(error, match=message):
        wrong(net)
    assert not any(map(vars, net.parameters()))
    assert all(map(torch.equal, net.parameters(), before))


def test_docstring_examples():
    failed, attempted = doctest.testmod(params)
    assert attempted == 4
    assert failed == 0
