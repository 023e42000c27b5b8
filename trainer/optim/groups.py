"""Parameter groups as torch has them, and GroupRows: the hyper-parameters of a step that their options make."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update
from ..optimizer.hyper_rows import equal_places
from .numbers import NumberTensors

if TYPE_CHECKING:
    from .base import FusedOptimizer

__all__ = ["Group", "GroupRows", "Numbers", "is_evaluated", "name_of", "refuse_evaluated"]

Group = dict[str, Any]
Numbers = MutableMapping[str, Any]


class GroupRows:
    """The rows of hyper-parameters that parameters of some groups have at each step; see `PlanRows`.

    Args:
        optimizer: whose parameters they are. Those of its numbers that are shown stand in its `state`.
        rule: that of all these groups.
        parameters: in order.
        groups: for each parameter the one that it is in.
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        rule: Rule | TensorRule,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[Group],
    ) -> None:
        self._optimizer, self._rule, self._groups = optimizer, rule, groups
        first = [
            optimizer._first_numbers(group, parameter, optimizer.state.get(parameter, {}))
            for group, parameter in zip(groups, parameters, strict=True)
        ]
        shown, self._rounds = optimizer._shown, optimizer._rounding(groups[0]) is not None
        if self._rounds:  # random numbers go on where they were after a load
            shown = (*shown, "step")
        self.tensors = {
            name: NumberTensors(optimizer, parameters, name, [numbers[name] for numbers in first])
            for name in first[0]
            if name in shown
        }
        # By name one for each parameter.
        self._numbers = {
            name: self.tensors[name].array if name in self.tensors else np.array([numbers[name] for numbers in first])
            for name in first[0]
        }
        self.active = [True] * len(groups)
        # Rows of equal hyper-parameters, the first of them, and its group; and the numbers by which these were found.
        self._shared: list[tuple[Any, int, Group]] = []
        self._shared_by: list[bytes] = []
        self._changes: list[tuple[Any, dict[str, Any]]] = []  # new numbers of these rows, after the step
        self._stepping: list[Group] = []

    def rule(self) -> Rule | TensorRule:
        return self._rule

    def use(self, active: list[bool]) -> None:
        if active != self.active:
            self.active, self._shared = active, []

    def forget(self) -> None:
        self._shared = []

    def write(self, update: Update, number: int | None = None) -> bool:
        optimizer = self._optimizer
        for shown in self.tensors.values():
            shown.read()
        if not self._shared or self._shared_by != [array.tobytes() for array in self._numbers.values()]:
            self._share()
        scale = getattr(optimizer, "grad_scale", None) if optimizer._control is None else None
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        for group in self._stepping:
            optimizer._begin(group)
        self._changes = []
        for rows, first, group in self._shared:
            numbers = {name: array[first] for name, array in self._numbers.items()}
            numbers["step"] += 1
            row = optimizer._row(group, numbers, self._rule, self._rounds)
            row[0] *= -unscale if group.get("maximize") else unscale
            if rows is None:
                update.broadcast_hyper(row)
            else:
                update.hyper[rows] = row
            if optimizer._counted(group):
                self._changes.append((slice(None) if rows is None else rows, numbers))
        return True  # without gradients, too: other ranks may wait for this one's share of a sum

    def undo(self) -> None:
        """Nothing that lasts has been changed."""

    def count(self) -> None:
        for rows, numbers in self._changes:
            for name, array in self._numbers.items():
                array[rows] = numbers[name]
        self._shared_by = [array.tobytes() for array in self._numbers.values()]
        for name, shown in self.tensors.items():
            if shown.apart:
                shown.write([rows for rows, _ in self._changes], name == "step")
        for group in self._stepping:
            self._optimizer._end(group)

    def _share(self) -> None:
        """Find the parameters that share hyper-parameters: those of one group and of equal numbers."""
        arrays = self._numbers.values()
        places = np.flatnonzero(self.active)
        columns = [[id(self._groups[i]) for i in places.tolist()], *(array[places].tolist() for array in arrays)]
        members = [places[rows] for rows in equal_places(list(zip(*columns, strict=True)))]
        whole = len(members) == 1 and len(places) == len(self.active)
        self._shared = [(None if whole else rows, int(rows[0]), self._groups[rows[0]]) for rows in members]
        self._stepping = list({id(group): group for _, _, group in self._shared}.values())


def name_of(group: Group, k: int) -> str:
    """What messages call a group's parameter."""
    return repr(group["param_names"][k]) if "param_names" in group else f"params[{k}]"


def is_evaluated(group: Group) -> bool:
    """Whether its parameters have their averaged values, as between `eval()` and `train()`; libraries share the key."""
    return not group.get("train_mode", True)


def refuse_evaluated(what: str, groups: Iterable[Group]) -> None:
    """Refuse what needs the parameters as they are trained."""
    if any(map(is_evaluated, groups)):
        raise RuntimeError(
            f"{what} where parameters have their averaged values, after eval() or inside averaged_weights(): call train() "
            "of the optimizer, or leave the context, first"
        )
