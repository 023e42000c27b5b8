"""Gluon's `clip_global_norm`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch

from ...kernels.norms import scale_to_norm_
from ..optimizer.sparse import is_sparse
from ..validation import boolean, number


@torch.no_grad()
def clip_global_norm(arrays: Iterable[torch.Tensor], max_norm: float, check_isfinite: bool = True) -> float | torch.Tensor:
    """Clip the joint 2-norm of tensors in place, and return the norm from before.

    If max_norm / (norm + 1e-8) < 1, all arrays are multiplied by it.

    Args:
        arrays: one or more floating-point tensors, dense or sparse along the first axis, as the gradients of
            `torch.nn.Embedding(sparse=True)` are.
        max_norm: the largest allowed 2-norm of all arrays together, >= 0.
        check_isfinite: read the norm on the host, which waits for the device, and warn if it is not finite; the arrays then
            stay as they are if it is NaN. With False a NaN spreads to all arrays.

    Returns:
        The norm: a float, or with `check_isfinite=False` a tensor of shape (1,).

    Raises:
        TypeError, ValueError: an empty list, an element that is no such tensor, or a negative `max_norm`; nothing has been
            changed.

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
    norms: list[float] = []

    def exceeds(norm: torch.Tensor) -> bool:
        norms.append(norm.item())
        return max_norm / (norms[0] + 1e-8) < 1.0

    summed = [array.detach().coalesce() if is_sparse(array) else array for array in arrays]
    values = [array.values() if is_sparse(array) else array for array in summed]
    norm = scale_to_norm_("arrays", values, max_norm, epsilon=1e-8, decide=exceeds if check_isfinite else None)
    for array, total in zip(arrays, summed, strict=True):
        if is_sparse(array) and not array.is_coalesced():  # coalesced arrays share their values with `total`
            array.copy_(total)
    if not check_isfinite:
        return norm.reshape(1)
    if not math.isfinite(norms[0]):
        warnings.warn("nan or inf is detected. Clipping results will be undefined.", stacklevel=2)
    return norms[0]
