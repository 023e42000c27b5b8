"""`staged_rule`: define a rule of matrices as elementwise rules around torch operations on 16-bit matrices."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from .checks import check_names, unpacked_names
from .codegen import RuleSource
from .function import jit
from .ops import tl
from .reduction import Reduction
from .rule import Rule, rule
from .tensor_rule import TensorRule

OF_MATRICES = ("ratio", "splitter")  # numbers of elementwise parts that are not the optimizer's
TO_BFLOAT16 = 65537.0  # the splitter with which `rounded` rounds float32 to bfloat16


class Matrices(Protocol):
    """How a staged rule finds the matrices in tensors: what the keyword-only argument `how` of its function must have."""

    def blocks(self, tensors: torch.Tensor, split: int) -> Sequence[torch.Tensor]:
        """Return the matrices of stacked tensors, [n, ...], in stacks [m, rows, columns], which are views if possible."""

    def joined(self, blocks: Sequence[torch.Tensor], like: torch.Tensor, split: int) -> torch.Tensor:
        """Return such blocks in a new tensor of the shape and strides of `like`."""

    def dtype_for(self, matrices: torch.Tensor) -> torch.dtype:
        """Return the 16-bit dtype of the normalized matrices."""

    def rounds_first(self, matrices: torch.Tensor) -> bool:
        """Return whether matrices are rounded to bfloat16 also before they are divided by their norms."""


def staged_rule(*, before: Rule, after: Rule, **options: Any) -> Callable[[Callable[..., Any]], StagedRule]:
    """Make a rule of matrices from two elementwise rules and a function `(x, spare, state, hyper)` between them.

    The new weight of `before` is the direction of the step. The function gets that of each matrix, divided by its Frobenius
    norm and rounded to 16 bits, and returns the step in 16 bits, a factor of the learning rate, and its new states. The step
    is the gradient of `after`, which unpacks the factor as `ratio` from `hyper`. Where an engine can walk the matrices,
    `before` and `after` run on it as other rules do, and nothing is copied; elsewhere all run in torch, one after the other.

    Args:
        before: elementwise rule that ignores the weight. Hyper-parameter `epsilon` is the smallest norm to divide by.
        after: elementwise rule without states of its own.
        **options: keyword arguments of `tensor_rule`, but for `batched` and `never_raises`.

    The function gets two tensors [n, rows, columns], `x` and `spare`, which has no values yet; it may write to both, and the
    step is in one of them. Its states are stacks, too. It must not wait for the device. Its keyword-only argument `how` has
    the methods of `Matrices`; the rule's hyper-parameter `split` is passed to them.
    """
    return partial(StagedRule, before=before, after=after, **options)


@rule
def unchanged(w, g, state, hyper):
    """No step: a rule to which a limit adds its reduction."""
    return w, state


class StagedRule(TensorRule):
    """A rule of matrices, made by `staged_rule`.

    Attributes:
        before: the elementwise rule of the direction.
        normalized: the same rule with the direction divided by its norm, which its reduction computes.
        after: the elementwise rule that takes the step.
        middle: the names of the states that the function between them has, and of its hyper-parameters.
        summed: a rule with the reductions over all gradients.
    """

    summed = unchanged

    def __init__(self, fn: Callable[..., Any], before: Rule, after: Rule, **options: Any) -> None:
        self.before, self.after = before, after
        super().__init__(fn, batched=True, never_raises=True, **options)

    def _read_arguments(self, tree: ast.FunctionDef) -> None:
        arguments = [argument.arg for argument in tree.args.args]
        if len(arguments) != 4 or "how" not in (self.fn.__kwdefaults__ or {}):
            raise TypeError(
                f"staged rule {self.name!r} takes ({', '.join(arguments)}): it must be (x, spare, state, hyper, *, how=...)"
            )
        self.middle = unpacked_names(tree, arguments[2]), unpacked_names(tree, arguments[3])
        check_names(tree, *self.middle[0], *self.middle[1])
        self.normalized = _over_norm(self.before)
        first = () if self.elementwise_rule is None else self.elementwise_rule.state
        self.state = tuple(dict.fromkeys((*first, *self.before.state, *self.middle[0])))
        names = dict.fromkeys((*self.after.hyper, *self.normalized.hyper, *self.middle[1], "split"))
        self.own_hyper = tuple(name for name in names if name not in OF_MATRICES)

    @property
    def how(self) -> Matrices:
        how: Any = self._options.get("how", self.fn.__kwdefaults__["how"])
        return how

    def between(
        self, x: torch.Tensor, spare: torch.Tensor, states: Sequence[torch.Tensor], hyper: Sequence[float]
    ) -> tuple[torch.Tensor, float, Sequence[torch.Tensor]]:
        """Call the function between both rules: return the step, its ratio, and the new states."""
        step, ratio, new = self._function(x, spare, tuple(states), tuple(hyper))
        return step, ratio, new

    def _computed(self, w: torch.Tensor, g: torch.Tensor, state: Sequence[torch.Tensor], hyper: Sequence[Any]) -> Any:
        numbers = dict(zip(self.own_hyper, hyper, strict=True))
        stacks = {"w": w, "g": g} | dict(zip(self.state, state, strict=True))
        changed, split, how = ("w", *self.before.state, *self.middle[0]), int(numbers["split"]), self.how
        blocks = {name: how.blocks(stacks[name], split) for name in ("g", *changed)}
        results: dict[str, list[Any]] = {name: [None] * len(blocks["w"]) for name in changed}
        for shape in dict.fromkeys(block.shape for block in blocks["w"]):
            members = [k for k, block in enumerate(blocks["w"]) if block.shape == shape]
            together = {name: _joined([of[k] for k in members]) for name, of in blocks.items()}
            new = self._stepped(together, numbers)
            for name, result in new.items():
                for k, each in zip(members, result.split(shape[0]), strict=True):
                    results[name][k] = each
        stacks |= {name: how.joined(parts, stacks[name], split) for name, parts in results.items()}
        return stacks["w"], tuple(stacks[name] for name in self.state)

    def _stepped(self, of: dict[str, torch.Tensor], numbers: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the new weights and states of matrices [n, rows, columns], by their names."""

        def hyper(names: Sequence[str]) -> tuple[Any, ...]:
            return tuple(numbers[name] for name in names)

        before, after, (own, of_function) = self.before, self.after, self.middle
        direction, states = before(of["w"], of["g"], tuple(of[name] for name in before.state), hyper(before.hyper))
        x = normalized(direction, numbers["epsilon"], self.how)
        del direction
        step, ratio, new = self.between(x, torch.empty_like(x), [of[name] for name in own], hyper(of_function))
        numbers = numbers | {"ratio": ratio}
        w, _ = after(of["w"], step.to(of["w"].dtype), (), hyper(after.hyper))
        return {"w": w} | dict(zip((*before.state, *own), (*states, *new), strict=True))


def normalized(matrices: torch.Tensor, epsilon: float, how: Matrices) -> torch.Tensor:
    """Return matrices, [n, rows, columns], over their Frobenius norms, which are `epsilon` at least, in 16 bits.

    The same as the kernels' `over_norm`, in torch operations of fewer passes. The norms are those of matrices whose largest
    element is 1, as squares of others may be 0 or infinite in float32.

    Args:
        matrices: float32 or float64.
        epsilon: the smallest norm to divide by.
        how: gives the dtype of the result, and says whether to round to it first.
    """
    dtype, rounds_first = how.dtype_for(matrices), how.rounds_first(matrices)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(x.dtype) if rounds_first else x

    x, norm = cut(matrices), partial(torch.linalg.vector_norm, dim=(-2, -1), keepdim=True)
    largest = norm(x, math.inf).clamp_(min=torch.finfo(x.dtype).tiny)
    norms = cut(norm(x / largest) * largest).clamp_(min=epsilon)
    return (x / norms).to(dtype)


@jit
def rounded(x, splitter):
    """Return x without the bits that Veltkamp's splitting (Dekker 1971) cuts: 16 of float32 for 2^16 + 1, none for 0."""
    product = x * splitter
    return product - (product - x)


@jit
def scaled_squares(x, splitter):
    """Return (2^-70 x)^2 and (2^34 x)^2: whatever the size of a matrix, one of the sums is a normal float32 number."""
    small, large = rounded(x * 8.470329472543003e-22, splitter), rounded(x * 17179869184.0, splitter)
    return small * small, large * large


@jit
def over_norm(x, small, large, epsilon, splitter):
    """Return x over the norm from the sums of `scaled_squares`, or over `epsilon` if that is larger."""
    is_normal = large <= 3e38  # false for NaN
    scale, square = tl.where(is_normal, 17179869184.0, 8.470329472543003e-22), tl.where(is_normal, large, small)
    norm = rounded(tl.maximum(tl.sqrt(square), epsilon * scale), splitter)
    return rounded(rounded(x * scale, splitter) / norm, splitter)  # so that storing it cannot round at random


def _over_norm(of: Rule) -> Rule:
    """Return the rule with its new weight divided by the norm that it has in the whole tensor."""
    text = RuleSource(of, "splitter", scaled_squares=scaled_squares)
    stepped, small, large = text.new("stepped", "small", "large")
    squares = f"{text['scaled_squares']}({stepped}, splitter)"
    lines = [*text.step(stepped, text.call()), f"{small}, {large} = {squares}"]
    sums = Reduction(text.define("squares", text.arguments(hyper=("splitter",)), lines, f"{small}, {large}"))
    text = RuleSource(of, "epsilon", "splitter", over_norm=over_norm)
    stepped, *numbers = text.new("stepped", "small", "large")
    unpacked = text.unpacked(("sums",), of.state, (*of.own_hyper, "epsilon", "splitter"), tuple(numbers))
    quotient = f"{text['over_norm']}({', '.join((stepped, *numbers))}, epsilon, splitter)"
    return Rule(text.define("normalized", unpacked, text.step(stepped, text.call()), f"{quotient}, {text.returned()}"), sums)


def _joined(stacks: Sequence[torch.Tensor]) -> torch.Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))
