"""`apply_if_finite`: no change where the gradients are not finite."""

from __future__ import annotations

from typing import Any

import torch

from ..language import Rule, TensorRule, jit
from ..rules.common import total_square
from .base import Made, skipping, transformed


def apply_if_finite(rule: Rule | TensorRule) -> Any:
    """The rule, but nothing changes where the sum of squares of the gradients over all tensors is not finite.

    Neither weights nor states nor per-tensor states do; update counts go on, since the host does not wait for the device to
    know. In float32 the sum of squares is infinite from a norm of 1.8e19, too.

    Args:
        rule: any rule; what is composed after this is not skipped.
    """
    return transformed(apply_if_finite, _make, rule, around=_around_whole, reduction=total_square, skips_nonfinite=True)


def _around_whole(step: Any, w: Any, g: Any, states: Any, hyper: Any, sums: Any) -> Any:
    going = sums[-1].isfinite()
    new, found = step(torch.where(going, g, torch.zeros_like(g)))  # decompositions refuse non-finite values
    kept = {name: old if found[name] is old else torch.where(going, found[name], old) for name, old in states.items()}
    return torch.where(going, new, w), kept


@jit
def is_finite(x):
    """Whether a number is neither infinite nor NaN: else its difference from itself is NaN."""
    return x - x == 0.0


def _make(rule: Rule) -> Made:
    return skipping(rule, "skipping", is_finite)
