"""Updates with sparse gradients: the rule runs on copies of the rows that a gradient lists, which are then written back.

Handled are gradients of the layout `torch.sparse_coo`, as `torch.nn.Embedding(sparse=True)` produces them; optimizers that
have no such update get them dense. Other sparse layouts are refused by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels import Update, storage
from ...kernels.metrics import MetricsBuffer
from .counts import Index
from .limits import begin_together
from .options import OPTIONS
from .settings import warn_once

Places = tuple[torch.Tensor, ...]  # indices along a tensor's first dimensions


class SparseRows:
    """Runner of an `Update` whose gradients may be sparse: it updates the rows listed by sparse gradients separately.

    `split` is called with all gradients if some are sparse, and raises for gradients that are not supported. It returns the
    gradients to use as a whole, with None for the rest, and the positions of the gradients to use by row. With `elements`, a
    gradient that lists single elements updates only these, not their whole rows.
    """

    def __init__(
        self,
        names: Sequence[str],
        split: Callable[[Sequence[torch.Tensor | None]], tuple[list[torch.Tensor | None], list[int]]],
        elements: bool = False,
    ) -> None:
        # Gradients are inspected only if there has been a sparse one, when `met` is True.
        self._names, self._split, self._elements, self.met = list(names), split, elements, False
        self._by_row: tuple[Update, list[int]] | None = None  # an update of copies, and the positions of their weights
        self._copies: list[tuple[torch.Tensor, Places, torch.Tensor]] = []  # (whole tensor, rows, copy of the rows)
        self._bound_gradients: list[torch.Tensor] = []  # sparse gradients and their values, kept alive while bound

    def bind(self, update: Update, gradients: Sequence[torch.Tensor | None], own: bool) -> None:
        """Bind gradients, some of which may be sparse, to the update of all weights; check everything, change no weight."""
        self._by_row = None
        if not (self.met and any(map(is_sparse, gradients))):
            try:
                update.bind(gradients, own=own)
                return
            except TypeError:  # inspecting gradients at every step would slow models without sparse ones
                if not any(map(is_sparse, gradients)):
                    raise
        whole, places = self._split(gradients)
        update.bind(whole)
        self.met = True
        self._bound_gradients = [gradient for gradient in gradients if gradient is not None and is_sparse(gradient)]
        self._by_row = self._update_of_rows(update, gradients, places), places

    @torch.no_grad()
    def _update_of_rows(self, update: Update, gradients: Sequence[torch.Tensor | None], places: list[int]) -> Update:
        """Return an update of copies of the rows that the gradients at these positions list. All errors are raised here."""
        listed = [_listed(gradients[i], self._elements) for i in places]  # type: ignore[arg-type]  # none of them is None
        self._bound_gradients += [values for _, values in listed]
        self._copies = []

        def copy_of_rows(tensor: torch.Tensor, weight: torch.Tensor, rows: Places) -> torch.Tensor:
            if tensor.shape[:1] != weight.shape[:1]:  # shared by all rows, such as a number per tensor
                return tensor
            copy = tensor.detach()[rows].contiguous()
            self._copies.append((tensor.detach(), rows, copy))
            return copy

        weights, states, masters = [], [], []
        for i, (rows, _) in zip(places, listed, strict=True):
            weight, master = update.weights[i], update.masters[i]
            weights.append(copy_of_rows(weight, weight, rows))
            states.append(tuple(copy_of_rows(tensor, weight, rows) for tensor in update.states[i]))
            masters.append(None if master is None else copy_of_rows(master, weight, rows))
        names = [self._names[i] for i in places]
        by_row = Update(update.rule, weights, states, masters, update.engine, names, update.seed, update.grad_scale_and_skip)
        by_row.bind([values for _, values in listed])
        return by_row

    def updates(self, update: Update) -> list[Update]:
        """Return the updates of the next step: the one given to `bind`, and one of rows if a gradient lists rows.

        The hyper-parameters of the first must have been written; the second gets its own from it.
        """
        if self._by_row is None:
            return [update]
        by_row, places = self._by_row
        by_row.hyper[:] = update.hyper[places]
        return [update, by_row]

    @torch.no_grad()
    def run(self, update: Update, into: MetricsBuffer | None = None) -> None:
        """Update all weights that have a gradient, after `bind`; rows of sparse gradients are not measured."""
        updates = self.updates(update)
        if self._by_row is None:
            update(into)
            return
        if update.rule.limits and not update.begun:
            begin_together(updates, all_reduce=update.all_reduce_global)
        updates[1]()
        update(into)
        for whole, rows, copy in self._copies:
            whole.index_put_(rows, copy)
        for gradient in self._bound_gradients if update.zero_grads else ():
            if is_sparse(gradient):
                gradient.zero_()
        self._by_row, self._copies, self._bound_gradients = None, [], []


def is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, torch.Tensor) and gradient.layout == torch.sparse_coo


def split(
    optimizer: Any,
    indices: Sequence[Index],
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[int]]:
    """Return (gradients to use as a whole, with None for the rest; positions of the gradients to use by row).

    Without `lazy_update`, a sparse gradient is converted to a dense one. So it is, with a warning once for each class, if
    the optimizer cannot update rows on their own. Raise ValueError if options or weight decay do not support sparse ones.
    """
    whole, by_row = list(gradients), []
    for i, gradient in enumerate(gradients):
        if gradient is None or not is_sparse(gradient):
            continue
        weight = weights[i]
        if gradient.shape != weight.shape or gradient.device != weight.device:
            raise ValueError(
                f"the gradient of {names[i]} is {tuple(gradient.shape)} on {gradient.device}: "
                f"its weight is {tuple(weight.shape)} on {weight.device}"
            )
        if not optimizer.takes_sparse:
            name = type(optimizer).__name__
            warn_once(
                f"{name} updates all rows: it makes sparse gradients, such as of {names[i]}, dense at each step; use "
                "sparse=False in the layer, or SGD, Adam, AdaGrad, GroupAdaGrad or Ftrl, which update the listed rows only",
                f"sparse gradients of {name}",
            )
            whole[i] = gradient.detach().to_dense()
            continue
        for option, before, after in optimizer.transformed():
            if added := set(after.starts_as_weight) - set(before.starts_as_weight):
                raise ValueError(
                    f"{option.name}={getattr(optimizer, option.name)!r} for {names[i]}, whose gradient is sparse: the state "
                    f"{added.pop()} is kept of all rows, so it must be {option.default}; or use sparse=False in the layer"
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
            for option in OPTIONS if optimizer._joint is not None else ():
                if option.by_norm and option.is_on(optimizer):
                    raise ValueError(
                        f"{option.name}={getattr(optimizer, option.name)!r} of one of several optimizers that have a limit "
                        f"together, for {names[i]}, whose gradient is sparse: give it for all of them; or use "
                        "lazy_update=False"
                    )
            for option, before, after in optimizer.transformed():
                if not option.by_row and (after.reductions != before.reductions or after.slots != before.slots):
                    raise ValueError(
                        f"{option.name}={getattr(optimizer, option.name)!r} for {names[i]}, whose gradient is sparse: rows "
                        f"are updated apart from the other weights, so it must be {option.default}; or use lazy_update=False"
                    )
            whole[i] = None
            by_row.append(i)
        else:
            whole[i] = gradient.detach().to_dense()
    return whole, by_row


def _listed(gradient: torch.Tensor, elements: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return what a sparse gradient lists: indices of rows (or single elements), each once, and the values there."""
    gradient = gradient.detach().coalesce()
    if elements or gradient.sparse_dim() == 1:
        return gradient.indices().unbind(), gradient.values()
    rows = gradient.indices()[0].unique()
    return (rows,), gradient.to_dense().index_select(0, rows)
