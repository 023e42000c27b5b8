"""What is kept of parameters from step to step: of each a dictionary of its rule's states, by slot, and of its master.

All plans ask `match_states` for it, whoever has the dictionaries: an `Updater`, torch's `optimizer.state`, or the owner of a
parameter that is cut among ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...kernels import Rule, TensorRule, storage
from ...kernels.states import goes_with, master_like, slot_dtypes, state_type
from .counts import Index
from .rule_optimizer import RuleOptimizer

MASTER = "master copy"  # the key of a master; with a space, so that no rule's state has the same name
State = dict[str, torch.Tensor]


def has_slots(rule: Rule | TensorRule, state: Mapping[str, Any]) -> bool:
    """Whether a dictionary has the states of this rule, and no others."""
    return len(state) - (MASTER in state) == len(rule.slots) and all(slot in state for slot in rule.slots)


def current_state(optimizer: RuleOptimizer, index: Index, weight: torch.Tensor, state: State) -> State:
    """The states of a parameter and its master; new states if the rule is another one since the last step.

    The next step makes the same.
    """
    rule = optimizer.composed_rule
    if has_slots(rule, state):
        return state
    new = dict(zip(rule.slots, optimizer.create_state(index, weight), strict=True))
    return new | {name: master for name, master in state.items() if name == MASTER}


def match_states(
    rule: Rule | TensorRule,
    weights: Sequence[torch.Tensor],
    found: Sequence[State],
    narrow: torch.dtype | None,
    make: Callable[[list[torch.Tensor]], Sequence[Sequence[torch.Tensor]]],
    start: Callable[[int, State, list[str]], None],
    masters: Sequence[torch.dtype | None],
) -> list[State]:
    """States and masters that go with the weights as they are now: those found, converted if need be, and new ones.

    What goes with its weight stays the tensor that it is, and a dictionary in which all do is returned itself.

    Args:
        rule: the rule that is to run with them.
        weights: the weights.
        found: for each weight the states that it has already, by slot, and its master.
        narrow: the type in which states are to be stored where they may be, None for the type of the arithmetic.
        make: gives zeros for all slots of each of some weights, in few pieces of memory.
        start: fills the new states of weight `i`, in which the slots of a list are not to be converted from others.
        masters: for each weight the type of its master, None if it is to have none.
    """
    known: dict[Any, Sequence[torch.dtype]] = {}  # many weights are alike
    unfit: dict[int, list[str]] = {}  # places of weights, and the slots of theirs that stay
    for i, (weight, state) in enumerate(zip(weights, found, strict=True)):
        kind = weight.dtype, weight.shape, weight.is_contiguous()
        if kind not in known:
            known[kind] = slot_dtypes(rule, weight.dtype, state_type(weight, narrow), weight.shape)
        pairs = zip(rule.slots, known[kind], strict=True)
        fitting = [slot for slot, dtype in pairs if slot in state and goes_with(state[slot], weight, dtype)]
        if len(fitting) < len(rule.slots):
            unfit[i] = fitting
    matched = list(found)
    for (i, fitting), tensors in zip(unfit.items(), make([weights[i].detach() for i in unfit]), strict=True):
        old, new = found[i], dict(zip(rule.slots, tensors, strict=True))
        if missing := [slot for slot in rule.slots if slot not in old]:
            start(i, new, missing)
        for slot in rule.slots:
            if slot in fitting:
                new[slot] = old[slot]
            elif slot in old:
                storage.copy(new[slot], old[slot], weights[i].shape, slot in rule.nonnegative)
        matched[i] = new
    for i, (weight, state, dtype) in enumerate(zip(weights, found, masters, strict=True)):
        old_master = state.get(MASTER)
        master = old_master
        if dtype is None:
            master = None
        elif old_master is None or not goes_with(old_master, weight, dtype):
            master = new_master(weight.detach(), old_master, dtype)
        if matched[i] is not state or master is not old_master:
            matched[i] = {slot: matched[i][slot] for slot in rule.slots}
            if master is not None:
                matched[i][MASTER] = master
    return matched


def states_and_masters(
    rule: Rule | TensorRule, states: Sequence[State]
) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor | None]]:
    """The states in the order of the rule's slots and the masters, as an `Update` takes them."""
    return [tuple(map(state.__getitem__, rule.slots)) for state in states], [state.get(MASTER) for state in states]


def new_master(weight: torch.Tensor, old: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A master of this type for a weight; `old` is its master so far."""
    if old is not None and storage.kind_of(weight.dtype, old.dtype) is None:  # of the type that the weight was of
        old = None
    master = master_like(weight, dtype)
    whole = storage.combined(weight, None if old is None else old.to(weight.device))
    if storage.kind_of(weight.dtype, dtype) == storage.MasterKind.FULL:
        return master.copy_(whole)
    return master.copy_(storage.master_for(weight, whole, dtype))


def put_master(weight: torch.Tensor, old: torch.Tensor | None, master: torch.Tensor) -> torch.Tensor:
    """A copy of a master: in the tensor that the weight has as its master or, where that does not go with it, a new one."""
    if old is None or not goes_with(old, weight, master.dtype):
        old = master_like(weight, master.dtype)
    return old.copy_(master)
