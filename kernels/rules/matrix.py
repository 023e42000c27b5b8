"""Rules of whole matrices: SOAP, and the factored Adafactor and CAME; muon.py has Muon.

In plain torch operations, for stacks of tensors of one shape: the first dimension numbers the tensors, each of which is
updated independently. Intermediate results are changed in place: on a CPU, allocating a large tensor costs more
than computing with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from ..language import TensorRule, tensor_rule
from .common import limited
from .costs import bases_cost


def factored(shape: torch.Size) -> dict[str, Any]:
    """The shapes of an average of squares: its rows and columns for two and more dimensions, else the whole."""
    if len(shape) < 2:
        return {"row": (0,), "column": (0,)}
    return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, shape[-1]), "var": (0,)}


def averages(
    square: torch.Tensor, row: torch.Tensor, column: torch.Tensor, var: torch.Tensor, new: float, added: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new row, column and whole averages. Shazeer & Stern (2018), alg. 4.

    Args:
        square: what is averaged.
        row, column, var: the averages, as `factored` shapes them.
        new: the share of `square`.
        added: to each square.
    """
    if square.dim() < 3:
        return row, column, (1.0 - new) * var + new * (square + added)  # torch.lerp would make NaN of an infinite square
    row = (1.0 - new) * row + new * (square.mean(dim=-1, keepdim=True) + added)
    column = (1.0 - new) * column + new * (square.mean(dim=-2, keepdim=True) + added)
    return row, column, var


def over_root(
    x: torch.Tensor, row: torch.Tensor, column: torch.Tensor, var: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """`x` over the root of the average that its rows and columns stand for, in `out`; never as their product, which may
    be too small for a number."""
    if x.dim() < 3:
        return torch.mul(x, var.rsqrt(), out=out)
    return torch.mul(x, (row / row.mean(dim=-2, keepdim=True)).rsqrt(), out=out).mul_(column.rsqrt())


def rms(x: torch.Tensor) -> torch.Tensor:
    """The root of each tensor's mean square, [n, 1, ...]."""
    if x.dim() < 2:
        return x.abs()
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), keepdim=True) / math.sqrt(x[0].numel())


def moved(w: torch.Tensor, step: torch.Tensor, lr: float | torch.Tensor, decay: float) -> torch.Tensor:
    """w - lr step - decay w, in the memory of `step`."""
    return step.mul_(-lr).add_(w, alpha=1.0 - decay)


@tensor_rule(shapes=factored, batched=True, full_precision=("row", "column", "var"))
def adafactor(w, g, state, hyper):
    """Steps in proportion to the weights' size, divided by a factored root. Shazeer & Stern (2018), alg. 4 and 5.

    `lr` arrives as min(lr, 1 / sqrt(t)), `new` is the share of this gradient in the averages, t^-0.8 in the paper.
    """
    row, column, var = state
    lr, decay, clip, new, epsilon1, epsilon2, limit = hyper
    g = limited(g, clip)
    step = g * g
    row, column, var = averages(step, row, column, var, new)
    if w.dim() < 3:
        step.copy_(var)
    else:
        torch.mul(row / row.mean(dim=-2, keepdim=True).clamp(min=epsilon1), column, out=step)
    # The paper's epsilon1 of 1e-30 has no square in float32.
    step.clamp_(min=max(epsilon1 * epsilon1, torch.finfo(step.dtype).tiny)).rsqrt_().mul_(g)
    lr = lr * rms(w).clamp(min=epsilon2) / (rms(step) / limit).clamp(min=1.0)
    return moved(w, step, lr, decay), (row, column, var)


def factored_twice(shape: torch.Size) -> dict[str, Any]:
    """As `factored`, for the averages of squares and of instability."""
    shapes = factored(shape)
    return shapes | {f"unstable_{name}": own for name, own in shapes.items()}


@tensor_rule(
    shapes=factored_twice,
    batched=True,
    full_precision=("row", "column", "var", "unstable_row", "unstable_column", "unstable_var"),
)
def came(w, g, state, hyper):
    """Adafactor with momentum, divided by a factored measure of how unsteady it is. Luo et al. (2023), alg. 2."""
    mean, row, column, var, unstable_row, unstable_column, unstable_var = state
    lr, decay, clip, beta1, one_minus_beta1, one_minus_beta2, one_minus_beta3, epsilon1, epsilon2, limit = hyper
    g = limited(g, clip)
    step = g * g
    row, column, var = averages(step, row, column, var, one_minus_beta2, epsilon1)
    over_root(g, row, column, var, out=step)
    step.div_((rms(step) / limit).clamp(min=1.0))
    mean = (beta1 * mean).add_(step, alpha=one_minus_beta1)
    if w.dim() < 3:
        step.copy_(mean)
    else:
        step.sub_(mean).square_()
        unstable_row, unstable_column, unstable_var = averages(
            step, unstable_row, unstable_column, unstable_var, one_minus_beta3, epsilon2
        )
        over_root(mean, unstable_row, unstable_column, unstable_var, out=step)
    state = mean, row, column, var, unstable_row, unstable_column, unstable_var
    return moved(w, step, lr, decay), state


LIMIT = 10_000  # the largest dimension that SOAP turns by default


def turned_dimensions(shape: Sequence[int], limit: float, vectors: float) -> list[int]:
    """The dimensions' sizes, 0 for those that keep their axes: large ones, and those of vectors if not asked for."""
    if len(shape) == 1 and not vectors:
        return [0]
    return [size if size <= limit else 0 for size in shape]


def room_for_bases(shape: torch.Size, limit: int = LIMIT, vectors: bool = False) -> dict[str, Any]:
    """The shapes of SOAP's matrices, one for each dimension, which lie one after the other in one state."""
    size = sum(side * side for side in turned_dimensions(shape, limit, vectors))
    return {"gram": (size,), "basis": (size,)}


def matrices(flat: torch.Tensor, sides: Sequence[int]) -> list[torch.Tensor | None]:
    """The matrices of each dimension, [n, side, side], None for those that have none."""
    pieces = flat.split([side * side for side in sides], dim=1)
    return [piece.unflatten(1, (side, side)) if side else None for piece, side in zip(pieces, sides, strict=True)]


def flattened(found: Sequence[torch.Tensor | None], flat: torch.Tensor) -> torch.Tensor:
    """The opposite of `matrices`; `flat` where there are none."""
    pieces = [matrix.flatten(1) for matrix in found if matrix is not None]
    return torch.cat(pieces, dim=1) if pieces else flat


def turned(x: torch.Tensor, bases: Sequence[torch.Tensor | None], back: bool = False) -> torch.Tensor:
    """`x` in the coordinates of these bases, the columns of the matrices, or `back` from there."""
    for basis in bases:  # each takes the first dimension of the tensors, and puts its own last
        x = x.movedim(1, -1)
        if basis is not None:
            product = x.reshape(len(x), -1, x.shape[-1]) @ (basis.mT if back else basis)
            x = product.view(x.shape)
    return x


def gram_matrix(g: torch.Tensor, dimension: int) -> torch.Tensor:
    """The products of the slices along a dimension with each other, [n, size, size]."""
    slices = g.movedim(dimension, 1).flatten(2) if g.dim() > 2 else g[..., None]
    return slices @ slices.mT


def eigenvectors(matrix: torch.Tensor) -> torch.Tensor:
    """Those of symmetric matrices as columns, of the largest eigenvalue first."""
    try:
        _, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # of matrices that are too near to singular for float32
        if len(matrix) > 1:
            return torch.cat([eigenvectors(each) for each in matrix.split(1)])
        _, vectors = torch.linalg.eigh(matrix.double())
    return vectors.flip(-1).to(matrix.dtype)


def turning_cost(shape: torch.Size, limit: int = LIMIT, vectors: bool = False) -> float:
    """About how many operations SOAP's update takes; Adam's, where no dimension has a basis, one per element."""
    return shape.numel() + bases_cost(shape, turned_dimensions(shape, limit, vectors))


@tensor_rule(shapes=room_for_bases, batched=True, cost=turning_cost, full_precision=("gram", "basis"), nonnegative=("var",))
def soap(w, g, state, hyper):
    """Adam in the eigenbases of Shampoo's preconditioner. Vyas et al. (2024), alg. 3; numbers of the authors' code.

    A parameter's first update, with `first` 1, only finds the bases; where `turn` is 1 they follow by a step of the power
    iteration (alg. 4). `lr` arrives with the bias corrections in it; `decay` is taken off the stepped weight.
    """
    mean, var, gram, basis = state
    (
        lr, decay, clip, one_minus_beta1, one_minus_beta2, one_minus_shampoo_beta, epsilon, limit, vectors, first, turn,
    ) = hyper  # fmt: skip
    g = g.clamp(-clip, clip)
    sides = turned_dimensions(w.shape[1:], limit, vectors)
    grams, bases = matrices(gram, sides), matrices(basis, sides)
    if not first:
        mean = torch.lerp(mean, g, one_minus_beta1)
        var = torch.lerp(var, turned(g, bases).square(), one_minus_beta2)
        w = w - lr * turned(turned(mean, bases) / (var.sqrt() + epsilon), bases, back=True)
        w = w - decay * w if decay else w
    for k, old in enumerate(grams):
        if old is None:
            continue
        new = grams[k] = torch.lerp(old, gram_matrix(g, 1 + k), one_minus_shampoo_beta)
        if first:
            bases[k] = eigenvectors(new)
        elif turn:
            product = new @ bases[k]
            order = (bases[k] * product).sum(dim=-2).argsort(descending=True)
            var = torch.take_along_dim(var, order.view(len(w), *[-1 if j == k else 1 for j in range(w.dim() - 1)]), 1 + k)
            bases[k] = torch.linalg.qr(torch.take_along_dim(product, order[:, None], 2)).Q
    return w, (mean, var, flattened(grams, gram), flattened(bases, basis))


@cache
def soap_up_to(limit: int, vectors: bool) -> TensorRule:
    """`soap` with room for the bases of dimensions up to this size, and of vectors or not; its hyper-parameters agree."""
    if (limit, vectors) == (LIMIT, False):
        return soap
    room, cost = (partial(each, limit=limit, vectors=vectors) for each in (room_for_bases, turning_cost))
    return soap.variant((soap_up_to, (limit, vectors)), room, cost)
