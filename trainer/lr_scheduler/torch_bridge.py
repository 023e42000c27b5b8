"""Adapters: schedules of torch for our optimizers (`from_torch`), and our schedules for torch's optimizers (`to_torch`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ...kernels.messages import did_you_mean
from ..validation import instance, integer
from .base import LRScheduler, evaluate, register
from .config import functions


@register
class TorchScheduler(LRScheduler):
    """Schedule of ``torch.optim.lr_scheduler``, usable with tristep's optimizers; :func:`from_torch` makes it.

    The torch schedule is stepped with an optimizer of one dummy parameter, and its learning rates are recorded. So updates
    may be asked for in any order, and update n has the learning rate of torch's epoch n - 1 (update 0 that of epoch 0), as
    in a torch run that steps its schedule once after each update. Momentum, which some of torch's schedules change as well,
    is left alone. The first request for update n steps torch's schedule n - 1 times, about a second per million; tristep's
    own schedules need no such steps. To save a schedule whose ``factory`` is a function, register the function
    (``@register`` above its ``def``).

    Args:
        factory: a class of ``torch.optim.lr_scheduler`` or its name; or a function from a torch optimizer to a torch
            schedule, which may combine several, or the registered name of such a function.
        kwargs: the arguments of ``factory`` other than the optimizer, as a dict.
        base_lr: the learning rate of the optimizer when the schedule starts. Some schedules, such as ``OneCycleLR``, replace
            it.

    Raises:
        TypeError: ``factory`` returns no torch schedule, or one that needs losses (``ReduceLROnPlateau``).
        ValueError: no class or function has that name; when called, the torch schedule has ended before this update.

    Source: ``torch.optim.lr_scheduler``.

    >>> schedule = from_torch("StepLR", step_size=2, gamma=0.5, base_lr=0.8)
    >>> [schedule(n) for n in (1, 2, 3, 4, 5)]
    [0.8, 0.8, 0.4, 0.4, 0.2]
    """

    def __init__(
        self,
        factory: Callable[..., Any] | str,
        kwargs: Mapping[str, Any] | None = None,
        base_lr: float = 0.01,
    ) -> None:
        super().__init__(base_lr)
        self.factory = _factory(factory)
        instance("kwargs", kwargs, (Mapping, type(None)), "a dict of arguments", shown=True)
        self.kwargs = {name: list(v) if isinstance(v, tuple) else v for name, v in (kwargs or {}).items()}
        self._recording: Any = self._record()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy: without the recording, whose torch schedule may not be picklable."""
        return {**vars(self), "_recording": None}

    def _after_warmup(self, n):
        epoch = np.maximum(n - 1, 0)
        last = int(np.max(epoch, initial=0))
        if self._recording is None or self._recording[0] != self.base_lr:
            self._recording = self._record()
        _, schedule, rates = self._recording
        while len(rates) <= last:
            try:
                schedule.step()
            except ValueError as error:
                raise ValueError(
                    f"num_update={last + 1}: the schedule of torch ends after update {len(rates)} ({error})"
                ) from error
            rates.append(float(schedule.optimizer.param_groups[0]["lr"]))
        return np.array(rates)[epoch.astype(np.int64)] if isinstance(n, np.ndarray) else rates[last]

    def _record(self) -> tuple[float, torch.optim.lr_scheduler.LRScheduler, list[float]]:
        """Return (base_lr, new torch schedule, learning rates by epoch); the list has only epoch 0 yet."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=self.base_lr, momentum=0.9)
        factory = getattr(torch.optim.lr_scheduler, self.factory) if isinstance(self.factory, str) else self.factory
        schedule = factory(optimizer, **copy.deepcopy(self.kwargs))
        if not isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(
                f"factory={self.factory!r}: returned {schedule!r}, which is not a torch.optim.lr_scheduler.LRScheduler"
            )
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                f"factory={self.factory!r}: ReduceLROnPlateau needs losses, so it is not a function of the update count; "
                "call trainer.set_learning_rate instead"
            )
        optimizer.step()  # changes nothing, but torch warns if a schedule is stepped before its optimizer
        return self.base_lr, schedule, [float(optimizer.param_groups[0]["lr"])]


def from_torch(factory: Callable[..., Any] | str, *, base_lr: float = 0.01, **kwargs: Any) -> TorchScheduler:
    """Return a torch schedule as a :class:`TorchScheduler`, for use with tristep's optimizers and Trainer.

    Args:
        factory: a class of ``torch.optim.lr_scheduler`` or its name; or a function from a torch optimizer to a torch
            schedule.
        base_lr: the learning rate of the optimizer when the schedule starts.
        **kwargs: the arguments of ``factory`` other than the optimizer.

    Raises:
        TypeError: ``factory`` returns no torch schedule, or one that needs losses (``ReduceLROnPlateau``).
        ValueError: no class or function has that name.

    >>> from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR
    >>> def both(optimizer):
    ...     parts = [ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.5)]
    ...     return SequentialLR(optimizer, parts, milestones=[2])
    >>> schedule = from_torch(both, base_lr=0.8)
    >>> [schedule(n) for n in (1, 2, 3, 4, 5)]
    [0.4, 0.4, 0.8, 0.4, 0.2]
    """
    return TorchScheduler(factory, kwargs, base_lr)


def to_torch(
    scheduler: Callable[[int], float], optimizer: torch.optim.Optimizer, last_epoch: int = -1
) -> torch.optim.lr_scheduler.LRScheduler:
    """Attach a tristep schedule to a torch optimizer, as a ``torch.optim.lr_scheduler.LRScheduler``.

    Each parameter group gets the schedule's learning rate, times the group's ``"lr_mult"`` if it has one, instead of its own
    rate. Step the returned schedule once after each ``optimizer.step()``: the first update then has the learning rate of
    update 1, as with a Trainer. Its ``state_dict`` holds the update count, not the schedule.

    Args:
        scheduler: a schedule of this package, or another callable from update count to learning rate.
        optimizer: the torch optimizer.
        last_epoch: number of updates made already, minus 1; -1 at the start.

    Returns:
        The torch schedule, of a subclass of ``torch.optim.lr_scheduler.LRScheduler``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``last_epoch`` is less than -1.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> schedule = to_torch(lambda n: 0.8 / n, optimizer)
    >>> optimizer.step()
    >>> schedule.step()
    >>> schedule.get_last_lr()
    [0.4]
    """
    if not callable(scheduler):
        raise TypeError(f"scheduler={scheduler!r}: must be a schedule, a callable from update count to learning rate")
    instance("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    return TristepLR(scheduler, optimizer, integer("last_epoch", last_epoch, low=-1))


class TristepLR(torch.optim.lr_scheduler.LRScheduler):
    """torch schedule that takes its learning rates from a tristep schedule; :func:`to_torch` makes it."""

    def __init__(self, schedule: Callable[[int], float], optimizer: torch.optim.Optimizer, last_epoch: int) -> None:
        self.schedule = schedule
        if last_epoch >= 0:  # torch requires initial_lr when a run is resumed
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        rate = evaluate(self.schedule, self.last_epoch + 1, "scheduler")
        return [rate * group.get("lr_mult", 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["schedule"]
        return state


def _factory(factory: Any) -> Callable[..., Any] | str:
    """Return the name of a torch schedule class, or the function that makes a schedule; raise for anything else."""
    module = torch.optim.lr_scheduler
    classes = [name for name in module.__all__ if name != "LRScheduler"]
    if isinstance(factory, module.LRScheduler):
        raise TypeError(
            f"factory={factory!r}: is bound to its optimizer already; give its class and arguments, "
            f"from_torch({type(factory).__name__}, ...), or a function that makes it from an optimizer"
        )
    if isinstance(factory, str):
        if factory not in classes and factory not in functions:
            raise ValueError(
                f"factory={factory!r}: neither a class of torch.optim.lr_scheduler nor a registered function."
                f"{did_you_mean(factory, [*classes, *functions])}"
            )
        return factory if factory in classes else functions[factory]
    if not callable(factory):
        raise TypeError(f"factory={factory!r}: must be a class of torch.optim.lr_scheduler, or a function that makes one")
    name = getattr(factory, "__name__", None)
    return name if name in classes and getattr(module, name) is factory else factory
