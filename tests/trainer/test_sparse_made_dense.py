"""Sparse gradients for every optimizer: the numbers of dense ones, and one warning where rows cannot be updated alone.

In MXNet, operators without a sparse form convert their arguments, and say so once.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer, replicate
from tristep.trainer.optimizer import create, registered, settings

TAKERS = {name for name, klass in registered().items() if getattr(klass, "takes_sparse", False)}
OTHERS = sorted(registered().keys() - TAKERS)


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def gradients(steps=3):
    """Pairs of a sparse gradient, with a row that comes twice, and the same as a dense one."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows, values = torch.tensor([[2, 0, 2]]), torch.randn(3, 3, generator=generator)
        sparse = torch.sparse_coo_tensor(rows, values, (4, 3))
        yield sparse, sparse.to_dense()


def by_trainer(weight, name, given):
    param = Parameter(weight)
    trainer = Trainer([param], name)
    for gradient in given:
        param.grad = gradient
        trainer.step(2)
    return [param.detach(), *trainer._updater.states[0]]


def by_hand(weight, name, given):
    """As MXNet's test_rms calls it."""
    optimizer = create(name, rescale_grad=0.5)
    state = optimizer.create_state(0, weight)
    for gradient in given:
        optimizer.update(0, weight, gradient, state)
    return [weight, *state]


def by_store(weight, name, given):
    layer = torch.nn.Linear(3, 4, bias=False)
    layer.weight.data = weight
    nets = replicate(layer, ["cpu", "cpu"])
    trainer = Trainer(nets, name, update_on_kvstore=False)
    for gradient in given:
        nets[0].weight.grad, nets[1].weight.grad = gradient, gradient.clone()
        trainer.step(4)
    return [nets[0].weight.detach(), nets[1].weight.detach()]


@pytest.mark.sample(12)
@pytest.mark.parametrize("way", [by_trainer, by_hand, by_store])
@pytest.mark.parametrize("name", OTHERS)
def test_a_sparse_gradient_gives_the_numbers_of_a_dense_one(name, way, recwarn):
    ends = []
    for kind in range(2):
        start = torch.linspace(-1, 1, 12).reshape(4, 3)
        ends.append(way(start, name, [pair[kind] for pair in gradients()]))
    assert len(ends[0]) == len(ends[1])
    assert all(map(torch.equal, *ends))
    (warning,) = recwarn.list
    assert f"{registered()[name].__name__} updates all rows: it makes sparse gradients, such as of" in str(warning.message)
    assert warning.filename == __file__


def test_gradients_are_zeroed():
    param = Parameter(torch.ones(4, 3))
    trainer = Trainer([param], "lion", zero_grads=True)
    for k, (param.grad, _) in enumerate(gradients()):
        with pytest.warns(UserWarning, match="Lion updates all rows") if k == 0 else nullcontext():
            trainer.step(1)
        assert not param.grad.to_dense().any()
