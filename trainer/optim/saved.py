"""The states that `state_dict` returns, and the checks of a loaded state, which torch's `load_state_dict` does not check."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from ...kernels import TensorRule, storage
from ...kernels.messages import listed
from ...kernels.states import PACK_FROM, copies_on_host
from ..optimizer import registered
from ..serialization import HINT, MOST_UPDATES, Loaded, match, refuse_common
from ..validation import integer
from . import shards
from .groups import MASTER_KEY, STORAGE, Group, GroupOptimizer, as_real, name_of


@contextmanager
def shown_states(optimizer: GroupOptimizer, only: Collection[str] | None = None) -> Iterator[None]:
    """Inside this context, `optimizer.state` has the format of `state_dict`; all ranks must enter it.

    8-bit and 4-bit states become bfloat16 tensors of the parameter's shape, and states that only one rank has become
    DTensors. `only`: the keys of states and masters to convert; None: all.
    """
    states, owners = optimizer.state, optimizer._owners or {}
    shown = copy.copy(states)  # rows without a conversion stay the same objects, as in torch
    for group in optimizer.param_groups:
        rule = optimizer._rule(group)
        unsigned = {optimizer._keys.get(slot, slot): slot in rule.nonnegative for slot in rule.slots}
        for parameter in group["params"]:
            if not isinstance(states.get(parameter), dict) or (parameter in owners and isinstance(rule, TensorRule)):
                continue
            row, shape = dict(states[parameter]), shards.local(parameter).shape
            for key in unsigned:
                state: Any = row.get(key)
                if not storage.is_packed(state) or shards.is_dtensor(state) or (only is not None and key not in only):
                    continue
                if len(state) == storage.packed_size(shape.numel(), state.dtype):  # else it is another model's
                    # The same dtype on all ranks, although a rank with few elements does not pack them.
                    show = storage.unpacked if shards.fewest_elements(parameter) < PACK_FROM else storage.as_bfloat16
                    row[key] = shards.placed_as(parameter, show(state, shape, unsigned[key]))
                    shown[parameter] = row
    if owners:
        shards.whole_plan().show(optimizer, shown, only)
    try:
        if not all(map(is_, shown.values(), states.values())):
            optimizer.state = shown
        yield
    finally:
        optimizer.state = states


def converted(optimizer: GroupOptimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state with this optimizer's names of options and states, where torch has other names."""
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        return dict(saved)
    groups, state = list(groups), dict(state)
    for k, group in enumerate(groups):
        options, keys = optimizer._from_torch(group)
        if k < len(optimizer.param_groups) and "state_dtype" in optimizer.param_groups[k]:
            # A file without this option, such as one of torch's, leaves the storage of states to the optimizer.
            options = {"state_dtype": group.get("state_dtype", optimizer.param_groups[k]["state_dtype"]), **options}
        groups[k] = {name: value for name, value in {**group, **options}.items() if name != "state_device"}
        if k < len(optimizer.param_groups) and "state_device" in optimizer.param_groups[k]:
            groups[k]["state_device"] = optimizer.param_groups[k]["state_device"]  # it says nothing of the numbers
        for parameter in group.get("params", ()):
            row = state.get(parameter)
            if isinstance(row, Mapping):
                state[parameter] = {keys.get(key, key): value for key, value in row.items()}
    return {**saved, "param_groups": groups, "state": state}


def on_host(optimizer: GroupOptimizer, saved: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return saved states, copied to memory of the host where they belong there: torch would copy them to the GPU."""
    if not any(map(optimizer._on_host, optimizer.param_groups)):
        return saved["state"]
    state = dict(saved["state"])
    for group, current in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        parameters = zip(group["params"], current["params"], strict=True) if optimizer._on_host(current) else ()
        for key, parameter in parameters:
            row = state.get(key)
            if parameter.device.type != "cuda" or shards.is_dtensor(parameter) or not isinstance(row, Mapping):
                continue
            names = [name for name, each in row.items() if name != MASTER_KEY and _is_like(each, parameter)]
            copies = copies_on_host([row[name] for name in names], parameter.device)
            state[key] = {**row, **dict(zip(names, copies, strict=True))}
    return state


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.shape == parameter.shape != ()


def check_sizes(groups: Sequence[Group], saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a saved state has another number of groups, or of parameters in a group."""
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved["param_groups"]))
    if len(sizes) != len(saved_sizes):
        raise ValueError(
            f"state_dict has a different number of parameter groups, {len(saved_sizes)}, than this optimizer, {len(sizes)}: "
            + HINT
        )
    if sizes != saved_sizes:
        raise ValueError(f"state_dict has groups of {saved_sizes} parameters, this optimizer has groups of {sizes}: {HINT}")


def fit_groups(
    groups: Sequence[Group], owners: Sequence[Any], saved: Mapping[str, Any], settings: str
) -> tuple[dict[str, Any], Loaded]:
    """Return what of a saved state fits, as a state that a strict load takes, and the names of the parameters.

    Parameters are matched by name if all groups here and there have names, otherwise by group and place in it.

    Args:
        groups: the groups here.
        owners: the optimizer of each group.
        saved: the saved state.
        settings: "file" for the saved options of groups, "mine" for those here.

    Raises:
        ValueError, TypeError: there are sharded parameters, an optimizer of another library, or options of other groups; or
            nothing fits, or parameters cannot start anew.
    """
    there, rows = saved.get("param_groups"), saved.get("state")
    if not isinstance(there, list) or not isinstance(rows, Mapping):
        raise TypeError("state_dict must be a dict with param_groups and state, as state_dict() gives it")
    for owner, group in zip(owners, groups, strict=True):
        if not isinstance(owner, GroupOptimizer):
            raise TypeError(f"strict=False with {type(owner).__name__}: it must be an optimizer of tristep.optim")
        if any(map(shards.is_dtensor, group["params"])):
            raise ValueError("strict=False with sharded parameters (DTensor): load before they are sharded")
    several = len({id(owner) for owner in owners}) > 1
    carries = any("carried" in group for group in groups)
    if len(there) != len(groups) and (settings == "file" or several or carries):
        raise ValueError(
            f"strict=False: state_dict has {len(there)} groups, this optimizer {len(groups)}: "
            + ("make it with as many" if several or carries else "settings='mine' loads states without the groups' options")
        )
    named = all("param_names" in group for group in (*groups, *there))
    places, saved_places = _places(groups, named), _places(there, named)
    fitting = _fitting(groups, saved, settings)
    numbers = {name: number for number, name in enumerate(places)}
    of_parameters = {key for group in there for key in group["params"]}
    fitting["state"] = {key: row for key, row in rows.items() if key not in of_parameters}
    for name in places:
        j, i = saved_places.get(name, (0, 0))
        if name in saved_places and (row := rows.get(there[j]["params"][i])) is not None:
            fitting["state"][numbers[name]] = row
    fits, rules = _test_of_shapes(groups, owners, fitting)

    def fits_here(name: str) -> bool:
        (k, i), (j, _) = places[name], saved_places[name]
        return (not several or owners[k] is owners[j]) and fits(k, i, numbers[name])

    loaded = match("parameters", places, saved_places, fits_here)
    for name in loaded.anew:
        fitting["state"].pop(numbers[name], None)
    for owner, rule, group in zip(owners, rules, groups, strict=True):
        of_owner = [name for name in loaded.anew if owners[places[name][0]] is owner]
        refuse_common(type(owner).__name__, rule, "carried" in group, of_owner)
    return fitting, loaded


def _places(groups: Sequence[Mapping[str, Any]], named: bool) -> dict[str, tuple[int, int]]:
    """Return the group and the place in it of each parameter, by its name, or by a text of its place."""
    places: dict[str, tuple[int, int]] = {}
    for k, group in enumerate(groups):
        names = group["param_names"] if named else [f"params[{i}] of group {k}" for i in range(len(group["params"]))]
        if len(names) != len(group["params"]):
            raise ValueError(f"saved state: param_groups[{k}] has {len(names)} names of {len(group['params'])} parameters")
        places |= {name: (k, i) for i, name in enumerate(names)}
    return places


def _fitting(groups: Sequence[Group], saved: Mapping[str, Any], settings: str) -> dict[str, Any]:
    """Return a saved state with the parameters of these groups, numbered, and with saved options or those here."""
    number, fitting = 0, []
    for k, group in enumerate(groups):
        of_file = saved["param_groups"][k] if k < len(saved["param_groups"]) else {}
        options = dict(of_file if settings == "file" else group)
        if settings == "mine" and "carried" in of_file:  # numbers that go with the states
            options["carried"] = of_file["carried"]
        options.pop("param_names", None)
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        fitting.append({**options, **names, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    return {**saved, "param_groups": fitting}


def _test_of_shapes(
    groups: Sequence[Group], owners: Sequence[GroupOptimizer], fitting: Mapping[str, Any]
) -> tuple[Callable[[int, int, int], bool], list[Any]]:
    """Return a function of a group, a place in it and a number that says whether that state has the parameter's shape.

    And the rule of each group with the options of `fitting`.
    """
    states: list[Mapping[Any, Any]] = []
    rules: list[Any] = []
    for group, owner in zip(fitting["param_groups"], owners, strict=True):
        of_group = converted(owner, {"param_groups": [group], "state": fitting["state"]})
        rules.append(owner._rule({**owner.defaults, **of_group["param_groups"][0]}))
        states.append(of_group["state"])

    def fits(k: int, i: int, number: int) -> bool:
        row, parameter, owner = states[k].get(number), groups[k]["params"][i], owners[k]
        if not isinstance(row, Mapping):
            return True
        whole = as_real(parameter).shape
        keys = [owner._keys.get(slot, slot) for slot in rules[k].slots]
        shapes = zip((*keys, MASTER_KEY), (*rules[k].shapes(whole), whole), strict=True)
        return not any(_has_other_shape(row.get(key), parameter, shape) for key, shape in shapes)

    return fits, rules


def check_numbers(optimizer: GroupOptimizer, saved: Mapping[str, Any], shown: Collection[str]) -> None:
    """Raise if a saved state has invalid options or step counts, or another optimizer's states; before anything is loaded.

    torch checks the number of groups and parameters. Values of states may be NaN, as after a training that diverged.
    `shown`: the keys of the numbers in a parameter's state that depend on its step count and options only.
    """
    saved = converted(optimizer, saved)
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups) or not isinstance(state, Mapping):
        return
    for k, (group, current) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        options = {name: _number_in(value) for name, value in group.items() if name in optimizer.defaults}
        for name, value in options.items():
            if isinstance(value, float) and not math.isfinite(value) and value != current.get(name):
                raise ValueError(f"saved state: param_groups[{k}][{name!r}] is {value!r}: must be finite")
        # Booleans are not checked: some that torch saves, such as `capturable`, would be refused, but do no harm here.
        kinds = (int, float, str, tuple, list)
        options = {n: v for n, v in options.items() if isinstance(v, kinds) and not isinstance(v, bool)}
        options |= {name: group[name] for name in STORAGE if name in group}
        _check_options(type(optimizer), k, options)
        _check_slots(optimizer, k, group, state)
    for key, row in state.items():
        for name, value in row.items() if isinstance(row, Mapping) else ():
            if isinstance(value, torch.Tensor) and storage.is_packed(value) and value.dim() == 1 and name != MASTER_KEY:
                storage.check_scales(f"saved state: {name!r} of parameter {key!r}", value)
            value = _number_in(value)
            if name == "step" and isinstance(value, int | float):
                count = int(value) if math.isfinite(value) and value == int(value) else value
                integer(f"saved state: 'step' of parameter {key!r}", count, low=0, high=MOST_UPDATES)
            elif name in shown and isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"saved state: {name!r} of parameter {key!r} is {value!r}: must be finite")


def _check_slots(optimizer: GroupOptimizer, k: int, group: Mapping[str, Any], state: Mapping[Any, Any]) -> None:
    """Raise if group `k` has states of another optimizer: missing states would start at 0, with that optimizer's counts."""
    current, rows = optimizer.param_groups[k], [state.get(key) for key in group.get("params", ())]
    rule = optimizer._rule({**optimizer.defaults, **group})
    saved_options = {*group, *STORAGE}
    # torch adds "differentiable" to the defaults of an optimizer that was loaded or copied once.
    lacks_options = bool(optimizer.defaults.keys() - saved_options - {"differentiable"})
    added = saved_options - current.keys() - {*STORAGE}
    keys = [optimizer._keys.get(slot, slot) for slot in rule.slots]
    known = {"step", *optimizer._shown, *keys, MASTER_KEY}
    for i, (parameter, row) in enumerate(zip(current["params"], rows, strict=False)):
        if not isinstance(row, Mapping) or not row:
            continue
        shapes = rule.shapes(as_real(parameter).shape)
        filled = [key for key, shape in zip(keys, shapes, strict=True) if math.prod(shape) or not parameter.numel()]
        missing = [key for key in (*optimizer._shown, *filled) if key not in row]
        unknown = [key for key in row if key not in known]
        for key, shape in (*zip(keys, shapes, strict=True), (MASTER_KEY, as_real(parameter).shape)):
            _check_shape(name_of(current, i), key, row.get(key), parameter, shape)
        # Unknown states may be a user's, or of an option that was on before, unless the options differ, too.
        if missing or (unknown and (lacks_options or added & _options_of_all())):
            raise ValueError(
                f"saved state: param_groups[{k}]: the state of {name_of(current, i)} is another optimizer's than "
                f"{type(optimizer).__name__}'s: it lacks {missing}, and has unknown {unknown}; load a state_dict that an "
                "optimizer of this class returned"
            )
    filled_in = getattr(optimizer, "_options", ())  # with their defaults, as files of torch's classes have none of them
    needed = [name for name, default in optimizer.defaults.items() if _is_needed(default) and name not in filled_in]
    if lacking := [name for name in needed if name not in group]:
        raise ValueError(
            f"saved state: param_groups[{k}] has no {listed(map(repr, lacking))}, which {type(optimizer).__name__} needs: "
            "load a state_dict that an optimizer of this class returned"
        )


def _is_needed(default: Any) -> bool:
    """Return whether an option with this default is a number, or several, without which a group cannot step."""
    return isinstance(default, (int, float, tuple, torch.Tensor)) and not isinstance(default, bool)


def _check_shape(name: str, key: str, state: Any, parameter: torch.Tensor, shape: torch.Size) -> None:
    """Raise if a state has another shape than the rule's."""
    if _has_other_shape(state, parameter, shape):
        raise ValueError(
            f"saved state: {key!r} of {name} has shape {tuple(state.shape)}, the parameter {tuple(parameter.shape)}: the "
            f"state of another model? {HINT}"
        )


def _has_other_shape(state: Any, parameter: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether a state has another shape than the rule's; packed states and shards are checked in the step."""
    if not isinstance(state, torch.Tensor) or storage.is_packed(state) or any(map(shards.is_dtensor, (state, parameter))):
        return False
    found = (*state.shape, 2) if state.is_complex() else state.shape
    return tuple(found) != tuple(shape) and bool(state.numel() or math.prod(shape))


def _options_of_all() -> set[str]:
    """Return the names of the options of all optimizers of torch and tristep."""
    torchs = [klass for klass in vars(torch.optim).values() if isinstance(klass, type)]
    return {name for klass in (*torchs, *registered().values()) for name in inspect.signature(klass).parameters}


def _check_options(klass: Any, k: int, options: Mapping[str, Any]) -> None:
    """Check options by a call of the constructor; for a user's subclass, of its nearest base class in tristep."""
    package = __name__.partition(".")[0]
    klass = next(base for base in klass.__mro__ if base.__module__.partition(".")[0] == package or "_klass" in vars(base))
    arguments = inspect.signature(klass).parameters
    group = {"params": [torch.nn.Parameter(torch.zeros(1, 1))]}
    group |= {name: v for name, v in options.items() if name in STORAGE}  # not all constructors know them
    try:
        klass([group], **{name: v for name, v in options.items() if name in arguments})
    except (TypeError, ValueError) as error:
        raise type(error)(f"saved state: param_groups[{k}]: {error}") from None


def _number_in(value: Any) -> Any:
    """Return the number in a CPU tensor without dimensions; anything else unchanged."""
    plain = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu" and not value.is_complex()
    return value.item() if plain else value
