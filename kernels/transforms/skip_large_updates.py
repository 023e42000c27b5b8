"""`skip_large_updates`: no change where the gradients' norm is too large."""

from __future__ import annotations

from ..language import Rule, jit
from .base import Made, skipping, transformed


def skip_large_updates(rule: Rule) -> Rule:
    """The rule, but nothing changes where the sum of squares of the gradients over all tensors exceeds `skip_square`.

    That is a hyper-parameter. Where the sum is not finite nothing changes either, as of `apply_if_finite`, and the rest
    is as there.

    Args:
        rule: an elementwise rule; what is composed after this is not skipped.

    Source: `optax.skip_large_updates`; the option of Megatron-LM.
    """
    return transformed(skip_large_updates, _make, rule)


@jit
def is_small(total, limit):
    """Whether a number is finite and not above this limit, which may be infinite."""
    return (total <= limit) & (total - total == 0.0)


def _make(rule: Rule) -> Made:
    return skipping(rule, "skipping_large", is_small, "skip_square")
