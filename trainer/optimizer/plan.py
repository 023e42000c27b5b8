"""Plans: how a list of parameters is stepped, made once, so that a step is little more than a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels import Rule, TensorRule, Update
from ...kernels.guards import Reference
from ...kernels.metrics import MetricsBuffer
from .hyper_rows import FormedRows, Rows
from .sparse import SparseRows

__all__ = ["Plan", "StepPlan"]


class Plan:
    """How one list of parameters is updated at every step.

    Attributes:
        update: the `Update` of the last step, if there is one for all parameters.
        references: weak references to the gradients of the last step; None if only some of them are known.
    """

    update: Any = None
    references: list[Reference] | None = None

    def total(self) -> torch.Tensor | None:
        """The sum of squares of all gradients of the last step, if its rule skips steps with non-finite ones."""
        return None

    def step(self, grads: Sequence[torch.Tensor | None], into: MetricsBuffer | None = None) -> None:
        """`prepare` and `run`."""
        self.prepare(grads)
        self.run(into)

    def prepare(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take these gradients, one for each weight, for the next step; None leaves a weight alone.

        Finds out whether the step would fail for their sake. No weight changes.
        """
        raise NotImplementedError

    def run(self, into: MetricsBuffer | None = None) -> None:
        """Update all weights that have a gradient, after `prepare`.

        Args:
            into: where to put what the update measures, into the rows of its `rng_offsets`.
        """
        raise NotImplementedError


class StepPlan(Plan):
    """That of parameters with one rule. A subclass says where their states and masters come from.

    Args:
        names: what messages call the parameters.
        rows: their hyper-parameters.
        own: gradients will be the weights' own, `weight.grad`.
        elements: as for `RowUpdate`.
    """

    update: Update

    def __init__(self, names: list[str], rows: Rows, own: bool = False, elements: bool = False) -> None:
        self.names, self.rows, self._own = names, rows, own
        self._updates: dict[Rule | TensorRule, Update] = {}  # an optimizer may go from one rule to another and back
        self._sparse = SparseRows(names, self.split, elements)
        self._active: list[bool] | None = None  # as that of the update of the last step
        self._make_update(rows.rule())

    def new_update(self, rule: Rule | TensorRule) -> Update:
        """An `Update` of the parameters as they are now; creates, moves and converts states and masters where needed."""
        raise NotImplementedError

    def is_current(self, update: Update) -> bool:
        """Whether this update works on the states and masters that the parameters have now."""
        raise NotImplementedError

    def fits(self, update: Update) -> bool:
        """Whether the states and masters of this update still match the parameters."""
        return update.fits()

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        """What of these is used as a whole and what by row; see `SparseRows`."""
        return list(grads), []

    @property
    def references(self) -> list[Reference] | None:  # type: ignore[override]  # it is looked up at every step
        return None if self._sparse.met else self.update.references

    def total(self) -> torch.Tensor | None:
        return self.update.total() if self.update.rule.skips_nonfinite else None

    def prepare(
        self, grads: Sequence[torch.Tensor | None], rule: Rule | TensorRule | None = None, in_place: bool = False
    ) -> None:
        """As that of `Plan`.

        Args:
            grads: the gradients.
            rule: that of the step; default: by the plan's own rows.
            in_place: as for `Update.rebind`.
        """
        rule, update, switched = self.rows.rule() if rule is None else rule, self.update, False
        if update.rule is not rule:
            update, switched, in_place = self._use(rule), True, False
        if self._sparse.met or not update.rebind(grads, own=self._own, in_place=in_place):
            if not self.fits(update):
                update = self._make_update(rule)
            self._sparse.bind(update, grads, self._own)
            switched = True
        if switched or update.active is not self._active:
            self._active = update.active
            self.rows.use([grad is not None for grad in grads])

    def run(self, into: MetricsBuffer | None = None) -> None:
        try:
            if self.rows.write(self.update):
                self.launch(into)
        except BaseException:
            self.rows.undo()
            raise

    def launch(self, into: MetricsBuffer | None = None) -> None:
        """The second half of `run`, after `rows.write`: what is left when nothing can fail any more."""
        if self._sparse.met:
            self._sparse.run(self.update, into)
        else:
            self.update(into)
        self.rows.count()

    def step_with(
        self,
        grads: Sequence[torch.Tensor | None],
        formed: FormedRows,
        places: Sequence[int],
        into: MetricsBuffer | None = None,
    ) -> None:
        """Update the weights that have a gradient, in a step whose rows are formed for more weights than these.

        No count moves.

        Args:
            formed: the rule and the rows of the step.
            places: for each weight the place of its row in these.
        """
        self.prepare(grads, formed.rule)
        formed.write(self.update, places)
        self._sparse.run(self.update, into)

    def host_step(self, update: Update, active: list[bool]) -> None:
        """The host half of a step with this update, whose kernels are replayed by a CUDA graph."""
        if self.update is not update:
            self.update = update
            self.rows.forget()
        self.rows.use(active)
        update.host_only = True
        try:
            self.run()
        finally:
            update.host_only = False

    def _use(self, rule: Rule | TensorRule) -> Update:
        """Go on with another rule, with the `Update` that was made for it before if that still has the right states."""
        update = self._updates.get(rule)
        if update is None or not self.is_current(update):
            return self._make_update(rule)
        self.update = update
        return update

    def _make_update(self, rule: Rule | TensorRule) -> Update:
        self.update = self._updates[rule] = self.new_update(rule)
        self.rows.forget()
        return self.update
