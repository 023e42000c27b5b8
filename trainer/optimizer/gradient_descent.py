"""SGD and its variants: with momentum, Nesterov momentum, signs, noise (SGLD) or delay compensation (DCASGD)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ...kernels import Rule, rules
from ..validation import integer
from .base import register
from .rule_optimizer import RuleOptimizer
from .settings import Setting, first_argument_in_mxnet, fraction, not_negative, switch

__all__ = ["DCASGD", "NAG", "SGD", "SGLD", "Signum"]


@register
class SGD(RuleOptimizer):
    """Stochastic gradient descent (SGD), optionally with momentum.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        momentum: decay rate of the momentum, in [0, 1); 0 means plain SGD without state.
        lazy_update: whether a sparse gradient updates and decays only the rows that it lists; False means all rows.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: MXNet 1.9.1 SGD. The momentum contains the learning rate, so a new rate does not rescale past
    steps.
    """

    takes_sparse = True
    master_comes_last = True

    momentum = fraction()
    lazy_update = switch()

    @first_argument_in_mxnet("momentum")
    def __init__(
        self, learning_rate: float | None = None, momentum: float = 0.0, lazy_update: bool = True, **kwargs: Any
    ) -> None:
        self.momentum, self.lazy_update = momentum, lazy_update
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.sgd_momentum if self.momentum else rules.sgd


@register
class NAG(RuleOptimizer):
    """Nesterov's accelerated gradient (NAG), SGD with Nesterov momentum.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        momentum: decay rate of the momentum, in [0, 1); 0 means plain SGD without state.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: MXNet 1.9.1 NAG, which computes weight decay for the stored momentum from the updated weight.
    """

    master_comes_last = True

    momentum = fraction()

    @first_argument_in_mxnet("momentum")
    def __init__(self, learning_rate: float | None = None, momentum: float = 0.0, **kwargs: Any) -> None:
        self.momentum = momentum
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.nag if self.momentum else rules.sgd


@register
class Signum(RuleOptimizer):
    """Signum optimizer: each element steps by the learning rate, in the direction of the sign of its momentum.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        momentum: decay rate of the momentum, in [0, 1); 0 means signSGD, which uses the gradient's sign.
        wd_lh: decoupled weight decay, >= 0, in addition to `wd` (Loshchilov & Hutter).
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: MXNet 1.9.1 Signum; `wd_lh` works without momentum as in MXNet 2.0, where 1.9.1 raises an error.
    """

    takes_unused: ClassVar[tuple[str, ...]] = ("clip_gradient",)  # which changes no sign
    default_overrules_schedule = True

    momentum = fraction()
    wd_lh = not_negative()

    def __init__(self, learning_rate: float | None = None, momentum: float = 0.9, wd_lh: float = 0.0, **kwargs: Any) -> None:
        self.momentum, self.wd_lh = momentum, wd_lh
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.signum if self.momentum else rules.sign_sgd

    @property
    def decoupled_weight_decay(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("wd_lh",) if self.momentum else ("wd", "wd_lh")


@register
class SGLD(RuleOptimizer):
    """Stochastic gradient Langevin dynamics (SGLD): half a step of SGD plus Gaussian noise of variance `learning_rate`.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        seed: seed of the noise, an int >= 0; equal seeds give equal noise, on every engine and after resuming.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: MXNet 1.9.1 SGLD, there with noise from a global generator; Welling & Teh (2011).
    """

    rule = rules.sgld
    seed = Setting(integer, low=0)

    def __init__(self, learning_rate: float | None = None, seed: int = 0, **kwargs: Any) -> None:
        self.seed = seed
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"key0": self.seed, "key1": t}


@register
class DCASGD(RuleOptimizer):
    """Delay-compensated asynchronous SGD (DCASGD): corrects gradients that were computed at older weights.

    The correction is proportional to how far the weight has moved: on a parameter server ("dist_async") since the worker
    pulled it, elsewhere since the last update.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        momentum: decay rate of the momentum, in [0, 1); 0 means none, and no state for it.
        lamda: strength of the correction, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: MXNet 1.9.1 DCASGD; momentum as in MXNet 2.0, since it fails in 1.9.1; Zheng et al. (2017).
    """

    weight_of_gradient = "previous"

    momentum = fraction()
    lamda = not_negative()

    @first_argument_in_mxnet("momentum")
    def __init__(
        self, learning_rate: float | None = None, momentum: float = 0.0, lamda: float = 0.04, **kwargs: Any
    ) -> None:
        self.momentum, self.lamda = momentum, lamda
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.dcasgd_momentum if self.momentum else rules.dcasgd

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[-1].copy_(weight)
