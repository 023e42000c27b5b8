"""EpochBatches: goes through data for some epochs, with a place that can be saved and gone back to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .random_state import random_state, set_random_state


class EpochBatches:
    """The batches of data, epoch by epoch.

    Its place can be gone back to as long as the data depend on nothing but the random numbers of torch, NumPy and Python,
    and a generator of the loader's own: the epoch is begun again with those that it began with, and batches are skipped.

    Args:
        data: batches, iterated again in every epoch.
        epoch: the number of the first epoch.

    Attributes:
        epoch: the number of the epoch from which the next batch comes.
        batch: how many batches of this epoch there have been.
        length: how many there are in an epoch, None if the data do not say.
    """

    def __init__(self, data: Iterable[Any], epoch: int = 0) -> None:
        self.epoch, self.batch = epoch, 0
        try:
            self.length: int | None = len(data)  # type: ignore[arg-type]
        except TypeError:  # such as a DataLoader's of an IterableDataset
            self.length = None
        self._data = data
        self._generators = [own for own in (getattr(data, "generator", None),) if own is not None]
        self._batches: Iterator[Any] | None = None
        self._random: Any = None  # when the epoch began

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of this epoch. At their end the next epoch has come.

        Raises:
            ValueError: there is no batch in an epoch.
        """
        if self._batches is None:
            self._random = random_state(), [own.get_state() for own in self._generators]
            self._batches, self.batch = iter(self._data), 0
        for batch in self._batches:
            self.batch += 1
            yield batch
        if not self.batch:
            raise ValueError(f"data gave no batch in epoch {self.epoch + 1}: it must be iterable again in every epoch")
        self._batches, self.epoch, self.batch = None, self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        begun = self._batches is not None
        own = [generator.get_state() for generator in self._generators]
        return {"epoch": self.epoch, "batch": self.batch if begun else None, "random": self._random, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.batch, self._batches = state["epoch"], 0, None
        if state["batch"] is not None:
            self._random = state["random"]
            set_random_state(self._random[0])
            for generator, own in zip(self._generators, self._random[1], strict=True):
                generator.set_state(own)
            self._batches = iter(self._data)
            for self.batch in range(1, state["batch"] + 1):
                next(self._batches)
        for generator, own in zip(self._generators, state["own"], strict=True):
            generator.set_state(own)
