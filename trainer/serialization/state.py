"""Collect the state of an optimizer into a dict, restore it from one, and write and read it as a file."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from ...kernels import Rule, storage
from ...kernels.states import goes_with, slot_dtypes, slots_on_host, state_type, states_for
from .. import lr_scheduler
from ..lr_scheduler.config import checked_attributes, saved_attributes
from ..optimizer import MultiOptimizer, Optimizer, RuleOptimizer, Updater
from ..optimizer.counts import Index
from ..optimizer.multi import LIMITS, part_of
from ..optimizer.patterns import pattern_text
from ..optimizer.settings import stacklevel_of_caller
from ..optimizer.states import MASTER, State, current_state, has_slots, put_master
from . import files, mapping
from .check import LR, OWN, SCHEDULES, check, check_form, few, saved_rule, saved_schedules, shape_of, shares
from .nesting import flatten, tensor_names, unflatten

CALLABLE = "callable"  # stands for a schedule that cannot be made from a file, such as a function that is not registered
KIND = "states"
_Result = TypeVar("_Result")
# The sections of tensors, each with what follows the two names in the keys of its tensors.
_SECTIONS: dict[str, tuple[str, ...]] = {"state": (), "residuals": ("residual",), "reducers": ("reducer",)}


def collect(
    updater: Updater, names: Sequence[str], params: Sequence[torch.Tensor], indices: Sequence[Index] | None = None
) -> dict[str, Any]:
    """Return the state of an updater as a dict of plain data, and of tensors under "state".

    `names` are the parameters' in the dict, `indices` in the updater (None: 0, 1, and so on).

    Keys: "format", "optimizer" (name of its class), "settings", "lr_scheduler" (None where there is none, "callable" where
    it is or has a function without a name to be saved by, or {"callable": name of its class, "state": attributes} if such an
    object has attributes that can be saved), "schedules" (those of other settings by name, if there are any), "num_update",
    "counts", "parameters" (shapes by name, None where not initialized yet), "layout" (nesting of each parameter's state) and
    "state" (tensors by parameter and by slot; none before the first step). Of several optimizers "settings" are those that
    they have together, and "optimizers" is a list with "pattern", "optimizer", "settings", "lr_scheduler", "schedules" and
    "names" of the parameters of each. A trainer may add "residuals" (tensors by parameter and by source), "buckets" (plain
    data) and "reducers" (tensors by bucket and by name).
    """
    optimizer = updater.optimizer
    state: dict[str, dict[str, torch.Tensor]] = {}
    layout: dict[str, Any] = {}
    indices = range(len(names)) if indices is None else indices
    for i, name, param in zip(indices, names, params, strict=True):
        if i not in updater.state:
            continue
        part = part_of(optimizer, i)
        if isinstance(part, RuleOptimizer):
            state[name] = dict(current_state(part, i, param, updater.state[i]))
        else:
            state[name] = {}
            layout[name] = flatten(updater.state[i], "", state[name])
    counts = optimizer.counts
    if isinstance(optimizer, MultiOptimizer):
        described: dict[str, Any] = {
            "optimizer": type(optimizer).__name__.lower(),
            "settings": optimizer.limits(),
            "lr_scheduler": None,
            "optimizers": [
                _described(part)
                | {
                    "pattern": pattern_text(pattern),
                    "names": [name for i, name in zip(indices, names, strict=True) if part_of(optimizer, i) is part],
                }
                for pattern, part in zip(optimizer.patterns, optimizer.optimizers, strict=True)
            ],
        }
    else:
        described = _described(optimizer)
    return described | {
        "format": files.FORMAT,
        "num_update": optimizer.num_update,
        "counts": {name: counts[i] for i, name in zip(indices, names, strict=True) if i in counts},
        "parameters": dict(zip(names, map(shape_of, params), strict=True)),
        "layout": layout,
        "state": state,
    }


def restore(
    updater: Updater,
    names: Sequence[str],
    params: Sequence[torch.Tensor],
    saved: Mapping[str, Any],
    indices: Sequence[Index] | None = None,
    checks: AbstractContextManager[None] | None = None,
) -> None:
    """Load the result of `collect`, or raise if it does not fit; then nothing has been changed. Arguments are as there.

    Tensors of a mapped file are copied into states of the same form. Inside `checks`, a context, nothing is changed yet.
    """
    optimizer = updater.optimizer
    indices = range(len(names)) if indices is None else indices
    changes, overwritten = [], list[tuple[torch.Tensor, torch.Tensor]]()
    states: dict[str, Any] = {}
    with nullcontext() if checks is None else checks:
        check(optimizer, names, params, saved)
        present = {name: updater.state[i] for i, name in zip(indices, names, strict=True) if i in updater.state}
        for part, part_state in shares(optimizer, names, saved):
            settings = part_state["settings"]
            # How states are stored is the trainer's own choice, for masters if there are any in both.
            converted = settings.get("multi_precision") and part.multi_precision
            stays = ("state_dtype", "state_device", *(("multi_precision",) if converted else ()))
            restored = {name: value for name, value in settings.items() if name not in stays}
            own_schedules = {LR: part.lr_scheduler, **part.schedules}
            schedules, attributes = {}, list[tuple[Any, dict[str, Any]]]()
            for name, each in saved_schedules(part, part_state).items():
                schedules[name], values = _saved_schedule(name, own_schedules.get(name), each)
                attributes.append((schedules[name], values))
                _warn_of_end(name, own_schedules.get(name), schedules[name], saved["num_update"])
            restored |= {LR: schedules.pop(LR), "_schedules": schedules}
            changes.append((part, restored, attributes))
            states |= _saved_states(part, dict(zip(names, params, strict=True)), part_state, present, overwritten)
    for part, settings, attributes in changes:
        part.set_together(settings, True)
        for schedule, values in attributes:
            if values:
                vars(schedule).update(values)
    if isinstance(optimizer, MultiOptimizer):
        optimizer.set_together({option.name: option.default for option in LIMITS} | saved["settings"])
    for state, of_file in overwritten:
        mapping.copy(state, of_file)
    slots = optimizer.slots(indices)  # also extends `values` for new parameters
    optimizer.step_counts.values[slots] = [saved["counts"].get(name, optimizer.begin_num_update) for name in names]
    optimizer.num_update = saved["num_update"]
    anew = set(saved.get("anew", ())) if states else ()
    for i, name, param in zip(indices, names, params, strict=True):
        if name in anew:  # a file has the states of all parameters, or of none
            part = part_of(optimizer, i)
            own = isinstance(part, RuleOptimizer)  # the next step makes its states
            states[name] = {} if own else part.create_state_multi_precision(i, param)
    updater.state = {i: states[name] for i, name in zip(indices, names, strict=True) if name in states}
    updater.forget_plan()


def _saved_states(
    optimizer: Optimizer,
    params: Mapping[str, torch.Tensor],
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    overwritten: list[tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    """Return the saved states and masters, on the devices and in the memory formats of their parameters; by name.

    They are copies, or states in `present` that have the form of those in a mapped file, so that there is no need of more
    memory: these are put into the list `overwritten`, with what is still to be copied into them.
    """
    states: dict[str, Any] = {}
    if not isinstance(optimizer, RuleOptimizer):
        for name, slots in saved["state"].items():
            layout = saved["layout"].get(name)
            if sorted(tensor_names(layout)) != sorted(slots):
                raise ValueError(f"saved state: {name!r} has {few(slots) or 'no tensors'}, its layout is {layout!r}")
            states[name] = unflatten(layout, slots, params[name].device)
        return states
    rule, weights = saved_rule(optimizer, saved["settings"]), {name: params[name].detach() for name in saved["state"]}
    kept = {
        name: {slot: present[name][slot] for slot in slots}
        for name, slots in saved["state"].items()
        if name in present and _fits(optimizer, rule, weights[name], present[name], slots)
    }
    new = [name for name in weights if name not in kept]
    zeros = states_for(rule, [weights[name] for name in new], optimizer.narrow, on_host=optimizer.state_device is not None)
    made = dict(zip(new, zeros, strict=True))
    for name, slots in saved["state"].items():
        if name in kept:
            overwritten += [(tensor, slots[slot]) for slot, tensor in kept[name].items()]
            states[name] = kept[name]
            continue
        state: State = dict(zip(rule.slots, made[name], strict=True))
        for slot, tensor in state.items():
            if tensor.dtype == slots[slot].dtype:
                mapping.copy(tensor, slots[slot])
            else:
                old = slots[slot].to(tensor.device)
                storage.copy(tensor, old, weights[name].shape, slot in rule.nonnegative)
        if MASTER in slots:
            state[MASTER] = put_master(weights[name], None, slots[MASTER])
        states[name] = state
    return states


def _fits(
    optimizer: RuleOptimizer, rule: Rule, weight: torch.Tensor, state: State, slots: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether `slots` are of a mapped file, and `state` would be made for them as it is."""
    dtypes = slot_dtypes(rule, weight.dtype, state_type(weight, optimizer.narrow), weight.shape)
    places = [optimizer.state_device is not None and there for there in slots_on_host(rule, weight.shape)]
    forms = dict(zip(rule.slots, zip(dtypes, places, strict=True), strict=True))
    return (
        has_slots(rule, state)
        and all(slot in state for slot in slots)
        and all(
            mapping.is_mapped(tensor)
            and (state[slot].shape, state[slot].dtype) == (tensor.shape, tensor.dtype)
            and goes_with(state[slot], weight, *forms.get(slot, (tensor.dtype,)))
            for slot, tensor in slots.items()
        )
    )


def _described(optimizer: Optimizer) -> dict[str, Any]:
    """Return the name, the settings and the schedules of one optimizer."""
    schedules = {name: _described_schedule(schedule) for name, schedule in optimizer.schedules.items()}
    return {
        "optimizer": type(optimizer).__name__.lower(),
        "settings": optimizer.settings(),
        LR: _described_schedule(optimizer.lr_scheduler),
        **({SCHEDULES: schedules} if schedules else {}),
    }


def _described_schedule(schedule: Any) -> dict[str, Any] | str | None:
    """Return a schedule as plain data, with `CALLABLE` if it cannot be made again; None if there is none."""
    if schedule is None:
        return None
    if isinstance(schedule, lr_scheduler.LRScheduler):
        with suppress(TypeError):  # it has an argument that cannot be saved, such as a function that is not registered
            return schedule.to_config()
    state = saved_attributes(schedule) if hasattr(schedule, "__dict__") else {}
    return {CALLABLE: type(schedule).__qualname__, "state": state} if state else CALLABLE


def _saved_schedule(name: str, own: Any, saved: Any) -> tuple[Any, dict[str, Any]]:
    """Return the schedule that was saved, and {}; or if it cannot be made, the optimizer's own and its saved attributes."""
    if saved == OWN or (saved is None and name == LR):
        return own if saved == OWN else None, {}
    if saved == CALLABLE:
        words, fits = "a plain callable", CALLABLE in (_described_schedule(own) or ())
    elif isinstance(saved, Mapping) and CALLABLE in saved:
        words, fits = f"a {saved[CALLABLE]}", type(own).__qualname__ == saved[CALLABLE]
    else:
        return lr_scheduler.from_config(saved, own), {}
    if not fits:
        raise ValueError(
            f"saved state had {words} as its {_title(name)}, which cannot be saved; this trainer has {own!r}: give it that "
            "callable before loading"
        )
    return own, {} if saved == CALLABLE else checked_attributes(own, saved.get("state"))


def _title(name: str) -> str:
    return name if name == LR else f"{SCHEDULES}[{name!r}]"


def _warn_of_end(name: str, own: Any, schedule: Any, num_update: int) -> None:
    """Warn if the saved schedule is at its end, and the one that it replaces is not: a training is to go on for longer."""
    end, own_end = getattr(schedule, "max_update", None), getattr(own, "max_update", None)
    if isinstance(end, int) and isinstance(own_end, int) and end <= num_update < own_end:
        warnings.warn(
            f"the saved {type(schedule).__name__} replaces the trainer's: it ended at max_update={end}, and the saved "
            f"training is at update {num_update}, so that {'the learning rate' if name == LR else name} stays at its "
            f"last value; to train until update {own_end}, set trainer.optimizer.{LR if name == LR else SCHEDULES} after "
            "loading",
            stacklevel=stacklevel_of_caller(),
        )


def load_read(load: Callable[[dict[str, Any]], _Result], state: dict[str, Any], name: str) -> _Result:
    """Return `load(state)`; errors that a state of another kind causes become ValueError, with the file's `name`."""
    try:
        return load(state)
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{name}: not a state of such a trainer ({error})") from error


def write(path: str | os.PathLike[str], collected: Mapping[str, Any]) -> None:
    """Write what `collect` returned to a file. A file of that name is replaced when the new one is complete."""
    tensors = {
        json.dumps([name, slot, *section]): tensor
        for key, section in _SECTIONS.items()
        for name, slots in collected.get(key, {}).items()
        for slot, tensor in slots.items()
    }
    header = {key: value for key, value in collected.items() if key not in _SECTIONS}
    files.write("fname", path, KIND, header | {"states of": list(collected["state"])}, tensors)


def read(path: str | os.PathLike[str], mapped: bool = False) -> dict[str, Any]:
    """Read a file of `write`, and return what `collect` returned; `mapped` as in `files.read`."""
    with files.contents("fname", path, "a state file of tristep"):
        return _put_together(*files.read(path, KIND, mapped=mapped))


def _put_together(header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what `collect` returned, from the header of a file and its tensors, whose names are JSON texts."""
    sections = {marks: section for section, marks in _SECTIONS.items()}
    parts: dict[str, dict[str, dict[str, torch.Tensor]]] = {section: {} for section in _SECTIONS}
    parts["state"] = {name: {} for name in header.pop("states of")}
    for key, tensor in tensors.items():
        name, slot, *marks = json.loads(key)
        section = sections.get(tuple(marks))
        if not (isinstance(name, str) and isinstance(slot, str) and section):
            raise ValueError(f"a tensor has the name {key!r}")
        part = parts[section]
        (part[name] if section == "state" else part.setdefault(name, {}))[slot] = tensor
    saved = header | {section: part for section, part in parts.items() if part or section == "state"}
    check_form(saved)
    return saved
