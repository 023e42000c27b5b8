"""Training of a small network on each rank, or in one process with the whole batch, for tests."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import tristep

PARTS = 12  # samples of a step, over all ranks


def make_net(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)).to(dtype)


def make_batch(step, dtype, rank=0, ranks=1):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(PARTS, 7, generator=generator), torch.randn(PARTS, 2, generator=generator)
    part = slice(rank * PARTS // ranks, (rank + 1) * PARTS // ranks)
    return x[part].to(dtype), y[part].to(dtype)


def weights_of(net):
    return torch.cat([param.detach().flatten() for param in net.parameters()]).numpy().copy()


def train(optimizer, arguments, steps=5, dtype=torch.float64, spoil=True, first=0, net=None, trainer=None, **settings):
    """Weights after each step; with a store, on each rank with its part of the batch."""
    several = "kvstore" in settings
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    net = net or make_net(dtype)
    if spoil and rank:  # rank 0's are taken
        with torch.no_grad():
            for param in net.parameters():
                param.add_(1.0)
    trainer = trainer or tristep.Trainer(net, optimizer, dict(arguments), **settings)
    if several:  # a store gives the first weights at the first step, so the first gradients are of these, too
        trainer._init_kvstore()
    after = []
    for step in range(first, first + steps):
        x, y = make_batch(step, dtype, rank, ranks)
        trainer.zero_grad()
        (net(x) - y).square().sum().backward()
        trainer.step(PARTS)
        after.append(weights_of(net))
    return np.stack(after), net, trainer


def weights_after_steps(*args, **kwargs):
    return train(*args, **kwargs)[0]
