"""Patterns that select the parameters of an optimizer, by name, shape or class of the layer."""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from ...kernels.messages import listed, there_are
from ..validation import boolean

_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(\w+(?:\[-?\d+\])?)\s*(<=|>=|==|!=|<|>)\s*(.*)", re.DOTALL)
_SHAPES = ("ndim", "numel", "shape[k]", "layer")


class Parameter(NamedTuple):
    """Parameter as a pattern function gets it.

    Attributes:
        name: the parameter's name.
        tensor: the parameter itself.
        layer: the module that owns it; None if the trainer was given parameters instead of a module.
    """

    name: str
    tensor: torch.Tensor
    layer: torch.nn.Module | None


Pattern = str | re.Pattern[str] | Callable[[Parameter], bool]


def matcher(pattern: Pattern) -> Callable[[Parameter], bool]:
    """Return a function that tells whether a `Parameter` matches a pattern.

    A pattern is a string, a compiled regular expression to search in the name, or a function from `Parameter` to bool. In a
    string, alternatives are separated by "|", and the terms of each by "&"; "!" before a term negates it. A term is a whole
    name (case matters; *, ? and [...] are the shell's wildcards), a comparison of `ndim`, `numel` or `shape[k]` with an
    integer, such as "shape[0]>=50000", or a comparison (== or !=) of the layer's class or its bases, as "layer==Embedding".
    """
    if isinstance(pattern, re.Pattern):
        return lambda parameter: pattern.search(parameter.name) is not None
    if callable(pattern):
        return lambda parameter: bool(pattern(parameter))
    if not isinstance(pattern, str):
        raise TypeError(
            f"pattern={pattern!r}: must be a string such as '*embed*|ndim<2', a compiled regular expression, or a function "
            f"of name, tensor and layer; not {type(pattern).__name__}"
        )
    alternatives = [[_term(pattern, term.strip()) for term in terms.split("&")] for terms in pattern.split("|")]
    return lambda parameter: any(all(term(parameter) for term in terms) for terms in alternatives)


def read_entry(called: str, entry: Any) -> tuple[Pattern, Any, dict[str, Any]]:
    """Return (pattern, optimizer, arguments) of an entry of `MultiOptimizer`; `called` names the entry in messages.

    The arguments, {} if the entry has none, may contain "optional".
    """
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise TypeError(f"{called}={entry!r}: must be (pattern, optimizer) or (pattern, optimizer, arguments)")
    pattern, chosen, arguments = entry if len(entry) == 3 else (*entry, None)
    try:
        matcher(pattern)
        arguments = dict(arguments if arguments is not None else {})
        boolean("optional", arguments.get("optional", False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{called}: {error}") from None
    return pattern, chosen, arguments


def pattern_text(pattern: Pattern) -> str:
    if isinstance(pattern, str):
        return pattern
    return pattern.pattern if isinstance(pattern, re.Pattern) else getattr(pattern, "__name__", repr(pattern))


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of strings as lines of aligned columns: the first and last column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *middle, pattern in rows:
        right = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *right, pattern]))
    return "\n".join(lines)


def layers_of(module: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return the submodule that owns each parameter of a module, by the parameter's id; the first one if it is shared."""
    layers: dict[int, torch.nn.Module] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            layers.setdefault(id(parameter), layer)
    return layers


def assign(
    patterns: Sequence[Pattern],
    names: Sequence[str],
    params: Sequence[torch.Tensor],
    layers: Mapping[int, torch.nn.Module] | None = None,
    optional: Collection[int] = (),
    advice: str = "; where that is right, say 'optional': True in the arguments",
) -> list[int]:
    """Return, for each parameter, the position of the first pattern that it matches; raise if there is none.

    Also raise if a pattern gets no parameter, unless its position is in `optional`; `advice` ends that message.
    `layers`: the result of `layers_of`.
    """
    matchers = [matcher(pattern) for pattern in patterns]
    parameters = [Parameter(*pair, (layers or {}).get(id(pair[1]))) for pair in zip(names, params, strict=True)]
    matches = [[matches(parameter) for parameter in parameters] for matches in matchers]
    unmatched = [repr(name) for name, *by_pattern in zip(names, *matches, strict=True) if not any(by_pattern)]
    if unmatched:
        raise ValueError(f"no pattern takes {listed(unmatched)}: end the list with ('*', 'adamw'), which takes the rest")
    chosen = [by_pattern.index(True) for by_pattern in zip(*matches, strict=True)]
    for k, pattern in enumerate(patterns):
        if k not in chosen and k not in optional:
            earlier = [parameters[i].name for i, matched in enumerate(matches[k]) if matched]
            why = (
                f"earlier patterns take all that it matches, such as {earlier[0]!r}: the first match wins"
                if earlier
                else f"no parameter matches it; their names are {listed(map(repr, names))}"
            )
            raise ValueError(f"pattern {pattern!r} gets no parameter: {why}{advice}")
    return chosen


def _term(pattern: str, term: str) -> Callable[[Parameter], bool]:
    """Return the function that tells whether a parameter fulfils one term of a pattern."""
    if term.startswith("!"):
        plain = term.lstrip("!" + string.whitespace)
        inner, negated = _term(pattern, plain), term[: len(term) - len(plain)].count("!") % 2
        return (lambda parameter: not inner(parameter)) if negated else inner
    if not term:
        raise ValueError(f"pattern={pattern!r}: there is nothing on one side of '|', '&' or '!'")
    condition = _CONDITION.fullmatch(term)
    if condition is None:
        return lambda parameter: fnmatchcase(parameter.name, term)
    what, sign, value = condition.groups()
    compare = _COMPARED[sign]
    if what == "layer":
        if sign not in ("==", "!="):
            raise ValueError(f"pattern={pattern!r}: a layer's class is compared by == or !=, not by {sign}")
        return lambda parameter: compare(value in _classes(pattern, parameter), True)
    measure = _measure(pattern, what)
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"pattern={pattern!r}: {what} is compared with an integer, not with {value!r}") from None
    return lambda parameter: (size := measure(_shape(pattern, parameter))) is not None and compare(size, number)


def _classes(pattern: str, parameter: Parameter) -> list[str]:
    if parameter.layer is None:
        raise ValueError(f"pattern={pattern!r} asks for layers, which parameters alone do not have: give params as a module")
    return [klass.__name__ for klass in type(parameter.layer).__mro__]


def _shape(pattern: str, parameter: Parameter) -> torch.Size:
    if isinstance(parameter.tensor, torch.nn.UninitializedParameter):
        raise ValueError(
            f"pattern={pattern!r} asks for the shape of {parameter.name!r}, which is not initialized yet: run the model "
            "once before"
        )
    return parameter.tensor.shape


def _measure(pattern: str, what: str) -> Callable[[torch.Size], int | None]:
    """Return the function from a shape to `ndim`, `numel` or `shape[k]`; it returns None if there is no such axis."""
    if what == "ndim":
        return len
    if what == "numel":
        return torch.Size.numel
    if what.startswith("shape["):
        axis = int(what[6:-1])
        return lambda shape: shape[axis] if -len(shape) <= axis < len(shape) else None
    raise ValueError(f"pattern={pattern!r}: {what!r} is no size.{there_are(what, _SHAPES)}")
