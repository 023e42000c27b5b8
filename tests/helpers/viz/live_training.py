"""A small training for the tests of the live loop, and its exact outcome without one."""

import asyncio

import numpy as np
import pytest
import torch

import tristep

pytest.importorskip("matplotlib")

from tristep.viz import LiveLoop
from tristep.viz.scene import Axis, Panel, Scene
from tristep.viz.views import View

KINDS = ("trainer", "trainer with schedule", "torch", "torch with scheduler", "tristep.optim")


class Training:
    """A small net with dropout and batch norm, so that random numbers and buffers matter, and what trains it."""

    def __init__(self, kind="trainer", seed=3):
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.scheduler, self.stateful = None, [self.net]
        if kind.startswith("trainer"):
            rate = {"learning_rate": 0.02}
            if "schedule" in kind:
                rate = {"lr_scheduler": tristep.lr_scheduler.CosineScheduler(40, base_lr=0.02, warmup_steps=4)}
            self.trainer = tristep.Trainer(self.net, "nadam", rate)
            self.update = lambda: self.trainer.step(1)
        else:
            module = tristep.optim if kind == "tristep.optim" else torch.optim
            self.trainer = module.AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1)
            if "scheduler" in kind:  # one that makes each rate from the one before
                self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.trainer, 0.9)
                self.stateful.append(self.scheduler)
            self.update = self.trainer.step
        self.rates = []

    def step(self):
        x = torch.randn(16, 3)
        self.trainer.zero_grad()
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def steps(self, n=30):
        for _ in range(n):
            yield self.step()

    def loop(self, steps=None, **options):
        options = {"view": None, "mode": "block", "stateful": self.stateful} | options
        return LiveLoop(self.steps if steps is None else steps, trainer=self.trainer, **options)

    def state(self, drawn=True):
        """All numbers: weights, buffers and the optimizer's; with `drawn` the place in torch's random numbers."""
        tensors = [*self.net.state_dict().values(), *([torch.get_rng_state()] if drawn else [])]
        state = self.trainer.state_dict()
        if isinstance(self.trainer, tristep.Trainer):
            tensors += [tensor for own in state["state"].values() for tensor in own.values()]
            plain = [state["num_update"], state["counts"], state["settings"], state["lr_scheduler"]]
        else:
            tensors += [torch.as_tensor(value) for own in state["state"].values() for value in own.values()]
            plain = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        return [tensor.numpy().copy() for tensor in tensors], plain


def same(state, other):
    return len(state[0]) == len(other[0]) and state[1] == other[1] and all(map(np.array_equal, state[0], other[0]))


def plain(kind, n=30):
    """What a for loop makes of it."""
    training = Training(kind)
    losses = [loss.item() for loss in training.steps(n)]
    return training.state(), losses


def losses(run):
    return run.scalars["loss"].recent()[1].tolist()


async def ended(loop):
    while loop.status == "running" or len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)


def sliced(loop):
    """The loop, each step of which is a slice."""
    now = iter(range(10**6))
    loop.clock = lambda: next(now)
    return loop


class Watching(View):
    """Notes when it is refreshed, and when it is to catch up."""

    def __init__(self, now):
        super().__init__()
        self.now, self.refreshed, self.caught_up = now, [], []

    def scene(self):
        return Scene([Panel(Axis("", 0, 1), Axis("", 0, 1), [])])

    def refresh(self):
        self.refreshed.append(self.now[0])

    def catch_up(self):
        self.caught_up.append(self.now[0])
