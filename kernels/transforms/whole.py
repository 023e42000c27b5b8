"""Transforms of rules of whole tensors: functions around a step that change gradients, weights and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..language import Limit, Reduction, Rule, StagedRule, TensorRule

# A function of `step`, w, g, the states by name, the hyper-parameters by name, and the reduction's results, which returns
# the new w and states. `step(g, **hyper)` takes the rule's step with this gradient and these other hyper-parameters.
Around = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class ComposedTensorRule(TensorRule):
    """A rule of whole tensors made from another one, `of`, whose elementwise rule is transformed in the same way.

    Args:
        how: function and its arguments that make this rule again, for pickle.
        around: the function around a step.
        elementwise: the transformed elementwise rule of `of`, or None. Its states become the first states of this rule.
        state: names of additional states, which have the weight's shape and full precision.
        hyper: names of additional hyper-parameters.
        reduction: a reduction over all gradients whose result is the last number that `around` gets, or None.
        limit: what the reduction, the sum of squares of all gradients, does.
        starts_as_weight: names of additional states that must start equal to the weight.
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
        limit: Limit | None = None,
        starts_as_weight: tuple[str, ...] = (),
    ) -> None:
        _ = of.state  # reads all attributes of `of`
        vars(self).update(vars(of))
        self._of, self._made_by, self._around, self.made_of_it = of, how, around, {}
        self._reduces = reduction is not None
        first = () if elementwise is None else elementwise.state
        self.state = tuple(dict.fromkeys((*first, *of.state, *state)))
        self.hyper = tuple(dict.fromkeys((*of.hyper, *hyper, *(elementwise.hyper if elementwise else ()))))
        self.full_precision = (*of.full_precision, *state)
        self._elementwise = self._elementwise[0], elementwise
        self.reductions = of.reductions if reduction is None else (reduction, *of.reductions)
        self.starts_as_weight = (*of.starts_as_weight, *starts_as_weight)
        self.limits = of.limits if limit is None else (limit, *of.limits)

    def compute(
        self, w: torch.Tensor, g: torch.Tensor, state: Sequence[torch.Tensor], hyper: Sequence[Any], *sums: Any
    ) -> Any:
        states, values, of = dict(zip(self.state, state, strict=True)), dict(zip(self.hyper, hyper, strict=True)), self._of

        def step(g: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            inner: Mapping[str, Any] = values | changed
            old = tuple(states[name] for name in of.state)
            passed = [numbers[:-1] for numbers in sums] if self._reduces else sums
            new, kept = of.compute(w, g, old, tuple(inner[name] for name in of.hyper), *(passed if of.reductions else ()))
            return new, states | dict(zip(of.state, kept, strict=True))

        new_w, new_states = self._around(step, w, g, states, values, *sums)
        return new_w, tuple(new_states[name] for name in self.state)


class ComposedStagedRule(ComposedTensorRule, StagedRule):
    """A staged rule whose gradients are multiplied by a factor from the sum of squares of all, on the engine, too.

    Args:
        of: the staged rule.
        transform: the transform of its elementwise rules.
        how, around, **whole: as of `ComposedTensorRule`.
    """

    def __init__(
        self,
        of: StagedRule,
        transform: Callable[[Rule], Rule],
        how: tuple[Callable[..., Any], tuple[Any, ...]],
        around: Around,
        **whole: Any,
    ) -> None:
        elementwise = of.elementwise_rule
        super().__init__(of, how, around, None if elementwise is None else transform(elementwise), **whole)
        self.normalized, self.summed = transform(of.normalized), transform(of.summed)
