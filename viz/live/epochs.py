"""Epochs: training steps over some epochs of data, as `tristep.fit` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...trainer.fitting import EpochBatches, evaluate, train_on
from ...trainer.metrics import checked_metrics
from .steps import weakly

__all__ = ["Epochs"]


class Epochs:
    """Training steps over some epochs, with a place in the data that can be gone back to.

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
