"""Muon and NorMuon, optimizers that orthogonalize the momentum of matrices. Weight decay is decoupled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from ...kernels import TensorRule, rules
from ...kernels.messages import listed
from ...kernels.rules.muon import COEFFICIENTS, Orthogonalization, Triple, matrix_shape
from ..validation import boolean, choice, integer, number
from .base import register
from .counts import Index
from .row_splits import Blocks, blocks_by_parameter, check_rows, checked_blocks, checked_split, needs_names, refuse_names
from .rule_optimizer import RuleOptimizer
from .settings import Setting, fraction, not_negative, positive, switch

__all__ = ["Muon", "NorMuon"]

# Default numbers of Newton-Schulz steps that differ from the length of the list. Each of the eight triples of polar_express
# is optimal after the ones before it, so the list may be cut anywhere.
STEPS = {"polar_express": 5}
MAY_BE_CUT = ("quintic", "polar_express")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def checked_coefficients(argument: str, value: Any) -> str | tuple[Triple, ...]:
    """Return the argument `coefficients`, checked: a known name, or a tuple of triples of floats."""
    if isinstance(value, str):
        return choice(argument, value, COEFFICIENTS)
    allowed = f"one of {listed(map(repr, COEFFICIENTS))}, or a list of triples, [(a, b, c), ...], one for each step"
    try:
        rows = [list(row) for row in value]
    except TypeError:
        raise TypeError(f"{argument}={value!r}: must be {allowed}") from None
    if not rows:
        raise ValueError(f"{argument}={value!r}: must be {allowed}")
    for k, row in enumerate(rows):
        if len(row) != 3:
            raise ValueError(f"{argument}[{k}]={value[k]!r}: must be the three numbers a, b, c of a x + b x^3 + c x^5")
    return tuple(
        tuple(number(f"{argument}[{k}][{place}]", each) for place, each in enumerate(row))  # type: ignore[misc]
        for k, row in enumerate(rows)
    )


@cache
def triples_of(coefficients: str | tuple[Triple, ...], steps: int | None) -> tuple[Triple, ...]:
    """Return the polynomial coefficients of each Newton-Schulz step; the last triple is repeated if `steps` is larger.

    None is the list's own number of steps. A list that is not in `MAY_BE_CUT` must not be cut short.
    """
    triples = COEFFICIENTS[coefficients] if isinstance(coefficients, str) else coefficients
    if steps is None:
        steps = STEPS.get(str(coefficients), len(triples))
    if steps < len(triples) and coefficients not in MAY_BE_CUT:
        what = f"coefficients={coefficients!r}" if isinstance(coefficients, str) else "your list of coefficients"
        raise ValueError(f"steps={steps}: {what} has {len(triples)} steps, so it must be that or more, or None")
    return (*triples, *[triples[-1]] * (steps - len(triples)))[:steps]


def dtype_of(iteration_dtype: str | None) -> torch.dtype | None:
    """Return the dtype that the argument `iteration_dtype` names."""
    return None if iteration_dtype is None else DTYPES[iteration_dtype]


class WithOrthogonalization(RuleOptimizer):
    """Base class of optimizers that orthogonalize matrices by Newton-Schulz iteration.

    Args:
        coefficients: (a, b, c) of the polynomial a x + b x^3 + c x^5 that each iteration applies to the singular values:
            "quintic" (Jordan et al. 2024), "polar_express" (Amsel et al. 2025), "cubic5" (arXiv 2606.00371), "deepseekv4"
            (DeepSeek-AI 2026), or a list of your own triples, one per iteration.
        steps: number of iterations, >= 1; None means 10 for "deepseekv4", 5 for the other names, and the length of a list
            of your own. Further iterations repeat the last triple. Only "quintic" and "polar_express" may be cut short.
        gram: whether to iterate on the Gram matrix of the rows and multiply the matrix only once (Zhang et al. 2026, "Gram
            Newton-Schulz"), equal up to rounding; None means for matrices with one side more than twice the other in
            bfloat16, and from 1.5 times on in float16.
        iteration_dtype: "bfloat16" or "float16", the type of the iteration's matrices. None means bfloat16 on a CPU, where
            float16 is slow, and for matrices of more than 2^26 elements; elsewhere float16, whose results are nearer.
        flatten: whether a tensor of more than two dimensions, such as a convolution's weight, is one matrix of shape
            (out, in * height * width). If False, tensors of three dimensions are stacks of matrices (experts, rows, columns)
            that are orthogonalized one by one, as in Jordan's code, and tensors of more dimensions take AdamW's step; a
            Conv1d then needs `flatten=True` or AdamW.
        split: blocks of rows that are orthogonalized separately, such as the heads of a projection: a number of equal
            blocks, a list with the number of rows of each block, or a pattern of rows, such as "(row part=2) -> part row"
            for two matrices with rows in turn (see `docs/guide.md`, "Parts of fused matrices"). Under a Trainer also a
            mapping from patterns of parameter names to these, such as {"*qkv.weight": [64, 64, 64], "*out|*proj": 4}, or a
            function from name and shape to one of these or None. None means that matrices are not split.
        **kwargs: arguments of `RuleOptimizer`.
    """

    coefficients = Setting(checked_coefficients)
    steps = Setting(integer, low=1, high=1000)
    gram = Setting(boolean, optional=True)
    iteration_dtype = Setting(choice, optional=True, allowed=tuple(DTYPES))
    flatten = switch()
    split = Setting(checked_split, optional=True)

    def __init__(
        self,
        *,
        coefficients: str | Sequence[Sequence[float]] = "quintic",
        steps: int | None = None,
        gram: bool | None = None,
        iteration_dtype: str | None = None,
        flatten: bool = False,
        split: Any = None,
        **kwargs: Any,
    ) -> None:
        self.coefficients = coefficients
        self.steps = len(triples_of(self.coefficients, None)) if steps is None else steps
        self.gram, self.iteration_dtype, self.flatten = gram, iteration_dtype, flatten
        self.split = split
        self._blocks: tuple[Blocks, ...] = ((),)
        self._entries: list[int] = []  # for each parameter its place in `_blocks`, if parameters differ
        super().__init__(**kwargs)

    def check_settings(self) -> None:
        triples_of(self.coefficients, self.steps)
        if self.uniform_hyper:
            self._blocks = (() if self.split is None else checked_blocks("split", self.split),)
        super().check_settings()

    @property
    def uniform_hyper(self) -> bool:  # type: ignore[override]
        return not needs_names(self.split)

    @property
    def orthogonalization(self) -> Orthogonalization:
        """The settings of the Newton-Schulz iteration, for the rule."""
        triples = triples_of(self.coefficients, self.steps)
        return Orthogonalization(triples, self.gram, self.flatten, self._blocks, dtype_of(self.iteration_dtype))

    def hyper_of(self, index: Index | None, t: int, lr: float, wd: float) -> dict[str, float]:
        values = self.hyper(t, lr, wd) | {"split": 0.0}
        if self.uniform_hyper:
            return values
        if not isinstance(index, int) or index >= len(self._entries):
            refuse_names(self)
        return values | {"split": float(self._entries[index])}

    def unsaved_settings(self) -> dict[str, Any]:
        return {"coefficients": self.coefficients, "split": self._blocks}

    def cost_of(self, index: Index, weight: torch.Tensor) -> float:
        if not (self._entries and isinstance(index, int)):
            return super().cost_of(index, weight)
        return self.composed_rule.cost(weight.shape, split=self._entries[index])  # type: ignore[call-arg]

    def use_parameters(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        by_parameter: list[Blocks] = []
        if not self.uniform_hyper:
            by_parameter = blocks_by_parameter(self.split, params, names, partial(matrix_shape, flatten=self.flatten))
        super().use_parameters(params, names)
        if by_parameter:
            self._blocks = ((), *dict.fromkeys(blocks for blocks in by_parameter if blocks != ()))
            self._entries = [self._blocks.index(blocks) for blocks in by_parameter]

    def check_storage(self, name: str, weight: torch.Tensor) -> None:
        super().check_storage(name, weight)
        if self.uniform_hyper and self.split is not None and (matrix := matrix_shape(weight.shape, self.flatten)):
            check_rows("split", checked_blocks("split", self.split), name, weight.shape, matrix[0])


@register
class Muon(WithOrthogonalization):
    """Muon optimizer: orthogonalized momentum for matrices of hidden layers; other tensors take AdamW's steps.

    Embeddings and output layers are matrices, too, but should not be trained by Muon: give them another optimizer.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        momentum: decay rate of the momentum, in [0, 1).
        nesterov: whether to use Nesterov momentum.
        steps: number of Newton-Schulz iterations, >= 1; None means the default of `coefficients`, usually 5.
        match_adamw: multiply the learning rate by 0.2 sqrt(max(rows, columns)), which makes steps as large as AdamW's (Liu
            et al. 2025), instead of by sqrt(max(1, rows / columns)).
        epsilon: lower limit of the norm that the momentum is divided by before the iteration, > 0.
        adam_learning_rate: learning rate of AdamW's steps, >= 0; None means the same. When a schedule or a new learning rate
            changes Muon's, its ratio to `learning_rate`, or a schedule's `base_lr`, is kept.
        beta1, beta2, adam_epsilon: decay rates and epsilon of AdamW's steps.
        **kwargs: `coefficients`, `gram`, `iteration_dtype`, `flatten` and `split` of `WithOrthogonalization`, and arguments
            of `RuleOptimizer` and `Optimizer`.

    Source: Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks".
    """

    default_learning_rate = 0.001
    decoupled_weight_decay = ("decay", "adam_decay")

    momentum = fraction()
    nesterov = switch()
    match_adamw = switch()
    epsilon = positive()
    beta1 = fraction()
    beta2 = fraction()
    adam_epsilon = not_negative()
    adam_ratio = not_negative()  # of AdamW's rate to Muon's

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int | None = None,
        match_adamw: bool = False,
        epsilon: float = 1e-7,
        adam_learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.momentum, self.nesterov, self.match_adamw = momentum, nesterov, match_adamw
        self.epsilon, self.beta1, self.beta2 = epsilon, beta1, beta2
        self.adam_epsilon = adam_epsilon
        super().__init__(learning_rate=learning_rate, steps=steps, **kwargs)
        self.adam_ratio = 1.0
        if adam_learning_rate is not None:
            rate = number("adam_learning_rate", adam_learning_rate, low=0)
            base_lr = getattr(self.lr_scheduler, "base_lr", None)
            if base_lr is None:
                base_lr = self.learning_rate
            if not base_lr:
                raise ValueError(
                    f"adam_learning_rate={rate!r} with a learning rate of 0, to which it would have no ratio: must be None"
                )
            self.adam_ratio = rate / base_lr

    @property
    def rule(self) -> TensorRule:  # type: ignore[override]
        return rules.muon_with(self.orthogonalization)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        root = math.sqrt(1.0 - self.beta2**t)
        return {
            "of_gradient": 1.0 - self.momentum if self.nesterov else 0.0,
            "of_mean": self.momentum if self.nesterov else 1.0,
            "scale": 0.2 if self.match_adamw else 0.0,
            "adam_lr": lr * self.adam_ratio * root / (1.0 - self.beta1**t),
            "adam_decay": lr * self.adam_ratio * wd,
            "adam_epsilon": self.adam_epsilon * root,
        }


@register
class NorMuon(Muon):
    """NorMuon optimizer: Muon with an adaptive step size for each row of a matrix, that is, for each neuron.

    Each row of the orthogonal matrix is divided by the root of a running average of its mean square; the matrix is then
    scaled back to its norm. Tensors that are not matrices take AdamW's steps.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        row_beta: decay rate of the running average of each row, in [0, 1).
        match_adamw: scale steps to a root mean square of 0.2 times the learning rate, as in the paper, instead of
            multiplying the rate by sqrt(max(1, rows / columns)), as in the authors' code.
        **kwargs: arguments of `Muon`.

    Source: Li et al. (2025), "NorMuon: Making Muon more efficient and scalable", alg. 1.
    """

    row_beta = fraction()

    def __init__(
        self, learning_rate: float | None = None, row_beta: float = 0.95, match_adamw: bool = False, **kwargs: Any
    ) -> None:
        self.row_beta = row_beta
        super().__init__(learning_rate, match_adamw=match_adamw, **kwargs)

    @property
    def rule(self) -> TensorRule:  # type: ignore[override]
        return rules.normuon_with(self.orthogonalization)
