"""LARS, LAMB and LANS, optimizers for large batches, which scale each tensor's step by norms of the whole tensor."""

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
    """Layer-wise adaptive rate scaling (LARS): SGD with each tensor's step scaled by the norm ratio of weight and gradient.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        momentum: decay rate of the momentum, in [0, 1); 0 means none, and no state for it.
        lazy_update: accepted as in MXNet, without effect: it concerns sparse gradients, which LARS makes dense.
        eta: the trust coefficient, multiplier of the norm ratio, > 0.
        eps: added to the denominator of the norm ratio, >= 0; may also be given as `epsilon`.
        momentum_correction: whether to rescale the momentum by new rate / old rate when the learning rate changes.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. With `param_idx2name`, only parameters whose
            names end in weight are decayed, and those ending in gamma, beta or bias are not scaled.

    Source: MXNet 1.9.1 LARS; You, Gitman & Ginsburg (2017).
    """

    uniform_hyper = False
    host_state_names = ("last_lr", "ratio")
    last_lr, ratio = carried(optional=True), carried()
    begins_with_each = True  # in MXNet the second call after a change of the rate finds no change
    decayed_names = ("_weight", ".weight")
    master_comes_last = True

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
    """Base class of LAMB and LANS: their common arguments and limits of the weights' norm."""

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
    """LAMB optimizer: Adam with each tensor's step scaled by the norm of its weights over the norm of Adam's direction.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        lower_bound, upper_bound: limits of the norm of the weights in that ratio; None or 0 means no limit.
        bias_correction: whether to correct the averages for starting at zero.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is part of the direction.

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
    """LANS optimizer: LAMB on normalised gradients, with Nesterov momentum; scales two directions per tensor by norm ratios.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        lower_bound, upper_bound: limits of the norm of the weights in that ratio; None or 0 means no limit.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is part of both directions.

    Source: MXNet 2.0 LANS; Zheng et al. (2020).
    """

    rule = rules.lans
