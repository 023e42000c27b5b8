"""The learning rate of whatever trains, and a multiplier of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...trainer import Trainer
from ...trainer.optimizer import Optimizer
from ...trainer.optimizer.multi import parts_of

__all__ = ["LearningRate"]


class LearningRate:
    """The learning rate of what trains, times a multiplier.

    Args:
        trainer: a `Trainer`, a `torch.optim.Optimizer`, or None: there is no rate. It is referred to weakly.

    Attributes:
        multiplier: what the rate of each step is multiplied by.
        last: the rate of the last step, or before the first that to come; None without a trainer.
    """

    def __init__(self, trainer: Trainer | torch.optim.Optimizer | None) -> None:
        self._rates: Rates | None = None
        if trainer is not None:
            self._rates = TrainerRates(trainer) if isinstance(trainer, Trainer) else OptimizerRates(trainer)
        self.multiplier = 1.0
        self.last = None if self._rates is None else self._rates.now()

    @property
    def known(self) -> bool:
        """Whether there is one."""
        return self.trainer is not None

    @property
    def trainer(self) -> Trainer | torch.optim.Optimizer | None:
        """What has it, if there still is such."""
        return None if self._rates is None else self._rates.living()

    @property
    def coming(self) -> float | None:
        """That of the coming step, whatever has been set since the last one."""
        return self._rates.now() * self.multiplier if self._rates is not None and self.known else None

    @property
    def constant(self) -> float | None:
        """The rate without the multiplier where no schedule decides it."""
        return self._rates.now() if self._rates is not None and self.known and not self._rates.is_scheduled() else None

    def needed(self, what: str) -> Rates:
        """What has the rates.

        Raises:
            ValueError: there is no trainer, without which there is no such thing as `what`.
            RuntimeError: there is none any more.
        """
        if self._rates is None:
            raise ValueError(f"{what} needs to know what trains: make the loop with trainer=..., a Trainer or an optimizer")
        if not self.known:
            raise RuntimeError(
                f"{what} needs what this loop has trained, which is gone: a loop that has ended does not keep it"
            )
        return self._rates

    def set(self, lr: float) -> None:
        """Set the rate, where a schedule decides it by way of the multiplier."""
        self.multiplier = self.needed("set_learning_rate").set(lr)
        self.last = lr

    def take(self, step: Callable[[], Any]) -> Any:
        """What a step gives that is taken at the multiplied rate."""
        if self._rates is None:
            return step()
        with self._rates.multiplied(self.multiplier):
            value = step()
            self.last = self._rates.used()
        return value


class TrainerRates:
    """Rate and parameters of a Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.living = weakref.ref(trainer)

    @property
    def source(self) -> Trainer:
        trainer = self.living()
        assert trainer is not None  # `LearningRate` has looked
        return trainer

    def params(self) -> list[torch.Tensor]:
        return [param for replica in self.source.replicas for param in replica.params]

    def now(self) -> float:
        return self.source.learning_rate

    used = now

    def is_scheduled(self) -> bool:
        """Whether a schedule decides the rate."""
        return any(part.lr_scheduler is not None for part in parts_of(self.source.optimizer))

    def set(self, lr: float) -> float:
        """Set the rate; the multiplier that it needs, 1 where no schedule decides."""
        if not self.is_scheduled():
            self.source.set_learning_rate(lr)
            return 1.0
        return _ratio(lr, self.now())

    @contextmanager
    def multiplied(self, multiplier: float) -> Iterator[None]:
        """A context whose steps take the rate times this; afterwards all is as it was, or as steps have set it."""
        with ExitStack() as stack:
            for optimizer in parts_of(self.source.optimizer):
                stack.enter_context(_multiplied(optimizer, multiplier))
            yield


@contextmanager
def _multiplied(optimizer: Optimizer, multiplier: float) -> Iterator[None]:
    if multiplier == 1.0:
        yield
    elif optimizer.lr_scheduler is None:
        before, optimizer.lr = optimizer.lr, optimizer.lr * multiplier
        now = optimizer.lr
        try:
            yield
        finally:
            if optimizer.lr == now:
                optimizer.lr = before
    else:
        schedule = optimizer.lr_scheduler
        multiplied = MultipliedSchedule(schedule, multiplier)
        optimizer.lr_scheduler = multiplied
        try:
            yield
        finally:
            if optimizer.lr_scheduler is multiplied:
                optimizer.lr_scheduler = schedule


class MultipliedSchedule:
    """A schedule, times a number. What is asked of it otherwise, or set, is the schedule's."""

    def __init__(self, schedule: Callable[[int], float], multiplier: float) -> None:
        self.__dict__.update(_schedule=schedule, _multiplier=multiplier)

    def __call__(self, num_update: int) -> float:
        return self._schedule(num_update) * self._multiplier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._schedule, name, value)


class OptimizerRates:
    """Rate and parameters of an optimizer of torch's interface."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.living = weakref.ref(optimizer)
        self._used: float | None = None

    @property
    def source(self) -> torch.optim.Optimizer:
        optimizer = self.living()
        assert optimizer is not None
        return optimizer

    def params(self) -> list[torch.Tensor]:
        return [param for group in self.source.param_groups for param in group["params"]]

    def now(self) -> float:
        return float(self.source.param_groups[0]["lr"])

    def is_scheduled(self) -> bool:
        """Whether a schedule decides the rate."""
        return any("initial_lr" in group for group in self.source.param_groups)  # which a scheduler of torch has put there

    def used(self) -> float:
        return self.now() if self._used is None else self._used

    def set(self, lr: float) -> float:
        """Set the rate; the multiplier that it needs, 1 where no schedule decides."""
        groups, now = self.source.param_groups, self.now()
        if self.is_scheduled():
            return _ratio(lr, now)
        for group in groups:
            group["lr"] = lr * (float(group["lr"]) / now) if now else lr
        return 1.0

    @contextmanager
    def multiplied(self, multiplier: float) -> Iterator[None]:
        """As above. A scheduler of torch makes rates from rates, so it must never see the multiplied ones."""
        before: list[Any] = []

        def begin(*_: Any) -> None:
            groups = self.source.param_groups
            before[:] = [group["lr"] for group in groups]
            if multiplier != 1.0:
                for group in groups:
                    group["lr"] = group["lr"] * multiplier
            self._used = self.now()

        def end(*_: Any) -> None:
            for group, lr in zip(self.source.param_groups, before, strict=False):
                group["lr"] = lr
            before.clear()

        self._used = None
        hooks = [self.source.register_step_pre_hook(begin), self.source.register_step_post_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if before:  # the step failed between the two
                end()


Rates = TrainerRates | OptimizerRates


def _ratio(lr: float, scheduled: float) -> float:
    if scheduled == 0:
        raise ValueError(f"lr={lr!r}: the schedule's rate is 0 here, which no multiplier makes another one; step on first")
    return lr / scheduled
