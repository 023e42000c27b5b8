"""Training of some parameters with options of optimizers, for tests."""

import torch

from tristep import Trainer

SHAPES = ((5, 3), (7,), (4, 4), ())
STEPS = 11


def parameters(device, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in SHAPES]


def train(params, step, steps=STEPS, seed=1):
    torch.manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, dtype=torch.float64).to(param)
        step()


def trained(device, name, arguments, engine=None, steps=STEPS, **others):
    params = parameters(device)
    trainer = Trainer(params, name, {"learning_rate": 0.05, **arguments}, engine=engine, **others)
    train(params, lambda: trainer.step(1), steps)
    return params, trainer


def same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def states_of(trainer):
    """Copies of all saved states."""
    return {
        name: {slot: value.clone() for slot, value in row.items()} for name, row in trainer.state_dict()["state"].items()
    }
