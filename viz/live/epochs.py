"""Epochs: training steps over some epochs of data, as `tristep.fit` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...trainer import Trainer
from ...trainer.fit import device_of, unpack_batch
from ...trainer.snapshot import random_state, set_random_state

__all__ = ["Epochs"]


class Epochs:
    """Training steps over some epochs, with a place in the data that can be gone back to."""

    def __init__(self, net: torch.nn.Module, loss: Any, data: Iterable[Any], trainer: Any, num_epoch: int) -> None:
        self._net, self._loss, self._data, self._trainer, self._num_epoch = net, loss, data, trainer, num_epoch
        self._generators = [own for own in (getattr(data, "generator", None),) if own is not None]
        self._epoch, self._batch = 0, 0
        self._batches: Iterator[Any] | None = None
        self._random: Any = None  # when the epoch began

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> torch.Tensor:
        inputs, labels = unpack_batch("data", self._next_batch(), device_of(self._net))
        value = self._loss(self._net(*inputs), labels)
        size = len(inputs[0])
        if value.shape not in (torch.Size(), torch.Size([size])):
            raise ValueError(
                f"loss gave shape {tuple(value.shape)} for a batch of {size}: it must give one number for each sample, "
                f"shape ({size},), or their mean, shape ()"
            )
        self._trainer.zero_grad()
        if isinstance(self._trainer, Trainer):
            value.sum().backward()
            self._trainer.step(size if value.dim() else 1)
        else:
            value.mean().backward()
            self._trainer.step()
        return value.detach().mean()

    def _next_batch(self) -> Any:
        while self._epoch < self._num_epoch:
            if self._batches is None:
                self._random = random_state(), [own.get_state() for own in self._generators]
                self._batches, self._batch = iter(self._data), 0
            try:
                batch = next(self._batches)
            except StopIteration:
                if self._batch == 0:
                    raise ValueError(
                        f"data gave no batch in epoch {self._epoch + 1}: it must be iterable again in every epoch"
                    ) from None
                self._batches, self._epoch = None, self._epoch + 1
                continue
            self._batch += 1
            return batch
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        begun = self._batches is not None
        own = [generator.get_state() for generator in self._generators]
        return {"epoch": self._epoch, "batch": self._batch if begun else None, "random": self._random, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._batches = state["epoch"], None
        if state["batch"] is not None:
            self._random = state["random"]
            set_random_state(self._random[0])
            for generator, own in zip(self._generators, self._random[1], strict=True):
                generator.set_state(own)
            self._batches = iter(self._data)
            for self._batch in range(1, state["batch"] + 1):
                next(self._batches)
        for generator, own in zip(self._generators, state["own"], strict=True):
            generator.set_state(own)
