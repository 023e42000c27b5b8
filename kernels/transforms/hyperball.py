"""`hyperball`: each tensor keeps the norm that it had at first."""

from __future__ import annotations

import types

from ..language import Reduction, Rule, jit, tl
from ..language.codegen import RuleSource
from ..rules.common import norm_of
from .base import ComposedReduction, Made, transformed

_KEPT = ("radius", "weight_scale", "step_scale")


def hyperball(rule: Rule) -> Rule:
    """The rule with each tensor kept on the sphere on which it was before its first step, and steps of a given length on it.

    With the norm R of the tensor w before its first step, and the step -u of the rule without weight decay:

        v = w - hyperball_lr R u / |u|
        w <- R v / |v|

    All norms are those of the tensor's elements together, and |v| follows from the sums of w^2, u^2 and w u. So a tensor of
    one element stays as it is, and it is up to you to which tensors you apply this: the paper does so to weight matrices.
    A tensor whose norm is 0 before its first step takes the rule's own steps; if |u| is 0, or v is, the tensor stays.
    NaN in one element's step makes the tensor NaN. u is a difference of weights, so it has lost the digits that these have
    lost: the rule's own learning rate should not be so small that its steps hardly change a weight. It is meant for rules
    that take a step from the weight, not for those that make the weight of their states, as FTRL does.

    The rule has the per-tensor states `radius`, -1 where that norm was 0, and `weight_scale` and `step_scale`, by which
    weight and -u are multiplied; the hyper-parameter `hyperball_lr`; and one more reduction. The hyper-parameters of weight
    decay, `wd`, `decay` and `decoupled_decay`, have no effect.

    Args:
        rule: an elementwise rule. Apply this after what changes gradients or steps, before what averages weights.

    Source: Wen et al. (2026), "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization",
    arXiv 2606.16899.
    """
    return transformed(hyperball, _make, rule)


class _OnSphere(ComposedReduction):
    """The reduction of a rule on a sphere."""

    def __init__(self, fn: types.FunctionType, sums: Reduction | None) -> None:
        super().__init__(fn, sums, feeds_next=True)
        self.finish(_scales)


def _scales(sums, kept, hyper):
    """Radius, and what weight and step are multiplied by. Comparisons are such that what is NaN stays that."""
    w_square, u_square, product = sums
    radius, weight_scale, step_scale = kept  # noqa: RUF059  # names them
    (hyperball_lr,) = hyper
    at_first = tl.where(w_square == 0.0, -1.0, norm_of(w_square))
    radius = tl.where(radius == 0.0, at_first, radius)
    share = hyperball_lr * radius / norm_of(u_square)
    square = w_square - 2.0 * share * product + share * share * u_square
    stays = (u_square == 0.0) | (square <= 0.0)
    scale = radius / norm_of(square)
    free = radius < 0.0
    step_scale = tl.where(free, 1.0, tl.where(stays, 0.0, scale * share))
    return radius, tl.where(free | stays, 1.0, scale), step_scale


@jit
def on_sphere(w, stepped, radius, weight_scale, step_scale):
    """The new weight; `stepped` where there is no sphere."""
    return tl.where(radius < 0.0, stepped, weight_scale * w - step_scale * (w - stepped))


@jit
def squares_and_product(w, stepped):
    u = w - stepped
    return w * w, u * u, w * u


def _make(rule: Rule) -> Made:
    text = RuleSource(rule, *_KEPT, "hyperball_lr", on_sphere=on_sphere, squares_and_product=squares_and_product)
    stepped, ignored, nothing, *values = text.new("stepped", "ignored", "nothing", "w_square", "u_square", "product")
    decay = [name for name in rule.own_hyper if name in ("wd", "decay", "decoupled_decay")]
    lines = [f"{nothing} = 0.0 * {decay[0]}"] if decay else []
    call = text.call(dict.fromkeys(decay, nothing))
    found = text.define(
        "lengths",
        text.arguments(),
        [
            *lines,
            f"{stepped}, {ignored} = {call}",
            f"{', '.join(values)} = {text['squares_and_product']}({text.w}, {stepped})",
        ],
        ", ".join(values),
    )
    extras = ("sums", *(("index",) if "index" in rule.extras else ()))
    first = text.unpacked(extras, rule.state, rule.own_hyper, (*_KEPT, *text.sums))
    result = f"{text['on_sphere']}({text.w}, {stepped}, {', '.join(_KEPT)}), {text.returned()}"
    lines = [*lines, *text.step(stepped, call)]
    return Made(text.define("on_sphere", first, lines, result), _OnSphere(found, rule.reduction))
