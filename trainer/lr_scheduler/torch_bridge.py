"""torch's schedules for our optimizers, and our schedules for torch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..validation import did_you_mean, integer
from .base import LRScheduler, evaluate, register
from .config import functions


@register
class TorchScheduler(LRScheduler):
    """A schedule of ``torch.optim.lr_scheduler`` as one of ours; :func:`from_torch` makes it.

    It is stepped with an optimizer of one dummy parameter, and its learning rates are recorded. So it may be asked in any
    order, and the same update has the same learning rate as in a torch run whose schedule is stepped once after each
    update: update 1 that of torch's epoch 0, update n that of epoch n - 1 (and update 0 that of update 1). Momentum, which
    some of torch's schedules change as well, is left alone. The first request for update n steps torch's schedule n - 1
    times, about a second per million; tristep's own need no such steps. To be saved, a ``factory`` that is no class of
    torch's is registered under its name (``@register`` above its ``def``).

    Args:
        factory: a class of ``torch.optim.lr_scheduler`` or its name; or a function from an optimizer to a schedule, such
            as one of several combined, or the registered name of such a function.
        kwargs: the arguments of ``factory`` other than the optimizer, as a dict.
        base_lr: the optimizer's learning rate from which the schedule starts. Some, such as ``OneCycleLR``, set their own.

    Raises:
        TypeError: ``factory`` does not return a schedule, or one that needs losses (``ReduceLROnPlateau``).
        ValueError: no class or function has that name; asked for an update after the end of a schedule that has one.

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
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs={kwargs!r}: must be a dict of arguments")
        self.kwargs = {name: list(v) if isinstance(v, tuple) else v for name, v in (kwargs or {}).items()}
        self._kept: Any = self._record()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the recording, whose schedule may not be picklable."""
        return {**vars(self), "_kept": None}

    def _after_warmup(self, n):
        epoch = np.maximum(n - 1, 0)
        last = int(np.max(epoch, initial=0))
        if self._kept is None or self._kept[0] != self.base_lr:
            self._kept = self._record()
        _, schedule, rates = self._kept
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
        """A new schedule of torch's with its base_lr, and its learning rates by epoch: so far the first."""
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
        optimizer.step()  # a no-op; torch warns if schedules are stepped without
        return self.base_lr, schedule, [float(optimizer.param_groups[0]["lr"])]


def from_torch(factory: Callable[..., Any] | str, *, base_lr: float = 0.01, **kwargs: Any) -> TorchScheduler:
    """A schedule of torch's, for an optimizer or a Trainer of ours; see :class:`TorchScheduler`.

    Args:
        factory: a class of ``torch.optim.lr_scheduler`` or its name; or a function from an optimizer to a schedule.
        base_lr: the learning rate that the schedule starts from.
        **kwargs: the arguments of ``factory`` other than the optimizer.

    Raises:
        TypeError, ValueError: as in :class:`TorchScheduler`.

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
    """A schedule of ours as one of torch's, bound to a torch optimizer.

    Every group gets the schedule's learning rate, times its ``"lr_mult"`` if it has one, instead of its own. Step it once
    after each ``optimizer.step()``: the first update then has the learning rate of update 1, as with a Trainer.
    ``state_dict`` holds the update count, not the schedule.

    Args:
        scheduler: a schedule of this package, or another callable from update count to learning rate.
        optimizer: the torch optimizer.
        last_epoch: number of updates made already, less one; -1 at the start.

    Returns:
        An object of a subclass of ``torch.optim.lr_scheduler.LRScheduler``.

    Raises:
        TypeError: an argument of a wrong type.
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
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return TristepLR(scheduler, optimizer, integer("last_epoch", last_epoch, low=-1))


class TristepLR(torch.optim.lr_scheduler.LRScheduler):
    """The schedule that :func:`to_torch` makes."""

    def __init__(self, schedule: Callable[[int], float], optimizer: torch.optim.Optimizer, last_epoch: int) -> None:
        self.schedule = schedule
        if last_epoch >= 0:  # torch asks for these where a run goes on
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The learning rate of each group for the next update."""
        rate = evaluate(self.schedule, self.last_epoch + 1, "scheduler")
        return [rate * group.get("lr_mult", 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The counts; the schedule is created again from its arguments."""
        state = super().state_dict()
        del state["schedule"]
        return state


def _factory(factory: Any) -> Callable[..., Any] | str:
    """The name of a class of torch's, or the function that makes a schedule."""
    module = torch.optim.lr_scheduler
    classes = [name for name in module.__all__ if name != "LRScheduler"]
    if isinstance(factory, module.LRScheduler):
        raise TypeError(
            f"factory={factory!r}: is bound to its optimizer already; give its class and its arguments, "
            f"from_torch({type(factory).__name__}, ...), or a function from an optimizer to it"
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
