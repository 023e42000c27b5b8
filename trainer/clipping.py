"""Gluon's `clip_global_norm`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch

from ..kernels.norms import scale_to_norm_
from .optimizer.sparse import is_sparse
from .validation import boolean, number


@torch.no_grad()
def clip_global_norm(arrays: Iterable[torch.Tensor], max_norm: float, check_isfinite: bool = True) -> float | torch.Tensor:
    """Multiply all arrays by max_norm / (norm + 1e-8), in place, if that is less than 1; returns their norm from before.

    Args:
        arrays: floating-point tensors, at least one, dense or as gradients of `torch.nn.Embedding(sparse=True)` are.
        max_norm: what their 2-norm together is to be at most.
        check_isfinite: look at the norm, which waits for the device: the result is a float then, and a norm that is not
            finite gives a warning. A NaN leaves the arrays as they are then; otherwise it spreads to all of them.

    Returns:
        A float, or without `check_isfinite` a tensor of shape (1,).

    Raises:
        TypeError, ValueError: no arrays, something that is no such tensor, or a negative norm; nothing has been changed.

    Example:
        >>> import torch, tristep
        >>> x = torch.tensor([3.0, 4.0])
        >>> tristep.clip_global_norm([x], 1.0)
        5.0
        >>> x
        tensor([0.6000, 0.8000])

    Source: MXNet 1.9.1, `gluon.utils.clip_global_norm`.
    """
    if isinstance(arrays, torch.Tensor):
        raise TypeError("arrays must be a list of tensors, got Tensor: put it into a list")
    arrays = list(arrays)
    if not arrays:
        raise ValueError("arrays is empty: there must be one tensor at least")
    max_norm, check_isfinite = number("max_norm", max_norm, low=0), boolean("check_isfinite", check_isfinite)
    found: list[float] = []

    def smaller(norm: torch.Tensor) -> bool:
        found.append(norm.item())
        return max_norm / (found[0] + 1e-8) < 1.0

    summed = [array.detach().coalesce() if is_sparse(array) else array for array in arrays]
    values = [array.values() if is_sparse(array) else array for array in summed]
    norm = scale_to_norm_("arrays", values, max_norm, epsilon=1e-8, decide=smaller if check_isfinite else None)
    for array, total in zip(arrays, summed, strict=True):
        if is_sparse(array) and not array.is_coalesced():  # others share their values
            array.copy_(total)
    if not check_isfinite:
        return norm.reshape(1)
    if not math.isfinite(found[0]):
        warnings.warn("nan or inf is detected. Clipping results will be undefined.", stacklevel=2)
    return found[0]
