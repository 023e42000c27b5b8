"""Muon: momentum, orthogonalized by the Newton-Schulz iteration.

The iteration is torch operations on stacks of matrices of one shape; what is around it are elementwise rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..backends import asked_engine, choose_engine
from ..language import StagedRule, rule, staged_rule
from ..language.staged_rule import normalized
from .adam import adamw
from .common import clipped
from .costs import newton_schulz_cost

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
    """Return the coefficients of the polynomial p(x / factor)."""
    a, b, c = triple
    return a / factor, b / factor**3, c / factor**5


# Coefficients a, b, c of the polynomials a x + b x^3 + c x^5 that singular values go through, one after the other.
#
# quintic: Jordan et al. (2024), "Muon", section "Tuning the coefficients": a steep start; values end in about [0.7, 1.2].
# polar_express: Amsel et al. (2025), "The Polar Express", arXiv 2505.16932, alg. 1: each is optimal after the
#     ones before. All but the last include its safety factor of 1.01, the first twice, as alg. 1 divides the matrix by it.
# cubic5: arXiv 2606.00371, as in NVIDIA's Emerging-Optimizers: without fifth powers, so one product fewer per step.
# deepseekv4: DeepSeek-AI (2026), "DeepSeek-V4": eight steps of quintic bring the values near 1, and two more converge to it.
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

# The rows, or columns if those are fewer, from which symmetric products are computed by half on a GPU: ten of 16 blocks of
# the largest tile, then fewer. No GPU has timed it.
SYMMETRIC_FROM = 512


@dataclass(frozen=True)
class RowPattern:
    """Where the rows of separate matrices are among the rows of a fused one.

    Attributes:
        lengths: the lengths of the axes that number the rows, the slowest first; -1 for one that follows from the rows.
        order: the axes in the order in which they number the rows of all separate matrices, one matrix after the other.
        leading: how many of the axes in `order` number the matrices; the others number the rows of each.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    leading: int

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return the lengths of the axes for so many rows."""
        given = -math.prod(self.lengths) if -1 in self.lengths else math.prod(self.lengths)
        return tuple(rows // given if length == -1 else length for length in self.lengths)

    def parts(self, rows: int) -> int:
        """Return the number of separate matrices."""
        sizes = self.sizes(rows)
        return math.prod(sizes[axis] for axis in self.order[: self.leading])

    def arranged(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return fused matrices [n, rows, columns] in another order of rows, in which the rows of each part are adjacent."""
        return self._permuted(matrices, self.sizes(matrices.shape[1]), self.order)

    def restored(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return [n, rows, columns] in the order of the fused matrix: the inverse of `arranged`."""
        sizes = self.sizes(matrices.shape[1])
        inverse = tuple(self.order.index(axis) for axis in range(len(sizes)))
        return self._permuted(matrices, [sizes[axis] for axis in self.order], inverse)

    def _permuted(self, matrices: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        axes = matrices.unflatten(1, tuple(sizes))
        return axes.permute(0, *(axis + 1 for axis in order), -1).reshape(matrices.shape)


class Orthogonalization(NamedTuple):
    """Settings of Muon's orthogonalization.

    Attributes:
        triples: coefficients (a, b, c) of the iteration's polynomials, one triple per step.
        gram: whether to iterate on the Gram matrix of the rows; None means what `uses_gram` says.
        flatten: whether a tensor of more than two dimensions is one matrix with its first dimension as the rows.
        splits: ways to split a matrix into blocks of rows that are orthogonalized separately: a number of equal blocks, the
            number of rows of each block, or a `RowPattern`; () means no split. A tensor's hyper-parameter `split` indexes
            this tuple.
        dtype: the type of the iteration's matrices, bfloat16 or float16; None means what `dtype_for` says.
    """

    triples: tuple[Triple, ...] = COEFFICIENTS["quintic"]
    gram: bool | None = None
    flatten: bool = False
    splits: tuple[int | tuple[int, ...] | RowPattern, ...] = ((),)
    dtype: torch.dtype | None = None

    def blocks(self, tensors: torch.Tensor, split: int) -> Sequence[torch.Tensor]:
        """Split [n, rows, ...] or [n, matrices, rows, columns] into blocks of rows that are orthogonalized separately."""
        matrices, pattern = matrices_of(tensors, self), self.splits[split]
        sizes = block_rows(matrices.shape[1], self, split)
        if isinstance(pattern, RowPattern):
            matrices = pattern.arranged(matrices)
        return [matrices] if len(sizes) < 2 else matrices.split(sizes, dim=1)

    def joined(self, blocks: Sequence[torch.Tensor], like: torch.Tensor, split: int) -> torch.Tensor:
        """Return the blocks of `blocks` in one new tensor, as `like`."""
        whole, pattern = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1), self.splits[split]
        if isinstance(pattern, RowPattern):
            whole = pattern.restored(whole)
        return torch.empty_like(like).copy_(whole.reshape(like.shape))

    def dtype_for(self, matrices: torch.Tensor) -> torch.dtype:
        """Return the dtype of the iteration's matrices."""
        return self.dtype or dtype_for(matrices)

    def rounds_first(self, matrices: torch.Tensor) -> bool:
        """Return whether to round before the division, too, as torch.optim.Muon does: it costs accuracy on Gram matrices."""
        dtype = self.dtype_for(matrices)
        return dtype == torch.bfloat16 and not self._on_gram(matrices, dtype)

    def _on_gram(self, matrices: torch.Tensor, dtype: torch.dtype) -> bool:
        rows, columns = matrices.shape[-2:]
        return uses_gram(rows, columns, dtype) if self.gram is None else self.gram

    def orthogonal(self, x: torch.Tensor, spare: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the iteration to stacked matrices with norms of at most 1; see `iterated`."""
        form = iterated_on_gram if self._on_gram(x, x.dtype) else iterated
        if len(x) > 1:
            return form(x, self.triples, spare)
        return form(x[0], self.triples, None if spare is None else spare[0])[None]  # torch multiplies it faster


def orthogonalized(
    matrices: torch.Tensor,
    triples: Sequence[Triple],
    epsilon: float,
    gram: bool | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return approximately U V^T of the singular value decompositions U S V^T, in a 16-bit dtype. Jordan et al. (2024).

    Args:
        matrices: [n, rows, columns].
        triples: the coefficients of each step.
        epsilon: the smallest norm to divide by.
        gram: whether to iterate on the Gram matrix; None means if that saves time and costs no accuracy (`uses_gram`).
        dtype: bfloat16, as its authors use, or float16; None means the one of `dtype_for`.
    """
    how = Orthogonalization(tuple(triples), gram, dtype=dtype)
    return how.orthogonal(normalized(matrices, epsilon, how))


def dtype_for(matrices: torch.Tensor) -> torch.dtype:
    """Return float16, which is more accurate, where it is as fast as bfloat16 and its range is large enough; else bfloat16.

    On a CPU float16 is slow. The entries of a matrix of norm 1 are about 1 / sqrt(rows * columns): here at least twice the
    smallest normal float16 number.
    """
    small_enough = matrices[0].numel() <= 2**26
    return torch.float16 if matrices.device.type != "cpu" and small_enough else torch.bfloat16


def uses_gram(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether to iterate on the Gram matrix by default: in bfloat16 the results of less wide matrices are worse."""
    short, long = sorted((rows, columns))
    return 2 * long >= 3 * short if dtype == torch.float16 else long > 2 * short


def iterated(x: torch.Tensor, triples: Sequence[Triple], spare: torch.Tensor | None = None) -> torch.Tensor:
    """Apply these Newton-Schulz steps to `x`, [(n,) rows, columns] with norms of at most 1.

    The result is in `x` or in `spare`, another tensor of this shape, and both are overwritten. Default: new memory.
    """
    multiplied, factors, (gram_of, symmetric) = _multiplied(x), _factors(x), _symmetric(x)
    gram = _gram(x, gram_of)
    # Two tensors take turns as a step's result: allocating a large one costs more than writing to it.
    square, new = torch.empty_like(gram), torch.empty_like(x) if spare is None else spare
    for k, (a, b, c) in enumerate(triples):
        if k:
            _gram(x, gram_of, out=gram)
        if c:
            symmetric(gram, gram, gram, beta=b, alpha=c, out=square)
            multiplied(x, *factors(square, x), beta=a, out=new)
        else:
            multiplied(x, *factors(gram, x), beta=a, alpha=b, out=new)
        x, new = new, x
    return x


def iterated_on_gram(x: torch.Tensor, triples: Sequence[Triple], spare: torch.Tensor | None = None) -> torch.Tensor:
    """Apply Newton-Schulz steps to the Gram matrix G of the shorter side and to their product Q, and return Q x.

    Zhang et al. (2026), "Gram Newton-Schulz". Rounding makes small eigenvalues of G negative, and the steps amplify them, so
    G is recomputed before some steps (`restarts_of`). Memory is used as by `iterated`.
    """
    multiplied, factors, (gram_of, symmetric) = _multiplied(x), _factors(x), _symmetric(x)
    restarts = restarts_of(triples, x.dtype)
    ends = {*(k - 1 for k in restarts), len(triples) - 1}
    new = torch.empty_like(x) if spare is None else spare
    product = None  # of the steps since G was computed; None for none
    gram = _gram(x, gram_of)
    for k, (a, b, c) in enumerate(triples):
        factor = symmetric(gram, gram, gram, beta=b, alpha=c) if c else b * gram  # less a times the identity
        if k in ends:
            if product is None:  # a plain step: as many operations, and more accurate
                multiplied(x, *factors(factor, x), beta=a, out=new)
            else:
                torch.matmul(*factors(symmetric(product, product, factor, beta=a), x), out=new)
            x, new = new, x
            if k + 1 < len(triples):
                product, gram = None, _gram(x, gram_of)
            continue
        gram = symmetric(gram, gram, factor, beta=a)
        gram = symmetric(gram, factor, gram, beta=a)
        if product is None:
            product = factor
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product = symmetric(product, product, factor, beta=a)
    return x


def restarts_of(triples: Sequence[Triple], dtype: torch.dtype) -> range:
    """Return the steps before which the Gram matrix is recomputed.

    After the second step, as the authors do for five steps, and after every third from there; in bfloat16 after every second
    step, which makes it about as accurate as `iterated`.
    """
    return range(2, len(triples), 2 if dtype == torch.bfloat16 else 3)


def halves_pay(x: torch.Tensor) -> bool:
    """Return whether half of the blocks of a symmetric product are computed: on a GPU with Triton, of large matrices.

    Their rows must begin at multiples of 16 numbers, and addresses in them fit into 32 bits.
    """
    rows, columns = x.shape[-2:]
    if (
        x.device.type != "cuda"
        or min(rows, columns) < SYMMETRIC_FROM
        or rows % 16
        or columns % 16
        or rows * columns > 2**30
        or choose_engine(x.device, asked_engine.get()) != "triton"
    ):
        return False
    from ..backends.triton.symmetric import works_on

    return works_on(x.device)


def _symmetric(x: torch.Tensor) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Return functions for symmetric y z, and for symmetric beta x + alpha y z."""
    if not halves_pay(x):
        return torch.matmul, _multiplied(x)
    from ..backends.triton.symmetric import symmetric_product

    return partial(symmetric_product, None), symmetric_product


def _gram(x: torch.Tensor, product: Callable[..., torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the inner products of the rows of `x`, or of its columns if those are fewer."""
    return product(*((x, x.mT) if x.shape[-2] <= x.shape[-1] else (x.mT, x)), out=out)


def _factors(x: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that orders the factors of a product of a square matrix and one of the shape of `x`."""
    return (lambda square, x: (square, x)) if x.shape[-2] <= x.shape[-1] else (lambda square, x: (x, square))


def _multiplied(x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return torch's function for beta x + alpha y z: of stacks if `x` is a stack, else of matrices."""
    return torch.baddbmm if x.dim() == 3 else torch.addmm


def block_rows(rows: int, how: Orthogonalization, split: int) -> tuple[int, ...]:
    """Return the rows of each block of a matrix of so many rows."""
    blocks = how.splits[split]
    number = blocks.parts(rows) if isinstance(blocks, RowPattern) else blocks
    return (rows // number,) * number if isinstance(number, int) else number or (rows,)


def step_ratio(block: torch.Tensor, scale: float) -> float:
    """Return the learning rate's factor: scale sqrt(max(rows, columns)), or sqrt(max(1, rows / columns)) if `scale` is 0."""
    rows, columns = block.shape[-2:]
    return scale * math.sqrt(max(rows, columns)) if scale else math.sqrt(max(1.0, rows / columns))


def matrix_shape(shape: Sequence[int], flatten: bool) -> tuple[int, int] | None:
    """Return the rows and columns of the matrix, or of each of the matrices, in a tensor; None if it has no matrices."""
    if len(shape) == 2 or (flatten and len(shape) > 2):
        return shape[0], math.prod(shape[1:])
    return (shape[1], shape[2]) if len(shape) == 3 else None


def matrices_of(tensors: torch.Tensor, how: Orthogonalization) -> torch.Tensor:
    """Reshape a stack of tensors, [n, ...], into a stack of all their matrices, [matrices, rows, columns]."""
    return tensors.flatten(0, 1) if tensors.dim() == 4 and not how.flatten else tensors.flatten(2)


def muon_shapes(shape: torch.Size, flatten: bool = False) -> dict[str, Any]:
    """Return the shapes of Muon's states that differ from the weight's shape: matrices need no `var`."""
    return {} if matrix_shape(shape, flatten) is None else {"var": (0,)}


def muon_cost(
    shape: torch.Size,
    how: Orthogonalization = Orthogonalization(),  # noqa: B008  # never changed
    split: float = 0.0,
) -> float:
    """Return the floating-point operations of a tensor's update: one per element for tensors that are not matrices."""
    matrix = matrix_shape(shape, how.flatten)
    if matrix is None:
        return float(shape.numel())
    rows, columns = matrix
    blocks = [(each, columns) for each in block_rows(rows, how, int(split))]
    return shape.numel() / max(1, rows * columns) * orthogonal_cost(blocks, how)


def orthogonal_cost(blocks: Sequence[tuple[int, int]], how: Orthogonalization) -> float:
    """Return the floating-point operations that orthogonalizing matrices of these rows and columns takes."""
    squares = sum(c != 0 for *_, c in how.triples)
    return sum(newton_schulz_cost(*block, len(how.triples), squares, how.gram) for block in blocks)


def is_elementwise(shape: torch.Size, flatten: bool = False) -> bool:
    """Return whether a tensor of this shape is updated elementwise, because it is not a matrix or a stack of matrices."""
    return matrix_shape(shape, flatten) is None


@rule(nonnegative=("var",))
def adamw_of_vectors(w, g, state, hyper):
    """AdamW for tensors that are not matrices; the prefix "adam_" marks settings that Muon's matrices have, too."""
    mean, var = state
    adam_lr, adam_decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, adam_epsilon = hyper
    return adamw(
        w, g, (mean, var), (adam_lr, adam_decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, adam_epsilon)
    )


@rule
def direction(w, g, state, hyper):
    """The momentum, and the direction that is orthogonalized: shares of the gradient and of the momentum."""
    (mean,) = state
    clip, momentum, one_minus_momentum, of_gradient, of_mean = hyper
    g = clipped(g, clip)
    mean = momentum * mean + one_minus_momentum * g
    return of_gradient * g + of_mean * mean, (mean,)


@rule
def moved(w, g, state, hyper):
    """A step along orthogonal matrices, which are the gradient here, and decay."""
    lr, decay, ratio = hyper
    return (1.0 - decay) * w - lr * ratio * g, state


@staged_rule(
    before=direction,
    after=moved,
    shapes=muon_shapes,
    cost=muon_cost,
    elementwise=is_elementwise,
    elementwise_rule=adamw_of_vectors,
    nonnegative=("var",),
)
def muon(x, spare, state, hyper, *, how=Orthogonalization()):  # noqa: B008  # never changed
    """Orthogonalized momentum. Jordan et al. (2024). `adamw_of_vectors` updates tensors that are not matrices.

    A tensor of three dimensions is a stack of matrices; each is orthogonalized separately, as in the authors' code.

    `of_gradient` and `of_mean` are the shares of gradient and momentum in the direction; the learning rate is multiplied by
    sqrt(max(1, rows / columns)) if `scale` is 0, else by scale sqrt(max(rows, columns)); `split` is an index into
    `how.splits`.
    """
    (scale,) = hyper
    return how.orthogonal(x, spare), step_ratio(x, scale), ()


def normuon_shapes(shape: torch.Size, flatten: bool = False) -> dict[str, Any]:
    """Return the shapes of NorMuon's states that differ from the weight's: `row` has a number per row of a matrix."""
    if matrix_shape(shape, flatten) is None:
        return {"row": (0,)}
    return {"var": (0,), "row": (shape[0], 1) if flatten else (*shape[:-1], 1)}


def row_squares(steps: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of 16-bit matrices [n, rows, columns], float32 [n, rows, 1]."""
    return torch.linalg.vector_norm(steps, dim=-1, keepdim=True, dtype=torch.float32).square_()


def evening(squares: torch.Tensor, row: torch.Tensor, columns: int, scale: float) -> torch.Tensor:
    """Return the factors, [n, rows, 1], that scale the rows of orthogonalized matrices to equal size (NorMuon, alg. 1).

    Each row is divided by the root of the running average of its mean square, `row` [n, rows, 1]. Then the whole matrix is
    scaled to its norm of before, or if `scale` is not 0, to this root mean square. `squares`: as of `row_squares`.
    """
    factors = 1.0 / (row.sqrt() + 1e-10)
    before, after = (each.sum(dim=-2, keepdim=True).sqrt() for each in (squares, squares * factors.square()))
    size = scale * math.sqrt(squares[0].numel() * columns) if scale else before
    return factors * (size / (after + 1e-10))


@staged_rule(
    before=direction,
    after=moved,
    shapes=normuon_shapes,
    cost=muon_cost,
    elementwise=is_elementwise,
    elementwise_rule=adamw_of_vectors,
    full_precision=("row",),
    nonnegative=("var", "row"),
)
def normuon(x, spare, state, hyper, *, how=Orthogonalization()):  # noqa: B008  # never changed
    """Muon with an adaptive learning rate for each row. Li et al. (2025), alg. 1, with the hyper-parameters of `muon`.

    `row` is the running average of the mean square of each row of the orthogonal matrix. With `scale` 0 the matrix keeps its
    norm, as in the authors' code; else its root mean square becomes `scale`.
    """
    (row,) = state
    scale, row_beta, one_minus_row_beta = hyper
    step = how.orthogonal(x, spare)
    squares, columns = row_squares(step), step.shape[-1]
    row = (row_beta * row).add_(squares, alpha=one_minus_row_beta / columns)
    step *= evening(squares, row, columns, scale)
    return step, 1.0 if scale else step_ratio(step, 0.0), (row,)


@cache
def muon_with(how: Orthogonalization) -> StagedRule:
    """Return the rule `muon` with these settings of the orthogonalization."""
    return _with(muon, muon_with, muon_shapes, how)


@cache
def normuon_with(how: Orthogonalization) -> StagedRule:
    """Return the rule `normuon` with these settings of the orthogonalization."""
    return _with(normuon, normuon_with, normuon_shapes, how)


def _with(rule: StagedRule, made_by: Any, shapes: Any, how: Orthogonalization) -> StagedRule:
    if how == Orthogonalization():
        return rule
    elementwise = partial(is_elementwise, flatten=how.flatten)
    shapes = partial(shapes, flatten=how.flatten)
    variant: Any = rule.variant((made_by, (how,)), shapes, partial(muon_cost, how=how), elementwise, how=how)
    return variant
