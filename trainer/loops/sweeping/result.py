"""Sweep: the result of `sweep`, which can be saved."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....kernels.messages import listed, there_are
from ...serialization import files
from ...validation import choice, integer


@dataclass(repr=False)
class Sweep:
    """The losses, scores and weights of all trainings of a sweep.

    Arrays have one axis for each entry of `axes`, in this order.

    Attributes:
        axes: the values of each varied setting by name; the last entry is "seeds".
        losses: the mean loss over each batch, before its update, float32 [*axes, steps].
        steps_per_epoch: the number of batches in an epoch of the data; of data without a length, at most as many as the
            training has used.
        scores: "loss" and the metrics by name over `eval_data`, after training, float64 [*axes]; {} without `eval_data`.
        weights: the state_dict entries of all networks by name, [*axes, *shape].
        make_model: the function that makes a network to load weights into; None if it was not given to `load`.
    """

    axes: dict[str, tuple[Any, ...]]
    losses: np.ndarray
    steps_per_epoch: int
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    make_model: Callable[[], torch.nn.Module] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of values of each axis."""
        return tuple(map(len, self.axes.values()))

    @property
    def final(self) -> np.ndarray:
        """The mean loss over the last epoch, or over all steps if there were fewer, float32 [*axes]."""
        return self.losses[..., -self.steps_per_epoch :].mean(axis=-1)

    @property
    def lowest(self) -> np.ndarray:
        """The smallest loss of a batch, float32 [*axes]; NaN if all losses are NaN."""
        return np.fmin.reduce(self.losses, axis=-1)

    def best(self, by: str = "final") -> dict[str, Any]:
        """Return the combination of settings with the best median over seeds, a dict by name of the axis, without "seeds".

        Args:
            by: the criterion: "final" or "lowest" loss, or the name of a score. The smallest value is the best, for
                "accuracy" the largest.

        Raises:
            ValueError: there is no such score, or all its values are infinite or NaN.
        """
        table = self._table(by)
        worst = -np.inf if by == "accuracy" else np.inf
        table = np.where(np.isfinite(table), table, worst)
        medians = np.sort(table, axis=-1)[..., (table.shape[-1] - 1) // 2]
        best = np.unravel_index(medians.argmax() if by == "accuracy" else medians.argmin(), medians.shape)
        if not np.isfinite(medians[best]):
            raise ValueError(f"by={by!r}: no training has ended with a finite number")
        return {name: values[i] for (name, values), i in zip(self.axes.items(), best, strict=False)}

    def at(self, **point: Any) -> tuple[int, ...]:
        """Return the indices of a combination of settings in the arrays.

        Args:
            **point: the value on each axis by name. Axes with one value may be left out, and "seeds" (the first).

        Raises:
            TypeError: there is no such axis, or an axis is missing.
            ValueError: the axis has no such value.
        """
        for name in point:
            if name not in self.axes:
                raise TypeError(f"no axis {name!r}.{there_are(name, self.axes)}")
        indices = []
        for name, values in self.axes.items():
            if name in point:
                if point[name] not in values:
                    raise ValueError(f"{name}={point[name]!r}: must be one of {listed(map(repr, values))}")
                indices.append(values.index(point[name]))
            elif name == "seeds" or len(values) == 1:
                indices.append(0)
            else:
                raise TypeError(f"{name} is missing; it has the values {listed(map(repr, values))}")
        return tuple(indices)

    def model(self, **point: Any) -> torch.nn.Module:
        """Return the trained network of a combination of settings, as a new module.

        Args:
            **point: the value on each axis by name. Axes with one value may be left out, and "seeds" (the first).

        Raises:
            TypeError, ValueError: there is no such axis or value, or an axis is missing.
            RuntimeError: the sweep was loaded without `make_model`.
        """
        where = self.at(**point)
        if self.make_model is None:
            raise RuntimeError("this sweep was loaded without make_model: use Sweep.load(path, make_model=...)")
        model = self.make_model()
        model.load_state_dict({name: stacked[where] for name, stacked in self.weights.items()})
        return model

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each training: its values on the axes, "final" and "lowest" loss, and scores as "eval_..."."""
        tables = {"final": self.final, "lowest": self.lowest} | {
            f"eval_{name}": score for name, score in self.scores.items()
        }
        return [
            dict(zip(self.axes, point, strict=True)) | {name: float(table[where]) for name, table in tables.items()}
            for where, point in zip(np.ndindex(self.shape), itertools.product(*self.axes.values()), strict=True)
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but `make_model` to a safetensors file, atomically.

        Values on the axes that JSON cannot hold, such as schedules, become strings.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        about: dict[str, Any] = {"steps_per_epoch": self.steps_per_epoch, "scores": list(self.scores)}
        about["axes"] = [[name, list(values)] for name, values in self.axes.items()]
        arrays: dict[str, Any] = {f"score {name}": score for name, score in self.scores.items()}
        arrays |= {f"weight {name}": weight.detach().cpu().numpy() for name, weight in self.weights.items()}
        files.write_arrays("path", path, "sweep", about, {"losses": self.losses, **arrays})

    @classmethod
    def load(cls, path: str | os.PathLike[str], make_model: Callable[[], torch.nn.Module] | None = None) -> Sweep:
        """Read a sweep from a file that `save` wrote.

        Args:
            path: the file.
            make_model: the function that makes a network, for `model`; None if that is not needed.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no saved sweep, or damaged.
        """
        with files.contents("path", path, "a file that was written by Sweep.save"):
            about, arrays = files.read_arrays(path, "sweep")
            axes = {str(name): tuple(values) for name, values in about["axes"]}
            scores = {str(name): arrays.pop(f"score {name}") for name in about["scores"]}
            losses, per_epoch = arrays.pop("losses"), integer("steps_per_epoch", about["steps_per_epoch"], low=1)
            shape = tuple(map(len, axes.values()))
            if list(axes)[-1:] != ["seeds"] or 0 in shape or len(axes) != len(about["axes"]):
                raise ValueError(f"it has the axes {', '.join(axes)}: must be several, the last of them 'seeds'")
            if losses.dtype.kind != "f" or losses.ndim != len(shape) + 1 or not losses.shape[-1]:
                raise ValueError(f"losses are {losses.dtype} {losses.shape}")
            for name, array in {"losses": losses, **scores, **arrays}.items():
                fits = array.shape == shape if name in scores else array.shape[: len(shape)] == shape
                if not fits or not (name in scores or name == "losses" or name.startswith("weight ")):
                    raise ValueError(f"{name!r} has shape {array.shape}, the axes {shape}")
            weights = {name.removeprefix("weight "): torch.from_numpy(array) for name, array in arrays.items()}
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
