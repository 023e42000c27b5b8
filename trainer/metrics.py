"""Metrics of `fit` and of sweeps, by name or as functions of labels and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .validation import choice

Metric = Callable[[torch.Tensor, torch.Tensor], "float | torch.Tensor"]


def _accuracy(labels: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    predicted = outputs.argmax(dim=1) if outputs.dim() > labels.dim() else outputs
    return (predicted == labels).double().mean()


def _mse(labels: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean().double()


def _mae(labels: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).abs().mean().double()


_METRICS: dict[str, tuple[str, Metric]] = {
    "accuracy": ("accuracy", _accuracy),
    "acc": ("accuracy", _accuracy),
    "mse": ("mse", _mse),
    "mae": ("mae", _mae),
}


def checked_metrics(given: Any) -> dict[str, Metric]:
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [] if given is None else [given]
    found: dict[str, Metric] = {}
    for metric in several:
        if callable(metric):
            name = getattr(metric, "__name__", type(metric).__name__)
        else:
            name, metric = _METRICS[choice("eval_metric", metric, _METRICS, ignore_case=True)]
        if name in found or name == "loss":
            raise ValueError(f"eval_metric: there are two of the name {name!r}")
        found[name] = metric
    return found
