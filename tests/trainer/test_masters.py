"""Master weights: split ones of 16 and 8 bits, and how they are converted; the judges are runs with float32 masters."""

import copy

import pytest
import torch
from stored_training import made, parameters, saved, stepped, train, whole_of

import tristep
from tristep import Trainer

F32, BF16, I16, I8 = torch.float32, torch.bfloat16, torch.int16, torch.int8


@pytest.mark.sample(3)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lion"])
def test_remainders_are_masters_to_the_bit(name, engine, device):
    """Gradients are given, so that weights half-way between two numbers, rounded otherwise, have no consequences."""
    _, trainer = stepped(device, BF16, {"multi_precision": True}, engine, name, steps=10)
    weights, other = stepped(device, BF16, {"multi_precision": "remainder"}, engine, name, steps=10)
    masters, remainders = saved(trainer, "master copy"), saved(other, "master copy")
    for weight, master, remainder in zip(weights, masters.values(), remainders.values(), strict=True):
        assert remainder.dtype == I16
        whole = (weight.detach().float().view(torch.int32) + remainder.to(torch.int32)).view(F32)
        assert torch.equal(whole, master)


@pytest.mark.sample(1)
def test_steps_below_24_bits_are_right_on_average_at_random(engine, device):
    """A step of 1/16 of what 24 bits tell from numbers below 1, 64 times: none to the nearest."""
    moved, count, unit = {}, 4000, 2.0**-16
    for at_random in (False, True):
        param = torch.nn.Parameter(torch.ones(count, dtype=BF16, device=device))
        arguments = {"learning_rate": unit / 16, "multi_precision": "split8", "stochastic_rounding": at_random}
        trainer = Trainer([param], "sgd", arguments, engine=engine)
        for _ in range(64):
            param.grad = torch.ones_like(param)
            trainer.step(1)
        moved[at_random] = 1.0 - float(whole_of(param, saved(trainer, "master copy")["0"]).double().mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(4 * unit, abs=5 * 2 * unit / count**0.5)  # variances of 64 steps add up to 4


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("before", [True, "remainder", "split8"])
@pytest.mark.parametrize("after", [True, "remainder", "split8"])
def test_masters_are_converted_when_they_are_loaded(before, after, engine, device):
    """As states are: a trainer keeps how it stores. A rest that does not fit is the largest."""
    params, trainer = stepped(device, BF16, {"multi_precision": before}, engine)
    wholes = list(map(whole_of, params, saved(trainer, "master copy").values()))
    others, other = made(device, BF16, {"multi_precision": after}, engine)
    other.load_state_dict(copy.deepcopy(trainer.state_dict()))
    assert other.optimizer.multi_precision == after
    for param, old in zip(others, params, strict=True):
        param.data.copy_(old)
        param.grad = torch.zeros_like(param)
    other.optimizer.lr = 0.0
    other.step(1)
    for param, master, whole in zip(others, saved(other, "master copy").values(), wholes, strict=True):
        assert master.dtype == {True: F32, "remainder": I16, "split8": I8}[after]
        found = whole_of(param, master)
        most = {True: 0, "remainder": 1, "split8": 0x100}[after]
        assert ((found.view(torch.int32) - whole.view(torch.int32)).abs() <= most).all()


def test_a_trainer_without_masters_takes_those_of_the_file(device):
    _, trainer = stepped(device, BF16, {"multi_precision": "split8"})
    _, other = made(device, BF16, {})
    other.load_state_dict(trainer.state_dict())
    assert other.optimizer.multi_precision == "split8"


@pytest.mark.sample(0, "cpu", "triton")
def test_a_converted_model_keeps_its_master_weights(engine, device):
    params, trainer = stepped(device, BF16, {"multi_precision": "remainder"}, engine)
    remainders = saved(trainer, "master copy")
    whole = [
        (param.detach().float().view(torch.int32) + rest.to(torch.int32)).view(F32)
        for param, rest in zip(params, remainders.values(), strict=True)
    ]
    trainer.optimizer.multi_precision = True
    for param in params:
        param.data = param.data.clone()  # moved, so that the trainer looks
        param.grad = torch.zeros_like(param)
    trainer.optimizer.lr = 0.0
    trainer.step(1)
    assert all(map(torch.equal, saved(trainer, "master copy").values(), whole))
    for param in params:
        param.data = param.data.float()
        param.grad = torch.zeros_like(param)
    trainer.step(1)
    assert all("master copy" not in slots for slots in trainer.state_dict()["state"].values())


def test_masters_of_torchs_interface_are_converted(device):
    params = parameters(device, BF16)
    optimizer = tristep.optim.Lion(params, lr=0.01, multi_precision=True)
    train(params, optimizer.step, 2)
    (group,) = optimizer.param_groups
    wholes = [optimizer.state[param]["master"].clone() for param in params]
    group.update(multi_precision="split8", lr=0.0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, whole in zip(params, wholes, strict=True):
        assert optimizer.state[param]["master"].dtype == torch.int8
        found = whole_of(param, optimizer.state[param]["master"])
        assert ((found.view(torch.int32) - whole.view(torch.int32)).abs() <= 0x100).all()
