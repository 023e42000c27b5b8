"""Where training steps come from: a generator, an iterator, a callable, or epochs of data."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...trainer.fitting import EpochBatches, evaluate, train_on
from ...trainer.metrics import checked_metrics

__all__ = ["Epochs", "Steps", "is_stateful", "weakly"]


class Steps:
    """Training steps, one for each `take`.

    Args:
        steps: a generator function or an iterator, or a callable that takes a step, until it returns False.
    """

    def __init__(self, steps: Callable[[], Any] | Iterable[Any]) -> None:
        self._steps, self._iterator = steps, _iterator(steps)

    def take(self) -> Any:
        """Take one step.

        Raises:
            StopIteration: there are no more.
        """
        if self._iterator is not None:
            return next(self._iterator)
        value = self._steps()  # type: ignore[operator]
        if value is False:
            raise StopIteration
        return value

    @property
    def _is_closed(self) -> bool:
        return isinstance(self._iterator, Generator) and inspect.getgeneratorstate(self._iterator) == inspect.GEN_CLOSED

    @property
    def can_renew(self) -> bool:
        """Whether there are steps to come, once it is renewed."""
        return not self._is_closed or inspect.isgeneratorfunction(self._steps)

    def renew(self) -> bool:
        """As `can_renew`; a generator that an exception has ended is created again by its function."""
        if self._is_closed and self.can_renew:
            self._iterator = _iterator(self._steps)
        return self.can_renew

    def close(self) -> None:
        """Close a generator, which may have something to clean up."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()

    def is_redefined(self, newer: Steps) -> bool:
        """Whether newer steps are a function that has taken the name of this one, as in a cell that is run again."""
        mine, its = self._steps, newer._steps
        if not (isinstance(mine, types.FunctionType) and isinstance(its, types.FunctionType)) or mine is its:
            return False
        name, namespace = mine.__qualname__, mine.__globals__
        return its.__globals__ is namespace and its.__qualname__ == name and namespace.get(name) is its

    def forget(self) -> None:
        """Have no steps any more, nor what they refer to."""
        self._steps = self._iterator = iter(())


class Epochs:
    """Training steps over some epochs, as `tristep.fit` takes them, with a place in the data that can be gone back to.

    The loop that takes them has net and trainer as long as it needs them; these are weak references.
    """

    def __init__(
        self,
        net: torch.nn.Module,
        loss: Any,
        data: Iterable[Any],
        trainer: Any,
        num_epoch: int,
        eval_data: Iterable[Any] | None = None,
        eval_metric: Any = None,
    ) -> None:
        self._eval_data, self._metrics = eval_data, checked_metrics(eval_metric)
        if eval_data is None and self._metrics:
            raise ValueError("eval_metric without eval_data: there is nothing to evaluate on")
        if isinstance(eval_data, Iterator):
            raise TypeError("eval_data is an iterator, which ends after one epoch: give a DataLoader, a list, or the like")
        self._net, self._loss, self._trainer, self._num_epoch = weakly(net), loss, weakly(trainer), num_epoch
        self._batches = EpochBatches(data)
        if eval_data is not None and self._batches.length is None:
            raise TypeError("data has no length, so nobody knows which step ends an epoch: give a DataLoader or a list")
        self._rest: Iterator[Any] | None = None  # of an epoch

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> torch.Tensor | dict[str, Any]:
        net, trainer = self._net(), self._trainer()
        _, mean, _, _ = train_on(trainer, net, self._loss, self._next_batch())
        if self._eval_data is None or self._batches.batch != self._batches.length:
            return mean
        found = evaluate(net, self._loss, self._eval_data, self._metrics)
        return {"loss": mean} | {f"val_{name}": each for name, each in found.items()}

    def _next_batch(self) -> Any:
        while self._batches.epoch < self._num_epoch:
            self._rest = iter(self._batches) if self._rest is None else self._rest
            for batch in self._rest:
                return batch
            self._rest = None
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)
        self._rest = None


def is_stateful(thing: Any) -> bool:
    """Whether it has `state_dict` and `load_state_dict`."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def weakly(thing: Any) -> Callable[[], Any]:
    """A function that gives this thing, or None once nothing else refers to it."""
    try:
        return weakref.ref(thing)
    except TypeError:  # None, and objects of some classes
        return lambda: thing


def _iterator(steps: Any) -> Iterator[Any] | None:
    if inspect.isgeneratorfunction(steps):
        return steps()
    return iter(steps) if isinstance(steps, Iterable) else None
