"""Optimizers of recent papers. Weights decay by learning rate times `wd`, apart from the gradient, if not said otherwise."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...kernels import Rule, TensorRule, rules
from ...kernels.rules.matrix import COEFFICIENTS
from ..arguments import flag, real, whole
from .base import RuleOptimizer, register

__all__ = [
    "ADOPT",
    "ASGD",
    "CAME",
    "MARS",
    "SOAP",
    "AdEMAMix",
    "Adafactor",
    "Adan",
    "Lion",
    "Muon",
    "NovoGrad",
    "Prodigy",
    "RAdam",
    "Rprop",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "Sophia",
    "StableAdamW",
]


class _WithBetas(RuleOptimizer):
    """Two decays of averages in [0, 1), and an epsilon >= 0."""

    def __init__(self, learning_rate: float | None, beta1: float, beta2: float, epsilon: float, **kwargs: Any) -> None:
        self.beta1 = real("beta1", beta1, low=0, below=1)
        self.beta2 = real("beta2", beta2, low=0, below=1)
        self.epsilon = real("epsilon", epsilon, low=0)
        super().__init__(learning_rate=learning_rate, **kwargs)

    def corrections(self, t: int) -> dict[str, float]:
        """1 / (1 - beta^t) for both averages."""
        return {"correction1": 1.0 / (1.0 - self.beta1**t), "correction2": 1.0 / (1.0 - self.beta2**t)}

    def seen(self, t: int) -> dict[str, float]:
        """Whether the parameter has been updated before."""
        return {"seen": float(t > self.begin_num_update + 1)}


@register
class Lion(RuleOptimizer):
    """Steps of equal length, by the sign of an average of the gradient.

    Args:
        learning_rate: default 0.0001; a tenth to a third of AdamW's.
        beta1, beta2: decay of the average that votes and of the one that is kept, in [0, 1).
        **kwargs: those of `Optimizer`.

    Source: Chen et al. (2023), "Symbolic Discovery of Optimization Algorithms", alg. 2.
    """

    default_learning_rate = 0.0001
    rule = rules.lion

    def __init__(self, learning_rate: float | None = None, beta1: float = 0.9, beta2: float = 0.99, **kwargs: Any) -> None:
        self.beta1 = real("beta1", beta1, low=0, below=1)
        self.beta2 = real("beta2", beta2, low=0, below=1)
        super().__init__(learning_rate=learning_rate, **kwargs)


@register
class Adan(_WithBetas):
    """Adam with averages of the gradient and of its change.

    Args:
        learning_rate: default 0.001.
        beta1, beta2, beta3: decay of the averages of the gradient, of its change and of the square, in [0, 1).
        epsilon: added to the root, >= 0.
        **kwargs: those of `Optimizer`. The decay is proximal: the weight is divided by 1 + learning rate times wd.

    Source: Xie et al. (2022), "Adan: Adaptive Nesterov Momentum Algorithm", alg. 1, whose betas are 1 minus these.
    """

    default_learning_rate = 0.001
    rule = rules.adan

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.98,
        beta2: float = 0.92,
        beta3: float = 0.99,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.beta3 = real("beta3", beta3, low=0, below=1)
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return self.corrections(t) | self.seen(t) | {"correction3": 1.0 / (1.0 - self.beta3**t)}


@register
class AdEMAMix(_WithBetas):
    """AdamW with a second, much slower average of the gradient.

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the fast average and of the square, in [0, 1).
        beta3: decay of the slow average, in (0, 1).
        alpha: weight of the slow average, >= 0.
        warmup: updates over which `alpha` and `beta3` grow to their values; None means they have them from the start.
        epsilon: added to the root, >= 0.
        **kwargs: those of `Optimizer`.

    Source: Pagliardini, Ablin & Grangier (2024), "The AdEMAMix Optimizer", alg. 1, the warm-up from section 3.
    """

    default_learning_rate = 0.001
    rule = rules.ademamix

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float = 0.9999,
        alpha: float = 5.0,
        warmup: int | None = None,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.beta3 = real("beta3", beta3, above=0, below=1)
        self.alpha = real("alpha", alpha, low=0)
        self.warmup = None if warmup is None else whole("warmup", warmup, low=1)
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        alpha, beta3 = self.alpha, self.beta3
        if self.warmup is not None and t < self.warmup and 0 < self.beta1 < beta3:
            part = t / self.warmup
            start, end = math.log(self.beta1), math.log(beta3)
            alpha, beta3 = part * alpha, min(math.exp(start * end / ((1.0 - part) * end + part * start)), beta3)
        return self.corrections(t) | {"alpha": alpha, "beta3": beta3, "one_minus_beta3": 1.0 - beta3}


@register
class ADOPT(_WithBetas):
    """Adam that divides by the average of the squares before this gradient, and so converges with any beta2.

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the averages, in [0, 1).
        epsilon: the smallest root, > 0.
        **kwargs: those of `Optimizer`. The first update of a parameter only starts its averages.

    Source: Taniguchi et al. (2024), "ADOPT: Modified Adam Can Converge with Any beta2", alg. 2.
    """

    default_learning_rate = 0.001
    rule = rules.adopt

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.9999,
        epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, real("epsilon", epsilon, above=0), **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return self.seen(t) | {"limit": (t - 1) ** 0.25}


@register
class Sophia(RuleOptimizer):
    """Steps by the gradient's average over an estimate of the curvature, limited to the learning rate.

    The curvature is estimated every ten or so updates from labels drawn from the model:

        labels = torch.distributions.Categorical(logits=net(x)).sample()
        cross_entropy(net(x), labels).backward()
        with trainer.optimizer.estimating(scale=tokens):
            trainer.step(1)

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the averages of the gradient and of the curvature, in [0, 1).
        rho: what the curvature is multiplied by; the share of limited elements should be between 10 and 50 %.
        epsilon: the smallest denominator, > 0.
        **kwargs: those of `Optimizer`.

    Source: Liu et al. (2023), "Sophia: A Scalable Stochastic Second-order Optimizer", alg. 2 and 3 (Sophia-G).
    """

    default_learning_rate = 0.001

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.965,
        beta2: float = 0.99,
        rho: float = 0.04,
        epsilon: float = 1e-15,
        **kwargs: Any,
    ) -> None:
        self.beta1 = real("beta1", beta1, low=0, below=1)
        self.beta2 = real("beta2", beta2, low=0, below=1)
        self.rho = real("rho", rho, above=0)
        self.epsilon = real("epsilon", epsilon, above=0)
        self._scale: float | None = None
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def counts_as_step(self) -> bool:  # type: ignore[override]
        return self._scale is None

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.sophia if self._scale is None else rules.sophia_curvature

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {} if self._scale is None else {"scale": self._scale}

    def estimating(self, scale: float = 1.0) -> _Estimating:
        """A context in which a step takes its gradients for the curvature and leaves the weights as they are.

        Args:
            scale: the number of samples or tokens in the batch, > 0.
        """
        return _Estimating(self, real("scale", scale, above=0))


class _Estimating:
    def __init__(self, optimizer: Sophia, scale: float) -> None:
        self._optimizer, self._scale = optimizer, scale

    def __enter__(self) -> None:
        self._optimizer._scale = self._scale

    def __exit__(self, *exception: object) -> None:
        self._optimizer._scale = None


@register
class StableAdamW(_WithBetas):
    """AdamW that takes shorter steps, tensor by tensor, while gradients are larger than their averages expect.

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the averages, in [0, 1).
        epsilon: added to the root, > 0.
        **kwargs: those of `Optimizer`.

    Source: Wortsman et al. (2023), "Stable and low-precision training for large-scale vision-language models", alg. 2.
    """

    default_learning_rate = 0.001
    rule = rules.stable_adamw
    decoupled_weight_decay = ("wd",)

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.99,
        epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, real("epsilon", epsilon, above=0), **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        corrected = {}
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            corrected[f"one_minus_{name}"] = (1.0 - beta) / (1.0 - beta**t)
            corrected[name] = 1.0 - corrected[f"one_minus_{name}"]
        return corrected


@register
class MARS(_WithBetas):
    """AdamW on gradients whose variance is reduced by how they change.

    Args:
        learning_rate: default 0.003.
        beta1, beta2: decay of the averages, in [0, 1).
        gamma: how much of the change is made use of, >= 0.
        epsilon: added to the root, >= 0.
        **kwargs: those of `Optimizer`.

    Source: Yuan et al. (2024), "MARS: Unleashing the Power of Variance Reduction", alg. 2 with gradients of one batch each.
    """

    default_learning_rate = 0.003
    rule = rules.mars

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.95,
        beta2: float = 0.99,
        gamma: float = 0.025,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.gamma = real("gamma", gamma, low=0)
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        gamma = self.gamma * self.beta1 / (1.0 - self.beta1)
        return self.corrections(t) | {"gamma": gamma}


@register
class NovoGrad(_WithBetas):
    """Momentum on gradients divided by the running norm of their tensor.

    Args:
        learning_rate: default 0.01.
        beta1, beta2: decay of the momentum and of the squared norm, in [0, 1).
        epsilon: added to the norm, >= 0.
        **kwargs: those of `Optimizer`. The decay is added to the normalised gradient.

    Source: Ginsburg et al. (2019), "Stochastic Gradient Methods with Layer-wise Adaptive Moments", alg. 1.
    """

    rule = rules.novograd

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.95,
        beta2: float = 0.98,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return self.seen(t)


@register
class Prodigy(_WithBetas):
    """Adam that finds its learning rate, from how far the weights have come; the rate that is given is a factor of it.

    Args:
        learning_rate: default 1.0; a schedule may still lower it.
        beta1, beta2: decay of the averages, in [0, 1).
        beta3: decay of the sums that the estimate is made of, in [0, 1); None means the root of beta2.
        epsilon: added to the root, times the estimate, >= 0.
        d0: the first estimate, > 0.
        d_coef: what estimates are multiplied by, > 0; the number to change where rates are too large or too small.
        growth_rate: by how much the estimate may grow in one update, > 1; None means by any.
        safeguard_warmup: whether to leave the learning rate out of the estimate's denominator, for schedules that warm up.
        use_bias_correction: whether the averages are corrected for starting at zero.
        decoupled: whether the decay is apart from the gradient, or added to it.
        **kwargs: those of `Optimizer`. Weights of 16 bits need `multi_precision`: the first steps are too small for them.

    Attributes:
        d: the present estimate. To read it waits for the device.

    Source: Mishchenko & Defazio (2023), "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", alg. 4.
    """

    default_learning_rate = 1.0
    rule = rules.prodigy

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float | None = None,
        epsilon: float = 1e-8,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float | None = None,
        safeguard_warmup: bool = False,
        use_bias_correction: bool = False,
        decoupled: bool = True,
        **kwargs: Any,
    ) -> None:
        self.beta3 = None if beta3 is None else real("beta3", beta3, low=0, below=1)
        self.d0 = real("d0", d0, above=0)
        self.d_coef = real("d_coef", d_coef, above=0)
        self.growth_rate = None if growth_rate is None else real("growth_rate", growth_rate, above=1)
        self.safeguard_warmup = flag("safeguard_warmup", safeguard_warmup)
        self.use_bias_correction = flag("use_bias_correction", use_bias_correction)
        self.decoupled = flag("decoupled", decoupled)
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    @property
    def d(self) -> float:
        return next(iter(self.kept("d").values()), self.d0)

    @property
    def couples_wd(self) -> bool:
        return not self.decoupled

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        if self.use_bias_correction:
            lr *= math.sqrt(1.0 - self.beta2**t) / (1.0 - self.beta1**t)
        decays = {"wd": 0.0, "decay": lr * wd} if self.decoupled else {"wd": wd, "decay": 0.0}
        return decays | {
            "lr": lr,
            "beta3": math.sqrt(self.beta2) if self.beta3 is None else self.beta3,
            "growth_rate": math.inf if self.growth_rate is None else self.growth_rate,
            "safeguard": float(self.safeguard_warmup),
        }

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        slots = dict(zip(self.rule.slots, state, strict=True))
        slots["start"].copy_(weight)
        for name in ("d", "largest_d", "last_d"):
            slots[name].fill_(self.d0)


@register
class Muon(RuleOptimizer):
    """Momentum made orthogonal, for the matrices of hidden layers; other tensors take AdamW's steps.

    Embeddings and output layers are matrices, too, but should not be trained by Muon: give them a trainer of their own.

    Args:
        learning_rate: default 0.001.
        momentum: in [0, 1).
        nesterov: whether the gradient counts once more.
        steps: iterations of the orthogonalisation, >= 1.
        match_adamw: use the rate times 0.2 sqrt(max(rows, columns)), for steps as large as AdamW's (Liu et al. 2025), not
            the rate times sqrt(max(1, rows / columns)).
        epsilon: the smallest norm that is divided by, > 0.
        adam_learning_rate: AdamW's rate over Muon's is kept when a schedule changes it; None means the same rate.
        beta1, beta2, adam_epsilon: AdamW's.
        **kwargs: those of `Optimizer`.

    Source: Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks".
    """

    default_learning_rate = 0.001
    rule = rules.muon

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        match_adamw: bool = False,
        epsilon: float = 1e-7,
        adam_learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.momentum = real("momentum", momentum, low=0, below=1)
        self.nesterov = flag("nesterov", nesterov)
        self.steps = whole("steps", steps, low=1)
        self.match_adamw = flag("match_adamw", match_adamw)
        self.epsilon = real("epsilon", epsilon, above=0)
        self.beta1 = real("beta1", beta1, low=0, below=1)
        self.beta2 = real("beta2", beta2, low=0, below=1)
        self.adam_epsilon = real("adam_epsilon", adam_epsilon, low=0)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.adam_ratio = 1.0
        if adam_learning_rate is not None:
            self.adam_ratio = real("adam_learning_rate", adam_learning_rate, low=0) / self.learning_rate

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        root = math.sqrt(1.0 - self.beta2**t)
        return {
            "of_gradient": 1.0 - self.momentum if self.nesterov else 0.0,
            "of_mean": self.momentum if self.nesterov else 1.0,
            "scale": 0.2 if self.match_adamw else 0.0,
            "adam_lr": lr * self.adam_ratio * root / (1.0 - self.beta1**t),
            "adam_decay": lr * self.adam_ratio * wd,
            "adam_epsilon": self.adam_epsilon * root,
            **COEFFICIENTS,
        }


@register
class SOAP(_WithBetas):
    """Adam in coordinates that turn with the gradients, those of Shampoo's preconditioner.

    Args:
        learning_rate: default 0.003.
        beta1, beta2: decay of the averages, in [0, 1).
        shampoo_beta: decay of the matrices whose eigenvectors are the coordinates, in [0, 1); None means beta2.
        epsilon: added to the root, >= 0.
        precondition_frequency: the coordinates turn every so many updates, >= 1.
        max_precondition_dim: larger dimensions keep their coordinates, >= 1; each other one has two matrices of its size.
        precondition_1d: whether vectors have coordinates of their own, too.
        correct_bias: whether the rate is corrected for averages that start at zero.
        **kwargs: those of `Optimizer`. A parameter's first update only finds its coordinates.

    Source: Vyas et al. (2024), "SOAP: Improving and Stabilizing Shampoo using Adam", alg. 3.
    """

    default_learning_rate = 0.003

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.95,
        beta2: float = 0.95,
        shampoo_beta: float | None = None,
        epsilon: float = 1e-8,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10_000,
        precondition_1d: bool = False,
        correct_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        self.shampoo_beta = None if shampoo_beta is None else real("shampoo_beta", shampoo_beta, low=0, below=1)
        self.precondition_frequency = whole("precondition_frequency", precondition_frequency, low=1)
        self.max_precondition_dim = whole("max_precondition_dim", max_precondition_dim, low=1)
        self.precondition_1d = flag("precondition_1d", precondition_1d)
        self.correct_bias = flag("correct_bias", correct_bias)
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    @property
    def rule(self) -> TensorRule:  # type: ignore[override]
        return rules.soap_up_to(self.max_precondition_dim, self.precondition_1d)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        steps = t - self.begin_num_update - 1  # the first update is none
        rate = lr
        if self.correct_bias and steps:
            rate *= math.sqrt(1.0 - self.beta2**steps) / (1.0 - self.beta1**steps)
        return {
            "lr": rate,
            "one_minus_shampoo_beta": 1.0 - (self.beta2 if self.shampoo_beta is None else self.shampoo_beta),
            "limit": float(self.max_precondition_dim),
            "vectors": float(self.precondition_1d),
            "first": float(steps == 0),
            "turn": float(steps % self.precondition_frequency == 0),
        }


@register
class Adafactor(RuleOptimizer):
    """Adam's denominator from the means of rows and columns only, and steps in proportion to the size of the weights.

    Args:
        learning_rate: the largest relative step, default 0.01.
        decay_rate: the share of a gradient in the averages is its update number to this power, <= 0.
        epsilon1: the smallest root, None for the type's machine epsilon.
        epsilon2: the smallest size of weights that steps are in proportion to, >= 0.
        clip_threshold: the largest root mean square of a step, > 0.
        **kwargs: those of `Optimizer`.

    Source: Shazeer & Stern (2018), "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"; defaults of torch.
    """

    rule = rules.adafactor

    def __init__(
        self,
        learning_rate: float | None = None,
        decay_rate: float = -0.8,
        epsilon1: float | None = None,
        epsilon2: float = 1e-3,
        clip_threshold: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.decay_rate = real("decay_rate", decay_rate, high=0)
        self.epsilon1 = torch.finfo(torch.float32).eps if epsilon1 is None else real("epsilon1", epsilon1, above=0)
        self.epsilon2 = real("epsilon2", epsilon2, low=0)
        self.clip_threshold = real("clip_threshold", clip_threshold, above=0)
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": min(lr, 1.0 / math.sqrt(t)), "new": float(t**self.decay_rate), "limit": self.clip_threshold}


@register
class CAME(RuleOptimizer):
    """Adafactor with momentum, and shorter steps where the momentum and the newest step disagree.

    Args:
        learning_rate: default 0.0002.
        beta1, beta2, beta3: decay of the momentum, of the squares and of the disagreement, in [0, 1).
        epsilon1, epsilon2: added to squares and to disagreement, > 0.
        clip_threshold: the largest root mean square of a step before momentum, > 0.
        **kwargs: those of `Optimizer`.

    Source: Luo et al. (2023), "CAME: Confidence-guided Adaptive Memory Efficient Optimization", alg. 2.
    """

    default_learning_rate = 0.0002
    rule = rules.came

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float = 0.9999,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-16,
        clip_threshold: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.beta1 = real("beta1", beta1, low=0, below=1)
        self.beta2 = real("beta2", beta2, low=0, below=1)
        self.beta3 = real("beta3", beta3, low=0, below=1)
        self.epsilon1 = real("epsilon1", epsilon1, above=0)
        self.epsilon2 = real("epsilon2", epsilon2, above=0)
        self.clip_threshold = real("clip_threshold", clip_threshold, above=0)
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"limit": self.clip_threshold}


class _ScheduleFree(RuleOptimizer):
    """What both schedule-free optimizers have in common: the average's shares, and where the average is."""

    uniform_hyper = True
    host_state_names = ("steps", "largest_lr", "weight_sum", "share", "rate_scale")

    def __init__(self, learning_rate: float | None, beta: float, warmup: int, power: float, r: float, **kwargs: Any) -> None:
        self.beta = real("beta", beta, above=0, below=1)
        self.warmup = whole("warmup", warmup, low=0)
        self.power = real("power", power, low=0)
        self.r = real("r", r, low=0)
        self.steps = 0
        self.largest_lr = 0.0
        self.weight_sum = 0.0
        self.share = 1.0
        self.rate_scale = 1.0
        super().__init__(learning_rate=learning_rate, **kwargs)

    def begin_step(self, lr: float) -> None:
        self.steps += 1
        self.rate_scale = min(1.0, self.steps / self.warmup) if self.warmup else 1.0
        self.largest_lr = max(self.largest_lr, lr * self.rate_scale)
        weight = self.steps**self.r * self.largest_lr**self.power
        self.weight_sum += weight
        self.share = weight / self.weight_sum if self.weight_sum else 0.0

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": lr * self.rate_scale}

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[self.rule.state.index("z")].copy_(weight)

    def average(self) -> tuple[Rule, dict[str, float]]:
        return rules.toward, {"share": 1.0 - 1.0 / self.beta}


@register
class ScheduleFreeSGD(_ScheduleFree):
    """SGD whose weights are averaged so that the rate need not fall; evaluate inside `trainer.averaged_weights()`.

    Args:
        learning_rate: default 1.0.
        beta: how near the average gradients are taken, in (0, 1).
        warmup: steps over which the rate grows, >= 0.
        power: steps count in the average by the largest rate so far to this power, >= 0.
        r: and by their number to this power, >= 0.
        **kwargs: those of `Optimizer`. The decay is added to the gradient.

    Source: Defazio et al. (2024), "The Road Less Scheduled".
    """

    default_learning_rate = 1.0
    rule = rules.schedule_free_sgd

    def __init__(
        self,
        learning_rate: float | None = None,
        beta: float = 0.9,
        warmup: int = 0,
        power: float = 2.0,
        r: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta, warmup, power, r, **kwargs)


@register
class ScheduleFreeAdamW(_ScheduleFree):
    """AdamW whose weights are averaged so that the rate need not fall; evaluate inside `trainer.averaged_weights()`.

    Args:
        learning_rate: default 0.0025.
        beta: how near the average gradients are taken, in (0, 1); it takes the place of Adam's beta1.
        beta2: decay of the average of squares, in [0, 1).
        epsilon: added to the root, >= 0.
        warmup: steps over which the rate grows, >= 0.
        power: steps count in the average by the largest rate so far to this power, >= 0.
        r: and by their number to this power, >= 0.
        **kwargs: those of `Optimizer`. The decay is of y, at the rate.

    Source: Defazio et al. (2024), "The Road Less Scheduled", alg. 1.
    """

    default_learning_rate = 0.0025
    rule = rules.schedule_free_adamw
    decoupled_weight_decay = ("wd",)

    def __init__(
        self,
        learning_rate: float | None = None,
        beta: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        warmup: int = 0,
        power: float = 2.0,
        r: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.beta2 = real("beta2", beta2, low=0, below=1)
        self.epsilon = real("epsilon", epsilon, low=0)
        super().__init__(learning_rate, beta, warmup, power, r, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": lr * self.rate_scale, "correction2": 1.0 / (1.0 - self.beta2**t)}


@register
class RAdam(_WithBetas):
    """Adam that takes plain steps of its average while the average of squares is too uncertain to divide by.

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the averages, in [0, 1).
        epsilon: added to the root, >= 0.
        decoupled: whether the decay is apart from the gradient, or added to it.
        **kwargs: those of `Optimizer`.

    Source: Liu et al. (2020), "On the Variance of the Adaptive Learning Rate and Beyond", alg. 2, above 5 as in torch.
    """

    default_learning_rate = 0.001
    rule = rules.radam

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        decoupled: bool = True,
        **kwargs: Any,
    ) -> None:
        self.decoupled = flag("decoupled", decoupled)
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    @property
    def couples_wd(self) -> bool:
        return not self.decoupled

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        decays = {"wd": 0.0, "decay": lr * wd} if self.decoupled else {"wd": wd, "decay": 0.0}
        return rectified(lr, self.beta1, self.beta2, t) | decays


def rectified(lr: float, beta1: float, beta2: float, t: int) -> dict[str, float]:
    """RAdam's rate with its bias corrections and rectification, and whether it is adaptive. Liu et al. (2020), alg. 2."""
    correction = 1.0 - beta2**t
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * t * beta2**t / correction
    rate = lr / (1.0 - beta1**t)
    if adaptive := length > 5.0:
        above = (length - 4.0) * (length - 2.0) * longest
        rate *= math.sqrt(correction * above / ((longest - 4.0) * (longest - 2.0) * length))
    return {"lr": rate, "adaptive": float(adaptive)}


@register
class ASGD(RuleOptimizer):
    """SGD with a falling rate that also averages the weights; `trainer.averaged_weights()` shows these.

    Args:
        learning_rate: default 0.01.
        lambd: decay of weights and rate, >= 0.
        alpha: power by which the rate falls, >= 0.
        t0: update from which on weights are averaged, >= 0.
        **kwargs: those of `Optimizer`. Their decay is added to the gradient.

    Source: Polyak & Juditsky (1992), "Acceleration of stochastic approximation by averaging"; arguments as torch's.
    """

    rule = rules.asgd
    couples_wd = True

    def __init__(
        self,
        learning_rate: float | None = None,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        **kwargs: Any,
    ) -> None:
        self.lambd = real("lambd", lambd, low=0)
        self.alpha = real("alpha", alpha, low=0)
        self.t0 = real("t0", t0, low=0)
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        rate = lr / (1.0 + self.lambd * lr * (t - 1)) ** self.alpha
        return {"lr": rate, "decay": rate * self.lambd, "share": 1.0 / max(1.0, t - 1 - self.t0)}

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[0].copy_(weight)

    def average(self) -> tuple[Rule, dict[str, float]]:
        return rules.averaged, {}


@register
class Rprop(RuleOptimizer):
    """Steps of each element's own size, which grows while its gradient keeps its sign. For gradients of the whole data.

    Args:
        learning_rate: the first step's size, default 0.01; later rates are not looked at.
        shrink, grow: what sizes are multiplied by, 0 < shrink < 1 < grow.
        smallest, largest: the limits of sizes, > 0.
        **kwargs: those of `Optimizer`. There is no decay, so `wd` must be 0.

    Source: Riedmiller & Braun (1993), "A direct adaptive method for faster backpropagation learning: the RPROP algorithm".
    """

    rule = rules.rprop

    def __init__(
        self,
        learning_rate: float | None = None,
        shrink: float = 0.5,
        grow: float = 1.2,
        smallest: float = 1e-6,
        largest: float = 50.0,
        **kwargs: Any,
    ) -> None:
        self.shrink = real("shrink", shrink, above=0, below=1)
        self.grow = real("grow", grow, above=1)
        self.smallest = real("smallest", smallest, above=0)
        self.largest = real("largest", largest, low=self.smallest)
        super().__init__(learning_rate=learning_rate, **kwargs)
        if self.wd:
            raise ValueError(f"wd={self.wd!r}: Rprop has no weight decay, so it must be 0")

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[1].fill_(self.learning_rate)
