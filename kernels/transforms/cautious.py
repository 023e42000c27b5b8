"""`cautious`: steps only in elements where they descend the gradient."""

from __future__ import annotations

from collections.abc import Iterable

from ..language import Rule, jit, tl
from .base import Made, changed_step, check_rule, transformed


def cautious(rule: Rule, decay: Iterable[str] = ("decay",)) -> Rule:
    """The rule with its step masked where it does not descend the gradient, and scaled up in compensation.

    The steps that are left are divided by their share in the tensor's elements, which counts as 0.001 at least.

    Args:
        rule: an elementwise rule.
        decay: its hyper-parameters of decoupled weight decay, which is not masked; names that the rule does not have are
            ignored.

    Source: Liang et al. (2024), "Cautious Optimizers", alg. 1, with the share as in the authors' code.
    """
    check_rule(rule)
    decay = tuple(decay)
    return transformed(cautious, _make, rule, tuple(name for name in rule.hyper if name in decay))


@jit
def agrees(w, stepped, g):
    """1 where the step goes down the gradient, else 0. Their product could be too small to tell."""
    step = w - stepped
    return tl.where(((step > 0.0) & (g > 0.0)) | ((step < 0.0) & (g < 0.0)), 1.0, 0.0)


@jit
def masked(w, stepped, g, agreeing, count):
    """The weight after that part of its step which agrees. A product, since what is NaN is to stay NaN."""
    share = tl.maximum(agreeing / count, 0.001)
    return w - (w - stepped) * (agrees(w, stepped, g) / share)


def _make(rule: Rule, decay: tuple[str, ...]) -> Made:
    return changed_step(rule, ("agreement", "agreeing", agrees), ("cautious", masked), decay)
