"""collect_params: a module's parameters by name, in Gluon's order, or those of some names."""

from __future__ import annotations

import re
from typing import Any

import torch

from .validation import choice, number

__all__ = ["Parameters", "collect_params"]

_SETTABLE = ("lr_mult", "wd_mult", "grad_req", "init")


def collect_params(module: torch.nn.Module, select: str | None = None) -> Parameters:
    """The parameters of a module by name, sorted by these, as Gluon's method of blocks gives them.

    A `Trainer` takes them, and updates them in this order.

    Args:
        module: the module, with all its submodules.
        select: a regular expression that a name must match from its beginning, such as ".*bias|.*norm"; None means all.

    Raises:
        TypeError: no module, or no string.
        ValueError: `select` is no regular expression.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> tristep.collect_params(net, ".*bias").setattr("wd_mult", 0)
        >>> list(tristep.collect_params(net)), net[0].bias.wd_mult
        (['0.bias', '0.weight', '1.bias', '1.weight'], 0.0)

    Source: MXNet 1.9.1, `gluon.Block.collect_params`.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if select is not None and not isinstance(select, str):
        raise TypeError(f"select={select!r}: must be a regular expression, a string, or None")
    try:
        pattern = re.compile(select or "")
    except re.error as error:
        raise ValueError(f"select={select!r}: is no regular expression: {error}") from error
    return Parameters(sorted((name, param) for name, param in module.named_parameters() if pattern.match(name)))


class Parameters(dict[str, torch.nn.Parameter]):
    """Parameters by name, all of which get an attribute in one call."""

    def setattr(self, name: str, value: Any) -> None:
        """Set an attribute that a `Trainer` or `tristep.init.initialize` reads of all these parameters.

        Args:
            name: "lr_mult" or "wd_mult", relative to the optimizer's rate and decay, >= 0; "init", an initializer; or
                "grad_req", "null" for parameters that are not to be trained, "write" or "add" for others, which is
                `requires_grad` in torch.
            value: what it is to be.

        Raises:
            TypeError, ValueError: another attribute, or a value that it does not take; nothing has been changed.
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
