"""Parameter names and shapes as state files have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


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
