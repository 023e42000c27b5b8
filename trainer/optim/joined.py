"""Several optimizers that look like one of torch's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import torch

from ..dynamo import outside_dynamo
from ..interrupts import uninterrupted
from .groups import Group, refuse_evaluated, same_objects


class JoinedOptimizers(torch.optim.Optimizer):
    """The base of optimizers that consist of others: one list of groups and one `state` for all.

    A group, and what `state` has of a parameter, is the same object here and in the optimizer that has it. What is changed
    in the list or in `state`, the optimizers get by `share`, which the methods here call first; what an optimizer changes by
    itself, as when it is stepped alone, is here at once. `defaults` has what all of them have, with the values of the last.

    Attributes:
        optimizers: the others, which must be there before this class's constructor is called.
    """

    optimizers: list[Any]

    def __init__(self) -> None:
        every = [each.defaults for each in self.optimizers]
        common = {name: value for name, value in every[-1].items() if all(name in defaults for defaults in every)}
        self._agreed: dict[str, list[list[Any]]] = {}  # what was here and in each optimizer when both had the same
        self._owners: dict[torch.Tensor, int] = {}  # which optimizer a parameter has, or had
        groups = list(chain(*(each.param_groups for each in self.optimizers)))
        super().__init__([parameter for group in groups for parameter in group["params"]], common)
        self.param_groups, self.state = groups, self.state
        self.state.update(chain(*(each.state.items() for each in self.optimizers)))
        self._agree()

    def __getstate__(self) -> dict[str, Any]:
        self.share()
        return super().__getstate__() | {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # which writes to `__dict__`, where the groups and states are stored
        if "optimizers" in state:
            self._agreed, self._owners = {}, {}
            self._agree()

    @property
    def param_groups(self) -> list[Group]:
        """The groups of all optimizers."""
        self._look("param_groups")
        groups: list[Group] = vars(self)["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        vars(self)["param_groups"] = groups

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The states of all parameters."""
        self._look("state")
        state: defaultdict[Any, Any] = vars(self)["state"]
        return state

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        vars(self)["state"] = state

    @outside_dynamo
    def share(self) -> None:
        """Let the optimizers have the groups and states that are here.

        Raises:
            ValueError: nobody knows which optimizer is to have a group; nothing has been changed.
        """
        if not same_objects(vars(self)["param_groups"], self._agreed["param_groups"][0]):
            owned: list[list[Group]] = [[] for _ in self.optimizers]
            for i, group in enumerate(self.param_groups):
                owned[self.owner_of(i, group)].append(group)
            for optimizer, own in zip(self.optimizers, owned, strict=True):
                optimizer.param_groups[:] = own
            self._agree("param_groups")
        if not same_objects(_objects(vars(self)["state"]), self._agreed["state"][0]):
            alone = len(self.optimizers) == 1
            for optimizer in self.optimizers:
                members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
                for key in list(optimizer.state):
                    if alone or isinstance(key, torch.Tensor):  # several may have the same keys of other kinds
                        del optimizer.state[key]
                optimizer.state.update({key: row for key, row in self.state.items() if alone or key in members})
            self._agree("state")

    def add_param_group(self, param_group: Any) -> None:
        """Refused after construction: patterns say what a parameter gets."""
        if self._agreed:
            raise RuntimeError(f"add_param_group() of {type(self).__name__}: make a new one, with other patterns")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each optimizer update its parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is then returned here; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.share()
        refuse_evaluated("step()", self.param_groups)  # before some of them have stepped
        for optimizer in self.optimizers:
            optimizer.step()
        if [2 * len(each.state) + 1 for each in self.optimizers] != list(map(len, self._agreed["state"][1:])):
            self._look("state")  # who has got hold of it sees the new ones
        return loss

    @uninterrupted
    def eval(self) -> None:
        """Give the parameters their averaged values until `train()`: those of the optimizers that have this method."""
        self.share()
        with ExitStack() as stack:
            stack.callback(self.train)
            for optimizer in self.optimizers:
                if callable(method := getattr(optimizer, "eval", None)):
                    method()
            stack.pop_all()

    @uninterrupted
    def train(self) -> None:
        """Undo `eval()`."""
        self.share()
        with ExitStack() as stack:  # all of them are called, whatever one raises
            for optimizer in self.optimizers:
                if callable(method := getattr(optimizer, "train", None)):
                    stack.callback(method)

    def owner_of(self, i: int, group: Group) -> int:
        """Which optimizer has group `i`, or is to have it."""
        found = {k for k, own in enumerate(self._agreed["param_groups"][1:]) if any(group is each for each in own)}
        found = found or {self._owners[parameter] for parameter in group["params"] if parameter in self._owners}
        if len(self.optimizers) > 1 and len(found) != 1:
            raise ValueError(
                f"param_groups[{i}] has parameters of {'several optimizers' if found else 'no optimizer'}: must have those "
                f"of one, which the patterns gave it; make a new {type(self).__name__}, with other patterns or parameters"
            )
        return next(iter(found), 0)

    def _present(self, kind: str) -> list[list[Any]]:
        """The objects in the groups or states: those here, and those of each optimizer."""
        return [_objects(each) for each in (vars(self)[kind], *(getattr(each, kind) for each in self.optimizers))]

    def _look(self, kind: str) -> bool:
        """Take what an optimizer has changed by itself, unless a user has changed what is here: whether one has."""
        if not self._agreed:
            return False
        unchanged, *theirs = map(same_objects, self._present(kind), self._agreed[kind])
        if unchanged and not all(theirs):
            _, *before = self._agreed[kind]
            if kind == "param_groups":
                groups = vars(self)[kind]
                turns = [self.owner_of(i, group) for i, group in enumerate(groups)]  # an order that a user has made stays
                rest = [iter(each.param_groups) for each in self.optimizers]
                groups[:] = [*chain(*(islice(rest[k], 1) for k in turns)), *chain(*rest)]
            else:
                for key in chain(*(entries[1 : 1 + len(entries) // 2] for entries in before)):
                    vars(self)[kind].pop(key, None)
                vars(self)[kind].update(chain(*(each.state.items() for each in self.optimizers)))
            self._agree(kind)
        return not unchanged

    def _agree(self, *kinds: str) -> None:
        """Note that what is here is what the optimizers have."""
        for kind in kinds or ("param_groups", "state"):
            self._agreed[kind] = self._present(kind)
        for k, optimizer in enumerate(self.optimizers):
            self._owners.update((parameter, k) for group in optimizer.param_groups for parameter in group["params"])


def _objects(store: list[Group] | MutableMapping[Any, Any]) -> list[Any]:
    """The groups in a list; or a state itself, its keys and their values."""
    return list(store) if isinstance(store, list) else [store, *store, *store.values()]
