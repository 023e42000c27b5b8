"""`clip_by_block_rms`: limit the root mean square of each tensor's step."""

from __future__ import annotations

from collections.abc import Iterable

from ..language import Rule, jit, tl
from .base import Made, changed_step, check_rule, transformed


def clip_by_block_rms(rule: Rule, decay: Iterable[str] = ("decay",)) -> Rule:
    """Return the rule with its step -u divided by max(1, RMS(u) / step_limit), where RMS is over each tensor.

    `step_limit` is a hyper-parameter: the learning rate times the limit for a step of learning rate 1.

    Args:
        rule: an elementwise rule.
        decay: names of hyper-parameters of decoupled weight decay, which is not limited; names that the rule does not have
            are ignored.

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
    """Return the weight after the limited step. The comparison keeps NaN."""
    rms = tl.sqrt(square / count)
    return tl.where(rms > limit, w - (w - stepped) * (limit / rms), stepped)


def _make(rule: Rule, decay: tuple[str, ...]) -> Made:
    return changed_step(rule, ("squares", "square", step_square), ("clipped_step", limited), decay, "step_limit")
