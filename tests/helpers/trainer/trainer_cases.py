"""Parameters and small steps for tests of the Trainer."""

import pytest
import torch

from tristep import StaleGradientError

# Some roundings of float32 apart.
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def values_of(*tensors):
    return [tensor.detach().cpu().double().numpy().copy() for tensor in tensors]


def backward_with(params, gradients):
    """A real backward pass that gives every parameter exactly this gradient, added to what it has."""
    sum((param * gradient).sum() for param, gradient in zip(params, gradients, strict=True)).backward()


def one_step_rates(trainer, params):
    """The rate of each parameter in one step with gradient 1."""
    before = values_of(*params)
    trainer.zero_grad()
    backward_with(params, [torch.ones_like(param) for param in params])
    trainer.step(1)
    return [float((old - new).mean()) for old, new in zip(before, values_of(*params), strict=True)]


def fails_and_changes_nothing(trainer, params, everything, match):
    params = list(params)
    before = everything(trainer, params)
    with pytest.raises(StaleGradientError, match=match):
        trainer.step(1)
    assert everything(trainer, params) == before


def reach_both(net):
    x = torch.ones(1, 2, device=net["head"].weight.device)
    net["head"](net["body"](x)).sum().backward()


def reach_head(net):
    net["head"](torch.ones(1, 2, device=net["head"].weight.device)).sum().backward()
