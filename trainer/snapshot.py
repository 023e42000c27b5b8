"""Snapshot: the state of a training run at one moment, which can be restored bit for bit, however many steps later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .optimizer.multi import parts_of
from .random_state import random_state, set_random_state
from .replica import host_state_of, load_host_state
from .trainer import Trainer

__all__ = ["Snapshot"]


class Snapshot:
    """Weights, states, counts, settings, schedule, buffers of modules and random numbers, as they are now.

    Gradients are restored as the tensors that they are now, with what has been written to them since.

    Args:
        source: a `Trainer` or a `torch.optim.Optimizer`.
        modules: whose buffers, such as running means, to keep.

    Raises:
        TypeError: `source` is neither.

    Example:
        >>> import torch, tristep
        >>> from tristep.trainer.snapshot import Snapshot
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "adam")
        >>> before = Snapshot(trainer, [net])
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> trainer.step(1)
        >>> before.restore()
        >>> trainer.optimizer.num_update
        0
    """

    def __init__(self, source: Trainer | torch.optim.Optimizer, modules: Iterable[torch.nn.Module] = ()) -> None:
        if isinstance(source, Trainer):
            self.params = [parameter for replica in source.replicas for parameter in replica.params]
            self._restore_source = _of_trainer(source)
        elif isinstance(source, torch.optim.Optimizer):
            self.params = [parameter for group in source.param_groups for parameter in group["params"]]
            self._restore_source = _of_optimizer(source)
        else:
            raise TypeError(f"source must be a Trainer or a torch.optim.Optimizer, got {type(source).__name__}")
        self._weights = [parameter.detach().clone() for parameter in self.params]
        self._gradients = [parameter.grad for parameter in self.params]
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, so that none is kept twice
        for module in modules:
            self.add_buffers(module)
        self._random = random_state()

    def add_buffers(self, module: torch.nn.Module) -> None:
        """Keep the buffers of one more module, and of those in it, as they are now; known ones stay as they were kept."""
        for buffer in module.buffers():
            if id(buffer) not in self._buffers and not isinstance(buffer, torch.nn.parameter.UninitializedBuffer):
                self._buffers[id(buffer)] = buffer, buffer.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all of it. May be called several times."""
        for parameter, weight, gradient in zip(self.params, self._weights, self._gradients, strict=True):
            parameter.copy_(weight)
            parameter.grad = gradient
        for buffer, value in self._buffers.values():
            buffer.copy_(value)
        self._restore_source()
        set_random_state(self._random)


def _of_trainer(trainer: Trainer) -> Callable[[], None]:
    optimizer = trainer.optimizer
    saved, telemetry = copy.deepcopy(trainer.state_dict()), trainer.telemetry
    schedules = [(part, part.lr_scheduler) for part in parts_of(optimizer)]
    attributes = [copy.copy(getattr(schedule, "__dict__", {})) for _, schedule in schedules]
    counts, carried = optimizer.step_counts.copy(), host_state_of(optimizer)
    # Which gradients have been used up, of the trainer's one copy of the model, or of several.
    guards = [replica.guard for replica in trainer.replicas]
    used = [guard.snapshot() for guard in guards]

    def restore() -> None:
        for part, schedule in schedules:
            part.lr_scheduler = schedule
        trainer.load_state_dict(copy.deepcopy(saved))
        for (part, schedule), own in zip(schedules, attributes, strict=True):
            part.lr_scheduler = schedule  # the very same: who has made it may want to change it
            if own:
                vars(schedule).update(own)
        optimizer.step_counts.restore(counts)
        load_host_state(optimizer, carried)
        for guard, found in zip(guards, used, strict=True):
            guard.restore(found)
        trainer.telemetry = telemetry

    return restore


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    states = {key: copy.deepcopy(row) for key, row in optimizer.state.items()}
    groups = [_options(group) for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update({key: copy.deepcopy(row) for key, row in states.items()})
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            for name in set(group) - set(options) - {"params"}:
                del group[name]
            for name, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)  # a captured graph reads it where it is
                else:
                    group[name] = copy.deepcopy(value)

    return restore


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
