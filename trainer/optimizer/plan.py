"""StepPlan: how a list of parameters is stepped, made once, so that a step is little more than a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ...kernels import Rule, TensorRule, Update
from ...kernels.guards import Reference
from ...kernels.metrics import MetricsBuffer
from .hyper_rows import FormedRows
from .sparse import SparseRows

__all__ = ["PlanRows", "PlanStates", "StepPlan"]


class PlanStates(Protocol):
    """The parameters of a plan, and where their states and masters come from.

    Attributes:
        names: what messages call the parameters.
    """

    names: list[str]

    def make_update(self, rule: Rule | TensorRule) -> Update:
        """An `Update` of the parameters as they are now; creates, moves and converts states and masters where needed."""

    def is_current(self, update: Update) -> bool:
        """Whether this update works on the states and masters that the parameters have now."""

    def fits(self, update: Update) -> bool:
        """Whether the states and masters of this update still match the parameters."""

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        """What of these is used as a whole and what by row; see `SparseRows`."""


class PlanRows(Protocol):
    """The rows of hyper-parameters that the parameters of a plan have at each step, and their update counts.

    Attributes:
        active: for each parameter whether the next step updates it.
    """

    active: list[bool]

    def rule(self) -> Rule | TensorRule:
        """The rule of the next step."""

    def use(self, active: list[bool]) -> None:
        """Update these parameters from now on."""

    def forget(self) -> None:
        """Find again which parameters share hyper-parameters."""

    def write(self, update: Update, number: int | None = None) -> bool:
        """Give an update the hyper-parameters of the next step. Returns whether there is anything to update.

        Args:
            number: the update count after the step, where that updates parameters of other plans, too.
        """

    def undo(self) -> None:
        """Restore what `write` has changed, after a step that failed."""

    def count(self) -> None:
        """Count the step whose hyper-parameters have been written."""


class StepPlan:
    """How one list of parameters is updated at every step.

    Args:
        states: the parameters, and where their states come from; missing ones are created here.
        rows: their hyper-parameters.
        own: gradients will be the weights' own, `weight.grad`.
        elements: as for `RowUpdate`.

    Attributes:
        states, rows: those.
        update: the `Update` of the last step.
    """

    update: Update

    def __init__(self, states: PlanStates, rows: PlanRows, own: bool = False, elements: bool = False) -> None:
        self.states, self.rows, self._own = states, rows, own
        self._updates: dict[Rule | TensorRule, Update] = {}  # an optimizer may go from one rule to another and back
        self._sparse = SparseRows(states.names, states.split, elements)
        self._active: list[bool] | None = None  # as that of the update of the last step
        self._make_update(rows.rule())

    @property
    def references(self) -> list[Reference] | None:
        """Weak references to the gradients of the last step; None if only some of them are known."""
        return None if self._sparse.met else self.update.references

    def total(self) -> torch.Tensor | None:
        """The sum of squares of all gradients of the last step, if its rule skips steps with non-finite ones."""
        return self.update.total() if self.update.rule.skips_nonfinite else None

    def step(self, grads: Sequence[torch.Tensor | None], into: MetricsBuffer | None = None) -> None:
        """`prepare` and `run`."""
        self.prepare(grads)
        self.run(into)

    def prepare(
        self, grads: Sequence[torch.Tensor | None], rule: Rule | TensorRule | None = None, in_place: bool = False
    ) -> None:
        """Take these gradients, one for each weight, for the next step; None leaves a weight alone.

        Finds out whether the step would fail for their sake. No weight changes.

        Args:
            grads: the gradients.
            rule: that of the step; default: by the plan's own rows.
            in_place: as for `Update.rebind`.
        """
        rule, update, switched = self.rows.rule() if rule is None else rule, self.update, False
        if update.rule is not rule:
            update, switched, in_place = self._use(rule), True, False
        if self._sparse.met or not update.rebind(grads, own=self._own, in_place=in_place):
            if not self.states.fits(update):
                update = self._make_update(rule)
            self._sparse.bind(update, grads, self._own)
            switched = True
        if switched or update.active is not self._active:
            self._active = update.active
            self.rows.use([grad is not None for grad in grads])

    def run(self, into: MetricsBuffer | None = None) -> None:
        """Update all weights that have a gradient, after `prepare`.

        Args:
            into: where to put what the update measures, into the rows of its `rng_offsets`.
        """
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
        if update is None or not self.states.is_current(update):
            return self._make_update(rule)
        self.update = update
        return update

    def _make_update(self, rule: Rule | TensorRule) -> Update:
        self.update = self._updates[rule] = self.states.make_update(rule)
        self.rows.forget()
        return self.update
