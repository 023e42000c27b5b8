"""Checks of the numbers in a saved state, which torch's own `load_state_dict` takes as they come."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ...kernels.storage import check_scales, is_packed
from ..checkpoint import MOST_UPDATES
from ..validation import integer
from .states import MASTER_KEYS

__all__ = ["check_numbers"]


def check_numbers(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], shown: Collection[str]) -> None:
    """Refuse options that the optimizer's constructor would refuse, and update counts that no training reaches.

    Missing or different groups are left to torch to refuse. Per-tensor state may be NaN, as after a training that diverged.

    Args:
        optimizer: the optimizer that is to load it.
        saved: as returned by `state_dict`.
        shown: the numbers in each parameter's state that follow from its step count and options alone.

    Raises:
        ValueError, TypeError: such a number was found; nothing has been changed.
    """
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups) or not isinstance(state, Mapping):
        return
    for k, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        options = {name: _number_in(value) for name, value in group.items() if name in optimizer.defaults}
        for name, value in options.items():
            if isinstance(value, float) and not math.isfinite(value) and value != own.get(name):
                raise ValueError(f"saved state: param_groups[{k}][{name!r}] is {value!r}: must be finite")
        # Not its switches: some of torch's are refused when they are given, and do no harm in what torch has saved.
        kinds = (int, float, str, tuple, list)
        _make(type(optimizer), k, {n: v for n, v in options.items() if isinstance(v, kinds) and not isinstance(v, bool)})
    for key, row in state.items():
        for name, value in row.items() if isinstance(row, Mapping) else ():
            if isinstance(value, torch.Tensor) and is_packed(value) and value.dim() == 1 and name not in MASTER_KEYS:
                check_scales(f"saved state: {name!r} of parameter {key!r}", value)
            value = _number_in(value)
            if name == "step" and isinstance(value, int | float):
                count = int(value) if math.isfinite(value) and value == int(value) else value
                integer(f"saved state: 'step' of parameter {key!r}", count, low=0, high=MOST_UPDATES)
            elif name in shown and isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"saved state: {name!r} of parameter {key!r} is {value!r}: must be finite")


def _make(klass: Any, k: int, options: Mapping[str, Any]) -> None:
    """Have the constructor look at these options: that of the class of ours from which a user's is derived."""
    ours = __name__.partition(".")[0]
    klass = next(base for base in klass.__mro__ if base.__module__.partition(".")[0] == ours or "_klass" in vars(base))
    known = inspect.signature(klass).parameters
    try:
        klass([torch.nn.Parameter(torch.zeros(1, 1))], **{name: v for name, v in options.items() if name in known})
    except (TypeError, ValueError) as error:
        raise type(error)(f"saved state: param_groups[{k}]: {error}") from None


def _number_in(value: Any) -> Any:
    """The number in a tensor on the host without dimensions; anything else as it is."""
    plain = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu" and not value.is_complex()
    return value.item() if plain else value
