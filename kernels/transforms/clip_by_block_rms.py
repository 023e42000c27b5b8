"""`clip_by_block_rms`: steps whose root mean square over each tensor is limited."""

from __future__ import annotations

from collections.abc import Iterable

from ..language import Rule, jit, tl
from .base import Made, changed_step, check_rule, transformed


def clip_by_block_rms(rule: Rule, decay: Iterable[str] = ("decay",)) -> Rule:
    """The rule with its step -u divided by max(1, RMS(u) / step_limit), with the root mean square over each tensor.

    `step_limit` is a hyper-parameter: the learning rate times the threshold for an update of rate 1.

    Args:
        rule: an elementwise rule.
        decay: its hyper-parameters of decoupled weight decay, which is not limited; names that the rule does not have are
            ignored.

    Source: Shazeer & Stern (2018), "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", section 6;
    `optax.clip_by_block_rms`.
    """
    check_rule(rule)
    decay = tuple(decay)
    return transformed(clip_by_block_rms, _make, rule, tuple(name for name in rule.hyper if name in decay))


@jit
def step_square(w, stepped, g):
    step = w - stepped
    return step * step


@jit
def limited(w, stepped, g, square, count, limit):
    """The weight after the limited step; comparisons are such that what is NaN stays that."""
    rms = tl.sqrt(square / count)
    return tl.where(rms > limit, w - (w - stepped) * (limit / rms), stepped)


def _make(rule: Rule, decay: tuple[str, ...]) -> Made:
    return changed_step(rule, ("squares", "square", step_square), ("clipped_step", limited), decay, "step_limit")
