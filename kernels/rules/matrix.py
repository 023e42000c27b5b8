"""The rule of whole matrices SOAP; muon.py has Muon, factored.py Adafactor and CAME.

They are plain torch operations on stacks of tensors of one shape. The first dimension numbers the tensors, and each tensor
is updated independently. Intermediate results are changed in place, because on a CPU allocating a large tensor costs more
than computing with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from ..language import TensorRule, tensor_rule
from .costs import bases_cost

LIMIT = 10_000  # the largest dimension for which SOAP has a basis by default


def turned_dimensions(shape: Sequence[int], limit: float, vectors: float) -> list[int]:
    """Return the size of each dimension, or 0 if SOAP has no basis for it: above `limit`, or a vector without `vectors`."""
    if len(shape) == 1 and not vectors:
        return [0]
    return [size if size <= limit else 0 for size in shape]


def room_for_bases(shape: torch.Size, limit: int = LIMIT, vectors: bool = False) -> dict[str, Any]:
    """Return the shapes of SOAP's states `gram` and `basis`; each holds the matrices of all dimensions, concatenated."""
    size = sum(side * side for side in turned_dimensions(shape, limit, vectors))
    return {"gram": (size,), "basis": (size,)}


def matrices(flat: torch.Tensor, sides: Sequence[int]) -> list[torch.Tensor | None]:
    """Split a flat state into the matrices of the dimensions, [n, side, side]; None for a dimension without a matrix."""
    pieces = flat.split([side * side for side in sides], dim=1)
    return [piece.unflatten(1, (side, side)) if side else None for piece, side in zip(pieces, sides, strict=True)]


def flattened(by_dimension: Sequence[torch.Tensor | None], flat: torch.Tensor) -> torch.Tensor:
    """Concatenate the matrices of the dimensions into a flat state; return `flat` if there are no matrices."""
    pieces = [matrix.flatten(1) for matrix in by_dimension if matrix is not None]
    return torch.cat(pieces, dim=1) if pieces else flat


def turned(x: torch.Tensor, bases: Sequence[torch.Tensor | None], back: bool = False) -> torch.Tensor:
    """Rotate `x` into the coordinates of these bases, which are the matrices' columns, or `back` out of them."""
    for basis in bases:  # each pass rotates the first dimension of the tensors and moves it to the end
        x = x.movedim(1, -1)
        if basis is not None:
            product = x.reshape(len(x), -1, x.shape[-1]) @ (basis.mT if back else basis)
            x = product.view(x.shape)
    return x


def gram_matrix(g: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return the inner products of all pairs of slices along a dimension, [n, size, size]."""
    slices = g.movedim(dimension, 1).flatten(2) if g.dim() > 2 else g[..., None]
    return slices @ slices.mT


def eigenvectors(matrix: torch.Tensor) -> torch.Tensor:
    """Return the eigenvectors of symmetric matrices as columns, by descending eigenvalue."""
    try:
        _, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # the matrices are too close to singular for float32
        if len(matrix) > 1:
            return torch.cat([eigenvectors(single) for single in matrix.split(1)])
        _, vectors = torch.linalg.eigh(matrix.double())
    return vectors.flip(-1).to(matrix.dtype)


def turning_cost(shape: torch.Size, limit: int = LIMIT, vectors: bool = False) -> float:
    """Estimate the operations of SOAP's update: one per element for Adam's part, and the cost of the bases."""
    return shape.numel() + bases_cost(shape, turned_dimensions(shape, limit, vectors))


@tensor_rule(shapes=room_for_bases, batched=True, cost=turning_cost, full_precision=("gram", "basis"), nonnegative=("var",))
def soap(w, g, state, hyper):
    """Adam in the eigenbases of Shampoo's preconditioner. Vyas et al. (2024), alg. 3; matches the authors' code.

    A parameter's first update (`first` is 1) only computes the bases. If `turn` is 1, a step of the power iteration (alg. 4)
    updates them. `lr` includes the bias corrections; the decay is applied after the step.
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
    """Return `soap` with states for the bases of dimensions up to `limit`, and of vectors if `vectors` is true.

    The hyper-parameters `limit` and `vectors` must have the same values.
    """
    if (limit, vectors) == (LIMIT, False):
        return soap
    room, cost = (partial(function, limit=limit, vectors=vectors) for function in (room_for_bases, turning_cost))
    return soap.variant((soap_up_to, (limit, vectors)), room, cost)
