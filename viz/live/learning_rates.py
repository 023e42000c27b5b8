"""The learning rate of a trainer or torch optimizer in a live loop, and its multiplier."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...trainer import Trainer
from ...trainer.optimizer import Optimizer
from ...trainer.optimizer.multi import parts_of

__all__ = ["LearningRate", "weakly"]


class LearningRate:
    """The learning rate of a trainer or torch optimizer, times a multiplier; only a weak reference to it is kept.

    `last` is the rate of the last step; before the first step, the upcoming rate. None without a trainer.
    """

    def __init__(self, trainer: Trainer | torch.optim.Optimizer | None) -> None:
        self._living, self._is_known = weakly(trainer), trainer is not None
        self.multiplier = 1.0
        self.last = self.now

    @property
    def trainer(self) -> Trainer | torch.optim.Optimizer | None:
        """The trainer or optimizer; None if there was none, or it no longer exists."""
        trainer: Trainer | torch.optim.Optimizer | None = self._living()
        return trainer

    @property
    def now(self) -> float | None:
        """The first group's learning rate at the next step, without the multiplier; None without a trainer."""
        trainer = self.trainer
        if trainer is None:
            return None
        return trainer.learning_rate if isinstance(trainer, Trainer) else float(trainer.param_groups[0]["lr"])

    @property
    def is_scheduled(self) -> bool:
        trainer = self.trainer
        if isinstance(trainer, Trainer):
            return any(part.lr_scheduler is not None for part in parts_of(trainer.optimizer))
        # Torch's schedulers add this entry.
        return trainer is not None and any("initial_lr" in group for group in trainer.param_groups)

    def needed(self, what: str) -> Trainer | torch.optim.Optimizer:
        """Return the trainer or optimizer; raise, for the feature `what`, if there was none or it no longer exists."""
        if not self._is_known:
            raise ValueError(f"{what} needs to know what trains: make the loop with trainer=..., a Trainer or an optimizer")
        if self.trainer is None:
            raise RuntimeError(
                f"{what} needs what this loop has trained, which is gone: a loop that has ended does not keep it"
            )
        return self.trainer

    def set(self, lr: float) -> None:
        """Set the learning rate of the first group; other groups keep their proportions to it.

        If a schedule sets the rate, the multiplier is changed instead, which raises ValueError if the scheduled rate is 0.
        """
        trainer, now = self.needed("set_learning_rate"), self.now
        if self.is_scheduled:
            if not now:
                raise ValueError(f"lr={lr!r}: the schedule's rate is 0 here, which no multiplier changes; step on first")
            self.multiplier = lr / now
        else:
            self.multiplier = 1.0
            if isinstance(trainer, Trainer):
                trainer.set_learning_rate(lr)
            else:
                for group in trainer.param_groups:
                    group["lr"] = lr * (float(group["lr"]) / now) if now else lr
        self.last = lr

    @contextmanager
    def applied(self) -> Iterator[Callable[[], int]]:
        """Multiply the learning rate inside this context, for one step; a rate that the step itself sets stays.

        Yields a function that returns how many steps the trainer or optimizer has taken since.
        """
        trainer, used = self.trainer, list[float]()
        begun = trainer.optimizer.num_update if isinstance(trainer, Trainer) else 0
        with ExitStack() as multiplied:
            if isinstance(trainer, Trainer):
                for part in parts_of(trainer.optimizer):
                    multiplied.enter_context(_multiplied(part, self.multiplier))
            elif trainer is not None:
                multiplied.enter_context(_multiplied_groups(trainer, self.multiplier, used))
            yield lambda: trainer.optimizer.num_update - begun if isinstance(trainer, Trainer) else len(used)
            self.last = used[-1] if used else self.now


@contextmanager
def _multiplied(optimizer: Optimizer, multiplier: float) -> Iterator[None]:
    if multiplier == 1.0:
        yield
        return
    name = "lr" if optimizer.lr_scheduler is None else "lr_scheduler"
    before = getattr(optimizer, name)
    setattr(optimizer, name, before * multiplier if name == "lr" else MultipliedSchedule(before, multiplier))
    now = getattr(optimizer, name)
    try:
        yield
    finally:
        if getattr(optimizer, name) == now:
            setattr(optimizer, name, before)


class MultipliedSchedule:
    """A learning-rate schedule times a number. All attributes are read from and set on the original schedule."""

    def __init__(self, schedule: Callable[[int], float], multiplier: float) -> None:
        self.__dict__.update(_schedule=schedule, _multiplier=multiplier)

    def __call__(self, num_update: int) -> float:
        return self._schedule(num_update) * self._multiplier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._schedule, name, value)


@contextmanager
def _multiplied_groups(optimizer: torch.optim.Optimizer, multiplier: float, used: list[float]) -> Iterator[None]:
    """Multiply the rates of a torch optimizer during its step only, and append the rate of each step to `used`.

    Torch's schedulers compute rates from earlier rates, so they must never see the multiplied ones.
    """
    before: list[Any] = []

    def begin(*_: Any) -> None:
        before[:] = [group["lr"] for group in optimizer.param_groups]
        if multiplier != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * multiplier
        used.append(float(optimizer.param_groups[0]["lr"]))

    def end(*_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, before, strict=False):
            group["lr"] = lr
        before.clear()

    hooks = [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        end()  # if the step failed between the two hooks


def weakly(thing: Any) -> Callable[[], Any]:
    """Return a weak reference; an object that cannot have one is referred to strongly."""
    try:
        return weakref.ref(thing)
    except TypeError:  # None, and objects of some classes
        return lambda: thing
