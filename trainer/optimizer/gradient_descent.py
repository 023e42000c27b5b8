"""SGD, NAG and Signum: steps along the gradient, its running sum or their signs."""

from __future__ import annotations

from typing import Any

from ...kernels import Rule, rules
from ..arguments import flag, real
from .base import RuleOptimizer, register

__all__ = ["NAG", "SGD", "Signum"]


@register
class SGD(RuleOptimizer):
    """Stochastic gradient descent, with momentum if asked.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); 0 keeps no state.
        lazy_update: kept for MXNet's sake; it concerns sparse gradients.
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 SGD. The momentum is a step in weight space: a new rate does not rescale the past.
    """

    def __init__(
        self, learning_rate: float | None = None, momentum: float = 0.0, lazy_update: bool = True, **kwargs: Any
    ) -> None:
        self.momentum = real("momentum", momentum, low=0, below=1)
        self.lazy_update = flag("lazy_update", lazy_update)
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.sgd_momentum if self.momentum else rules.sgd


@register
class NAG(RuleOptimizer):
    """Nesterov's accelerated gradient.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); 0 is plain SGD and keeps no state.
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 NAG, whose stored momentum takes the weight decay of the updated weight.
    """

    def __init__(self, learning_rate: float | None = None, momentum: float = 0.0, **kwargs: Any) -> None:
        self.momentum = real("momentum", momentum, low=0, below=1)
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.nag if self.momentum else rules.sgd


@register
class Signum(RuleOptimizer):
    """Steps of equal length, by the sign of the momentum, or of the gradient where there is none.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); with 0 only the gradient's sign counts, so that rescaling and clipping change nothing.
        wd_lh: decay apart from the gradient, >= 0 (Loshchilov & Hutter).
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 Signum; `wd_lh` without momentum, which 1.9.1 refuses, as in 2.0.
    """

    def __init__(self, learning_rate: float | None = None, momentum: float = 0.9, wd_lh: float = 0.0, **kwargs: Any) -> None:
        self.momentum = real("momentum", momentum, low=0, below=1)
        self.wd_lh = real("wd_lh", wd_lh, low=0)
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.signum if self.momentum else rules.sign_sgd
