"""`apply_if_finite`: no change where the gradients are not finite."""

from __future__ import annotations

from typing import Any

from ..language import Rule, jit
from ..language.codegen import RuleSource, tuple_text
from .base import Made, after_total, transformed

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
    sums: Any = rule.reduction if rule.knows_total else after_total(rule, "behind")
    text = RuleSource(rule, is_finite=is_finite)
    stepped, finite = text.new("stepped", "finite")
    first, total = text.behind(sums)
    lines = [*text.step(stepped, text.call()), f"{finite} = {text['is_finite']}({total})"]
    states = tuple_text(
        f"{text.tl}.where({finite}, {text.new_state(name)}, {name})" if name in rule.changed else name for name in rule.state
    )
    result = f"{text.tl}.where({finite}, {stepped}, {text.w}), {states}"
    return Made(text.define("skipping", first, lines, result), sums, knows_total=True, skips_nonfinite=True)
