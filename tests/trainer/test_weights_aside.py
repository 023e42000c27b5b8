"""What is written while the model has other weights than those that training goes on with is not lost without a word."""

import pytest
import torch

import tristep
from tristep import Trainer


def _trained(optimizer="sgd", **kwargs):
    net = torch.nn.Linear(3, 2)
    trainer = Trainer(net, optimizer, {"learning_rate": 0.1, **kwargs})
    for _ in range(2):
        _backward(net)
        trainer.step(1)
    _backward(net)
    return net, trainer


def _backward(net):
    net.zero_grad()
    net(torch.randn(4, 3)).square().sum().backward()


def _write(net):
    with torch.no_grad():
        net.bias.fill_(7.0)


def _replace(net):
    net.bias.data = torch.full_like(net.bias, 7.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.step(1),
        lambda trainer: trainer.update(1),
        lambda trainer: trainer.step_in_backward(1).__enter__(),
        lambda trainer: trainer.averaged_weights().__enter__(),
        lambda trainer: trainer.resume("no folder"),
    ],
)
def test_no_step_is_taken_inside_averaged_weights(call):
    net, trainer = _trained("sgd", ema_decay=0.5)
    before = net.weight.detach().clone()
    match = r"\(\) inside averaged_weights\(\), whose weights are restored at its end"
    with trainer.averaged_weights(), pytest.raises(RuntimeError, match=match):
        call(trainer)
    assert torch.equal(net.weight, before)
    trainer.step(1)
    assert not torch.equal(net.weight, before)


@pytest.mark.parametrize("write", [_write, _replace])
def test_what_is_written_inside_averaged_weights_is_told(write):
    net, trainer = _trained("sgd", ema_decay=0.5)
    before = net.bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"'bias' written to inside averaged_weights\(\)"), trainer.averaged_weights():
        write(net)
    assert torch.equal(net.bias, before)
    with pytest.raises(KeyError), trainer.averaged_weights():  # noqa: PT012  # an error of its own comes first
        write(net)
        raise KeyError
    assert torch.equal(net.bias, before)


def test_a_step_of_an_optimizer_inside_averaged_weights_is_told():
    net = torch.nn.Linear(3, 2)
    optimizer = tristep.optim.ScheduleFreeSGD(net.parameters(), lr=0.1)
    for _ in range(2):
        _backward(net)
        optimizer.step()
    _backward(net)
    with optimizer.averaged_weights():
        averaged = net.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"step\(\) while parameters have their averaged values"):
            optimizer.step()
        assert torch.equal(net.weight, averaged)
    with pytest.raises(RuntimeError, match=r"written to .* inside averaged_weights\(\)"), optimizer.averaged_weights():
        _write(net)
