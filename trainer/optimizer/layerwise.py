"""LARS, LAMB and LANS, whose steps are scaled by norms of the whole tensor, for training with large batches."""

from __future__ import annotations

import math
from typing import Any

from ...kernels import Rule, rules
from ..validation import number
from .adaptive import WithBetas
from .base import register
from .counts import Index
from .rule_optimizer import RuleOptimizer
from .settings import Setting, also_called, carried, first_argument_in_mxnet, fraction, not_negative, positive, switch

__all__ = ["LAMB", "LANS", "LARS"]


@register
class LARS(RuleOptimizer):
    """SGD with a rate for each tensor, in proportion to the norm of its weights over that of its gradient.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); 0 keeps no momentum.
        lazy_update: kept for MXNet's sake; it concerns sparse gradients, which are refused.
        eta: the trust coefficient, > 0.
        eps: added to the denominator, >= 0; MXNet 2.0's name `epsilon` is also accepted.
        momentum_correction: multiply the momentum by the ratio of the rates where the rate has changed.
        **kwargs: those of `Optimizer`. Where `param_idx2name` is given, only names that end in weight are decayed, and
            gamma, beta and bias are not scaled.

    Source: MXNet 1.9.1 LARS; You, Gitman & Ginsburg (2017).
    """

    uniform_hyper = False
    host_state_names = ("last_lr", "ratio")
    last_lr, ratio = carried(optional=True), carried()
    begins_with_each = True  # in MXNet the second call after a change of the rate finds no change
    decayed_names = ("_weight", ".weight")

    momentum = fraction()
    lazy_update = switch()
    eta = positive()
    eps = not_negative()
    momentum_correction = switch()

    @also_called(epsilon="eps")
    @first_argument_in_mxnet("momentum")
    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        lazy_update: bool = True,
        eta: float = 0.001,
        eps: float = 0.0,
        momentum_correction: bool = True,
        **kwargs: Any,
    ) -> None:
        self.momentum, self.lazy_update, self.eta = momentum, lazy_update, eta
        self.eps, self.momentum_correction = eps, momentum_correction
        self.last_lr = None
        self.ratio = 1.0
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.lars_momentum if self.momentum else rules.lars

    def begin_step(self, lr: float) -> None:
        self.ratio = lr / self.last_lr if self.momentum_correction and self.last_lr else 1.0
        self.last_lr = lr

    def hyper_of(self, index: Index | None, t: int, lr: float, wd: float) -> dict[str, float]:
        name = str(self.idx2name.get(index, index))  # type: ignore[arg-type]
        scaled = not name.endswith(("gamma", "beta", "bias"))
        return {"epsilon": self.eps, "scaled": float(scaled), "momentum": self.momentum * self.ratio}


class _Lamb(WithBetas):
    """What LAMB and LANS have in common."""

    default_overrules_schedule = True
    default_learning_rate = 0.001
    bias_correction = True

    lower_bound = Setting(number, low=0, optional=True)
    upper_bound = Setting(number, low=0, optional=True)

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.lower_bound, self.upper_bound = lower_bound, upper_bound
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        uncorrected = {} if self.bias_correction else {"correction1": 1.0, "correction2": 1.0}
        return {"lower_bound": self.lower_bound or 0.0, "upper_bound": self.upper_bound or math.inf} | uncorrected


@register
class LAMB(_Lamb):
    """Adam with a rate for each tensor, in proportion to the norm of its weights over that of its direction.

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root, >= 0.
        lower_bound, upper_bound: the norm of the weights is limited to these; None or 0 means no limit.
        bias_correction: whether the averages are corrected for starting at zero.
        **kwargs: those of `Optimizer`. The decay is part of the direction.

    Source: MXNet 1.9.1 LAMB; You et al. (2020).
    """

    rule = rules.lamb

    bias_correction = switch()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        bias_correction: bool = True,
        **kwargs: Any,
    ) -> None:
        self.bias_correction = bias_correction
        super().__init__(learning_rate, beta1, beta2, epsilon, lower_bound, upper_bound, **kwargs)


@register
class LANS(_Lamb):
    """LAMB with the gradient normalised first, and Nesterov's momentum.

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root, >= 0.
        lower_bound, upper_bound: the norm of the weights is limited to these; None or 0 means no limit.
        **kwargs: those of `Optimizer`. The decay is part of both directions.

    Source: MXNet 2.0 LANS; Zheng et al. (2020).
    """

    rule = rules.lans
