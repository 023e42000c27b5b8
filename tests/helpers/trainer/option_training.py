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


def trained(device, name, arguments, engine=None, **others):
    params = parameters(device)
    trainer = Trainer(params, name, {"learning_rate": 0.05, **arguments}, engine=engine, **others)
    train(params, lambda: trainer.step(1))
    return params, trainer
