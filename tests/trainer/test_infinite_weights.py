"""Weights of -inf that mask something, with gradients of 0: without weight decay they stay as they are, as in torch."""

import numpy as np
import pytest
import torch

import tristep

MASKED = torch.tensor([False, True, False, True])
PEERS = {
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.1},
    "Adam with amsgrad": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.0},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.1},
}


@pytest.fixture(autouse=True)
def _no_warnings_of_the_interpreter():
    """Triton's interpreter computes the product of 0 and infinity in NumPy, before the selection drops it."""
    with np.errstate(invalid="ignore"):
        yield


def masked(values):
    return torch.where(MASKED, -torch.inf, values)


def gradients(step, device="cpu"):
    return torch.where(MASKED, 0.0, torch.tensor([1.0, 2.0, -3.0, 4.0]) * (1.0 - 0.3 * step)).to(device)


@pytest.mark.parametrize("name", PEERS)
def test_a_masked_weight_stays_as_torch_leaves_it(name, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    answers = []
    for module, where in ((torch.optim, "cpu"), (tristep.optim, device)):
        param = torch.nn.Parameter(masked(torch.ones(4)).to(where))
        made = getattr(module, name.split()[0])([param], **PEERS[name])
        for step in range(3):
            param.grad = gradients(step, where)
            made.step()
        answers.append((param.detach().cpu(), {key: state.cpu() for key, state in made.state[param].items()}))
    (expected, states), (found, own) = answers
    torch.testing.assert_close(found, expected)
    for key, state in states.items():
        torch.testing.assert_close(own[key].to(state.dtype), state, msg=lambda text, key=key: f"{key}: {text}")
