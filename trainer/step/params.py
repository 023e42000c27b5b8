"""The parameters of a trainer: taken from the argument `params`, named and checked; or collected from a module by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...kernels.checks import DTYPES, check_apart
from ...kernels.layouts import is_wrapper
from ...kernels.messages import listed, there_are
from .. import serialization
from ..optimizer import Optimizer
from ..validation import choice, instance, number

_SETTABLE = ("lr_mult", "wd_mult", "grad_req", "init")


def is_lazy(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, torch.nn.UninitializedParameter)


def modules_of(params: Any) -> list[torch.nn.Module]:
    """Return the replicas of a model if `params` is a list of modules, else an empty list."""
    if isinstance(params, (list, tuple)) and params and all(isinstance(module, torch.nn.Module) for module in params):
        return list(params)
    return []


def replica_of(
    r: int, module: torch.nn.Module, first: list[tuple[str, torch.nn.Parameter, Any]]
) -> list[torch.nn.Parameter]:
    """Return the parameters of replica `r`, after a check that they match the `first` replica's."""
    named = named_parameters(module)
    first_names, names = [name for name, _, _ in first], [name for name, _, _ in named]
    if names != first_names:
        odd = sorted(set(names) ^ set(first_names)) or names
        raise ValueError(
            f"params[{r}] is no copy of params[0]: {listed(list(map(repr, odd)))} of their parameters differ in name or "
            "order; make copies with tristep.replicate(module, devices)"
        )
    check_parameters(named)
    params = [parameter for _, parameter, _ in named]
    check_alike(r, names, params, [parameter for _, parameter, _ in first])
    return params


def check_alike(r: int, names: Sequence[str], params: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> None:
    """Raise if a parameter of replica `r` has another shape or dtype than the first replica's."""
    for name, parameter, model in zip(names, params, first, strict=True):
        if is_lazy(parameter) or is_lazy(model):
            continue
        if parameter.shape != model.shape or parameter.dtype != model.dtype:
            raise ValueError(
                f"params[{r}] is no copy of params[0]: {name!r} is {parameter.dtype} {tuple(parameter.shape)}, in params[0] "
                f"it is {model.dtype} {tuple(model.shape)}"
            )


def check_distinct(replicas: Sequence[Sequence[torch.nn.Parameter]]) -> None:
    """Raise if two replicas share a parameter."""
    seen: dict[int, int] = {}
    for r, params in enumerate(replicas):
        for parameter in params:
            if seen.setdefault(id(parameter), r) != r:
                raise ValueError(
                    f"params[{r}] and params[{seen[id(parameter)]}] share parameters: each copy needs its own; make copies "
                    "with tristep.replicate(module, devices)"
                )


def named_parameters(params: Any) -> list[tuple[str, torch.nn.Parameter, dict[str, float]]]:
    """Return name, parameter and multipliers of each parameter, without repetitions, from a trainer's argument `params`."""
    if isinstance(params, DistributedDataParallel):
        params = params.module
    if isinstance(params, torch.nn.Module):
        entries: list[Any] = list(params.named_parameters())
    elif isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be a module, or a list or dict of parameters, got {type(params).__name__}"
            + (": put it into a list" if isinstance(params, torch.Tensor) else "")
        )
    else:
        entries = list(params)
    named: list[tuple[Any, Any, dict[str, float]]] = []
    grouped: dict[int, int] = {}  # the group of each parameter, by the parameter's id
    for i, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            members = _group(i, entry)
            for name, parameter, _ in members:
                if (first := grouped.setdefault(id(parameter), i)) != i:
                    raise ValueError(
                        f"some parameters appear in more than one parameter group: {name!r} of params[{i}] is also in "
                        f"params[{first}]"
                    )
            named += members
        elif isinstance(entry, tuple) and len(entry) == 2:
            named.append((*entry, {}))
        else:
            named.append((str(len(named)), entry, {}))
    for name, parameter, _ in named:
        if not isinstance(name, str):
            raise TypeError(f"params: names must be strings, got {name!r} ({type(name).__name__})")
        if not isinstance(parameter, torch.nn.Parameter):
            hint = "; wrap it in torch.nn.Parameter" if isinstance(parameter, torch.Tensor) else ""
            raise TypeError(f"params: {name!r} must be a torch.nn.Parameter, got {type(parameter).__name__}{hint}")
    once: dict[int, Any] = {}
    for name, parameter, multipliers in named:
        once.setdefault(id(parameter), (serialization.plain_name(name), parameter, multipliers))
    result = list(once.values())
    names = [name for name, _, _ in result]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"params: the names {listed(twice)} stand for several parameters: give each a name of its own")
    return result


def gluons_order(named: Sequence[tuple[str, Any, Any]], optimizer: Optimizer) -> list[int]:
    """Return the indices of a module's parameters in the order of updates: by name if numbers depend on the order."""
    places = list(range(len(named)))
    return sorted(places, key=lambda i: named[i][0]) if optimizer.depends_on_order else places


def _group(i: int, group: Mapping[str, Any]) -> list[tuple[str, Any, dict[str, float]]]:
    """Return name, parameter and multipliers of each parameter of group `i`."""
    allowed = ("params", "lr_mult", "wd_mult")
    for key in group:
        if key not in allowed:
            raise ValueError(
                f"params[{i}] has the key {key!r}.{there_are(key, allowed)}; multipliers are relative to the optimizer's "
                "learning_rate and wd"
            )
    if "params" not in group:
        raise ValueError(f"params[{i}] has no 'params': a group is a dict with 'params' and, if wanted, multipliers")
    multipliers = {key: number(f"params[{i}][{key!r}]", group[key], low=0) for key in allowed[1:] if key in group}
    members = group["params"]
    if isinstance(members, torch.Tensor):
        members = [members]
    instance(f"params[{i}]['params']", members, Iterable, "a parameter or a list of parameters")
    named = []
    for j, member in enumerate(members):
        name, parameter = member if isinstance(member, tuple) and len(member) == 2 else (f"{i}.{j}", member)
        named.append((name, parameter, multipliers))
    return named


def check_parameters(named: list[tuple[str, torch.nn.Parameter, Any]]) -> None:
    """Raise if there are no parameters, one has a dtype or layout that cannot be trained, or they are on several devices."""
    if not named:
        raise ValueError(
            "params is empty: there is nothing to train (was a generator used up before, or a model without layers given?)"
        )
    devices: dict[torch.device, str] = {}
    for name, parameter, _ in named:
        if is_lazy(parameter):
            continue
        if parameter.dtype not in DTYPES:
            kind = "complex weights" if parameter.is_complex() else "weights of this type"
            raise TypeError(
                f"params: {name!r} is {parameter.dtype}: {kind} cannot be trained; allowed are {', '.join(map(str, DTYPES))}"
            )
        if parameter.layout != torch.strided:
            raise TypeError(f"params: {name!r} is sparse ({parameter.layout}): weights must be dense")
        if parameter.is_inference():
            raise ValueError(
                f"params: {name!r} was made under torch.inference_mode(), where autograd does not track changes: make the "
                "model outside of it"
            )
        if is_wrapper(parameter):
            raise TypeError(
                f"params: {name!r} is a {type(parameter).__name__}: a Trainer takes plain parameters; the classes of "
                "tristep.optim train those that fully_shard or distribute_tensor has made"
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"params are on different devices ({where}): move the model to one device first")
    check_apart([(repr(name), parameter) for name, parameter, _ in named if not is_lazy(parameter)])


def collect_params(module: torch.nn.Module, select: str | None = None) -> Parameters:
    """Return a module's parameters by name, sorted by name, as `Block.collect_params` of Gluon does.

    A `Trainer` takes the result as `params`, and updates the parameters in this order.

    Args:
        module: the module, with all its submodules.
        select: a regular expression that names must match from their beginning, such as ".*bias|.*norm"; None selects all.

    Raises:
        TypeError: `module` is no module, or `select` is no string.
        ValueError: `select` is no regular expression.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> tristep.collect_params(net, ".*bias").setattr("wd_mult", 0)
        >>> list(tristep.collect_params(net)), net[0].bias.wd_mult
        (['0.bias', '0.weight', '1.bias', '1.weight'], 0.0)

    Source: MXNet 1.9.1, `gluon.Block.collect_params`.
    """
    instance("module", module, torch.nn.Module, "a torch.nn.Module")
    instance("select", select, (str, type(None)), "a regular expression, a string, or None", shown=True)
    try:
        pattern = re.compile(select or "")
    except re.error as error:
        raise ValueError(f"select={select!r}: is no regular expression: {error}") from error
    return Parameters(sorted((name, param) for name, param in module.named_parameters() if pattern.match(name)))


class Parameters(dict[str, torch.nn.Parameter]):
    """A dict of parameters by name, with a method to set an attribute of all of them."""

    def setattr(self, name: str, value: Any) -> None:
        """Set an attribute of all parameters: a multiplier, the initializer, or whether they are trained.

        Args:
            name: "lr_mult", "wd_mult", "init" or "grad_req".
            value: for "lr_mult" and "wd_mult" the factor of the optimizer's learning rate and weight decay, >= 0; for "init"
                an initializer; for "grad_req" "null", which sets `requires_grad` to False, or "write" or "add", which set it
                to True.

        Raises:
            TypeError, ValueError: another attribute, or a value that the attribute does not take; nothing has been changed.
        """
        choice("name", name, _SETTABLE)
        if name == "grad_req":
            value = choice("grad_req", value, ("null", "write", "add"))
            for param in self.values():
                param.requires_grad_(value != "null")
            return
        if name != "init":
            value = number(name, value, low=0)
        for param in self.values():
            setattr(param, name, value)
