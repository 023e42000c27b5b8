"""The state of an optimizer: collected into a dict, restored from one, and written to a safetensors file with JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...kernels.states import states_for
from ...kernels.storage import copy
from .. import lr_scheduler
from ..optimizer import MultiOptimizer, Optimizer, RuleOptimizer, Updater
from ..optimizer.counts import Index
from ..optimizer.multi import part_of
from ..optimizer.patterns import pattern_text
from ..optimizer.states import MASTER, State, current_state, put_master
from . import files
from .check import FORMAT, check, check_form, check_format, few, saved_rule, shape_of, shares
from .nesting import flatten, tensor_names, unflatten

CALLABLE = "callable"  # stands for a schedule that is a function, or has one in it, that only the program has
_SECTIONS: dict[str, tuple[str, ...]] = {"state": (), "residuals": ("residual",)}  # of tensors, and what marks their keys


def collect(
    updater: Updater, names: Sequence[str], params: Sequence[torch.Tensor], indices: Sequence[Index] | None = None
) -> dict[str, Any]:
    """The state of an updater whose parameters have these names: JSON-able data, and tensors under "state".

    `indices` are what the updater knows the parameters by, default 0, 1, and so on.

    Keys: "format", "optimizer" (name of its class), "settings", "lr_scheduler" (None where there is none, "callable" where
    it is or has a function without a name to be saved by), "num_update", "counts", "parameters" (shapes by name, None where
    not initialized yet), "layout" (nesting of each parameter's state) and "state" (tensors by parameter and by slot; none
    before the first step). Of several optimizers "settings" are those that they have together, and "optimizers" is a list
    with "pattern", "optimizer", "settings", "lr_scheduler" and "names" of the parameters of each. A trainer may add
    "residuals" (tensors by parameter and by source).
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
        own: dict[str, Any] = {
            "optimizer": type(optimizer).__name__.lower(),
            "settings": {"clip_norm": optimizer.clip_norm, "skip_nonfinite": optimizer.skip_nonfinite},
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
        own = _described(optimizer)
    return own | {
        "format": FORMAT,
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
) -> None:
    """Load a collected state. All checks come first.

    Raises:
        ValueError, TypeError: it does not fit; nothing has been changed.
    """
    optimizer = updater.optimizer
    check(optimizer, names, params, saved)
    states: dict[Any, Any] = {}
    found = []
    for part, own in shares(optimizer, names, saved):
        found.append((part, own["settings"], _saved_schedule(part, own["lr_scheduler"])))
        states |= _saved_states(part, names, params, own)
    for part, settings, scheduler in found:
        converted = settings.get("multi_precision") and part.multi_precision
        stored = ("state_dtype", "multi_precision") if converted else ("state_dtype",)  # which is the trainer's own choice
        part.set_together({k: v for k, v in settings.items() if k not in stored} | {"lr_scheduler": scheduler}, True)
    if isinstance(optimizer, MultiOptimizer):
        optimizer.clip_norm, optimizer.skip_nonfinite = saved["settings"]["clip_norm"], saved["settings"]["skip_nonfinite"]
    indices = range(len(names)) if indices is None else indices
    slots = optimizer.slots(indices)
    optimizer.step_counts.values[slots] = [saved["counts"].get(name, optimizer.begin_num_update) for name in names]
    optimizer.num_update = saved["num_update"]
    updater.state = {indices[i]: state for i, state in states.items()}
    updater.forget_plan()


def _saved_states(
    optimizer: Optimizer, names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]
) -> dict[Any, Any]:
    """Copies of the saved states and masters by parameter index, on the parameters' devices, in their order of elements."""
    index = {name: i for i, name in enumerate(names)}
    states: dict[Any, Any] = {}
    if not isinstance(optimizer, RuleOptimizer):
        for name, slots in saved["state"].items():
            layout = saved["layout"].get(name)
            if sorted(tensor_names(layout)) != sorted(slots):
                raise ValueError(f"saved state: {name!r} has {few(slots) or 'no tensors'}, its layout is {layout!r}")
            states[index[name]] = unflatten(layout, slots, params[index[name]].device)
        return states
    slots_of = saved["state"]
    rule = saved_rule(optimizer, saved["settings"])
    copies = states_for(rule, [params[index[name]].detach() for name in slots_of], optimizer.narrow)
    for (name, slots), made in zip(slots_of.items(), copies, strict=True):
        weight = params[index[name]].detach()
        state: State = dict(zip(rule.slots, made, strict=True))
        for slot, new in state.items():
            copy(new, slots[slot].to(new.device), weight.shape, slot in rule.nonnegative)
        if MASTER in slots:
            state[MASTER] = put_master(weight, None, slots[MASTER])
        states[index[name]] = state
    return states


def _described(optimizer: Optimizer) -> dict[str, Any]:
    """The name, settings and schedule of one optimizer."""
    return {
        "optimizer": type(optimizer).__name__.lower(),
        "settings": optimizer.settings(),
        "lr_scheduler": _schedule_of(optimizer),
    }


def _schedule_of(optimizer: Optimizer) -> dict[str, Any] | str | None:
    """A schedule as plain data; None where there is none."""
    scheduler = optimizer.lr_scheduler
    if isinstance(scheduler, lr_scheduler.LRScheduler):
        try:
            return scheduler.to_config()
        except TypeError:  # it has a function in it that is known by no name
            return CALLABLE
    return None if scheduler is None else CALLABLE


def _saved_schedule(optimizer: Optimizer, schedule: Any) -> Any:
    """The schedule that was saved, or the optimizer's own, if that is a function that could not be.

    Raises:
        ValueError: there is no such function, or the data are no schedule's.
    """
    if schedule is None:
        return None
    if schedule != CALLABLE:
        return lr_scheduler.from_config(schedule)
    mine = optimizer.lr_scheduler
    if _schedule_of(optimizer) != CALLABLE:
        raise ValueError(
            f"saved state had a plain callable as its lr_scheduler, which cannot be saved; this trainer has {mine!r}: give "
            "it that callable before loading"
        )
    return mine


def load_read(load: Callable[[dict[str, Any]], None], state: dict[str, Any], name: str) -> None:
    """Call `load` with what was read; errors of contents of another kind become ValueError with this name."""
    try:
        load(state)
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{name}: not a state of such a trainer ({error})") from error


def write(path: str | os.PathLike[str], collected: Mapping[str, Any]) -> None:
    """Write a collected state to `path`, replacing what is there only when the new file is complete."""
    tensors = {
        json.dumps([name, slot, *section]): tensor.detach().contiguous()
        for key, section in _SECTIONS.items()
        for name, slots in collected.get(key, {}).items()
        for slot, tensor in slots.items()
    }
    header = {key: value for key, value in collected.items() if key not in _SECTIONS}
    files.write("fname", path, header | {"states of": list(collected["state"])}, tensors)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, or its contents are damaged.
    """
    with files.contents("fname", path, f"a state file of tristep{_hint(path)}"):
        found = files.read(path)
        if found is not None:
            return _put_together(*found)
    raise ValueError(f"fname={str(path)!r}: a safetensors file, but not one that Trainer.save_states wrote")


def _hint(path: str | os.PathLike[str]) -> str:
    """For a file of MXNet's Trainer, which is a pickle."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        begin = file.read(2)
    return " (tristep.load_mxnet_states reads those of MXNet)" if begin[:1] == b"\x80" and begin[1:] <= b"\x05" else ""


def _put_together(header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What was collected, from a file's header and tensors, which are there by JSON texts of names."""
    check_format(header)
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in header.pop("states of")}
    residuals: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, slot, *section = json.loads(key)
        if not (isinstance(name, str) and isinstance(slot, str) and section in ([], ["residual"])):
            raise ValueError(f"a tensor has the name {key!r}")
        (residuals.setdefault(name, {}) if section else state[name])[slot] = tensor
    saved = header | {"state": state} | ({"residuals": residuals} if residuals else {})
    check_form(saved)
    return saved
