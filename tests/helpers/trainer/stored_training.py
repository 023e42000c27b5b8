"""Trainings of a few parameters whose weights and states are stored in low precision, for tests."""

import torch

from tristep import Trainer, optimizer
from tristep.kernels import Rule

F32, I8 = torch.float32, torch.int8
SHAPES = ((40, 30), (7,), (4, 4), ())


def parameters(device, dtype):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def train(params, step, steps, seed=1):
    """With gradients of their own sizes, so that they do not depend on the weights."""
    torch.manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape).to(param)
        step()


def made(device, dtype, arguments, engine=None, name="adamw"):
    params = parameters(device, dtype)
    return params, Trainer(params, name, {"learning_rate": 0.01, "wd": 0.1, **arguments}, engine=engine)


def stepped(device, dtype, arguments, engine=None, name="adamw", steps=5):
    params, trainer = made(device, dtype, arguments, engine, name)
    train(params, lambda: trainer.step(1), steps)
    return params, trainer


def saved(trainer, slot):
    return {name: slots[slot] for name, slots in trainer.state_dict()["state"].items()}


def close_to(params, others, atol, rtol=2**-7):
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param.float(), other.float(), rtol=rtol, atol=atol)


def whole_of(weight, master):
    """The float32 number that a weight and its master are together."""
    bits = weight.detach().float().view(torch.int32)
    if master.dtype == F32:
        return master
    return (bits + (master.to(torch.int32) << (8 if master.dtype == I8 else 0))).view(F32)


def packs():
    """The optimizers that have states to be packed."""
    for name, klass in optimizer.registered().items():
        if klass.__module__.startswith("tristep.") and isinstance(rule := optimizer.create(name).rule, Rule):
            if set(rule.state) - set(rule.full_precision):
                yield name
