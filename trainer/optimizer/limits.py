"""Limits by the norm of all gradients of a step, of one optimizer or of several together: what their options ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Update, transforms
from ...kernels.language import Limit
from ...kernels.reductions import Join, join_totals
from ...kernels.transforms.limited import factor_of

OWN, JOINT = ("clip_norm", "skip_square"), ("clip_norm_of_all", "skip_square_of_all")  # names of hyper-parameters


def skips_steps(optimizer: Any) -> bool:
    """Return whether an optimizer's options may skip the next step."""
    skips: bool = optimizer.skip_nonfinite or optimizer._skips_overflow or optimizer.skip_norm is not None
    return skips


def has_limit(optimizer: Any) -> bool:
    """Return whether an optimizer's options limit the next step by the norm of all gradients."""
    return skips_steps(optimizer) or optimizer.clip_norm is not None


def limited(rule: Any, optimizer: Any, names: tuple[str, str] = OWN) -> Any:
    """Return the rule with the limits that an optimizer's options ask for; `names` has those of its two hyper-parameters."""
    return transforms.limited(rule, skips_steps(optimizer), names) if has_limit(optimizer) else rule


def limit_values(optimizer: Any, names: tuple[str, str] = OWN) -> dict[str, float]:
    norm, skip_norm = optimizer.clip_norm, optimizer.skip_norm
    return {
        names[0]: math.inf if norm is None else norm,
        names[1]: math.inf if skip_norm is None else square_limit(skip_norm),
    }


def square_limit(norm: float) -> float:
    """Return the limit for the square of a norm: just below the middle between the float32 norm^2 and the next float32.

    A square in float64 and the same rounded to float32 lie on one side of it, so ranks with different dtypes decide alike.
    """
    with np.errstate(over="ignore"):
        limit = np.float32(norm * norm)
    if not np.isfinite(limit):
        return math.inf
    middle = (float(limit) + float(np.nextafter(limit, np.float32(np.inf)))) / 2
    return float(np.nextafter(middle, 0.0))


def begin_together(
    updates: Sequence[Update], squares: Sequence[torch.Tensor] = (), all_reduce: Join | None = None
) -> torch.Tensor:
    """Begin a step of several updates that have a limit together; the next call of each update finishes its step.

    `squares`: sums of squares [1, 1] of gradients that no update has, which are replaced by the sum of all. Return that sum,
    a tensor without dimensions.
    """
    totals = [*(total for update in updates for total in update.begin()), *squares]
    join_totals(totals, "sum", all_reduce)
    return totals[0][0, 0]


def gradient_factor(optimizer: Any, total: torch.Tensor) -> torch.Tensor:
    """Return the factor of gradients with this sum of squares, negative to skip the step, by an optimizer's limit."""
    skips = skips_steps(optimizer)
    values = {name: total.new_tensor(value) for name, value in limit_values(optimizer).items()}
    return factor_of(Limit(skips, OWN[: 1 + skips]), total, values)
