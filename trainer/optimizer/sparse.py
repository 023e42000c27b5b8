"""Sparse gradients: the rule runs on copies of those rows that a gradient has, which are then written back.

A gradient as `torch.nn.Embedding(sparse=True)` gives it (`torch.sparse_coo`) lists rows and what stands in them. Other
sparse layouts, and gradients for optimizers that take none, are left to the kernels, which refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.metrics import MetricsBuffer
from .counts import Index
from .options import OPTIONS

__all__ = ["RowUpdate", "SparseRows", "is_sparse", "split"]


class RowUpdate:
    """One rule on the rows that gradients have, once. Everything that may fail happens when it is made.

    Args:
        rule: the update rule.
        weights: the whole weights.
        gradients: sparse, of the shapes of the weights.
        states: for each weight its whole states, one tensor for each slot of the rule.
        masters: for each weight its whole copy in the arithmetic's type, or None.
        engine, names, seed, control: as for `tristep.kernels.Update`.
        elements: whether a gradient that lists single elements updates only these, not the rows that they are in.

    Attributes:
        hyper: as that of `tristep.kernels.Update`.
    """

    @torch.no_grad()
    def __init__(
        self,
        rule: Rule | TensorRule,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[tuple[torch.Tensor, ...]],
        masters: Sequence[torch.Tensor | None],
        engine: str | None = None,
        names: Sequence[str] | None = None,
        seed: int | storage.CodesOnly | None = None,
        control: torch.Tensor | None = None,
        elements: bool = False,
    ) -> None:
        found = [_listed(gradient, elements) for gradient in gradients]
        self._values = [values for _, values in found]  # bound, so they must stay alive
        # Whole tensor, indices along its first dimensions, and a copy of what is there.
        self._pieces: list[tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]] = []

        def cut(tensor: torch.Tensor, weight: torch.Tensor, places: tuple[torch.Tensor, ...]) -> torch.Tensor:
            if tensor.shape[:1] != weight.shape[:1]:  # one for all rows, such as a number that the rule keeps
                return tensor
            piece = tensor.detach()[places].contiguous()
            self._pieces.append((tensor.detach(), places, piece))
            return piece

        cut_weights, cut_states, cut_masters = [], [], []
        for weight, (rows, _), state, master in zip(weights, found, states, masters, strict=True):
            cut_weights.append(cut(weight, weight, rows))
            cut_states.append(tuple(cut(tensor, weight, rows) for tensor in state))
            cut_masters.append(None if master is None else cut(master, weight, rows))
        self._update = Update(rule, cut_weights, cut_states, cut_masters, engine, names, seed, control)
        self._update.bind(self._values)

    @property
    def hyper(self) -> np.ndarray:
        return self._update.hyper

    def __call__(self) -> None:
        """Run the step with the values in `hyper`."""
        self.compute()
        self.write_back()

    def compute(self) -> None:
        """Update the copies."""
        self._update()

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the copies where they come from."""
        for whole, places, piece in self._pieces:
            whole.index_put_(places, piece)


class SparseRows:
    """Steps of an `Update` some of whose gradients may be sparse: the rows that these have are updated apart.

    Args:
        names: what messages call the weights.
        split: a function of all gradients, called where some are sparse: those to be taken as a whole, None for the others,
            and the places of those to be taken by row. It raises an error for those that cannot be taken.
        elements: as for `RowUpdate`.

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
        self._by_row: tuple[RowUpdate, list[int]] | None = None
        self._sparse: list[torch.Tensor] = []

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
        self._sparse = [gradient for gradient in gradients if gradient is not None and is_sparse(gradient)]
        by_row = RowUpdate(
            update.rule,
            [update.weights[i] for i in places],
            [gradients[i] for i in places],  # type: ignore[misc]  # these are there
            [update.states[i] for i in places],
            [update.masters[i] for i in places],
            update.engine,
            [self._names[i] for i in places],
            update.seed,
            update.grad_scale_and_skip,
            self._elements,
        )
        self._by_row = by_row, places

    def run(self, update: Update, into: MetricsBuffer | None = None) -> None:
        """Call the update, after `bind`."""
        if self._by_row is None:
            update(into)
            return
        by_row, places = self._by_row
        by_row.hyper[:] = update.hyper[places]
        by_row.compute()
        update(into)
        by_row.write_back()
        if update.zero_grads:
            for gradient in self._sparse:
                gradient.zero_()
        self._by_row, self._sparse = None, []


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
