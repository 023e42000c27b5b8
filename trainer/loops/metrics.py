"""Evaluation metrics of `fit` and `sweep`: functions of (labels, outputs), some of which have names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..validation import choice

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


def checked_metrics(eval_metric: Any) -> dict[str, Metric]:
    """Return the metrics by name, from one name or function, a list of them, or None."""
    if eval_metric is None:
        return {}
    is_list = isinstance(eval_metric, Sequence) and not isinstance(eval_metric, str)
    metrics: dict[str, Metric] = {}
    for metric in eval_metric if is_list else [eval_metric]:
        if callable(metric):
            name = getattr(metric, "__name__", type(metric).__name__)
        else:
            name, metric = _METRICS[choice("eval_metric", metric, _METRICS, ignore_case=True)]
        if name in metrics or name == "loss":
            raise ValueError(f"eval_metric: there are two metrics of the name {name!r}")
        metrics[name] = metric
    return metrics
