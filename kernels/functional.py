"""`update`: take one step of a rule on lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .language import Rule, TensorRule, derivation
from .update import Update


def update(
    rule: Rule | TensorRule,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    states: Sequence[Sequence[torch.Tensor]],
    hyper: Mapping[str, float] | Sequence[Mapping[str, float]],
    *,
    rescale_grad: float = 1.0,
    engine: str | None = None,
) -> None:
    """Apply `rule` once to every weight, in place. For repeated steps build an `Update` and keep it.

    Args:
        rule: the update rule.
        weights: floating-point tensors of any shape and layout.
        gradients: for each weight its gradient, of the same shape and any floating-point dtype; None skips the weight.
        states: for each weight its state tensors in the order of `rule.state`: float64 for a float64 weight, else float32.
        hyper: hyper-parameters by the names in `rule.hyper`: one mapping for all weights, or a mapping for each. You may
            leave out `one_minus_x` if you give `x`. Keys of `tl.normal` are whole numbers, 0 to 2^24 - 1; give each weight
            its own.
        rescale_grad: factor for all gradients. Default: 1.
        engine: "triton", "cpu", "eager" or None (default), the best engine for each weight's device.

    Raises:
        TypeError: a hyper-parameter is missing or no number, or an argument has another type.
        ValueError: lengths, shapes, dtypes or devices do not match, or a key of `tl.normal` is out of range. In either case
            nothing has changed.

    Example:
        >>> import torch
        >>> from tristep.kernels import rules, update
        >>> w = torch.ones(3)
        >>> update(rules.sgd, [w], [torch.ones(3)], [()], {"lr": 0.5, "wd": 0.0, "clip": float("inf")})
        >>> w
        tensor([0.5000, 0.5000, 0.5000])
    """
    rows = [hyper] * len(weights) if isinstance(hyper, Mapping) else list(hyper)
    if not len(rows) == len(gradients) == len(states) == len(weights):
        raise ValueError(
            f"{len(weights)} weights came with {len(gradients)} gradients, {len(states)} states and {len(rows)} sets of "
            "hyper-parameters: there must be as many of each"
        )
    run = Update(rule, weights, [tuple(row) for row in states], engine=engine)
    for i, values in enumerate(rows):
        run.hyper[i] = [rescale_grad, *hyper_values(rule, values)]
    run.bind(gradients)
    run()


def hyper_values(rule: Rule | TensorRule, values: Mapping[str, float]) -> list[float]:
    """Return the rule's hyper-parameters in order. A missing `one_minus_x` is computed from `x`, in float64."""
    row = []
    for name in rule.hyper:
        if name in values:
            row.append(_number(rule, name, values[name]))
            if name in rule.keys and not (0 <= row[-1] < 2**24 and row[-1].is_integer()):
                raise ValueError(f"{name}={values[name]!r} is a key of tl.normal: must be a whole number, 0 to 2^24 - 1")
        elif (how := derivation(name)) is not None and not how.counts and how.source in values:
            row.append(how.compute(_number(rule, how.source, values[how.source])))
        else:
            raise TypeError(
                f"rule {rule.name!r} needs the hyper-parameter {name!r}; given were {', '.join(sorted(values)) or 'none'}"
            )
    return row


def _number(rule: Rule | TensorRule, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} of rule {rule.name!r} must be a number, got {value!r}") from None
