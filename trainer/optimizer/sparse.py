"""Sparse gradients: the rule runs on copies of those rows that a gradient has, which are then written back.

A gradient as `torch.nn.Embedding(sparse=True)` gives it (`torch.sparse_coo`) lists rows and what stands in them. Other
sparse layouts, and gradients for optimizers that take none, are left to the kernels, which refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels import Update, storage
from ...kernels.metrics import MetricsBuffer
from .counts import Index
from .options import OPTIONS

Places = tuple[torch.Tensor, ...]  # indices along a tensor's first dimensions


class SparseRows:
    """Steps of an `Update` some of whose gradients may be sparse: the rows that these have are updated apart.

    Args:
        names: what messages call the weights.
        split: a function of all gradients, called where some are sparse: those to be taken as a whole, None for the others,
            and the places of those to be taken by row. It raises an error for those that cannot be taken.
        elements: whether a gradient that lists single elements updates only these, not the rows that they are in.

    Attributes:
        met: whether there has been a sparse gradient, for which to look from then on.
    """

    def __init__(
        self,
        names: Sequence[str],
        split: Callable[[Sequence[torch.Tensor | None]], tuple[list[torch.Tensor | None], list[int]]],
        elements: bool = False,
    ) -> None:
        self._names, self._split, self._elements, self.met = list(names), split, elements, False
        self._by_row: tuple[Update, list[int]] | None = None  # an update of copies, and the places of their weights
        self._copies: list[tuple[torch.Tensor, Places, torch.Tensor]] = []  # with the whole tensors that they are from
        self._alive: list[torch.Tensor] = []  # sparse gradients and what they list, which is bound

    def bind(self, update: Update, gradients: Sequence[torch.Tensor | None], own: bool) -> None:
        """As `Update.bind`. Checks everything and changes no weight."""
        self._by_row = None
        if not (self.met and any(map(is_sparse, gradients))):
            try:
                update.bind(gradients, own=own)
                return
            except TypeError:  # to look for sparse gradients at every step would cost those who have none
                if not any(map(is_sparse, gradients)):
                    raise
        whole, places = self._split(gradients)
        update.bind(whole)
        self.met = True
        self._alive = [gradient for gradient in gradients if gradient is not None and is_sparse(gradient)]
        self._by_row = self._cut(update, gradients, places), places

    @torch.no_grad()
    def _cut(self, update: Update, gradients: Sequence[torch.Tensor | None], places: list[int]) -> Update:
        """The rule on copies of the rows that the gradients at these places list. All that may fail happens here."""
        found = [_listed(gradients[i], self._elements) for i in places]  # type: ignore[arg-type]  # these are there
        self._alive += [values for _, values in found]
        self._copies = []

        def cut(tensor: torch.Tensor, weight: torch.Tensor, rows: Places) -> torch.Tensor:
            if tensor.shape[:1] != weight.shape[:1]:  # one for all rows, such as a number that the rule keeps
                return tensor
            copy = tensor.detach()[rows].contiguous()
            self._copies.append((tensor.detach(), rows, copy))
            return copy

        weights, states, masters = [], [], []
        for i, (rows, _) in zip(places, found, strict=True):
            weight, master = update.weights[i], update.masters[i]
            weights.append(cut(weight, weight, rows))
            states.append(tuple(cut(tensor, weight, rows) for tensor in update.states[i]))
            masters.append(None if master is None else cut(master, weight, rows))
        names = [self._names[i] for i in places]
        by_row = Update(update.rule, weights, states, masters, update.engine, names, update.seed, update.grad_scale_and_skip)
        by_row.bind([values for _, values in found])
        return by_row

    @torch.no_grad()
    def run(self, update: Update, into: MetricsBuffer | None = None) -> None:
        """Call the update, after `bind`."""
        if self._by_row is None:
            update(into)
            return
        by_row, places = self._by_row
        by_row.hyper[:] = update.hyper[places]
        by_row()
        update(into)
        for whole, rows, copy in self._copies:
            whole.index_put_(rows, copy)
        for gradient in self._alive if update.zero_grads else ():
            if is_sparse(gradient):
                gradient.zero_()
        self._by_row, self._copies, self._alive = None, [], []


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient lists its rows."""
    return isinstance(gradient, torch.Tensor) and gradient.layout == torch.sparse_coo


def split(
    optimizer: Any,
    indices: Sequence[Index],
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[int]]:
    """The gradients of a `RuleOptimizer` to be taken as a whole, None for the others; and the places of those by row.

    With `lazy_update=False` a sparse gradient is as good as a dense one, zeros and all.

    Raises:
        ValueError: a sparse gradient that does not fit its weight, or that the optimizer cannot decay.
    """
    whole, by_row = list(gradients), []
    for i, gradient in enumerate(gradients):
        if gradient is None or not is_sparse(gradient) or not optimizer.takes_sparse:
            continue
        weight = weights[i]
        if gradient.shape != weight.shape or gradient.device != weight.device:
            raise ValueError(
                f"the gradient of {names[i]} is {tuple(gradient.shape)} on {gradient.device}: "
                f"its weight is {tuple(weight.shape)} on {weight.device}"
            )
        for option in OPTIONS:
            if option.first_state is not None and option.is_on(optimizer):
                raise ValueError(
                    f"{option.name}={getattr(optimizer, option.name)!r} for {names[i]}, whose gradient is sparse: "
                    f"{option.by_row} are those of all rows, so it must be {option.default}; or use sparse=False in the "
                    "layer"
                )
        if not optimizer.decays_sparse and (wd := optimizer._get_wd(indices[i])):
            raise ValueError(
                f"wd={wd:g} for {names[i]}, whose gradient is sparse: {type(optimizer).__name__} does not decay such "
                "weights, so it must be 0; set the parameter's wd_mult to 0, or use sparse=False in the layer"
            )
        if getattr(optimizer, "lazy_update", True) and gradient.sparse_dim():
            if any(map(storage.is_packed, optimizer.state_dtypes(weight))):
                raise ValueError(
                    f"state_dtype={optimizer.state_dtype!r} for {names[i]}, whose gradient is sparse: rows share scales, so "
                    "it must be None or 'bfloat16'; or use lazy_update=False"
                )
            if optimizer._skips_overflow:
                raise ValueError(
                    f"the gradient of {names[i]} is sparse: with a loss scaler all gradients are looked at together, and "
                    "rows are updated apart; use lazy_update=False, or sparse=False in the layer"
                )
            for option in OPTIONS:
                if option.by_row and option.is_on(optimizer):
                    raise ValueError(
                        f"{option.name}={getattr(optimizer, option.name)!r} for {names[i]}, whose gradient is sparse: "
                        f"{option.by_row}, so it must be {option.default}; or use lazy_update=False"
                    )
            whole[i] = None
            by_row.append(i)
        else:
            whole[i] = gradient.detach().to_dense()
    return whole, by_row


def _listed(gradient: torch.Tensor, elements: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The indices, each once, of what a gradient lists, rows or single elements, and the values."""
    gradient = gradient.detach().coalesce()
    if elements or gradient.sparse_dim() == 1:
        return gradient.indices().unbind(), gradient.values()
    rows = gradient.indices()[0].unique()
    return (rows,), gradient.to_dense().index_select(0, rows)
