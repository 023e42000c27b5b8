"""Sweep: the losses, scores and weights of all trainings of a sweep."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..checkpoint import files
from ..validation import choice, integer

FORMAT = 1


@dataclass(repr=False)
class Sweep:
    """What `sweep` found. Its arrays have one axis for each entry of `axes`, in this order.

    Attributes:
        axes: what was varied, by name: the values. The last is "seed".
        losses: float32 [*axes, steps], the mean over each batch, before its update.
        steps_per_epoch: updates in an epoch.
        scores: of each metric by name, and "loss", float64 [*axes]: over `eval_data`, after the training; {} without it.
        weights: all that each network has in its state_dict, by name, [*axes, *shape].
        make_model: what makes a network to put weights into.
    """

    axes: dict[str, tuple[Any, ...]]
    losses: np.ndarray
    steps_per_epoch: int
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    make_model: Callable[[], torch.nn.Module] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """How many values each axis has."""
        return tuple(map(len, self.axes.values()))

    @property
    def final(self) -> np.ndarray:
        """float32 [*axes]: the mean loss of the last epoch, or of all steps where there were fewer."""
        return self.losses[..., -self.steps_per_epoch :].mean(axis=-1)

    @property
    def lowest(self) -> np.ndarray:
        """float32 [*axes]: the least loss of a batch; NaN where none is a number."""
        return np.fmin.reduce(self.losses, axis=-1)

    def best(self, by: str = "final") -> dict[str, Any]:
        """The combination with the smallest median over seeds, by the names of the axes, without "seed".

        Args:
            by: "final" or "lowest" loss, or the name of a score. Of "accuracy" the largest is the best.

        Raises:
            ValueError: no such score, or not one finite number among them.
        """
        table = self._table(by)
        worst = -np.inf if by == "accuracy" else np.inf
        table = np.where(np.isfinite(table), table, worst)
        middle = np.sort(table, axis=-1)[..., (table.shape[-1] - 1) // 2]
        found = np.unravel_index(middle.argmax() if by == "accuracy" else middle.argmin(), middle.shape)
        if not np.isfinite(middle[found]):
            raise ValueError(f"by={by!r}: no training has ended with a finite number")
        return {name: values[i] for (name, values), i in zip(self.axes.items(), found, strict=False)}

    def at(self, **point: Any) -> tuple[int, ...]:
        """The indices of a combination, for the arrays here. Axes of one value, and "seed" for its first, may be left out.

        Raises:
            TypeError: no such axis, or one is missing.
            ValueError: no such value.
        """
        for name in point:
            if name not in self.axes:
                raise TypeError(f"no axis {name!r}; there are {', '.join(self.axes)}")
        found = []
        for name, values in self.axes.items():
            if name in point:
                if point[name] not in values:
                    raise ValueError(f"{name}={point[name]!r}: must be one of {', '.join(map(repr, values))}")
                found.append(values.index(point[name]))
            elif name == "seed" or len(values) == 1:
                found.append(0)
            else:
                raise TypeError(f"{name} is missing; it has the values {', '.join(map(repr, values))}")
        return tuple(found)

    def model(self, **point: Any) -> torch.nn.Module:
        """The trained network of a combination, given as for `at`, as a module of its own.

        Raises:
            RuntimeError: this was loaded without `make_model`.
        """
        where = self.at(**point)
        if self.make_model is None:
            raise RuntimeError("there is nothing to put the weights into: Sweep.load(path, make_model=...)")
        model = self.make_model()
        model.load_state_dict({name: stacked[where] for name, stacked in self.weights.items()})
        return model

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each training: its values on the axes, "final", "lowest" and the scores."""
        tables = {"final": self.final, "lowest": self.lowest} | {f"eval_{name}": each for name, each in self.scores.items()}
        return [
            dict(zip(self.axes, point, strict=True)) | {name: float(table[where]) for name, table in tables.items()}
            for where, point in zip(np.ndindex(self.shape), itertools.product(*self.axes.values()), strict=True)
        ]

    def to_pandas(self) -> Any:
        """`rows()` as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all but `make_model` to a safetensors file, whole or not at all. What JSON lacks becomes text in the axes.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        about = {"format": FORMAT, "steps_per_epoch": self.steps_per_epoch, "scores": list(self.scores)}
        about["axes"] = [[name, list(values)] for name, values in self.axes.items()]
        arrays: dict[str, Any] = {f"score {name}": each for name, each in self.scores.items()}
        arrays |= {f"weight {name}": each.detach().cpu().numpy() for name, each in self.weights.items()}
        files.write_arrays("path", path, "sweep", about, {"losses": self.losses, **arrays})

    @classmethod
    def load(cls, path: str | os.PathLike[str], make_model: Callable[[], torch.nn.Module] | None = None) -> Sweep:
        """Read what `save` has written.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: another kind of file, or a damaged one.
        """
        with files.contents("path", path, "a file that was written by Sweep.save"):
            about, arrays = files.read_arrays(path, "sweep")
            if about["format"] != FORMAT:
                raise ValueError(f"it has format {about['format']!r}, this version knows {FORMAT}")
            axes = {str(name): tuple(values) for name, values in about["axes"]}
            scores = {str(name): arrays.pop(f"score {name}") for name in about["scores"]}
            losses, per_epoch = arrays.pop("losses"), integer("steps_per_epoch", about["steps_per_epoch"], low=1)
            shape = tuple(map(len, axes.values()))
            if list(axes)[-1:] != ["seed"] or 0 in shape or len(axes) != len(about["axes"]):
                raise ValueError(f"it has the axes {', '.join(axes)}: must be several, the last of them 'seed'")
            if losses.dtype.kind != "f" or losses.ndim != len(shape) + 1 or not losses.shape[-1]:
                raise ValueError(f"losses are {losses.dtype} {losses.shape}")
            for name, each in {"losses": losses, **scores, **arrays}.items():
                fits = each.shape == shape if name in scores else each.shape[: len(shape)] == shape
                if not fits or not (name in scores or name == "losses" or name.startswith("weight ")):
                    raise ValueError(f"{name!r} has shape {each.shape}, the axes {shape}")
            weights = {name.removeprefix("weight "): torch.from_numpy(each) for name, each in arrays.items()}
            return cls(axes, losses, per_epoch, scores, weights, make_model)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} {len(values)}" for name, values in self.axes.items())
        try:
            point = ", ".join(f"{name}={value!r}" for name, value in self.best().items())
            seeds = np.sort(self.final[self.at(**self.best())[:-1]])
            best = f"best {point or 'loss'}: {seeds[(len(seeds) - 1) // 2]:.4g}"
        except ValueError:
            best = "none has a finite loss"
        return f"<sweep of {self.losses[..., 0].size} trainings ({axes}), {self.losses.shape[-1]} steps; {best}>"

    def _table(self, by: str) -> np.ndarray:
        tables = {"final": self.final, "lowest": self.lowest} | {k: v for k, v in self.scores.items() if k != "final"}
        return tables[choice("by", by, tables)]
