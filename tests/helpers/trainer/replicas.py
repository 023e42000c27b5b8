"""Small models in several copies, for tests of trainers with stores."""

import torch

import tristep
from tristep import amp
from tristep.trainer.kvstore import KVStore, LocalStore
from tristep.trainer.optimizer import Optimizer


def small_net(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(dtype)


def copies_of(net, count=2):
    return tristep.replicate(net, [next(net.parameters()).device] * count)


def make_batches(count, size=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, 3, generator=generator, dtype=dtype) for _ in range(count)]


def backward_parts(nets, batch):
    """Each copy its part of the batch; the loss is a sum, as Gluon's step wants it."""
    places = [next(net.parameters()).device for net in nets]
    for net, part in zip(nets, tristep.split_and_load(batch, places), strict=True):
        net(part).square().sum().backward()


def train_copies(trainer, nets, batches, zero_grad=True):
    for batch in batches:
        if zero_grad:
            trainer.zero_grad()
        backward_parts(nets, batch)
        trainer.step(len(batch))


def weights_of(net):
    return [param.detach().clone() for param in net.parameters()]


def assert_close(nets, model, rtol=1e-12):
    for net in nets:
        for ours, other in zip(net.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, other, rtol=rtol, atol=rtol)


class UpdatedByHand(Optimizer):
    def create_state(self, index, weight):
        return torch.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state.mul_(0.5).add_(grad, alpha=self.rescale_grad)
        weight.sub_(state, alpha=self._get_lr(index) / self.counts[index])


class Remote(KVStore):
    """A store of which a trainer knows the interface only, and which counts what it is asked for."""

    def __init__(self):
        self.type, self.calls, self.priorities, self._inner = "remote", [], [], LocalStore("device")

    def __getattribute__(self, name):
        if name in ("push", "pull", "init", "set_optimizer", "set_gradient_compression"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def init(self, key, value):
        self._inner.init(key, value)

    def push(self, key, value, priority=0):
        self.priorities.append(priority)
        self._inner.push(key, value, priority)

    def pull(self, key, out, priority=0, ignore_sparse=True):
        self._inner.pull(key, out, priority, ignore_sparse)

    def set_optimizer(self, optimizer):
        self._inner.set_optimizer(optimizer)

    def set_updater(self, updater):
        self._inner.set_updater(updater)

    def set_gradient_compression(self, compression_params):
        self._inner.set_gradient_compression(compression_params)

    def save_optimizer_states(self, fname, dump_optimizer=False):
        self._inner.save_optimizer_states(fname, dump_optimizer)

    def load_optimizer_states(self, fname):
        self._inner.load_optimizer_states(fname)


def fill_in_place(param):
    param.data.fill_(0.25)


def replace_data(param):
    param.data = torch.full_like(param.data, -0.5)


def with_loss_scaler(trainer):
    amp.init_trainer(trainer, amp.LossScaler(1024.0))
    return trainer


TWO_BIT = {"type": "2bit", "threshold": 0.5}
