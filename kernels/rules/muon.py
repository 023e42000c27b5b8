"""Muon: momentum, made orthogonal by the iteration of Newton and Schulz.

In plain torch operations, for stacks of tensors of one shape, as in matrix.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..language import tensor_rule
from .adam import adamw
from .common import limited
from .matrix import moved

# Newton-Schulz iteration of Jordan et al. (2024), section "Tuning the coefficients": a steep start, singular values end in
# about [0.7, 1.2].
COEFFICIENTS = {"ns_a": 3.4445, "ns_b": -4.7750, "ns_c": 2.0315}

# Rows of matrices on a GPU from which `symmetric_product` multiplies them with themselves instead of torch. To be lowered
# once `benchmarks/run.py --gpu --only symmetric` has shown where it is faster.
SYMMETRIC_FROM = math.inf


def orthogonalized(matrices: torch.Tensor, steps: int, epsilon: float, a: float, b: float, c: float) -> torch.Tensor:
    """About U V^T of the singular value decompositions U S V^T, in bfloat16 as its authors do. Jordan et al. (2024).

    Args:
        matrices: [n, rows, columns].
        steps: iterations of Newton and Schulz.
        epsilon: the smallest norm that is divided by.
        a, b, c: of each iteration's polynomial a x + b x^3 + c x^5.
    """
    x = matrices.bfloat16()
    if turned := matrices.shape[-2] > matrices.shape[-1]:
        x = x.mT
    multiplied: Callable[..., torch.Tensor] = torch.baddbmm
    if len(x) == 1:  # torch multiplies a large matrix faster outside of a stack
        x, multiplied = x[0], torch.addmm
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=epsilon)
    if halved := takes_symmetric_products(x):
        from ..backends.triton.symmetric import symmetric_product
    for _ in range(steps):
        gram = symmetric_product(x) if halved else x @ x.mT
        if halved:
            square = symmetric_product(gram, added=gram, alpha=c, beta=b)
        else:
            square = multiplied(gram, gram, gram, beta=b, alpha=c)
        x = multiplied(x, square, x, beta=a)
    return (x.mT if turned else x).view(matrices.shape)


def takes_symmetric_products(x: torch.Tensor) -> bool:
    """Whether products of these matrices with themselves are computed by half."""
    rows, columns = x.shape[-2:]
    return x.is_cuda and rows >= SYMMETRIC_FROM and rows % 16 == columns % 16 == 0


@tensor_rule(shapes=lambda shape: {"var": (0,)} if len(shape) == 2 else {}, batched=True)
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
    if w.dim() != 3:
        return adamw(
            w,
            g,
            (mean, var),
            (adam_lr, adam_decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, adam_epsilon),
        )
    g = limited(g, clip)
    mean = (momentum * mean).add_(g, alpha=one_minus_momentum)
    rows, columns = w.shape[1:]
    ratio = scale * math.sqrt(max(rows, columns)) if scale else math.sqrt(max(1.0, rows / columns))
    step = orthogonalized((of_mean * mean).add_(g, alpha=of_gradient), int(steps), epsilon, ns_a, ns_b, ns_c)
    return moved(w, step.to(w.dtype, copy=True), lr * ratio, decay), (mean, var)
