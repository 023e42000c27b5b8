"""`apply_if_finite`: no change where the gradients are not finite."""

from __future__ import annotations

from ..language import Rule, jit
from .base import Made, skipping, transformed

__all__ = ["apply_if_finite"]


def apply_if_finite(rule: Rule) -> Rule:
    """The rule, but nothing changes where the sum of squares of the gradients over all tensors is not finite.

    Neither weights nor states nor per-tensor states do; update counts go on, since the host does not wait for the device to
    know. In float32 the sum of squares is infinite from a norm of 1.8e19, too.

    Args:
        rule: an elementwise rule; what is composed after this is not skipped.
    """
    return transformed(apply_if_finite, _make, rule)


@jit
def is_finite(x):
    """Whether a number is neither infinite nor NaN: else its difference from itself is NaN."""
    return x - x == 0.0


def _make(rule: Rule) -> Made:
    return skipping(rule, "skipping", is_finite)
