"""What a trainer saves: settings, counts, schedule and states of its optimizer; to a dict, and to a safetensors file.

A loaded state is checked whole before anything is changed; `files` writes and reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..kernels import Rule
from ..kernels.layouts import compute_dtype
from ..kernels.states import allocate_states, slot_shapes, states_for
from ..kernels.storage import copy, kind_of
from . import files, lr_scheduler
from .optimizer import Optimizer, RuleOptimizer, Updater
from .optimizer.base import WithMaster
from .optimizer.counts import Index
from .optimizer.settings import check_settings
from .validation import integer

__all__ = ["collect", "plain_name", "read", "restore", "shape_of", "with_plain_names", "write"]

FORMAT = 1
MOST_UPDATES = 2**53  # that a float64 counts exactly, as bias corrections do
MASTER = "master copy"  # with a space, so that no rule's state has the same name
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
    before the first step). A trainer may add "residuals" (tensors by parameter and by source).
    """
    optimizer = updater.optimizer
    state: dict[str, dict[str, torch.Tensor]] = {}
    layout: dict[str, Any] = {}
    indices = range(len(names)) if indices is None else indices
    for i, name, param in zip(indices, names, params, strict=True):
        if i not in updater.states:
            continue
        if isinstance(optimizer, RuleOptimizer):
            tensors = updater.states[i]
            slots = optimizer.composed_rule.slots
            if len(tensors) != len(slots):  # another rule since the last step; the next one does the same
                tensors = optimizer.create_state(i, param)
            state[name] = dict(zip(slots, tensors, strict=True))
            if i in updater.masters:
                state[name][MASTER] = updater.masters[i]
        else:
            state[name] = {}
            layout[name] = _flatten(updater.states[i], "", state[name])
    counts = optimizer.counts
    return {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__.lower(),
        "settings": optimizer.settings(),
        "lr_scheduler": _schedule(optimizer),
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
    """Put a collected state back. All checks come first.

    Raises:
        ValueError, TypeError: it does not fit; nothing has been changed.
    """
    optimizer = updater.optimizer
    _check(optimizer, names, params, saved)
    scheduler = _saved_schedule(optimizer, saved["lr_scheduler"])
    states, masters = _saved_states(optimizer, names, params, saved)
    for attribute, value in saved["settings"].items():
        if attribute != "state_dtype":  # which is the trainer's own: states are converted
            setattr(optimizer, attribute, value)
    optimizer.lr_scheduler = scheduler
    indices = range(len(names)) if indices is None else indices
    slots = optimizer.slots(indices)
    optimizer.step_counts.values[slots] = [saved["counts"].get(name, optimizer.begin_num_update) for name in names]
    optimizer.num_update = saved["num_update"]
    updater.states = {indices[i]: state for i, state in states.items()}
    updater.masters = {indices[i]: master for i, master in masters.items()}
    updater.forget_plan()


def write(path: str | os.PathLike[str], collected: Mapping[str, Any]) -> None:
    """Write a collected state to `path`, replacing what is there only when the new file is complete."""
    tensors = {
        json.dumps([name, slot, *section]): tensor.detach().contiguous()
        for key, section in _SECTIONS.items()
        for name, slots in collected.get(key, {}).items()
        for slot, tensor in slots.items()
    }
    header = {key: value for key, value in collected.items() if key not in _SECTIONS}
    files.write_tensors("fname", path, header | {"states of": list(collected["state"])}, tensors)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, or its contents are damaged.
    """
    with files.contents("fname", path, "a state file of tristep"):
        found = files.read_tensors(path)
        if found is not None:
            return _put_together(*found)
    raise ValueError(f"fname={str(path)!r}: a safetensors file, but not one that Trainer.save_states wrote")


def _put_together(header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What was collected, from a file's header and tensors, which are there by JSON texts of names."""
    _check_format(header)
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in header.pop("states of")}
    residuals: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, slot, *section = json.loads(key)
        if not (isinstance(name, str) and isinstance(slot, str) and section in ([], ["residual"])):
            raise ValueError(f"a tensor has the name {key!r}")
        (residuals.setdefault(name, {}) if section else state[name])[slot] = tensor
    saved = header | {"state": state} | ({"residuals": residuals} if residuals else {})
    _check_form(saved)
    return saved


def _check_format(saved: Mapping[str, Any]) -> None:
    if saved.get("format") != FORMAT:
        raise ValueError(
            f"saved state has format {saved.get('format')!r}: this version of tristep reads format {FORMAT}; "
            "it may come from a newer version"
        )


def _check_form(saved: Any) -> None:
    """Refuse what no `collect` has given, whatever the model and the optimizer are."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, as Trainer.state_dict gives it, got {type(saved).__name__}")
    _check_format(saved)
    keys = {"format", "optimizer", "settings", "lr_scheduler", "num_update", "counts", "parameters", "layout", "state"}
    if missing := sorted(keys - set(saved)):
        raise ValueError(f"saved state lacks {', '.join(missing)}: it must be as Trainer.state_dict gave it")
    for key in ("settings", "counts", "parameters", "layout", "state"):
        if not isinstance(saved[key], Mapping):
            raise TypeError(f"saved state: {key} must be a dict, got {type(saved[key]).__name__}")
        if odd := [name for name in saved[key] if not isinstance(name, str)]:
            raise TypeError(f"saved state: names in {key} must be strings, got {odd[0]!r}")
    integer("saved state: num_update", saved["num_update"], low=0, high=MOST_UPDATES)
    for name, count in saved["counts"].items():
        integer(f"saved state: the count of {name!r}", count, low=0, high=MOST_UPDATES)
    for name, shape in saved["parameters"].items():
        if shape is not None and not (isinstance(shape, (list, tuple)) and all(type(n) is int for n in shape)):
            raise TypeError(f"saved state: the shape of {name!r} is {shape!r}: must be a list of integers, or None")
    for name, layout in saved["layout"].items():
        _check_layout(name, layout)
    for name, slots in saved["state"].items():
        if not isinstance(slots, Mapping):
            raise TypeError(f"saved state: the state of {name!r} must be a dict, got {type(slots).__name__}")
        for slot, tensor in slots.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"saved state: {slot} of {name!r} must be a tensor, got {type(tensor).__name__}")


def _check_layout(name: str, layout: Any, depth: int = 0) -> None:
    items = layout
    if isinstance(layout, dict) and len(layout) == 1 and next(iter(layout)) in ("tuple", "with master"):
        (items,) = layout.values()
    if depth > 50 or not (items is None or isinstance(items, (str, list))) or (isinstance(layout, dict) and items is None):
        raise ValueError(f"saved state: the layout of {name!r} is no nesting of a state: {str(layout)[:80]}")
    for item in items if isinstance(items, list) else ():
        _check_layout(name, item, depth + 1)


def _check(optimizer: Optimizer, names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    _check_form(saved)
    mine = type(optimizer).__name__.lower()
    if saved["optimizer"] != mine:
        raise ValueError(
            f"saved state is of optimizer {saved['optimizer']!r}, this trainer has {mine!r}: make the trainer with "
            f"Trainer(params, {saved['optimizer']!r}) to load it"
        )
    _check_settings(optimizer, saved["settings"])
    _check_parameters(names, params, saved)
    if isinstance(optimizer, RuleOptimizer):
        _check_rule_state(optimizer, dict(zip(names, params, strict=True)), saved)


def _check_settings(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    known = optimizer.settings()
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"saved state has settings that {type(optimizer).__name__} does not know: {', '.join(unknown)}")
    for name, value in given.items():
        allowed = {_kind(known[name]), _kind(value)} - {None}
        if name == "multi_precision" and isinstance(optimizer, RuleOptimizer):
            if isinstance(value, bool) or value == "remainder":
                continue
            allowed.add("bool")
        if len(allowed) > 1 or "other" in allowed:
            raise TypeError(
                f"saved state: setting {name!r} is {value!r}: must be a {_kind(known[name])}, such as this trainer's "
                f"{known[name]!r}"
            )
    try:
        check_settings(optimizer, given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"saved state: {error}") from None


def _kind(value: Any) -> str | None:
    """What may stand for what in a setting; None may stand for anything, as the limit of clip_gradient does."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, (int, float)) else "string" if isinstance(value, str) else "other"


def _check_parameters(names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    theirs = saved["parameters"]
    if other := sorted(set(theirs) ^ set(names)):
        raise ValueError(
            f"saved state is of {len(theirs)} parameters, {_few(theirs)}; this trainer has {len(names)}, {_few(names)}: "
            f"{_few(other)} {'is' if len(other) == 1 else 'are'} in one of them only"
        )
    if lazy := [name for name, param in zip(names, params, strict=True) if shape_of(param) is None]:
        if saved["state"]:
            raise ValueError(f"{_few(lazy)} of params not initialized yet: run the model once before states are loaded")
    for name, param in zip(names, params, strict=True):
        if theirs[name] is not None and shape_of(param) not in (None, list(theirs[name])):
            raise ValueError(
                f"saved state: {name!r} has shape {tuple(theirs[name])}, in this trainer it has {tuple(param.shape)}"
            )
    if other := sorted((set(saved["counts"]) | set(saved["layout"]) | set(saved["state"])) - set(names)):
        raise ValueError(f"saved state: {_few(other)} have a count or state, but are not among its parameters")
    if saved["state"] and (missing := [name for name in names if name not in saved["state"]]):
        raise ValueError(f"saved state lacks the state of {_few(missing)}: it must have that of all parameters or of none")


def _check_rule_state(optimizer: RuleOptimizer, params: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    rule = _saved_rule(optimizer, saved["settings"])
    for name, slots in saved["state"].items():
        weight = params[name]
        shapes = dict(zip(rule.slots, rule.shapes(weight.shape), strict=True))
        if set(slots) >= set(shapes):
            tensors = [slots[slot] for slot in rule.slots]
            shapes = dict(zip(rule.slots, slot_shapes(rule, weight.shape, tensors), strict=True))
        if set(slots) - {MASTER} != set(shapes):
            raise ValueError(
                f"saved state: {name!r} has {_few(slots) or 'no tensors'}; its rule has {_few(sorted(shapes)) or 'none'}"
            )
        for slot, tensor in slots.items():
            if tensor.shape != shapes.get(slot, weight.shape):
                raise ValueError(
                    f"saved state: {slot} of {name!r} has shape {tuple(tensor.shape)}: for its parameter's "
                    f"{tuple(weight.shape)} it must have {tuple(shapes.get(slot, weight.shape))}"
                )
            dtype = compute_dtype(weight.dtype)
            narrow = slot in rule.state and dtype == torch.float32 and tensor.dtype in (torch.bfloat16, torch.uint8)
            beside = slot == MASTER and kind_of(weight.dtype, tensor.dtype) is not None
            if tensor.dtype != dtype and not (narrow or beside):
                raise ValueError(
                    f"saved state: {slot} of {name!r} is {tensor.dtype}; for a weight of {weight.dtype} it must be "
                    f"{dtype}: load it before the model is converted"
                )


def _saved_rule(optimizer: RuleOptimizer, settings: Mapping[str, Any]) -> Rule:
    """The rule that the optimizer has with these settings."""
    now = optimizer.settings()
    try:
        for attribute, value in settings.items():
            setattr(optimizer, attribute, value)
        return optimizer.composed_rule
    finally:
        for attribute, value in now.items():
            setattr(optimizer, attribute, value)


def _saved_states(
    optimizer: Optimizer, names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]
) -> tuple[dict[Any, Any], dict[Any, torch.Tensor]]:
    """Copies of the saved states and masters by parameter index, on the parameters' devices, in their order of elements."""
    index = {name: i for i, name in enumerate(names)}
    states: dict[Any, Any] = {}
    masters: dict[Any, torch.Tensor] = {}
    if not isinstance(optimizer, RuleOptimizer):
        for name, slots in saved["state"].items():
            layout = saved["layout"].get(name)
            if sorted(_slots(layout)) != sorted(slots):
                raise ValueError(f"saved state: {name!r} has {_few(slots) or 'no tensors'}, its layout is {layout!r}")
            states[index[name]] = _unflatten(layout, slots, params[index[name]].device)
        return states, masters
    slots_of = saved["state"]
    rule = _saved_rule(optimizer, saved["settings"])
    copies = states_for(rule, [params[index[name]].detach() for name in slots_of], optimizer.narrow)
    for (name, slots), state in zip(slots_of.items(), copies, strict=True):
        for slot, new in zip(rule.slots, state, strict=True):
            copy(new, slots[slot].to(new.device), params[index[name]].shape, slot in getattr(rule, "nonnegative", ()))
        states[index[name]] = state
        if MASTER in slots:
            ((master,),) = allocate_states([params[index[name]].detach()], 1, slots[MASTER].dtype)
            masters[index[name]] = master.copy_(slots[MASTER])
    return states, masters


def _schedule(optimizer: Optimizer) -> dict[str, Any] | str | None:
    scheduler = optimizer.lr_scheduler
    if isinstance(scheduler, lr_scheduler.LRScheduler):
        try:
            return scheduler.to_config()
        except TypeError:  # it has a function in it that is known by no name
            return CALLABLE
    return None if scheduler is None else CALLABLE


def _saved_schedule(optimizer: Optimizer, schedule: Any) -> Any:
    if schedule is None:
        return None
    if schedule != CALLABLE:
        return lr_scheduler.from_config(schedule)
    mine = optimizer.lr_scheduler
    if _schedule(optimizer) != CALLABLE:
        raise ValueError(
            f"saved state had a plain callable as its lr_scheduler, which cannot be saved; this trainer has {mine!r}: give "
            "it that callable before loading"
        )
    return mine


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into those of a compiled module."""
    return name.replace("_orig_mod.", "")


def with_plain_names(saved: Any) -> Any:
    """A collected state with plain names, where it is one from when names were not."""
    if not isinstance(saved, Mapping) or "_orig_mod." not in "".join(map(str, saved.get("parameters") or ())):
        return saved
    keys = [key for key in ("counts", "parameters", "layout", "state", "residuals") if isinstance(saved.get(key), Mapping)]
    return {**saved, **{key: {plain_name(str(name)): value for name, value in saved[key].items()} for key in keys}}


def shape_of(param: torch.Tensor) -> list[int] | None:
    """The shape of a parameter, None if it is not initialized yet."""
    return None if isinstance(param, torch.nn.UninitializedParameter) else list(param.shape)


def _few(names: Any, most: int = 5) -> str:
    names = list(map(repr, names))
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _flatten(state: Any, path: str, into: dict[str, torch.Tensor]) -> Any:
    """The nesting of a state that a user's optimizer made; its tensors go `into` a flat dict."""
    if state is None:
        return None
    if isinstance(state, torch.Tensor):
        into[path or "0"] = state
        return path or "0"
    if isinstance(state, (tuple, list)):
        items = [_flatten(item, f"{path}.{k}" if path else str(k), into) for k, item in enumerate(state)]
        if isinstance(state, WithMaster):
            return {"with master": items}
        return {"tuple": items} if isinstance(state, tuple) else items
    raise TypeError(f"a state to save is None, a tensor, or a tuple or list of such; got {type(state).__name__}")


def _slots(layout: Any) -> list[str]:
    """The names of the tensors in a nesting."""
    if layout is None or isinstance(layout, str):
        return [] if layout is None else [layout]
    items = next(iter(layout.values())) if isinstance(layout, dict) else layout
    return [slot for item in items for slot in _slots(item)]


def _unflatten(layout: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    if layout is None:
        return None
    if isinstance(layout, str):
        return tensors[layout].to(device, copy=True)
    if isinstance(layout, dict):
        ((kind, items),) = layout.items()
        made = _unflatten(items, tensors, device)
        return WithMaster(*made) if kind == "with master" else tuple(made)
    return [_unflatten(item, tensors, device) for item in layout]
