"""Dion2 and NorDion2: Muon and NorMuon on the rows or columns of the momentum that are largest.

The rules are plain torch operations on stacks of tensors of one shape, as Muon's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from ...kernels import TensorRule, tensor_rule
from ...kernels.rules.muon import (
    Orthogonalization,
    adamw_of_vectors,
    block_rows,
    direction,
    evening,
    is_elementwise,
    matrix_shape,
    moved,
    muon_cost,
    muon_shapes,
    normuon_shapes,
    orthogonal_cost,
    orthogonalized,
    row_squares,
    step_ratio,
)

FRACTION = 0.25  # the authors' default


class Selection:
    """The rows or columns of matrices with the largest 1-norms, in their order.

    Args:
        block: the matrices, [n, rows, columns].
        fraction: the share of rows or columns, in (0, 1].
        by_rows: whether to select rows; else columns. None: rows if there are no more rows than columns.
    """

    def __init__(self, block: torch.Tensor, fraction: float, by_rows: bool | None = None) -> None:
        rows, columns = self.shape = block.shape[-2:]
        self.dim = 1 if (rows <= columns if by_rows is None else by_rows) else 2
        side = block.shape[self.dim]
        self.index: torch.Tensor | None = None  # None: all
        if (count := selected(side, fraction)) < side:
            norms = block.abs().sum(dim=3 - self.dim)
            largest = norms.argsort(dim=1, descending=True, stable=True)[:, :count]
            self.index = largest.sort(dim=1).values.unsqueeze(3 - self.dim)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the selected part of `values`, which has the block's shape, or a length of 1 in the other dimension."""
        return values if self.index is None else values.take_along_dim(self.index, dim=self.dim)

    def into(self, values: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return `values` with the selected part replaced by `part`."""
        return part if self.index is None else values.scatter(self.dim, self.index.expand_as(part), part)

    def spread(self, part: torch.Tensor) -> torch.Tensor:
        """Return matrices of the block's shape with the selected part, and zeros elsewhere."""
        return part if self.index is None else self.into(part.new_zeros((len(part), *self.shape)), part)

    def decayed(self, mean: torch.Tensor, momentum: float) -> torch.Tensor:
        """Return `mean` with the selected part multiplied by `momentum`."""
        return self.into(mean, momentum * self.of(mean))


def selected(side: int, fraction: float) -> int:
    """Return how many of `side` rows or columns are selected: `fraction` of them, rounded up."""
    return min(side, max(1, math.ceil(round(fraction * side, 9))))


def dion2_cost(
    shape: torch.Size,
    how: Orthogonalization = Orthogonalization(),  # noqa: B008  # never changed
    split: float = 0.0,
    fraction: float = FRACTION,
    by_rows: bool | None = None,
) -> float:
    """Return the floating-point operations of a tensor's update, as `muon_cost` does."""
    matrix = matrix_shape(shape, how.flatten)
    if matrix is None:
        return muon_cost(shape, how)
    rows, columns = matrix
    blocks = []
    for each in block_rows(rows, how, int(split)):
        selects_rows = each <= columns if by_rows is None else by_rows
        blocks.append((selected(each, fraction), columns) if selects_rows else (each, selected(columns, fraction)))
    return shape.numel() / max(1, rows * columns) * orthogonal_cost(blocks, how)


def _accumulated(
    w: torch.Tensor, g: torch.Tensor, mean: torch.Tensor, numbers: tuple[float, float, float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the direction of which a part is orthogonalized, and the momentum before that part of it decays."""
    clip, *shares = numbers
    of_step, (mean,) = direction(w, g, (mean,), (clip, 1.0, *shares))
    return of_step, mean


def _orthogonal(parts: Sequence[torch.Tensor], how: Orthogonalization, epsilon: float) -> list[torch.Tensor]:
    """Return each of these stacks, [n, rows, columns], orthogonalized; those of one shape are computed together."""
    results: dict[int, torch.Tensor] = {}
    for shape in dict.fromkeys(part.shape for part in parts):
        members = [k for k, part in enumerate(parts) if part.shape == shape]
        stack = parts[members[0]] if len(members) == 1 else torch.cat([parts[k] for k in members])
        together = orthogonalized(stack, how.triples, epsilon, how.gram, how.dtype)
        results |= zip(members, together.split(shape[0]), strict=True)
    return [results[k] for k in range(len(parts))]


def _moved(
    w: torch.Tensor, steps: Sequence[torch.Tensor], ratios: Sequence[float], lr: float, decay: float, how: Any, split: int
) -> torch.Tensor:
    """Return the weights after steps of their blocks, whose learning rates are multiplied by the ratios."""
    rows = zip(how.blocks(w, split), steps, ratios, strict=True)
    return how.joined([moved(block, step.to(w.dtype), (), (lr, decay, ratio))[0] for block, step, ratio in rows], w, split)


def _decayed(
    mean: torch.Tensor, selections: Sequence[Selection], how: Orthogonalization, split: int, momentum: float
) -> torch.Tensor:
    """Return the momentum with all selected rows and columns multiplied by `momentum`."""
    blocks = zip(how.blocks(mean, split), selections, strict=True)
    return how.joined([each.decayed(block, momentum) for block, each in blocks], mean, split)


@tensor_rule(
    shapes=muon_shapes,
    batched=True,
    cost=dion2_cost,
    elementwise=is_elementwise,
    elementwise_rule=adamw_of_vectors,
    nonnegative=("var",),
    never_raises=True,
)
def dion2(w, g, state, hyper, *, how=Orthogonalization(), fraction=FRACTION):  # noqa: B008  # never changed
    """Muon on a fraction of the rows or columns. Ahn, Amsel & Langford (2025), with the hyper-parameters of `muon`.

    The gradient is added to the whole momentum. Of the shorter dimension the rows or columns with the largest 1-norms are
    orthogonalized and applied, and only these decay: what was not applied stays for later steps. `mean` is the paper's
    momentum times 1 - momentum, which changes no direction; with `fraction=1` it is Muon's times `momentum`, as it decays
    after the step. The learning rate has the factor of the whole matrix.
    """
    mean, var = state
    lr, decay, clip, momentum, one_minus_momentum, of_gradient, of_mean, epsilon, scale, split = hyper
    of_step, mean = _accumulated(w, g, mean, (clip, one_minus_momentum, of_gradient, of_mean))
    blocks = how.blocks(of_step, int(split))
    selections = [Selection(block, fraction) for block in blocks]
    parts = _orthogonal([each.of(block) for each, block in zip(selections, blocks, strict=True)], how, epsilon)
    ratios = [step_ratio(block, scale) for block in blocks]
    steps = [each.spread(part) for each, part in zip(selections, parts, strict=True)]
    w = _moved(w, steps, ratios, lr, decay, how, int(split))
    return w, (_decayed(mean, selections, how, int(split), momentum), var)


@tensor_rule(
    shapes=normuon_shapes,
    batched=True,
    cost=partial(dion2_cost, by_rows=True),
    elementwise=is_elementwise,
    elementwise_rule=adamw_of_vectors,
    full_precision=("row",),
    nonnegative=("var", "row"),
    never_raises=True,
)
def nordion2(w, g, state, hyper, *, how=Orthogonalization(), fraction=FRACTION):  # noqa: B008  # never changed
    """NorMuon on a fraction of the rows, as `dion2`, with the hyper-parameters of `normuon`. Only their `row` is updated.

    As in microsoft/dion, rows are selected whatever the shape, because each has a running average.
    """
    mean, var, row = state
    (
        lr, decay, clip, momentum, one_minus_momentum, of_gradient, of_mean, epsilon, scale, split, row_beta,
        one_minus_row_beta,
    ) = hyper  # fmt: skip
    of_step, mean = _accumulated(w, g, mean, (clip, one_minus_momentum, of_gradient, of_mean))
    blocks = how.blocks(of_step, int(split))
    selections = [Selection(block, fraction, by_rows=True) for block in blocks]
    parts = _orthogonal([each.of(block) for each, block in zip(selections, blocks, strict=True)], how, epsilon)
    rows = list(how.blocks(row, int(split)))
    steps = []
    for k, (part, each) in enumerate(zip(parts, selections, strict=True)):
        squares, columns = row_squares(part), part.shape[-1]
        new = (row_beta * each.of(rows[k])).add_(squares, alpha=one_minus_row_beta / columns)
        part *= evening(squares, new, columns, scale)
        steps.append(each.spread(part))
        rows[k] = each.into(rows[k], new)
    ratios = [1.0 if scale else step_ratio(block, 0.0) for block in blocks]
    w = _moved(w, steps, ratios, lr, decay, how, int(split))
    row = how.joined(rows, row, int(split))
    return w, (_decayed(mean, selections, how, int(split), momentum), var, row)


@cache
def dion2_with(how: Orthogonalization, fraction: float) -> TensorRule:
    """Return the rule `dion2` with these settings of the orthogonalization, for this fraction of rows or columns."""
    return _with(dion2, dion2_with, muon_shapes, how, fraction)


@cache
def nordion2_with(how: Orthogonalization, fraction: float) -> TensorRule:
    """Return the rule `nordion2` with these settings of the orthogonalization, for this fraction of the rows."""
    return _with(nordion2, nordion2_with, normuon_shapes, how, fraction, by_rows=True)


def _with(
    rule: TensorRule,
    made_by: Callable[..., Any],
    shapes: Callable[..., Mapping[str, Sequence[int]]],
    how: Orthogonalization,
    fraction: float,
    by_rows: bool | None = None,
) -> TensorRule:
    cost = partial(dion2_cost, how=how, fraction=fraction, by_rows=by_rows)
    elementwise = partial(is_elementwise, flatten=how.flatten)
    options = {"how": how, "fraction": fraction}
    return rule.variant((made_by, (how, fraction)), partial(shapes, flatten=how.flatten), cost, elementwise, **options)
