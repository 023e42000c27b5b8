"""Optimizers that MXNet has and few people ask for: SGD for large batches, an old name, and a test of stores."""

from __future__ import annotations

import math
from typing import Any

from ...kernels import Rule, rules
from ...trainer.optimizer import SGD, RuleOptimizer
from ...trainer.optimizer.settings import Setting, first_argument_in_mxnet, fraction
from ...trainer.validation import choice, integer

__all__ = ["LBSGD", "Test", "ccSGD"]


class LBSGD(RuleOptimizer):
    """SGD on the mean of `batch_scale` gradients, with a warm-up of the rate towards `batch_scale` times itself.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1).
        warmup_strategy: "linear", "power2", "sqrt", or "lars", a rate by norms instead of a warm-up.
        warmup_epochs: how long the warm-up lasts, >= 0.
        batch_scale: how many gradients make a step, >= 1.
        updates_per_epoch: >= 1.
        begin_epoch: where the count of epochs starts, >= 0.
        num_epochs: kept for MXNet's sake; not used.
        **kwargs: those of `Optimizer`. Schedules are asked for the count before the update, as in MXNet.

    Source: MXNet 1.9.1 LBSGD.
    """

    reads_rate_first = True

    momentum = fraction()
    warmup_strategy = Setting(choice, allowed=("linear", "power2", "sqrt", "lars"))
    warmup_epochs = Setting(integer, low=0)
    batch_scale = Setting(integer, low=1)
    updates_per_epoch = Setting(integer, low=1)
    begin_epoch = Setting(integer, low=0)
    num_epochs = Setting(integer, low=0)

    @first_argument_in_mxnet("momentum")
    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        warmup_strategy: str = "linear",
        warmup_epochs: int = 5,
        batch_scale: int = 1,
        updates_per_epoch: int = 32,
        begin_epoch: int = 0,
        num_epochs: int = 60,
        **kwargs: Any,
    ) -> None:
        self.momentum, self.warmup_strategy, self.warmup_epochs = momentum, warmup_strategy, warmup_epochs
        self.batch_scale, self.updates_per_epoch, self.begin_epoch = batch_scale, updates_per_epoch, begin_epoch
        self.num_epochs = num_epochs
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.lbsgd_lars if self.warmup_strategy == "lars" else rules.lbsgd

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        n = self.begin_epoch * self.updates_per_epoch + t - self.begin_num_update
        return {
            "lr": lr * self._warmup(n),
            "one_over_scale": 1.0 / self.batch_scale,
            "apply": float(n % self.batch_scale == 0),
        }

    def _warmup(self, n: int) -> float:
        end, scale = self.warmup_epochs * self.updates_per_epoch, self.batch_scale
        if self.warmup_strategy == "lars":
            return 1.0
        if n >= end:
            return float(scale)
        if end <= 1:
            return 1.0
        n = max(n, 0)
        part = {"linear": n / end, "power2": (n / end) ** 2, "sqrt": math.sqrt(n / end)}[self.warmup_strategy]
        return 1.0 + (scale - 1) * part


class ccSGD(SGD):  # MXNet's name
    """SGD under an old name.

    Source: MXNet 1.9.1 ccSGD.
    """


class Test(RuleOptimizer):
    """Adds the gradient to the weight and keeps a copy, to test stores with.

    Source: MXNet 1.9.1 Test.
    """

    rule = rules.test
