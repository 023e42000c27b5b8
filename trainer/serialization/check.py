"""Check a saved state completely, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import Rule
from ...kernels.layouts import compute_dtype
from ...kernels.states import slot_shapes
from ...kernels.storage import PACKED, check_scales, is_packed, kind_of
from ..optimizer import MultiOptimizer, Optimizer, RuleOptimizer
from ..optimizer.multi import LIMITS, part_of
from ..optimizer.options import OPTIONS
from ..optimizer.settings import SPLIT_MASTERS, UNSCHEDULED, check_scheduled, check_settings
from ..optimizer.states import MASTER
from ..validation import instance, integer
from .files import check_format
from .nesting import check_layout

LR, SCHEDULES = "lr_scheduler", "schedules"
OWN = "own"  # stands for the schedules of the trainer in place of saved ones
_PART_KEYS = {"pattern", "optimizer", "settings", LR, "names"}
HINT = "load it with strict=False to take what fits"
MOST_UPDATES = 2**53  # float64, in which bias corrections are computed, has all integers up to this


def check_form(saved: Any) -> None:
    """Raise TypeError or ValueError if `collect` cannot have returned `saved` for any model and optimizer."""
    instance("state_dict", saved, Mapping, "a dict, as Trainer.state_dict gives it")
    check_format("saved state", saved.get("format"))
    keys = {"format", "optimizer", "settings", "lr_scheduler", "num_update", "counts", "parameters", "layout", "state"}
    if missing := sorted(keys - set(saved)):
        raise ValueError(f"saved state lacks {', '.join(missing)}: it must be as Trainer.state_dict gave it")
    for key in ("settings", "counts", "parameters", "layout", "state"):
        _check_dict(key, saved[key])
    integer("saved state: num_update", saved["num_update"], low=0, high=MOST_UPDATES)
    for name, count in saved["counts"].items():
        integer(f"saved state: the count of {name!r}", count, low=0, high=MOST_UPDATES)
    for name, shape in saved["parameters"].items():
        if shape is not None and not (isinstance(shape, (list, tuple)) and all(type(n) is int for n in shape)):
            raise TypeError(f"saved state: the shape of {name!r} is {shape!r}: must be a list of integers, or None")
    for name, layout in saved["layout"].items():
        check_layout(name, layout)
    for name, slots in saved["state"].items():
        _check_dict(f"the state of {name!r}", slots, of_tensors=True)
    parts = saved.get("optimizers", [])
    instance("saved state: optimizers", parts, (list, tuple), "a list")
    for k, part in enumerate(parts):
        if not isinstance(part, Mapping) or set(part) - {SCHEDULES} != _PART_KEYS:
            raise ValueError(f"saved state: optimizers[{k}] must have {', '.join(sorted(_PART_KEYS))}, and nothing else")
        _check_dict(f"settings of optimizers[{k}]", part["settings"])
        if not isinstance(part["names"], (list, tuple)) or any(not isinstance(name, str) for name in part["names"]):
            raise TypeError(f"saved state: names of optimizers[{k}] must be a list of strings")


def _check_dict(what: str, value: Any, of_tensors: bool = False) -> None:
    """Raise TypeError if `value` is not a dict whose keys are strings, and its values tensors if that is asked for."""
    instance(f"saved state: {what}", value, Mapping, "a dict")
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"saved state: names in {what} must be strings, got {key!r}")
        if of_tensors and not isinstance(item, torch.Tensor):
            raise TypeError(f"saved state: {key} in {what} must be a tensor, got {type(item).__name__}")


def check(optimizer: Optimizer, names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if a saved state does not fit this optimizer and the parameters of these names."""
    check_form(saved)
    if saved["num_update"] > optimizer.begin_num_update and not saved["counts"] and names:
        raise ValueError(
            f"saved state: num_update is {saved['num_update']}, but no parameter has a count: states are missing, as where "
            "torch.distributed.checkpoint loads into a new Trainer's state_dict: use save_states and load_states"
        )
    check_class(optimizer, saved)
    _check_parameters(names, params, saved)
    for part, part_state in shares(optimizer, names, saved):
        _check_settings(part, part_state["settings"])
        if isinstance(part, RuleOptimizer):
            _check_rule_state(part, dict(zip(names, params, strict=True)), part_state)
    if isinstance(optimizer, MultiOptimizer):
        _check_common_settings(saved["settings"])


def check_class(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a saved state is of an optimizer of another class."""
    name = type(optimizer).__name__.lower()
    if saved["optimizer"] != name:
        wanted = [part["pattern"] for part in saved.get("optimizers", ())] or saved["optimizer"]
        raise ValueError(
            f"saved state is of optimizer {saved['optimizer']!r}, this trainer has {name!r}: make the trainer with "
            + (f"Trainer(params, {wanted!r}) to load it" if wanted == saved["optimizer"] else f"optimizers for {wanted}")
        )


def shares(optimizer: Optimizer, names: Sequence[str], saved: Mapping[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Return each optimizer with its part of a saved state; a `MultiOptimizer` has several.

    Raise ValueError if the saved optimizers, or their parameters, are not those of `optimizer`.
    """
    if not isinstance(optimizer, MultiOptimizer):
        return [(optimizer, dict(saved))]
    parts, pairs = saved.get("optimizers", []), []
    saved_names = {name: part["optimizer"] for part in parts for name in part["names"]}
    for i, name in enumerate(names):
        kind, former = type(part_of(optimizer, i)).__name__.lower(), saved_names.get(name)
        if kind != former:
            raise ValueError(f"saved state: {name!r} is a parameter of optimizer {former!r}, in this trainer of {kind!r}")
    if len(parts) != len(optimizer.optimizers):
        raise ValueError(f"saved state is of {len(parts)} optimizers, this trainer has {len(optimizer.optimizers)}")
    for k, (part, part_state) in enumerate(zip(optimizer.optimizers, parts, strict=True)):
        part_names = {name for i, name in enumerate(names) if part_of(optimizer, i) is part}
        if differing := sorted(part_names ^ set(part_state["names"])):
            raise ValueError(
                f"saved state: {differing[0]!r} belongs to optimizers[{k}] in the saved state or here, not in both"
            )
        state = {name: slots for name, slots in saved["state"].items() if name in part_names}
        pairs.append((part, {**saved, **part_state, "state": state}))
    return pairs


def _check_common_settings(settings: Mapping[str, Any]) -> None:
    """Raise if these are not the settings that the optimizers of a `MultiOptimizer` have in common."""
    names = [option.name for option in LIMITS]
    if not {"clip_norm", "skip_nonfinite"} <= set(settings) <= set(names):
        raise ValueError(
            f"saved state: settings are {sorted(settings)}: must be clip_norm, skip_nonfinite and perhaps others of "
            f"{', '.join(names)}"
        )
    try:
        for option in LIMITS:
            if option.name in settings:
                option.checked(settings[option.name])
    except (TypeError, ValueError) as error:
        raise type(error)(f"saved state: {error}") from None


def _check_settings(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    current = optimizer.settings()
    for option in OPTIONS if isinstance(optimizer, RuleOptimizer) else ():
        if option.name in settings.keys() - current.keys():  # it was registered after the optimizer was made
            current[option.name] = vars(optimizer).setdefault(option.name, option.default)
    if unknown := sorted(set(settings) - set(current)):
        raise ValueError(f"saved state has settings that {type(optimizer).__name__} does not know: {', '.join(unknown)}")
    for name, value in settings.items():
        kinds = {_kind(current[name]), _kind(value)} - {None}
        if name == "multi_precision" and isinstance(optimizer, RuleOptimizer):
            if isinstance(value, bool) or value in list(SPLIT_MASTERS):
                continue
            kinds.add("bool")
        if len(kinds) > 1 or "other" in kinds:
            raise TypeError(
                f"saved state: setting {name!r} is {value!r}: must be a {_kind(current[name])}, such as this trainer's "
                f"{current[name]!r}"
            )
    try:
        check_settings(optimizer, settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"saved state: {error}") from None


def saved_schedules(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved schedules by setting, the learning rate's as `LR`; raise if a setting cannot have one."""
    schedules = saved.get(SCHEDULES, {})
    if schedules == OWN:
        schedules = dict.fromkeys(optimizer.schedules, OWN)
    _check_dict(SCHEDULES, schedules)
    try:
        check_scheduled(optimizer, schedules)
    except ValueError as error:
        raise ValueError(f"saved state: {error}") from None
    return {LR: saved[LR], **schedules}


def _kind(value: Any) -> str | None:
    """Return the kind of a setting; None, which is compatible with every kind, for None."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, (int, float)) else "string" if isinstance(value, str) else "other"


def _check_parameters(names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    shapes = saved["parameters"]
    if differing := sorted(set(shapes) ^ set(names)):
        raise ValueError(
            f"saved state is of {len(shapes)} parameters, {few(shapes)}; this trainer has {len(names)}, {few(names)}: "
            f"{few(differing)} {'is' if len(differing) == 1 else 'are'} in one of them only: {HINT}"
        )
    if lazy := [name for name, param in zip(names, params, strict=True) if shape_of(param) is None]:
        if saved["state"]:
            raise ValueError(f"{few(lazy)} of params not initialized yet: run the model once before states are loaded")
    for name, param in zip(names, params, strict=True):
        if shapes[name] is not None and shape_of(param) not in (None, list(shapes[name])):
            raise ValueError(
                f"saved state: {name!r} has shape {tuple(shapes[name])}, in this trainer it has {tuple(param.shape)}: "
                + HINT
            )
    if unknown := sorted((set(saved["counts"]) | set(saved["layout"]) | set(saved["state"])) - set(names)):
        raise ValueError(f"saved state: {few(unknown)} have a count or state, but are not among its parameters")
    stated = {*saved["state"], *saved.get("anew", ())}  # what `fitted` returned names parameters that start anew
    if saved["state"] and (missing := [name for name in names if name not in stated]):
        raise ValueError(f"saved state lacks the state of {few(missing)}: it must have all states or none")


def _check_rule_state(optimizer: RuleOptimizer, params: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    rule = saved_rule(optimizer, saved["settings"])
    for name, slots in saved["state"].items():
        weight = params[name]
        shapes = dict(zip(rule.slots, rule.shapes(weight.shape), strict=True))
        if set(slots) >= set(shapes):
            tensors = [slots[slot] for slot in rule.slots]
            shapes = dict(zip(rule.slots, slot_shapes(rule, weight.shape, tensors), strict=True))
        if set(slots) - {MASTER} != set(shapes):
            raise ValueError(
                f"saved state: {name!r} has {few(slots) or 'no tensors'}; its rule has {few(sorted(shapes)) or 'none'}"
            )
        for slot, tensor in slots.items():
            if tensor.shape != shapes.get(slot, weight.shape):
                raise ValueError(
                    f"saved state: {slot} of {name!r} has shape {tuple(tensor.shape)}: for its parameter's "
                    f"{tuple(weight.shape)} it must have {tuple(shapes.get(slot, weight.shape))}"
                )
            dtype = compute_dtype(weight.dtype)
            narrow = slot in rule.state and dtype == torch.float32 and tensor.dtype in (torch.bfloat16, *PACKED)
            is_master = slot == MASTER and kind_of(weight.dtype, tensor.dtype) is not None
            if tensor.dtype != dtype and not (narrow or is_master):
                raise ValueError(
                    f"saved state: {slot} of {name!r} is {tensor.dtype}; for a weight of {weight.dtype} it must be "
                    f"{dtype}: load it before the model is converted"
                )
            if slot != MASTER and is_packed(tensor):
                check_scales(f"saved state: {slot} of {name!r}", tensor)


def saved_rule(optimizer: RuleOptimizer, settings: Mapping[str, Any]) -> Rule:
    """Return the rule that the optimizer would have with these settings."""
    probe = copy.copy(optimizer)
    probe.set_together({**UNSCHEDULED, **settings}, with_states=True)
    return probe.composed_rule


def few(names: Any, most: int = 5) -> str:
    names = list(map(repr, names))
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def check_residuals(names: Sequence[str], params: Sequence[torch.Tensor], saved: Any) -> None:
    """Raise TypeError or ValueError if these are not residuals of gradient compression for the parameters of these names."""
    _check_dict("residuals", saved)
    by_name = dict(zip(names, params, strict=True))
    for name, sources in saved.items():
        if name not in by_name:
            raise ValueError(f"saved state: {name!r} has residuals, but is not among this trainer's parameters")
        _check_dict(f"residuals of {name!r}", sources, of_tensors=True)
        for source, tensor in sources.items():
            shape = shape_of(by_name[name])
            if shape not in (None, list(tensor.shape)) or tensor.dtype != torch.float32:
                raise ValueError(
                    f"saved state: residual {source} of {name!r} is {tensor.dtype} {tuple(tensor.shape)}: it must be "
                    f"torch.float32 {() if shape is None else tuple(shape)}"
                )


def check_buckets(saved: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if a saved state has other "buckets" or "reducers" than trainers save; both may miss."""
    reducers = saved.get("reducers", {})
    _check_dict("reducers", reducers)
    for bucket, tensors in reducers.items():
        _check_dict(f"reducers[{bucket!r}]", tensors, of_tensors=True)
    if (buckets := saved.get("buckets")) is None:
        return
    _check_dict("buckets", buckets)
    if set(buckets) != {"ranks", "order", "trained", "reducers"}:
        raise ValueError(f"saved state: buckets has {few(buckets)}: it must have ranks, order, trained and reducers")
    count = len(saved["parameters"])
    integer("saved state: ranks of buckets", buckets["ranks"], low=1)
    order, trained, described = (buckets[key] for key in ("order", "trained", "reducers"))
    if not isinstance(order, (list, tuple)) or sorted(order, key=repr) != sorted(range(count), key=repr):
        raise ValueError(f"saved state: order of buckets is {str(order)[:80]}: it must have each number below {count} once")
    if not isinstance(trained, (list, tuple)) or len(trained) != count or any(type(each) is not bool for each in trained):
        raise ValueError(f"saved state: trained of buckets is {str(trained)[:80]}: it must be {count} times true or false")
    if not isinstance(described, (list, tuple)) or any(not isinstance(each, str) for each in described):
        raise TypeError(f"saved state: reducers of buckets is {str(described)[:80]}: it must be a list of strings")


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def shape_of(param: torch.Tensor) -> list[int] | None:
    """Return the shape of a parameter; None if it is not initialized yet."""
    return None if isinstance(param, torch.nn.UninitializedParameter) else list(param.shape)
