"""Training with updates cut among ranks, and without, for tests."""

import json
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import tristep
from tristep import optimizer as optimizers
from tristep.trainer.kvstore.buckets import GradientBuckets

LIMITS = {"bucket_bytes": 30_000, "first_bucket_bytes": 5_000}


def make_net(dtype=torch.float32, width=96):
    torch.manual_seed(5)
    conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
    layers = [conv, nn.Flatten(), nn.Linear(128, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)]
    return nn.Sequential(*layers).to(dtype)


def make_batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 3, 4, 4, generator=generator).to(dtype), torch.randn(12, 3, generator=generator).to(dtype)


def backward(net, step, rank, ranks, unused):
    x, y = (whole[rank * 12 // ranks : (rank + 1) * 12 // ranks] for whole in make_batch(step, next(net.parameters()).dtype))
    hidden = net[:-1](x)
    out = net[-1](hidden) if rank != unused else hidden[:, :3]
    ((out - y) ** 2).sum().backward()


def weights_of(net):
    return [param.detach().double().numpy().copy() for param in net.parameters()]


def make_optimizer(name, arguments):
    schedule = arguments.pop("schedule", False) if arguments else False
    if schedule:
        arguments["learning_rate"] = 0.01
        arguments["lr_scheduler"] = tristep.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.01)
    if name == "by hand":
        return ByHand(**arguments)
    return optimizers.create(name, **arguments)


class ByHand(optimizers.Optimizer):
    """An optimizer with a nested state, in torch's operations."""

    def create_state(self, index, weight):
        return [torch.zeros_like(weight), (torch.zeros(()), None)]

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state[0].mul_(0.9).add_(grad * self.rescale_grad)
        state[1][0].add_(1.0)
        weight.sub_(self._get_lr(index) * state[0])


def on_ranks(net, optimizer, update=True, limits=LIMITS, **settings):
    """A trainer over all ranks that has started, with small buckets."""
    trainer = tristep.Trainer(net, optimizer, kvstore="dist_sync", update_on_kvstore=update, **settings)
    with mock.patch.dict(GradientBuckets.__init__.__kwdefaults__, limits):
        trainer._init_kvstore()
    return trainer


def train_on_ranks(
    name, arguments, steps, dtype=torch.float32, unused=None, multipliers=False, loaded=None, start=0, update=True
):
    """Weights after each step and the whole state at the end; `update` is whether updates are cut among the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = make_net(dtype)
    params = list(net.parameters())
    if multipliers:
        params[0].lr_mult, params[3].wd_mult, params[4].lr_mult = 0.5, 0.0, 2.0
    engine = "eager" if ranks > 2 else None  # so that not every process has to compile
    trainer = on_ranks(net, make_optimizer(name, dict(arguments)), update, engine=engine)
    if loaded is not None:
        weights, path = loaded
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(torch.from_numpy(weight))
        trainer.load_states(path)
    each = []
    for step in range(start, start + steps):
        net.zero_grad()
        backward(net, step, rank, ranks, unused if step else None)
        trainer.step(12, ignore_stale_grad=True)
        each.append(weights_of(net))
    return each, as_arrays(trainer.state_dict())


def as_arrays(state):
    tensors = {
        name: {slot: (str(tensor.dtype), tensor.double().numpy().copy()) for slot, tensor in slots.items()}
        for name, slots in state["state"].items()
    }
    # How several processes put gradients together is no state of one process.
    return json.dumps({key: value for key, value in state.items() if key not in ("state", "buckets")}), tensors


def equal(one, other, atol=None):
    for a, b in zip(one, other, strict=True):
        if atol is None:
            assert a.tobytes() == b.tobytes()
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def same_state(one, other, atol=None):
    (header, tensors), (other_header, others) = one, other
    assert json.loads(header) == json.loads(other_header)
    assert list(tensors) == list(others)
    for name, slots in tensors.items():
        assert list(slots) == list(others[name])
        for slot, (dtype, values) in slots.items():
            assert (dtype, values.shape) == (others[name][slot][0], others[name][slot][1].shape)
            equal([values], [others[name][slot][1]], atol)
