"""`hyperball`: keep each tensor at the norm that it had before its first step."""

from __future__ import annotations

import types

from ..language import Reduction, Rule, jit, tl
from ..language.codegen import RuleSource
from ..rules.common import norm_of
from .base import ComposedReduction, Made, transformed

_KEPT = ("radius", "weight_scale", "step_scale")


def hyperball(rule: Rule) -> Rule:
    """Return the rule with each tensor kept at its initial norm, and with steps of a given length relative to that norm.

    With the norm R of the tensor w before its first step, and the step -u of the rule without weight decay:

        v = w - hyperball_lr R u / |u|
        w <- R v / |v|

    Norms are over all elements of the tensor, and |v| is computed from the sums of w^2, u^2 and w u. A tensor of one
    element never changes. You choose which tensors get this rule; the paper uses it for weight matrices. A tensor that
    is 0 before its first step takes the rule's own steps. If |u| or |v| is 0, the tensor does not change. A NaN in the step
    of one element makes the whole tensor NaN. u is a difference of two weights and has their rounding errors, so the rule's
    own learning rate should not be so small that its steps hardly change a weight. The transform is for rules that step from
    the weight, not for rules that compute the weight from their states, such as FTRL.

    The new rule has the per-tensor states `radius`, which is R, or -1 if R was 0, and `weight_scale` and `step_scale`, the
    factors of weight and -u; the hyper-parameter `hyperball_lr`; and an additional reduction. The hyper-parameters of weight
    decay, `wd`, `decay` and `decoupled_decay`, have no effect.

    Args:
        rule: an elementwise rule. Apply this after transforms that change gradients or steps, and before transforms that
            average weights.

    Source: Wen et al. (2026), "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization",
    arXiv 2606.16899.
    """
    return transformed(hyperball, _make, rule)


class _OnSphere(ComposedReduction):
    """The reduction that computes radius and scales."""

    def __init__(self, fn: types.FunctionType, sums: Reduction | None) -> None:
        super().__init__(fn, sums, feeds_next=True)
        self.finish(_scales)


def _scales(sums, kept, hyper):
    """Return the radius and the factors of weight and step. The comparisons keep NaN."""
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
    """Return the new weight; `stepped` if the initial norm was 0."""
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
    lengths = text.define(
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
    return Made(text.define("on_sphere", first, lines, result), _OnSphere(lengths, rule.reduction))
