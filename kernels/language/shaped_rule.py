"""`rule_by_shape`: define an update rule that chooses an elementwise rule by the shape of the weight."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..messages import instance
from .rule import Rule
from .tensor_rule import TensorRule


def rule_by_shape(*rules: Rule, state: Sequence[str]) -> Callable[[Callable[[torch.Size], Rule]], ShapedRule]:
    """Make an update rule from a function that returns the elementwise rule for a weight of a given shape.

    The rules may average over rows and columns (see `reduction`), so a weight is always updated as a whole, but on every
    engine, together with all others. A state that the chosen rule does not have is stored without elements. All transforms
    of elementwise rules apply: they transform each of the rules, or refuse one of them by its name.

    Args:
        *rules: all elementwise rules that the function may return.
        state: names of the states of all these rules, in the order of the new rule's states.

    Returns:
        A decorator for the function, which makes the `ShapedRule`.

    Raises:
        TypeError: what is decorated is no function, a rule is not elementwise, or `state` has other names than the rules'
            states. At the first step: the function returns something else than one of the rules.
        ValueError: no rules are given. At the first step: a rule with means over rows or columns is chosen for a vector.

    Example:
        >>> from tristep.kernels import reduction, rule, rule_by_shape, tl
        >>> @reduction(op="mean", scope="row")
        ... def squares(w, g, state, hyper):
        ...     return (g * g,)
        >>> @rule(reduction=squares)
        ... def normalized_rows(w, g, state, hyper, sums):
        ...     (lr,) = hyper
        ...     (square,) = sums
        ...     return w - lr * g / tl.sqrt(square), state
        >>> @rule
        ... def signs(w, g, state, hyper):
        ...     (lr,) = hyper
        ...     return w - lr * tl.where(g > 0.0, 1.0, -1.0), state
        >>> @rule_by_shape(normalized_rows, signs, state=())
        ... def normalized(shape):
        ...     return normalized_rows if len(shape) > 1 else signs
    """
    if not rules:
        raise ValueError("rule_by_shape() got no rules: name all rules that the function may return")
    for each in rules:
        instance("each rule of @rule_by_shape", each, Rule, "elementwise, made with @rule")
    return lambda fn: ShapedRule(fn, {each: each for each in rules}, state)


class ShapedRule(TensorRule):
    """An update rule that chooses an elementwise rule by the weight's shape, made by `rule_by_shape`.

    The attributes are those of `TensorRule`; `state` has states and per-tensor states of all rules.
    """

    def __init__(
        self,
        fn: Callable[[torch.Size], Rule],
        rules: Mapping[Rule, Rule],
        state: Sequence[str],
        how: tuple[Any, ...] | None = None,
    ) -> None:
        instance("the function of @rule_by_shape", fn, types.FunctionType, "a plain Python function")
        self.fn, self.name, self.batched = fn, fn.__name__, False
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__
        self._wanted, self._made_by, self.made_of_it = tuple(state), how, {}
        self.rules = dict(rules)  # by the rule that the function returns
        self._cost, self._elementwise = None, (None, None)
        self._defined()

    def read(self) -> None:
        """Read the attributes from those of the rules, and check them."""
        rules = list(self.rules.values())
        names = dict.fromkeys(name for rule in rules for name in rule.slots)
        if set(names) != set(self._wanted):
            raise TypeError(
                f"state={self._wanted!r} of {self.name!r}: its rules have the states {', '.join(names) or 'none'}"
            )
        self.state = self._wanted
        self.hyper = self.own_hyper = tuple(dict.fromkeys(name for rule in rules for name in rule.hyper))
        keys = {name for rule in rules for name in rule.keys}
        self.keys = tuple(name for name in self.hyper if name in keys)
        self.full_precision = tuple(
            name for name in names if any(name in (*rule.full_precision, *rule.kept) for rule in rules)
        )
        self.nonnegative = tuple(name for name in names if any(name in rule.nonnegative for rule in rules))
        self.starts_as_weight = tuple(name for name in names if any(name in rule.starts_as_weight for rule in rules))
        self.reductions = max((rule.reductions for rule in rules), key=len)
        self.limits = rules[0].limits

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        rule = self.rule_for(shape)
        of = dict(zip(rule.slots, rule.shapes(shape), strict=True))
        return [of.get(name, torch.Size([0])) for name in self.state]

    def rule_for(self, shape: torch.Size) -> Rule:
        chosen: Any = self.fn(shape)
        if not isinstance(chosen, Rule) or chosen not in self.rules:
            raise TypeError(
                f"{self.name!r} returned {chosen!r} for the shape {tuple(shape)}: it must return one of the rules that "
                f"@rule_by_shape names, {', '.join(rule.name for rule in self.rules)}"
            )
        if chosen.parts == "matrix" and len(shape) < 2:
            raise ValueError(
                f"{self.name!r} chose {chosen.name!r} for the shape {tuple(shape)}: it has means over rows or columns, so "
                "the weight must have two dimensions or more; choose another rule for others"
            )
        return self.rules[chosen]

    def transformed(self, transform: Callable[[Rule], Rule], how: tuple[Any, ...]) -> ShapedRule:
        """Return the rule that chooses among the transformed rules; `how` makes it again, for pickle."""
        rules = {chosen: transform(rule) for chosen, rule in self.rules.items()}
        names = dict.fromkeys((*self.state, *(name for rule in rules.values() for name in rule.slots)))
        return ShapedRule(self.fn, rules, tuple(names), how)

    def __call__(self, w: torch.Tensor, g: torch.Tensor, state: Any, hyper: Any, *sums: Any) -> Any:
        raise TypeError(f"rule {self.name!r} runs in an Update, which computes its reductions: it cannot be called")

    def __repr__(self) -> str:
        return f"<rule by shape {self.name}: state ({', '.join(self.state)}), hyper ({', '.join(self.hyper)})>"
