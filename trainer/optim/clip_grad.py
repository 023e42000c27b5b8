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
    """Clip the joint norm of all gradients in place, as torch's function, without copies or waiting for the device.

    Args:
        parameters: a parameter, or several; parameters without a gradient are skipped.
        max_norm: the largest allowed norm of all gradients together.
        norm_type: 1, 2 or inf; torch's function is called for other norms, and for sparse or complex gradients. The norm of
            DTensors covers the shards of all ranks; they may be mixed with plain tensors, which are equal on every rank.
        error_if_nonfinite: raise an error if the norm is not finite, which waits for the device.
        foreach: passed to torch's function, if that is called.

    Returns:
        The norm from before, a plain tensor: float32 for 16-bit gradients, whose dtype torch rounds it to.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is True; nothing has been changed.

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
        except (TypeError, ValueError):  # sparse or complex gradients; nothing has been changed yet
            pass
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm.full_tensor() if shards.is_dtensor(norm) else norm  # a DTensor has this rank's part only


@torch.no_grad()
def _clip_shards(
    gradients: Sequence[torch.Tensor], max_norm: float, norm_type: float, decide: Callable[[torch.Tensor], bool] | None
) -> torch.Tensor:
    """Clip this rank's shards by the norm over all ranks; gradients sharded over the same ranks are measured together."""
    members: dict[shards.Cut, list[torch.Tensor]] = {}
    for gradient in gradients:
        if shards.refusal(gradient) is not None:
            raise TypeError("a gradient of partial sums")
        members.setdefault(shards.cut_among(gradient), []).append(shards.local(gradient))
    # Measure all before any rank waits for another, because a measurement may raise.
    norms = [global_norm(local_shards, norm_type) for local_shards in members.values()]
    by = "max" if norm_type == math.inf else "sum"
    for norm, cut in zip(norms, members, strict=True):
        if norm_type == 2:
            norm.square_()
        shards.add_up(norm, by, cut)
    dtype = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    stacked = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    total = stacked.amax() if by == "max" else stacked.sum()
    if norm_type == 2:
        total = total.sqrt()
    if decide is None or decide(total):
        factor = (max_norm / (total + EPSILON)).clamp(max=1.0)
        for local_shards in members.values():
            torch._foreach_mul_(local_shards, factor.to(local_shards[0].device))
    return total
