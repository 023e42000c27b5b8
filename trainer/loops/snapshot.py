"""Snapshot: keep the state of a training in memory, and restore it bit for bit any number of steps later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..optim.base import FusedOptimizer
from ..optim.joined import JoinedOptimizers
from ..optimizer.multi import parts_of
from ..trainer import Trainer
from ..utils.interrupts import uninterrupted
from ..utils.random_state import random_state, set_random_state
from ..validation import instance


class Snapshot:
    """A copy of a training's weights, states, counts, settings, schedule, buffers and random generators.

    Gradients are not copied: `restore` sets `.grad` to the tensor that it is now, with what has been written to it since.

    Args:
        source: a `Trainer` or a `torch.optim.Optimizer`.
        modules: modules with buffers, such as running means, to keep.

    Raises:
        TypeError: `source` is neither.

    Example:
        >>> import torch, tristep
        >>> from tristep.trainer.loops.snapshot import Snapshot
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
        instance("source", source, (Trainer, torch.optim.Optimizer), "a Trainer or a torch.optim.Optimizer")
        self.params = parameters_of(source)
        self._restore_source = _of_trainer(source) if isinstance(source, Trainer) else _of_optimizer(source)
        self._weights = [parameter.detach().clone() for parameter in self.params]
        self._gradients = [parameter.grad for parameter in self.params]
        self._known = set(map(id, self.params))
        self._aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, so that none is kept twice
        for module in modules:
            self.add_buffers(module)
        self._random = random_state()

    def add_buffers(self, module: torch.nn.Module) -> None:
        """Keep the buffers of another module as they are now. Buffers that are kept already stay as they were."""
        for buffer in module.buffers():
            if id(buffer) not in self._buffers and not isinstance(buffer, torch.nn.parameter.UninitializedBuffer):
                self._buffers[id(buffer)] = buffer, buffer.detach().clone()

    def set_gradients_aside(self, module: torch.nn.Module) -> None:
        """Keep gradients of a module's parameters that the source does not have; they are None until `restore`."""
        for parameter in module.parameters():
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    @uninterrupted
    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything that is kept. It may be called several times."""
        for parameter, weight, gradient in zip(self.params, self._weights, self._gradients, strict=True):
            parameter.copy_(weight)
            parameter.grad = gradient
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        for buffer, value in self._buffers.values():
            buffer.copy_(value)
        self._restore_source()
        set_random_state(self._random)


def parameters_of(source: Trainer | torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of a trainer, those of all replicas, or of an optimizer."""
    if isinstance(source, Trainer):
        return [parameter for replica in source.replicas for parameter in replica.params]
    return [parameter for group in source.param_groups for parameter in group["params"]]


def _of_trainer(trainer: Trainer) -> Callable[[], None]:
    optimizer = trainer.optimizer
    saved, telemetry = copy.deepcopy(trainer.state_dict()), trainer.telemetry
    parts = parts_of(optimizer)
    settings = [{"lr_scheduler": part.lr_scheduler, "_schedules": dict(part.schedules)} for part in parts]
    schedules = [schedule for part in parts for schedule in (part.lr_scheduler, *part.schedules.values())]
    attributes = [copy.copy(getattr(schedule, "__dict__", {})) for schedule in schedules]
    counts, carried = optimizer.step_counts.copy(), optimizer.host_state()
    # For each replica, the gradients that steps have used.
    guards = [replica.guard for replica in trainer.replicas]
    used = [guard.snapshot() for guard in guards]

    def restore() -> None:
        for part, of_part in zip(parts, settings, strict=True):
            part.set_together(of_part, True)
        trainer.load_state_dict(copy.deepcopy(saved))
        for part, of_part in zip(parts, settings, strict=True):
            part.set_together(of_part, True)  # the same objects, which the user may have kept to change them
        for schedule, values in zip(schedules, attributes, strict=True):
            if values:
                vars(schedule).update(values)
        optimizer.step_counts.restore(counts)
        optimizer.load_host_state(carried)
        for guard, uses in zip(guards, used, strict=True):
            guard.restore(uses)
        trainer.telemetry = telemetry

    return restore


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Keep the states and options of an optimizer, and of optimizers that it wraps; return a function that restores them.

    A `state_dict` of a foreign class is loaded first, because loading it may round states to the weights' type.
    """
    optimizers = _with_inner(optimizer)
    parameters = {id(each): each for one in optimizers for group in one.param_groups for each in group["params"]}
    memo = dict(parameters)  # what optimizers share stays shared in a copy, and parameters are not copied
    states = [{key: copy.deepcopy(row, memo) for key, row in each.state.items()} for each in optimizers]
    groups = [[_options(group) for group in each.param_groups] for each in optimizers]
    saved = [(each, copy.deepcopy(each.state_dict())) for each in optimizers if _has_more(each)]

    def restore() -> None:
        for each, more in saved:
            each.load_state_dict(copy.deepcopy(more))
        memo = dict(parameters)
        for each, state, group_options in zip(optimizers, states, groups, strict=True):
            each.state.clear()
            each.state.update({key: copy.deepcopy(row, memo) for key, row in state.items()})
            for group, options in zip(each.param_groups, group_options, strict=True):
                _set_options(group, options)

    return restore


def _with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer, and the optimizers among its attributes or in lists there."""
    optimizers = {id(optimizer): optimizer}
    for value in vars(optimizer).values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, torch.optim.Optimizer):
                optimizers |= {id(inner): inner for inner in _with_inner(each)}
    return list(optimizers.values())


def _has_more(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class is foreign and has a `state_dict` of its own, with more in it than states and groups."""
    ours = isinstance(optimizer, (FusedOptimizer, JoinedOptimizers))
    return not ours and type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for name in set(group) - set(options) - {"params"}:
        del group[name]
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
            group[name].copy_(value)  # a captured graph reads it where it is
        else:
            group[name] = copy.deepcopy(value)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
