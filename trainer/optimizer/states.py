"""States of parameters: one dictionary for each, with the states of the rule by slot name, and the master weight.

All plans call `match_states` to create and convert them, whether an `Updater`, torch's `optimizer.state`, or the owner of a
sharded parameter holds the dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.layouts import first_alike
from ...kernels.states import goes_with, master_like, slot_dtypes, slots_on_host, state_type
from .counts import Index
from .rule_optimizer import RuleOptimizer

MASTER = "master copy"  # the key of a master; with a space, so that no rule's state has the same name
State = dict[str, torch.Tensor]


def has_slots(rule: Rule | TensorRule, state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's dictionary holds the states of this rule, all of them and no others."""
    return len(state) - (MASTER in state) == len(rule.slots) and all(slot in state for slot in rule.slots)


def current_state(optimizer: RuleOptimizer, index: Index, weight: torch.Tensor, state: State) -> State:
    """Return the states and master of a parameter's next step: `state`, or new ones if the rule has changed."""
    rule = optimizer.composed_rule
    if has_slots(rule, state):
        return state
    new = dict(zip(rule.slots, optimizer.create_state(index, weight), strict=True))
    return new | {name: master for name, master in state.items() if name == MASTER}


@torch.no_grad()
def match_states(
    rule: Rule | TensorRule,
    weights: Sequence[torch.Tensor],
    states: Sequence[State],
    first: Sequence[int],
    narrow: torch.dtype | None,
    make: Callable[[list[torch.Tensor]], Sequence[Sequence[torch.Tensor]]],
    start: Callable[[int, State, list[str]], None] | None,
    masters: Sequence[torch.dtype | None],
    on_host: bool = False,
) -> list[State]:
    """Return states and masters that fit the weights as they are now, converting existing ones and creating missing ones.

    A tensor that fits its weight is kept; a dictionary of which all tensors fit is returned itself.

    Args:
        first: for each weight the first one that is alike, as are its states; see `alike`.
        narrow: the dtype in which to store states that allow it; None for the dtype of the arithmetic.
        make: returns zero-filled states of each of a list of weights, in few memory blocks.
        start: fills the new states of weight `i`, given (i, states, slots that will not be converted from existing ones).
            None: they start from zeros.
        masters: for each weight, the dtype of the master that it must have; None for no master.
        on_host: whether states of a GPU's weights must be in memory of the host; `make` puts new ones there.
    """
    # By the first weight of each kind, the slots whose tensors are kept.
    fitting = {i: slots_that_fit(rule, weights[i], states[i], narrow, on_host) for i in set(first)}
    fit = {i for i, slots in fitting.items() if len(slots) == len(rule.slots)}
    unfit = [i for i, like in enumerate(first) if like not in fit]
    matched = list(states)
    for i, tensors in zip(unfit, make([weights[i] for i in unfit]), strict=True):
        old, new = states[i], dict(zip(rule.slots, tensors, strict=True))
        if start is not None and (missing := [slot for slot in rule.slots if slot not in old]):
            start(i, new, missing)
        for slot in rule.slots if old else ():
            if slot in fitting[first[i]]:
                new[slot] = old[slot]
            elif slot in old:
                storage.copy(new[slot], old[slot], weights[i].shape, slot in rule.nonnegative)
        matched[i] = new
    for i, (weight, state, dtype) in enumerate(zip(weights, states, masters, strict=True)):
        if dtype is None and MASTER not in state:
            continue
        old_master = state.get(MASTER)
        master = old_master
        if dtype is None:
            master = None
        elif old_master is None or not goes_with(old_master, weight, dtype):
            master = new_master(weight, old_master, dtype)
        if matched[i] is state and master is not old_master:
            matched[i] = {slot: state[slot] for slot in rule.slots}
        if matched[i] is not state and master is not None:
            matched[i][MASTER] = master
    return matched


def slots_that_fit(
    rule: Rule | TensorRule, weight: torch.Tensor, state: State, narrow: torch.dtype | None, on_host: bool
) -> list[str]:
    """Return the slots for which a weight has a state of the right dtype, in the right place."""
    dtypes = slot_dtypes(rule, weight.dtype, state_type(weight, narrow), weight.shape)
    places = [on_host and there for there in slots_on_host(rule, weight.shape)]
    forms = zip(rule.slots, dtypes, places, strict=True)
    return [slot for slot, dtype, at in forms if slot in state and goes_with(state[slot], weight, dtype, at)]


def alike(rule: Rule | TensorRule, weights: Sequence[torch.Tensor], states: Sequence[State]) -> list[int]:
    """Return for each weight the first one that is alike, as are its states, but for its master."""
    return first_alike(weights, *([state.get(slot) for state in states] for slot in rule.slots))


def states_and_masters(
    rule: Rule | TensorRule, states: Sequence[State]
) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor | None]]:
    """Return the states, as tuples in the order of the rule's slots, and the masters, as `Update` takes them."""
    columns = [[state[slot] for state in states] for slot in rule.slots]
    return list(zip(*columns, strict=True)) if columns else [()] * len(states), [state.get(MASTER) for state in states]


def apply_once(
    rule: Rule,
    hyper: Mapping[str, float],
    weights: Sequence[torch.Tensor],
    states: Sequence[State],
    engine: str | None = None,
) -> None:
    """Apply a rule to weights, with gradients of 0 and states by its names of them; masters, which it reads, stay."""
    run = Update(
        rule,
        weights,
        [tuple(map(state.__getitem__, rule.slots)) for state in states],
        [state[MASTER].clone() if MASTER in state else None for state in states],
        engine,
    )
    run.hyper[:] = [1.0, *(hyper[name] for name in rule.hyper)]
    run.bind([torch.zeros_like(weight) for weight in weights])
    run()


def new_master(weight: torch.Tensor, old: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return a new master of this dtype, with the value that a weight and its old master have together."""
    if old is not None and storage.kind_of(weight.dtype, old.dtype) is None:  # made for the weight's former dtype
        old = None
    master = master_like(weight, dtype)
    whole = storage.combined(weight, None if old is None else old.to(weight.device))
    if storage.kind_of(weight.dtype, dtype) == storage.MasterKind.FULL:
        return master.copy_(whole)
    return master.copy_(storage.master_for(weight, whole, dtype))


def put_master(weight: torch.Tensor, old: torch.Tensor | None, master: torch.Tensor) -> torch.Tensor:
    """Copy a master into the weight's present master `old` if that fits, else into a new tensor; return the copy."""
    if old is None or not goes_with(old, weight, master.dtype):
        old = master_like(weight, master.dtype)
    return old.copy_(master)
