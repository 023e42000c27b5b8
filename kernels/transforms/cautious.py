"""`cautious`: steps only in elements where they descend the gradient."""

from __future__ import annotations

import types
from collections.abc import Iterable

from ..language import Reduction, Rule, jit, tl
from ..language.codegen import RuleSource
from .base import ComposedReduction, Made, check_rule, transformed

__all__ = ["cautious"]


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


class _Agreement(ComposedReduction):
    """The reduction of a cautious rule."""

    def __init__(self, fn: types.FunctionType, sums: Reduction | None) -> None:
        super().__init__(fn, sums, feeds_next=True)


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
    """With decoupled weight decay the rule is computed with and without it: what the two differ by is the decay."""
    text = RuleSource(rule, agrees=agrees, masked=masked)
    agreeing, count, stepped, ignored, nothing = text.new("agreeing", "count", "stepped", "ignored", "nothing")
    full, lines, undecayed = stepped, [], None
    if decay:
        full = text.new("full")[0]
        lines = [f"{nothing} = 0.0 * {decay[0]}"]
        undecayed = dict.fromkeys(decay, nothing)
    found = text.define(
        "agreement",
        text.arguments(),
        [*lines, f"{stepped}, {ignored} = {text.call(undecayed)}"],
        f"{text['agrees']}({text.w}, {stepped}, {text.g}), 1.0",
    )
    if decay:
        lines += [f"{stepped}, {ignored} = {text.call(undecayed)}"]
    lines += text.step(full, text.call())
    result = f"{text['masked']}({text.w}, {stepped}, {text.g}, {agreeing}, {count})"
    if decay:
        result += f" + ({full} - {stepped})"
    extras = ("sums", *(("index",) if "index" in rule.extras else ()))
    first = text.unpacked(extras, rule.state, rule.own_hyper, (agreeing, count, *text.sums))
    return Made(text.define("cautious", first, lines, f"{result}, {text.returned()}"), _Agreement(found, rule.reduction))
