"""`apply_if_finite`: skip steps if the gradients are not finite."""

from __future__ import annotations

from typing import Any

import torch

from ..language import Rule, TensorRule, jit
from ..rules.common import total_square
from .base import Made, skipping, transformed


def apply_if_finite(rule: Rule | TensorRule) -> Any:
    """Return the rule with steps skipped if the sum of squares of the gradients over all tensors is not finite.

    A skipped step changes neither weights nor states nor per-tensor states, but counts as an update, because the host does
    not wait for the device. In float32 the sum is also infinite if the norm exceeds 1.8e19.

    Args:
        rule: an elementwise rule or a rule of whole tensors. Transforms that are applied after this one are not skipped.
    """
    return transformed(apply_if_finite, _make, rule, around=_around_whole, reduction=total_square, skips_nonfinite=True)


def _around_whole(step: Any, w: Any, g: Any, states: Any, hyper: Any, sums: Any) -> Any:
    going = sums[-1].isfinite()
    new_w, new = step(torch.where(going, g, torch.zeros_like(g)))  # matrix decompositions fail for non-finite values
    new_states = {name: old if new[name] is old else torch.where(going, new[name], old) for name, old in states.items()}
    return torch.where(going, new_w, w), new_states


@jit
def is_finite(x):
    """Return whether a number is neither infinite nor NaN; for these x - x is NaN."""
    return x - x == 0.0


def _make(rule: Rule) -> Made:
    return skipping(rule, "skipping", is_finite)
