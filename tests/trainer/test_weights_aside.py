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


@pytest.mark.parametrize("write", [_write, _replace])
def test_weights_that_are_written_after_ascend_stay(write):
    net, trainer = _trained()
    trainer.ascend()
    raised = net.weight.detach().clone()
    write(net)
    _backward(net)
    with pytest.raises(RuntimeError, match=r"'bias' written to between ascend\(\) and step\(\)"):
        trainer.step(1)
    assert (net.bias == 7.0).all()
    assert torch.equal(net.weight, raised)
    gradient = net.bias.grad.clone()
    trainer.step(1)
    torch.testing.assert_close(net.bias.detach(), 7.0 - 0.1 * gradient)


def test_nothing_is_saved_between_ascend_and_step(tmp_path):
    net, trainer = _trained()
    trainer.ascend()
    for save in (trainer.state_dict, lambda: trainer.save_states(tmp_path / "a")):
        with pytest.raises(RuntimeError, match=r"between ascend\(\) and step\(\).*save after step"):
            save()
    assert not (tmp_path / "a").exists()
    _backward(net)
    trainer.step(1)
    trainer.save_states(tmp_path / "a")


@pytest.mark.parametrize("loads_weights", [False, True])
def test_loading_ends_an_ascent(loads_weights):
    net, trainer = _trained()
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    states = trainer.state_dict()
    trainer.ascend()
    if loads_weights:
        net.load_state_dict({name: tensor + 1 for name, tensor in weights.items()})
    trainer.load_state_dict(states)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, weights[name] + loads_weights)


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.step(1),
        lambda trainer: trainer.update(1),
        lambda trainer: trainer.ascend(),
        lambda trainer: trainer.step_in_backward(1).__enter__(),
        lambda trainer: trainer.averaged_weights().__enter__(),
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


def test_what_is_written_inside_averaged_weights_is_told():
    net, trainer = _trained("sgd", ema_decay=0.5)
    before = net.bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"'bias' written to inside averaged_weights\(\)"), trainer.averaged_weights():
        _write(net)
    assert torch.equal(net.bias, before)
    with pytest.raises(KeyError), trainer.averaged_weights():  # noqa: PT012  # an error of its own comes first
        _write(net)
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
