"""JoinedOptimizers: several optimizers behind the interface of one `torch.optim.Optimizer`."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import torch

from ...kernels.graphs import current_recording
from ..utils.dynamo import outside_dynamo
from ..utils.interrupts import uninterrupted
from .base import FusedOptimizer
from .groups import Group, refuse_evaluated, same_objects

_MOMENTA = {"momentum", "betas"}  # what torch's schedulers cycle


class JoinedOptimizers(torch.optim.Optimizer):
    """The base class of optimizers that consist of several: it has one list of groups and one `state` for all.

    Groups, and the entries of `state`, are the same objects here and in the optimizer that updates them. Changes of the list
    or of `state` reach the optimizers by `share`, which the methods here call first; changes that an optimizer makes, for
    example when it is stepped alone, are visible here at once. `defaults` has the names common to all optimizers, with the
    last one's values. Where some have a momentum and the others betas, it has "momentum", for schedulers that cycle it: an
    entry "momentum" of a group with betas is the first of these. A subclass sets `optimizers` before it calls the
    constructor.
    """

    optimizers: list[Any]

    def __init__(self) -> None:
        all_defaults = [optimizer.defaults for optimizer in self.optimizers]
        common = {name: value for name, value in all_defaults[-1].items() if all(name in each for each in all_defaults)}
        if not common.keys() & _MOMENTA and all(each.keys() & _MOMENTA for each in all_defaults):
            common["momentum"] = next(each["momentum"] for each in all_defaults if "momentum" in each)
        self._agreed: dict[str, list[list[Any]]] = {}  # the objects here and in each optimizer when they last agreed
        # By id of a parameter: a weak reference to it, and the index of the optimizer that updates, or updated, it.
        self._owners: dict[int, tuple[weakref.ref[Any], int]] = {}
        groups = list(chain(*(optimizer.param_groups for optimizer in self.optimizers)))
        super().__init__([parameter for group in groups for parameter in group["params"]], common)
        self.param_groups, self.state = groups, self.state
        self.state.update(chain(*(optimizer.state.items() for optimizer in self.optimizers)))
        self._agree()

    def __getstate__(self) -> dict[str, Any]:
        self.share()
        return super().__getstate__() | {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # it writes to `__dict__`, where the groups and states are stored
        if "optimizers" in state:
            self._agreed, self._owners = {}, {}
            self._agree()

    @property
    def param_groups(self) -> list[Group]:
        """The parameter groups of all optimizers, a list."""
        self._look("param_groups")
        groups: list[Group] = vars(self)["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        vars(self)["param_groups"] = groups

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The states of all parameters, as in torch."""
        self._look("state")
        state: defaultdict[Any, Any] = vars(self)["state"]
        return state

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        vars(self)["state"] = state

    @outside_dynamo
    def share(self) -> None:
        """Pass changes of `param_groups` and `state` on to the optimizers.

        Raises:
            ValueError: a new group has parameters of several optimizers, or of none; nothing has been changed.
        """
        if not same_objects(vars(self)["param_groups"], self._agreed["param_groups"][0]):
            self._remember_owners()
            groups_of: list[list[Group]] = [[] for _ in self.optimizers]
            for i, group in enumerate(self.param_groups):
                groups_of[self.owner_of(i, group)].append(group)
            for optimizer, groups in zip(self.optimizers, groups_of, strict=True):
                optimizer.param_groups[:] = groups
            self._agree("param_groups")
        if not same_objects(_objects(vars(self)["state"]), self._agreed["state"][0]):
            alone = len(self.optimizers) == 1
            self._remember_owners()
            for k, optimizer in enumerate(self.optimizers):
                for key in list(optimizer.state):
                    if alone or isinstance(key, torch.Tensor):  # several optimizers may share other keys
                        del optimizer.state[key]
                optimizer.state.update({key: row for key, row in self.state.items() if alone or self._updates(k, key)})
            self._agree("state")

    def add_param_group(self, param_group: Any) -> None:
        """Raise RuntimeError: patterns decide which optimizer a parameter gets, at construction."""
        if self._agreed:
            raise RuntimeError(f"add_param_group() of {type(self).__name__}: make a new one, with other patterns")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, each with its optimizer.

        Args:
            closure: a function that evaluates the model again and returns the loss, called once; or None.

        Returns:
            The result of `closure`, or None.

        Raises:
            RuntimeError: parameters have their averaged values, after `eval()`; nothing has been changed.
            ValueError: a rule needs the shape or norm of parameters that were joined to a vector; nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.share()
        refuse_evaluated("step()", self.param_groups)  # before an optimizer has stepped
        for optimizer in self.optimizers:
            if isinstance(optimizer, FusedOptimizer):
                optimizer.refuse_flattened()
        self._step_each()
        if [2 * len(optimizer.state) + 1 for optimizer in self.optimizers] != list(map(len, self._agreed["state"][1:])):
            self._look("state")  # so that references to `state` see new states
        return loss

    def _pass_momentum(self) -> None:
        """Make "momentum" the first of the betas in groups of optimizers that have no momentum."""
        for optimizer in self.optimizers:
            if "momentum" not in optimizer.defaults:
                for group in optimizer.param_groups:
                    if "momentum" in group:
                        group["betas"] = (group["momentum"], *group["betas"][1:])

    @outside_dynamo
    @uninterrupted
    def _step_each(self) -> None:
        if "momentum" in self.defaults:
            self._pass_momentum()
            if (recording := current_recording.get()) is not None:
                recording.owners.append((lambda: True, self._pass_momentum))
        for optimizer in self.optimizers:
            optimizer.step()

    @uninterrupted
    def eval(self) -> None:
        """Call `eval` of each optimizer that has it: parameters have their averaged values until `train()`."""
        self.share()
        with ExitStack() as stack:
            stack.callback(self.train)
            for optimizer in self.optimizers:
                if callable(method := getattr(optimizer, "eval", None)):
                    method()
            stack.pop_all()

    @uninterrupted
    def train(self) -> None:
        """Call `train` of each optimizer that has it: parameters get back the values from before `eval()`."""
        self.share()
        with ExitStack() as stack:  # calls all, even if one raises
            for optimizer in self.optimizers:
                if callable(method := getattr(optimizer, "train", None)):
                    stack.callback(method)

    def owner_of(self, i: int, group: Group) -> int:
        """Return the index of the optimizer that updates group `i`, or will after `share`."""
        owners = {k for k, share in enumerate(self._agreed["param_groups"][1:]) if any(group is each for each in share)}
        parts = range(len(self.optimizers))
        owners = owners or {k for k in parts for parameter in group["params"] if self._updates(k, parameter)}
        if len(self.optimizers) > 1 and len(owners) != 1:
            raise ValueError(
                f"param_groups[{i}] has parameters of {'several optimizers' if owners else 'no optimizer'}: must have "
                f"parameters of one optimizer, as the patterns assign them; make a new {type(self).__name__}, with other "
                "patterns or parameters"
            )
        return next(iter(owners), 0)

    def _present(self, kind: str) -> list[list[Any]]:
        """Return the objects in "param_groups" or "state": of this object first, then of each optimizer."""
        return [_objects(store) for store in (vars(self)[kind], *(getattr(each, kind) for each in self.optimizers))]

    def _look(self, kind: str) -> None:
        """Take over changes that an optimizer has made to its "param_groups" or "state", unless they were changed here."""
        if not self._agreed:
            return
        unchanged, *optimizers_unchanged = map(same_objects, self._present(kind), self._agreed[kind])
        if unchanged and not all(optimizers_unchanged):
            _, *before = self._agreed[kind]
            if kind == "param_groups":
                groups = vars(self)[kind]
                turns = [self.owner_of(i, group) for i, group in enumerate(groups)]  # keeps an order that a user has made
                unused = [iter(optimizer.param_groups) for optimizer in self.optimizers]
                groups[:] = [*chain(*(islice(unused[k], 1) for k in turns)), *chain(*unused)]
            else:
                for key in chain(*(entries[1 : 1 + len(entries) // 2] for entries in before)):
                    vars(self)[kind].pop(key, None)
                vars(self)[kind].update(chain(*(optimizer.state.items() for optimizer in self.optimizers)))
            self._agree(kind)

    def _agree(self, *kinds: str) -> None:
        """Note that this object's groups and states are the optimizers' again."""
        for kind in kinds or ("param_groups", "state"):
            self._agreed[kind] = self._present(kind)
        self._remember_owners()

    def _remember_owners(self) -> None:
        """Note who updates the parameters that are in the groups now; libraries replace those of a group by shards."""
        self._owners = {key: entry for key, entry in self._owners.items() if entry[0]() is not None}
        for k, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                self._owners.update((id(parameter), (weakref.ref(parameter), k)) for parameter in group["params"])

    def _updates(self, k: int, key: Any) -> bool:
        """Return whether `key`, of `state` or of a group, is a parameter that optimizer `k` updates, or updated."""
        reference, owner = self._owners.get(id(key), (None, None))
        return owner == k and reference is not None and reference() is key


def _objects(store: list[Group] | MutableMapping[Any, Any]) -> list[Any]:
    """Return the groups of a list; or of a state the dict itself, its keys and its values."""
    return list(store) if isinstance(store, list) else [store, *store, *store.values()]
