"""Transforms of rules of whole tensors: what is done to gradients, weights and states, around a step of the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..language import Reduction, Rule, TensorRule

# A function of `step`, w, g, states and hyper-parameters by name, and the numbers that the reduction has found, which gives
# the new w and states. `step(g, **hyper)` is the step of the rule with this gradient, and these hyper-parameters instead of
# its own.
Around = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class ComposedTensorRule(TensorRule):
    """A rule of whole tensors made of another one, whose elementwise rule is transformed likewise.

    Its states begin with those of that rule, as `tensor_rule` wants it.

    Args:
        of: the other rule.
        how: a function and its arguments, which make it again.
        around: what is done around a step.
        elementwise: the transformed elementwise rule of `of`, if that has one.
        state, hyper: what it has in addition. Such states have the weight's shape, and full precision.
        reduction: over all gradients, if it needs one.
        skips_nonfinite: as that of `Rule`.
    """

    def __init__(
        self,
        of: TensorRule,
        how: tuple[Callable[..., Any], tuple[Any, ...]],
        around: Around,
        elementwise: Rule | None,
        state: Sequence[str] = (),
        hyper: Sequence[str] = (),
        reduction: Reduction | None = None,
        skips_nonfinite: bool = False,
    ) -> None:
        _ = of.state  # so that all of them have been read
        vars(self).update(vars(of))
        self._of, self._made_by, self._around, self.made_of_it = of, how, around, {}
        first = () if elementwise is None else elementwise.state
        self.state = tuple(dict.fromkeys((*first, *of.state, *state)))
        self.hyper = tuple(dict.fromkeys((*of.hyper, *hyper, *(elementwise.hyper if elementwise else ()))))
        self.full_precision = (*of.full_precision, *state)
        self._elementwise = self._elementwise[0], elementwise
        self.reductions = of.reductions or (() if reduction is None else (reduction,))
        self.knows_total = bool(self.reductions)
        self.skips_nonfinite = of.skips_nonfinite or skips_nonfinite

    def compute(
        self, w: torch.Tensor, g: torch.Tensor, state: Sequence[torch.Tensor], hyper: Sequence[Any], *sums: Any
    ) -> Any:
        states, values, of = dict(zip(self.state, state, strict=True)), dict(zip(self.hyper, hyper, strict=True)), self._of

        def step(g: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            own: Mapping[str, Any] = values | changed
            old = tuple(states[name] for name in of.state)
            new, kept = of.compute(w, g, old, tuple(own[name] for name in of.hyper), *(sums if of.reductions else ()))
            return new, states | dict(zip(of.state, kept, strict=True))

        new, found = self._around(step, w, g, states, values, *sums)
        return new, tuple(found[name] for name in self.state)
