"""`skip_large_updates`: skip steps if the gradients' norm is too large."""

from __future__ import annotations

from ..language import Rule, jit
from .base import Made, skipping, transformed


def skip_large_updates(rule: Rule) -> Rule:
    """Return the rule with steps skipped if the sum of squares of the gradients over all tensors exceeds `skip_square`.

    `skip_square` is a hyper-parameter. A step is also skipped if the sum is not finite. A skipped step changes neither
    weights nor states nor per-tensor states, but counts as an update, because the host does not wait for the device.

    Args:
        rule: an elementwise rule. Transforms that are applied after this one are not skipped.

    Source: `optax.skip_large_updates`; the option of Megatron-LM.
    """
    return transformed(skip_large_updates, _make, rule)


@jit
def is_small(total, limit):
    """Return whether a number is finite and not above the limit, which may be infinite."""
    return (total <= limit) & (total - total == 0.0)


def _make(rule: Rule) -> Made:
    return skipping(rule, "skipping_large", is_small, "skip_square")
