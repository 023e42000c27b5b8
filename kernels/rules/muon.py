"""Muon: momentum, made orthogonal by the iteration of Newton and Schulz.

In plain torch operations, for stacks of tensors of one shape, as in matrix.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..language import TensorRule, rule, tensor_rule
from .adam import adamw
from .common import limited
from .costs import newton_schulz_cost
from .matrix import moved

Triple = tuple[float, float, float]

_QUINTIC = (3.4445, -4.7750, 2.0315)
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def slowed(triple: Triple, factor: float) -> Triple:
    """The polynomial at 1 / factor of its argument."""
    a, b, c = triple
    return a / factor, b / factor**3, c / factor**5


# Coefficients a, b, c of the polynomials a x + b x^3 + c x^5 that singular values go through, one after the other.
#
# quintic: Jordan et al. (2024), "Muon", section "Tuning the coefficients": a steep start; values end in about [0.7, 1.2].
# polar_express: Amsel et al. (2025), "The Polar Express", arXiv 2505.16932, alg. 1: each is the best after those before. All
#     but the last have its safety factor of 1.01; the first has it twice, since alg. 1 also divides the matrix by it.
# cubic5: arXiv 2606.00371, as NVIDIA's Emerging-Optimizers has it: without fifth powers, so one product less for a step.
# deepseekv4: DeepSeek-AI (2026), "DeepSeek-V4": eight steps of quintic bring the values near 1, two converge to it.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "quintic": (_QUINTIC,) * 5,
    "polar_express": (
        slowed(slowed(_POLAR_EXPRESS[0], 1.01), 1.01),
        *(slowed(triple, 1.01) for triple in _POLAR_EXPRESS[1:-1]),
        _POLAR_EXPRESS[-1],
    ),
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    "deepseekv4": (_QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}

# Rows of matrices on a GPU from which `symmetric_product` multiplies them with themselves instead of torch. To be lowered
# once `benchmarks/run.py --gpu --only symmetric` has shown where it is faster.
SYMMETRIC_FROM = math.inf


class Orthogonalization(NamedTuple):
    """How Muon makes matrices orthogonal.

    Attributes:
        triples: coefficients of the iteration's polynomials, one triple for each step.
        gram: whether it is done on the products of the matrix' rows; None means where there are more than twice as many
            columns as rows, or rows as columns.
        flatten: whether tensors of more than two dimensions are one matrix: all dimensions but the first are columns.
        splits: blocks of rows that are matrices of their own: a number of equal ones, or the rows of each. That of a tensor
            is the one that its hyper-parameter `split` numbers. An empty one is for tensors that are not split.
    """

    triples: tuple[Triple, ...] = COEFFICIENTS["quintic"]
    gram: bool | None = None
    flatten: bool = False
    splits: tuple[int | tuple[int, ...], ...] = ((),)


def orthogonalized(
    matrices: torch.Tensor, triples: Sequence[Triple], epsilon: float, gram: bool | None = None
) -> torch.Tensor:
    """About U V^T of the singular value decompositions U S V^T, in 16 bits. Jordan et al. (2024).

    It is computed in bfloat16 as its authors do; on the products of rows float16 is needed for the same accuracy, which a
    CPU, where that is slow, replaces by more restarts (`iterated_on_gram`).

    Args:
        matrices: [n, rows, columns].
        triples: the coefficients of each step.
        epsilon: the smallest norm that is divided by.
        gram: as that of `Orthogonalization`.
    """
    rows, columns = sorted(matrices.shape[-2:])
    if gram is None:
        gram = columns > 2 * rows
    half = gram and matrices.device.type != "cpu"
    x = matrices.clone() if half else matrices.to(torch.bfloat16, copy=True)
    if turned := matrices.shape[-2] > matrices.shape[-1]:
        x = x.mT
    if len(x) == 1:  # torch multiplies a large matrix faster outside of a stack
        x = x[0]
    x.div_(torch.linalg.matrix_norm(x, keepdim=True).clamp(min=epsilon))
    iterate = iterated_on_gram if gram else iterated
    x = iterate(x.half() if half else x, triples)
    return (x.mT if turned else x).view(matrices.shape)


def iterated(x: torch.Tensor, triples: Sequence[Triple]) -> torch.Tensor:
    """`x`, [(n,) rows, columns] with norms of at most 1, after these steps of Newton and Schulz, in its type."""
    if takes_symmetric_products(x):
        return _iterated_by_halves(x, triples)
    multiplied = _multiplied(x)
    # A step's results take turns in two tensors: to allocate large ones anew costs more than to write them.
    gram = x.new_empty((*x.shape[:-1], x.shape[-2]))
    square = torch.empty_like(gram)
    new, other = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    for a, b, c in triples:
        torch.matmul(x, x.mT, out=gram)
        if c:
            multiplied(gram, gram, gram, beta=b, alpha=c, out=square)
            multiplied(x, square, x, beta=a, out=new)
        else:
            multiplied(x, gram, x, beta=a, alpha=b, out=new)
        x, new, other = new, other, new
    return x


def _iterated_by_halves(x: torch.Tensor, triples: Sequence[Triple]) -> torch.Tensor:
    """As `iterated`, with half of the blocks of each symmetric product."""
    from ..backends.triton.symmetric import symmetric_product

    multiplied = _multiplied(x)
    for a, b, c in triples:
        gram = symmetric_product(x)
        if c:
            x = multiplied(x, symmetric_product(gram, added=gram, alpha=c, beta=b), x, beta=a)
        else:
            x = multiplied(x, gram, x, beta=a, alpha=b)
    return x


def iterated_on_gram(x: torch.Tensor, triples: Sequence[Triple]) -> torch.Tensor:
    """As `iterated`, by the products of rows, G = x x^T: steps change G and their product Q, and last x is multiplied by Q.

    Zhang et al. (2026), "Gram Newton-Schulz". Rounding makes small eigenvalues of G negative, which steps enlarge, so that G
    is computed anew: after the second step, as its authors do for five, and after every third from there; in bfloat16 after
    every second, with which it is as accurate as `iterated`.
    """
    multiplied = _multiplied(x)
    every = 2 if x.dtype == torch.bfloat16 else 3
    restarts = range(2, len(triples), every)
    gram = product = x @ x.mT
    for k, (a, b, c) in enumerate(triples):
        if k in restarts:
            x = product @ x
            gram = x @ x.mT
        factor = multiplied(gram, gram, gram, beta=b, alpha=c) if c else b * gram  # less a times the identity
        if k == 0 or k in restarts:
            product = factor.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product = multiplied(product, product, factor, beta=a)
        if k + 1 < len(triples) and k + 1 not in restarts:
            gram = multiplied(gram, gram, factor, beta=a)
            gram = multiplied(gram, factor, gram, beta=a)
    return product @ x


def _multiplied(x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """torch's function for beta x + alpha y z of stacks like this, or of matrices."""
    return torch.baddbmm if x.dim() == 3 else torch.addmm


def takes_symmetric_products(x: torch.Tensor) -> bool:
    """Whether products of these matrices with themselves are computed by half."""
    rows, columns = x.shape[-2:]
    return x.is_cuda and rows >= SYMMETRIC_FROM and rows % 16 == columns % 16 == 0


def orthogonal_blocks(tensors: torch.Tensor, how: Orthogonalization, split: int, epsilon: float) -> list[torch.Tensor]:
    """The blocks of rows of these matrices, each made orthogonal.

    Args:
        tensors: [n, rows, ...], or [n, matrices, rows, columns].
        how, epsilon: as those of `orthogonalized`.
        split: the number of the entry of `how.splits`.

    Returns:
        Matrices [n, rows of the block, columns].
    """
    matrices = matrices_of(tensors, how)
    sizes = how.splits[split]
    if isinstance(sizes, int):
        sizes = (matrices.shape[1] // sizes,) * sizes
    if len(sizes) < 2:
        return [orthogonalized(matrices, how.triples, epsilon, how.gram)]
    blocks = matrices.split(sizes, dim=1)
    found: dict[int, torch.Tensor] = {}
    for size in dict.fromkeys(sizes):  # equal blocks are computed together
        members = [k for k, rows in enumerate(sizes) if rows == size]
        together = orthogonalized(torch.cat([blocks[k] for k in members]), how.triples, epsilon, how.gram)
        found |= zip(members, together.split(len(matrices)), strict=True)
    return [found[k] for k in range(len(sizes))]


def joined(blocks: Sequence[torch.Tensor], ratios: Sequence[float], out: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The blocks of rows, in `out`, and what is left to be multiplied by; blocks of other ratios are already."""
    if len(set(ratios)) > 1:
        blocks, ratios = [block * ratio for block, ratio in zip(blocks, ratios, strict=True)], [1.0]
    whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)
    return out.copy_(whole.reshape(out.shape)), ratios[0]


def accumulated(
    g: torch.Tensor, mean: torch.Tensor, momentum: float, one_minus_momentum: float, of_gradient: float, of_mean: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The direction that is made orthogonal, and the new momentum."""
    mean = (momentum * mean).add_(g, alpha=one_minus_momentum)
    return (of_mean * mean).add_(g, alpha=of_gradient), mean


def step_ratio(block: torch.Tensor, scale: float) -> float:
    """What the rate is multiplied by for a matrix of this shape."""
    rows, columns = block.shape[-2:]
    return scale * math.sqrt(max(rows, columns)) if scale else math.sqrt(max(1.0, rows / columns))


def matrix_shape(shape: Sequence[int], flatten: bool) -> tuple[int, int] | None:
    """The rows and columns of the matrix, or the matrices, that a tensor is; None if it is none."""
    if len(shape) == 2 or (flatten and len(shape) > 2):
        return shape[0], math.prod(shape[1:])
    return (shape[1], shape[2]) if len(shape) == 3 else None


def matrices_of(tensors: torch.Tensor, how: Orthogonalization) -> torch.Tensor:
    """Stacked tensors, [n, ...], as a stack of all their matrices."""
    return tensors.flatten(0, 1) if tensors.dim() == 4 and not how.flatten else tensors.flatten(2)


def muon_shapes(shape: torch.Size, flatten: bool = False) -> dict[str, Any]:
    return {} if matrix_shape(shape, flatten) is None else {"var": (0,)}


def muon_cost(shape: torch.Size, how: Orthogonalization = Orthogonalization()) -> float:  # noqa: B008  # never changed
    matrix = matrix_shape(shape, how.flatten)
    if matrix is None:
        return float(shape.numel())
    squares, number = sum(c != 0 for *_, c in how.triples), shape.numel() / max(1, math.prod(matrix))
    return number * newton_schulz_cost(*matrix, len(how.triples), squares, how.gram)


def is_elementwise(shape: torch.Size, flatten: bool = False) -> bool:
    return matrix_shape(shape, flatten) is None


@rule(nonnegative=("var",))
def adamw_of_vectors(w, g, state, hyper):
    """AdamW's step for what is no matrix, with names of its own for what matrices have, too."""
    mean, var = state
    adam_lr, adam_decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, adam_epsilon = hyper
    return adamw(
        w, g, (mean, var), (adam_lr, adam_decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, adam_epsilon)
    )


@tensor_rule(
    shapes=muon_shapes,
    batched=True,
    cost=muon_cost,
    elementwise=is_elementwise,
    elementwise_rule=adamw_of_vectors,
    nonnegative=("var",),
)
def muon(w, g, state, hyper, *, how=Orthogonalization()):  # noqa: B008  # never changed
    """Momentum, made orthogonal. Jordan et al. (2024). Tensors that are no matrices take the step of `adamw_of_vectors`.

    Tensors of three dimensions are stacks of matrices, each of which is made orthogonal, as in the authors' code.

    `of_gradient` and `of_mean` are the shares of gradient and momentum in the direction; `scale` is 0 for a rate multiplied
    by sqrt(max(1, rows / columns)), else the rate is multiplied by scale sqrt(max(rows, columns)); `split` is the number of
    an entry of `how.splits`.
    """
    mean, var = state
    lr, decay, clip, momentum, one_minus_momentum, of_gradient, of_mean, epsilon, scale, split = hyper
    direction, mean = accumulated(limited(g, clip), mean, momentum, one_minus_momentum, of_gradient, of_mean)
    blocks = orthogonal_blocks(direction, how, int(split), epsilon)
    step, ratio = joined(blocks, [step_ratio(block, scale) for block in blocks], out=direction)
    return moved(w, step, lr * ratio, decay), (mean, var)


def normuon_shapes(shape: torch.Size, flatten: bool = False) -> dict[str, Any]:
    if matrix_shape(shape, flatten) is None:
        return {"row": (0,)}
    return {"var": (0,), "row": (shape[0], 1) if flatten else (*shape[:-1], 1)}


def evened(block: torch.Tensor, row: torch.Tensor, scale: float) -> torch.Tensor:
    """Orthogonal matrices whose rows are divided by the root of their average mean square, and as large as before.

    Args:
        block: [n, rows, columns].
        row: the average, [n, rows, 1].
        scale: not 0: the root of the mean square of all elements instead, as in alg. 1.
    """
    even = block / (row.sqrt() + 1e-10)
    size = scale * math.sqrt(block[0].numel()) if scale else torch.linalg.matrix_norm(block, keepdim=True)
    return even.mul_(size / (torch.linalg.matrix_norm(even, keepdim=True) + 1e-10))


@tensor_rule(
    shapes=normuon_shapes,
    batched=True,
    cost=muon_cost,
    elementwise=is_elementwise,
    elementwise_rule=adamw_of_vectors,
    full_precision=("row",),
    nonnegative=("var", "row"),
)
def normuon(w, g, state, hyper, *, how=Orthogonalization()):  # noqa: B008  # never changed
    """Muon with an adaptive rate for each row. Li et al. (2025), alg. 1, with the momentum of `muon`, whose names these are.

    `row` is the average of the mean square of a row of the orthogonal matrix. With `scale` 0 a matrix stays as large as it
    was, as in the authors' code, else the root of its mean square is `scale`.
    """
    mean, var, row = state
    (
        lr, decay, clip, momentum, one_minus_momentum, of_gradient, of_mean, epsilon, scale, split, row_beta,
        one_minus_row_beta,
    ) = hyper  # fmt: skip
    direction, mean = accumulated(limited(g, clip), mean, momentum, one_minus_momentum, of_gradient, of_mean)
    blocks = [block.to(w.dtype) for block in orthogonal_blocks(direction, how, int(split), epsilon)]
    squares = torch.cat([block.square().mean(dim=-1, keepdim=True) for block in blocks], dim=1)
    row = (row_beta * row).add_(squares.view(row.shape), alpha=one_minus_row_beta)
    rows = row.view(squares.shape).split([block.shape[1] for block in blocks], dim=1)
    blocks = [evened(block, own, scale) for block, own in zip(blocks, rows, strict=True)]
    step, ratio = joined(blocks, [1.0 if scale else step_ratio(block, 0.0) for block in blocks], out=direction)
    return moved(w, step, lr * ratio, decay), (mean, var, row)


@cache
def muon_with(how: Orthogonalization) -> TensorRule:
    """`muon` with this orthogonalization."""
    return _with(muon, muon_with, muon_shapes, how)


@cache
def normuon_with(how: Orthogonalization) -> TensorRule:
    """`normuon` with this orthogonalization."""
    return _with(normuon, normuon_with, normuon_shapes, how)


def _with(rule: TensorRule, made_by: Any, shapes: Any, how: Orthogonalization) -> TensorRule:
    if how == Orthogonalization():
        return rule
    elementwise = partial(is_elementwise, flatten=how.flatten)
    shapes = partial(shapes, flatten=how.flatten)
    return rule.variant((made_by, (how,)), shapes, partial(muon_cost, how=how), elementwise, how=how)
