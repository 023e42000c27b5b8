"""`clip_by_global_norm`: clip gradients by their norm over all tensors."""

from __future__ import annotations

from typing import Any

from ..language import Rule, TensorRule
from ..language.codegen import RuleSource
from ..rules.common import clip_coefficient, total_square
from .base import Change, Made, changed_gradient, transformed


def clip_by_global_norm(rule: Rule | TensorRule) -> Any:
    """Return the rule with gradients multiplied by min(1, clip_norm / (norm + 1e-6)), with their norm over all tensors.

    The new rule has the additional hyper-parameter `clip_norm` and an additional first reduction. The rule's own reductions
    see the clipped gradient, too. The gradient tensors do not change.

    Args:
        rule: an elementwise rule or a rule of whole tensors. Apply this transform before others that read the gradient.

    Source: Pascanu et al. (2013), "On the difficulty of training recurrent neural networks", alg. 1; numbers of torch.
    """
    return transformed(clip_by_global_norm, _make, rule, around=_around_whole, hyper=("clip_norm",), reduction=total_square)


def _around_whole(step: Any, w: Any, g: Any, states: Any, hyper: Any, sums: Any) -> Any:
    return step(g * clip_coefficient(sums[-1].sqrt(), hyper["clip_norm"], 1e-6))


def _clip(text: RuleSource, numbers: tuple[str, ...]) -> tuple[list[str], str]:
    (clipped,) = text.new("clipped")
    coefficient = f"{text['clip_coefficient']}({text.tl}.sqrt({numbers[-1]}), clip_norm, 1e-6)"
    return [f"{clipped} = {text.g} * {coefficient}"], clipped


def _make(rule: Rule) -> Made:
    change = Change(_clip, ("clip_norm",), {"clip_coefficient": clip_coefficient})
    return changed_gradient(rule, "clipped", total_square, change, knows_total=True)
