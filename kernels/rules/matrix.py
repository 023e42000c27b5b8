"""Rules that see a whole matrix: Muon, and the factored Adafactor and CAME. In plain torch operations, for whole tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..language import tensor_rule
from .adam import adamw

# Newton-Schulz iteration of Jordan et al. (2024), section "Tuning the coefficients": a steep start, singular values end in
# about [0.7, 1.2].
COEFFICIENTS = {"ns_a": 3.4445, "ns_b": -4.7750, "ns_c": 2.0315}


def orthogonalized(matrix: torch.Tensor, steps: int, epsilon: float, a: float, b: float, c: float) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T, in bfloat16 as its authors do. Jordan et al. (2024).

    Args:
        matrix: [rows, columns].
        steps: iterations of Newton and Schulz.
        epsilon: the smallest norm that is divided by.
        a, b, c: of each iteration's polynomial a x + b x^3 + c x^5.
    """
    x = matrix.bfloat16()
    if turned := matrix.shape[0] > matrix.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=epsilon)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if turned else x


@tensor_rule(shapes=lambda shape: {"var": (0,)} if len(shape) == 2 else {})
def muon(w, g, state, hyper):
    """Momentum, made orthogonal. Jordan et al. (2024). Tensors that are no matrices take AdamW's step instead.

    `of_gradient` and `of_mean` are the shares of gradient and momentum in the direction; `scale` is 0 for a rate multiplied
    by sqrt(max(1, rows / columns)), else the rate is multiplied by scale sqrt(max(rows, columns)).
    """
    mean, var = state
    (
        lr, decay, clip, momentum, one_minus_momentum, of_gradient, of_mean, steps, epsilon, scale, adam_lr, adam_decay,
        beta1, one_minus_beta1, beta2, one_minus_beta2, adam_epsilon, ns_a, ns_b, ns_c,
    ) = hyper  # fmt: skip
    if w.dim() != 2:
        return adamw(
            w,
            g,
            (mean, var),
            (adam_lr, adam_decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, adam_epsilon),
        )
    g = g.clamp(-clip, clip)
    mean = momentum * mean + one_minus_momentum * g
    rows, columns = w.shape
    ratio = scale * math.sqrt(max(rows, columns)) if scale else math.sqrt(max(1.0, rows / columns))
    step = orthogonalized(of_gradient * g + of_mean * mean, int(steps), epsilon, ns_a, ns_b, ns_c)
    return w - (lr * ratio * step.to(w.dtype) + decay * w), (mean, var)


def factored(shape: torch.Size) -> dict[str, Any]:
    """The shapes of an average of squares: its rows and columns for two and more dimensions, else the whole."""
    if len(shape) < 2:
        return {"row": (0,), "column": (0,)}
    return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, shape[-1]), "var": (0,)}


def squares(
    square: torch.Tensor, row: torch.Tensor, column: torch.Tensor, var: torch.Tensor, new: float, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The estimated average, and the new row, column and whole averages. Shazeer & Stern (2018), alg. 2 and 4.

    Args:
        square: what is averaged.
        row, column, var: the averages, as `factored` shapes them.
        new: the share of `square`.
        epsilon: the smallest mean of rows that is divided by.
    """
    if square.dim() < 2:
        var = torch.lerp(var, square, new)
        return var, row, column, var
    row = torch.lerp(row, square.mean(dim=-1, keepdim=True), new)
    column = torch.lerp(column, square.mean(dim=-2, keepdim=True), new)
    return row @ column / row.mean(dim=-2, keepdim=True).clamp(min=epsilon), row, column, var


def rms(x: torch.Tensor) -> torch.Tensor:
    """The root of the mean square."""
    return x.norm() / math.sqrt(x.numel())


@tensor_rule(shapes=factored)
def adafactor(w, g, state, hyper):
    """Steps in proportion to the weights' size, divided by a factored root. Shazeer & Stern (2018), alg. 4 and 5.

    `lr` arrives as min(lr, 1 / sqrt(t)), `new` is the share of this gradient in the averages, t^-0.8 in the paper.
    """
    row, column, var = state
    lr, decay, clip, new, epsilon1, epsilon2, limit = hyper
    g = g.clamp(-clip, clip)
    estimate, row, column, var = squares(g * g, row, column, var, new, epsilon1)
    step = g * estimate.clamp(min=epsilon1 * epsilon1).rsqrt()
    lr = lr * rms(w).clamp(min=epsilon2) / (rms(step) / limit).clamp(min=1.0)
    return w - decay * w - lr * step, (row, column, var)


def factored_twice(shape: torch.Size) -> dict[str, Any]:
    """As `factored`, for the averages of squares and of instability."""
    shapes = factored(shape)
    return shapes | {f"unstable_{name}": own for name, own in shapes.items()}


@tensor_rule(shapes=factored_twice)
def came(w, g, state, hyper):
    """Adafactor with momentum, divided by a factored measure of how unsteady it is. Luo et al. (2023), alg. 2."""
    mean, row, column, var, unstable_row, unstable_column, unstable_var = state
    lr, decay, clip, beta1, one_minus_beta1, one_minus_beta2, one_minus_beta3, epsilon1, epsilon2, limit = hyper
    g = g.clamp(-clip, clip)
    estimate, row, column, var = squares(g * g + epsilon1, row, column, var, one_minus_beta2, 0.0)
    step = g * estimate.rsqrt()
    step = step / (rms(step) / limit).clamp(min=1.0)
    mean = beta1 * mean + one_minus_beta1 * step
    if w.dim() < 2:
        direction = mean
    else:
        unsteady = (step - mean) ** 2 + epsilon2
        estimate, unstable_row, unstable_column, unstable_var = squares(
            unsteady, unstable_row, unstable_column, unstable_var, one_minus_beta3, 0.0
        )
        direction = mean * estimate.rsqrt()
    state = mean, row, column, var, unstable_row, unstable_column, unstable_var
    return w - (lr * direction + decay * w), state
