"""Drop-in for `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...kernels.norms import EPSILON, global_norm, scale_to_norm_
from . import shards


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As torch's, in one pass over all gradients that measures and one that scales; no copies, no waiting for the device.

    Args:
        parameters: a parameter, or several; those without gradient are left out.
        max_norm: what the norm of all gradients together is to be at most.
        norm_type: 1, 2 or inf; other norms, and gradients that are sparse or complex, are left to torch. DTensors count with
            the shards of all ranks; they may be mixed with plain tensors, which are the same on every rank.
        error_if_nonfinite: whether a norm that is not finite is an error; to know it, the host waits for the device.
        foreach: taken for torch's sake, and without effect where torch is not asked.

    Returns:
        The norm before, a plain tensor. Of 16-bit gradients it is float32, not rounded to their type as torch does.

    Raises:
        RuntimeError: the norm is not finite, and that is to be an error; nothing has been changed.

    Source: `torch.nn.utils.clip_grad_norm_`.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    else:
        generated = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if generated and not parameters:
            warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2)
    norm_type = float(norm_type)
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]

    def clippable(norm: torch.Tensor) -> bool:
        if math.isfinite(norm.item()):
            return True
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )

    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if norm_type in (1.0, 2.0, math.inf) and not capturing:
        decide = clippable if error_if_nonfinite else None
        try:
            if any(map(shards.is_dtensor, gradients)):
                return _clip_shards(gradients, float(max_norm), norm_type, decide)
            return scale_to_norm_("parameters", gradients, float(max_norm), norm_type, decide=decide)
        except (TypeError, ValueError):  # gradients of other kinds; nothing has been changed yet
            pass
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm.full_tensor() if shards.is_dtensor(norm) else norm  # of this rank's shards it would be a part only


@torch.no_grad()
def _clip_shards(
    gradients: Sequence[torch.Tensor], max_norm: float, norm_type: float, decide: Callable[[torch.Tensor], bool] | None
) -> torch.Tensor:
    """Scale this rank's shards by the norm of all. Those that are cut among the same ranks are measured together."""
    members: dict[shards.Cut, list[torch.Tensor]] = {}
    for gradient in gradients:
        if shards.refusal(gradient) is not None:
            raise TypeError("a gradient of partial sums")
        members.setdefault(shards.cut_among(gradient), []).append(shards.local(gradient))
    # All are measured before any rank waits for another, as there may be some that cannot be.
    norms = [global_norm(each, norm_type) for each in members.values()]
    by = "max" if norm_type == math.inf else "sum"
    for norm, cut in zip(norms, members, strict=True):
        if norm_type == 2:
            norm.square_()
        shards.add_up(norm, by, cut)
    dtype = max((norm.dtype for norm in norms), key=lambda each: each.itemsize)
    found = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    total = found.amax() if by == "max" else found.sum()
    if norm_type == 2:
        total = total.sqrt()
    if decide is None or decide(total):
        factor = (max_norm / (total + EPSILON)).clamp(max=1.0)
        for own in members.values():
            torch._foreach_mul_(own, factor.to(own[0].device))
    return total
