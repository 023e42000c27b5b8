"""Optimizers of MXNet that few people use: SGD for large batches, SGD under an old name, and an optimizer for tests."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ...kernels import Rule, rules
from ...trainer.optimizer import SGD, RuleOptimizer
from ...trainer.optimizer.settings import Setting, first_argument_in_mxnet, fraction
from ...trainer.validation import choice, integer

__all__ = ["LBSGD", "Test", "ccSGD"]


class LBSGD(RuleOptimizer):
    """SGD for large batches: it averages `batch_scale` gradients, and warms the rate up to `batch_scale` times its value.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1), default 0.
        warmup_strategy: how the rate grows: "linear", "power2" or "sqrt"; "lars" has no warm-up, but a rate from the norms
            of weight and gradient.
        warmup_epochs: length of the warm-up in epochs, >= 0, default 5.
        batch_scale: the number of gradients that are averaged for a step, >= 1.
        updates_per_epoch: the number of updates (gradients) in an epoch, >= 1, default 32.
        begin_epoch: the epoch at which training begins, >= 0, default 0.
        num_epochs: accepted for compatibility with MXNet; has no effect.
        **kwargs: arguments of `Optimizer`. A schedule is evaluated at the count before the update, as in MXNet.

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
    """SGD under an old name of MXNet.

    Source: MXNet 1.9.1 ccSGD.
    """


class Test(RuleOptimizer):
    """An optimizer for tests of stores: it adds the gradient to the weight and keeps a copy of the weight as its state.

    Like MXNet's, it takes `clip_gradient` and `wd` and ignores them.

    Source: MXNet 1.9.1 Test.
    """

    rule = rules.test
    takes_unused: ClassVar[tuple[str, ...]] = ("clip_gradient", "wd")
