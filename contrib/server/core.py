"""ServerCore: the values and the optimizer of the server, without the network. A push is applied at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...trainer import serialization
from ...trainer.kvstore.base import Key, known_value, optimizer_updater, same_shapes
from ...trainer.optimizer import Optimizer, RuleOptimizer, Updater
from ...trainer.optimizer.plan import Plan
from ...trainer.optimizer.settings import check_scheduled, check_settings
from ...trainer.validation import instance, number

_MOST_PLANS = 32


@dataclass
class _Worker:
    """The server's data about a worker.

    Attributes:
        rescale_grad: the worker's gradient factor; None: the optimizer's.
        pulled: by key, its number of updates at the worker's last pull.
        weights: by key, the weights that the worker pulled last, if the optimizer needs them; before the first pull, the
            weights at the time when the optimizer was set.
        delays: the number of gradients of each age, in updates of the key since the worker's pull.
    """

    rescale_grad: float | None = None
    pulled: dict[Key, int] = field(default_factory=dict)
    weights: dict[Key, torch.Tensor] = field(default_factory=dict)
    delays: Counter[int] = field(default_factory=Counter)


class ServerCore:
    """The stored values of the server, its updater, and its data about each worker.

    Args:
        workers: the number of workers; they are numbered from 0.
        device: the device of the values. Default: "cpu".

    Attributes:
        values: the stored tensor of each key.
    """

    def __init__(self, workers: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.values: dict[Key, torch.Tensor] = {}
        self._updates = Counter[Key]()  # number of updates of each key
        self._updater: Updater | None = None
        self._plans: dict[tuple[Key, ...], Plan] = {}
        self._rule: Any = None
        self._workers = [_Worker() for _ in range(workers)]

    @property
    def num_update(self) -> int:
        """The optimizer's count of updates; 0 if there is none."""
        return 0 if self._updater is None else self._updater.optimizer.num_update

    def init(self, values: Mapping[Key, torch.Tensor]) -> None:
        """Store copies of new values.

        Raises:
            ValueError: a key is stored already; nothing has been changed.
        """
        for key in values:
            if key in self.values:
                raise ValueError(f"key {key!r} has been initialized already: init takes each key once")
        for key, value in values.items():
            self.values[key] = torch.empty(value.shape, dtype=value.dtype, device=self.device).copy_(value)
        self._keep_weights(values)

    def use(self, optimizer: Optimizer) -> None:
        """Update values from now on by an optimizer, with new states."""
        self._updater = Updater(optimizer)
        self._plans, self._rule = {}, None
        for worker in self._workers:
            worker.rescale_grad, worker.weights = None, {}
        self._keep_weights(self.values)

    def change(self, worker: int, changes: Mapping[str, Any]) -> None:
        """Apply a worker's changes of its optimizer to the server's optimizer.

        They hold for all workers, except for `rescale_grad`, which depends on the worker's batch size and holds for its own
        pushes.

        Args:
            worker: the worker's number.
            changes: any of "settings" (by attribute), "lr_scheduler" and "schedules", and "multipliers" (lr_mult and wd_mult
                by key).

        Raises:
            RuntimeError: there is no optimizer.
            ValueError, TypeError: the optimizer has no such setting, or a value is invalid; nothing has been changed.
        """
        optimizer = optimizer_updater(self._updater).optimizer
        settings = dict(changes.get("settings", {}))
        if unknown := set(settings) - set(optimizer.settings()):
            raise ValueError(f"{type(optimizer).__name__} has no settings {sorted(map(str, unknown))}")
        check_settings(optimizer, settings)
        lr_scheduler = changes.get("lr_scheduler")
        instance("lr_scheduler", lr_scheduler, (Callable, type(None)), "a schedule or None", shown=True)
        schedules = changes.get("schedules", {})
        instance("schedules", schedules, Mapping, "a mapping", shown=True)
        check_scheduled(optimizer, schedules)
        for name, schedule in schedules.items():
            instance(f"schedules[{name!r}]", schedule, Callable, "a schedule", shown=True)
        multipliers = {
            key: (number(f"lr_mult of key {key!r}", lr_mult, low=0), number(f"wd_mult of key {key!r}", wd_mult, low=0))
            for key, (lr_mult, wd_mult) in changes.get("multipliers", {}).items()
        }
        if "rescale_grad" in settings:
            self._workers[worker].rescale_grad = settings.pop("rescale_grad")
        optimizer.set_together(settings)
        if "lr_scheduler" in changes:
            optimizer.set_together({"lr_scheduler": lr_scheduler, "_schedules": schedules})
        for key, (lr_mult, wd_mult) in multipliers.items():
            optimizer.lr_mult[key], optimizer.wd_mult[key] = lr_mult, wd_mult

    @torch.no_grad()
    def push(self, worker: int, keys: Sequence[Key], grads: Sequence[torch.Tensor]) -> None:
        """Update the values of these keys by a worker's gradients.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError: a key is not stored, or a gradient has the wrong shape; nothing has been changed.
        """
        if self._updater is None:
            raise RuntimeError("nothing says what a push does to the stored values: call set_optimizer() before push()")
        if not keys:  # a step without parameters would count as an update
            return
        weights, sender = self.values_of(keys), self._workers[worker]
        for key, grad, weight in zip(keys, grads, weights, strict=True):
            same_shapes(key, [grad], weight, "value")
        if self.device.type != "cpu":
            grads = [grad.to(self.device) for grad in grads]
        self._update(self._updater, sender, tuple(keys), grads, weights)
        sender.delays.update([self._updates[key] - sender.pulled.get(key, 0) for key in keys])
        self._updates.update(keys)

    @torch.no_grad()
    def pull(self, worker: int, keys: Sequence[Key], out: Sequence[torch.Tensor]) -> None:
        """Copy the values of these keys to `out`, for a worker that computes its next gradients with them.

        If `keeps_pulled`, `out` itself is stored, unless values are on another device. Do not write to it until the worker
        has pulled again.
        """
        values = self.values_of(keys)
        if values:
            torch._foreach_copy_(list(out), values)
        receiver = self._workers[worker]
        receiver.pulled.update((key, self._updates[key]) for key in keys)
        if self.keeps_pulled:
            weights = out if self.device.type == "cpu" else [value.clone() for value in values]
            receiver.weights.update(zip(keys, weights, strict=True))

    def values_of(self, keys: Sequence[Key]) -> list[torch.Tensor]:
        """Return the stored tensors of these keys, not copies; the next push may change them.

        Raises:
            ValueError: a key is not stored.
        """
        return [known_value(key, self.values) for key in keys]

    @property
    def keeps_pulled(self) -> bool:
        """Whether the optimizer needs the weights with which a worker computed its gradients."""
        optimizer = None if self._updater is None else self._updater.optimizer
        return isinstance(optimizer, RuleOptimizer) and optimizer.weight_of_gradient is not None

    def delays(self) -> list[Counter[int]]:
        """Return for each worker the number of its gradients of each age; see `Staleness`."""
        return [Counter(worker.delays) for worker in self._workers]

    def states(self) -> dict[str, Any]:
        """Return the optimizer's state as `serialization.collect` does, with a state for every key.

        Raises:
            RuntimeError: there is no optimizer.
        """
        updater, keys = optimizer_updater(self._updater), list(self.values)
        if new := [key for key in keys if key not in updater.state]:
            updater.make_plan(new, [self.values[key] for key in new])
        return serialization.collect(updater, [str(key) for key in keys], list(self.values.values()), keys)

    def load_states(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `states`; `rescale_grad` does not change.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError, TypeError: `saved` does not fit; nothing has been changed.
        """
        updater, keys = optimizer_updater(self._updater), list(self.values)
        rescale_grad = updater.optimizer.rescale_grad
        serialization.restore(updater, [str(key) for key in keys], list(self.values.values()), saved, keys)
        updater.optimizer.rescale_grad = rescale_grad
        self._plans = {}

    def _keep_weights(self, keys: Iterable[Key]) -> None:
        """Store copies of these weights for all workers, if `keeps_pulled`."""
        for key in keys if self.keeps_pulled else ():
            weight = self.values[key].clone()
            for worker in self._workers:
                worker.weights[key] = weight

    def _update(
        self,
        updater: Updater,
        sender: _Worker,
        keys: tuple[Key, ...],
        grads: Sequence[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> None:
        optimizer = updater.optimizer
        if isinstance(optimizer, RuleOptimizer) and optimizer.composed_rule is not self._rule:
            self._plans, self._rule = {}, optimizer.composed_rule  # another rule may have other states
        plan = self._plans.get(keys)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans = {}
            plan = self._plans[keys] = updater.make_plan(keys, weights)
        if self.keeps_pulled:
            slot = optimizer.weight_of_gradient  # type: ignore[attr-defined]
            pulled = [sender.weights[key] for key in keys]
            torch._foreach_copy_([updater.state[key][slot] for key in keys], pulled)
        default = optimizer.rescale_grad
        optimizer.rescale_grad = default if sender.rescale_grad is None else sender.rescale_grad
        try:
            plan.step(list(grads))
        finally:
            optimizer.rescale_grad = default
