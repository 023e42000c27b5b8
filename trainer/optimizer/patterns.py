"""Patterns that say which parameters an optimizer gets: by name, by shape, and by the layer that has them."""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from ..validation import boolean, did_you_mean

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
    """What a pattern is asked about.

    Attributes:
        name: of the parameter.
        tensor: the parameter.
        layer: the module that has it; None where the trainer was given parameters and no module.
    """

    name: str
    tensor: torch.Tensor
    layer: torch.nn.Module | None


Pattern = str | re.Pattern[str] | Callable[[Parameter], bool]


def matcher(pattern: Pattern) -> Callable[[Parameter], bool]:
    """A function that tells whether a parameter matches.

    Args:
        pattern: alternatives, separated by "|", of which one must hold; each of terms, separated by "&", which all must
            hold; a "!" before a term negates it. A term is a name with the wildcards *, ? and [...] of the shell, for the
            whole name and with case; or a condition on `ndim`, `numel` or `shape[k]`, such as "ndim<2" or
            "shape[0]>=50000", with <, <=, >, >=, == or !=; or on the class of the layer, or a class that this is derived
            from, such as "layer==Embedding". Or a compiled regular expression, which must be found in the name; or a
            function of a `Parameter`.

    Raises:
        TypeError, ValueError: it is none.
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
    alternatives = [[_term(pattern, term.strip()) for term in each.split("&")] for each in pattern.split("|")]
    return lambda parameter: any(all(term(parameter) for term in terms) for terms in alternatives)


def read_entry(called: str, entry: Any) -> tuple[Pattern, Any, dict[str, Any]]:
    """The pattern, the optimizer and the arguments of an entry, where "optional" may be one of these.

    Raises:
        TypeError, ValueError: it is no entry; `called` says what messages call it.
    """
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise TypeError(f"{called}={entry!r}: must be (pattern, optimizer) or (pattern, optimizer, arguments)")
    pattern, chosen, *rest = entry
    try:
        matcher(pattern)
        arguments = dict(rest[0] if rest and rest[0] is not None else {})
        boolean("optional", arguments.get("optional", False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{called}: {error}") from None
    return pattern, chosen, arguments


def pattern_text(pattern: Pattern) -> str:
    """What messages and tables call a pattern."""
    if isinstance(pattern, str):
        return pattern
    return pattern.pattern if isinstance(pattern, re.Pattern) else getattr(pattern, "__name__", repr(pattern))


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines, with columns aligned: the first and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *others, pattern in rows:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *right, pattern]))
    return "\n".join(lines)


def layers_of(module: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """By the id of a parameter the first of a module's submodules that has it."""
    found: dict[int, torch.nn.Module] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            found.setdefault(id(parameter), layer)
    return found


def assign(
    patterns: Sequence[Pattern],
    names: Sequence[str],
    params: Sequence[torch.Tensor],
    layers: Mapping[int, torch.nn.Module] | None = None,
    optional: Collection[int] = (),
) -> list[int]:
    """For each parameter the number of the first pattern that it matches.

    Args:
        patterns: see `matcher`.
        names, params: of the parameters.
        layers: as `layers_of` gives them.
        optional: the numbers of the patterns that may get no parameter.

    Raises:
        TypeError, ValueError: a pattern that is none; that gets no parameter and is not optional; or a parameter that none
            takes.
    """
    matchers = [matcher(pattern) for pattern in patterns]
    asked = [Parameter(*pair, (layers or {}).get(id(pair[1]))) for pair in zip(names, params, strict=True)]
    matches = [[matches(each) for each in asked] for matches in matchers]
    left = [repr(each.name) for i, each in enumerate(asked) if not any(own[i] for own in matches)]
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        raise ValueError(
            f"no pattern takes {', '.join(left[:8])}{more}: end the list with ('*', 'adamw'), which takes the rest"
        )
    chosen = [next(k for k, own in enumerate(matches) if own[i]) for i in range(len(asked))]
    for k, pattern in enumerate(patterns):
        if k not in chosen and k not in optional:
            earlier = [asked[i].name for i, matched in enumerate(matches[k]) if matched]
            why = (
                f"earlier patterns take all that it matches, such as {earlier[0]!r}: the first match wins"
                if earlier
                else f"no parameter matches it; their names are {', '.join(map(repr, names[:8]))}"
                + (" and others" if len(names) > 8 else "")
            )
            raise ValueError(
                f"pattern {pattern!r} gets no parameter: {why}; where that is right, say 'optional': True in the arguments"
            )
    return chosen


def _term(pattern: str, term: str) -> Callable[[Parameter], bool]:
    if term.startswith("!"):
        rest = term.lstrip("!" + string.whitespace)
        inner, negated = _term(pattern, rest), term[: len(term) - len(rest)].count("!") % 2
        return (lambda parameter: not inner(parameter)) if negated else inner
    if not term:
        raise ValueError(f"pattern={pattern!r}: there is nothing on one side of '|', '&' or '!'")
    found = _CONDITION.fullmatch(term)
    if found is None:
        return lambda parameter: fnmatchcase(parameter.name, term)
    what, sign, value = found.groups()
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
    """A size by its name; None for an axis that a tensor does not have, which fulfils no condition."""
    if what == "ndim":
        return len
    if what == "numel":
        return torch.Size.numel
    if what.startswith("shape["):
        axis = int(what[6:-1])
        return lambda shape: shape[axis] if -len(shape) <= axis < len(shape) else None
    raise ValueError(f"pattern={pattern!r}: unknown {what!r}; sizes are {', '.join(_SHAPES)}.{did_you_mean(what, _SHAPES)}")
