"""`Exercises`: tries the answers of a notebook's exercises."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,  # of floats, so that no answer takes long
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# What an answer must be, and how that is said of one that is not.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (lambda value: True, "a number"),
    "positive": (lambda value: value > 0, "a number above 0"),
    "count": (lambda value: value > 0 and value == round(value), "a whole number above 0"),
    "function": (callable, "a function or a class"),
}
_ODD: tuple[Any, ...] = (0, -1, 0.5, 1e9, math.nan, math.inf, True, 1j, "", "text", "1 / 0", [], [1, 2], {}, print)


class Exercises:
    """Tries the answers that students type into a cell, and prints a verdict on each.

    A number may be typed as a number of any library, as text, such as ``"1 / 25"``, or as an array of one element. Whatever
    is typed, no answer raises, and the others are tried.

    Args:
        is_right: for each exercise a function from an answer to whether it is right.
        hints: for each exercise a function from a wrong answer to a sentence about it.
        kinds: what an answer must be: "positive", a number above 0, which is the default; "count", a whole number above 0,
            which the functions get as an int; "number"; or "function", for a function or a class.

    Raises:
        ValueError: there are not the same exercises in `is_right` and `hints`, one in `kinds` is not in them, or a kind is
            unknown.

    Example:
        >>> from tristep import viz
        >>> exercises = viz.Exercises(
        ...     is_right={1: lambda rate: abs(rate - 2 / 50) < 1e-3, 2: lambda step: step == 23},
        ...     hints={1: lambda rate: "which curvature sets the limit?", 2: lambda step: "solve 0.97^t = 1/2"},
        ...     kinds={2: "count"},
        ... )
        >>> exercises.check({1: "2 / 50", 2: None})
        exercise 1: right
        exercise 2: open
    """

    def __init__(
        self,
        is_right: Mapping[int, Callable[[Any], Any]],
        hints: Mapping[int, Callable[[Any], str]],
        kinds: Mapping[int, str] | None = None,
    ) -> None:
        if is_right.keys() != hints.keys() or not (kinds or {}).keys() <= hints.keys():
            raise ValueError(
                f"is_right has the exercises {[*is_right]}, hints {[*hints]}, kinds {[*(kinds or {})]}: give the first "
                "two the same, and kinds only some of them"
            )
        if unknown := [kind for kind in (kinds or {}).values() if kind not in _KINDS]:
            raise ValueError(f"kinds has {unknown[0]!r}: a kind is one of {', '.join(map(repr, _KINDS))}")
        self._is_right, self._hints = dict(is_right), dict(hints)
        self._kinds = dict.fromkeys(is_right, "positive") | dict(kinds or {})

    def check(self, answers: Mapping[int, Any]) -> None:
        """Print for each exercise "open", "right", or "not yet" with a hint.

        Args:
            answers: by exercise; None for those that are open. Exercises that are left out are open, too.
        """
        for number in self._is_right:
            print(f"exercise {number}: {self.verdict(number, answers.get(number))}")
        for number in answers:
            if number not in self._is_right:
                print(f"exercise {number}: there is none of this number")

    def verdict(self, number: int, answer: Any) -> str:
        """Return what `check` prints of an answer, without the exercise's number."""
        if answer is None:
            return "open"
        try:
            return self._verdict(number, answer)
        except Exception as error:  # of a student's function, or of a number too large to be tried
            return f"not yet: trying it ended with {type(error).__name__}: {error}"

    def _verdict(self, number: int, answer: Any) -> str:
        kind = self._kinds[number]
        allows, meant = _KINDS[kind]
        value = answer if kind == "function" else _number(answer)
        if value is None or not allows(value):
            return f"not yet: the answer must be {meant}, and this is {_shown(answer)}"
        value = int(value) if kind == "count" else value
        return "right" if self._is_right[number](value) else f"not yet: {self._hints[number](value)}"

    def prove(self, solutions: Mapping[int, Any], wrong: Mapping[int, Sequence[Any]]) -> None:
        """Assert that right answers in each spelling are right, and others are not, each with a hint of its own.

        Numbers, texts, lists and functions that are typed by accident are tried, too: none may raise.

        Args:
            solutions: a right answer for each exercise.
            wrong: for each exercise some wrong answers.

        Raises:
            AssertionError: a verdict is another one, or two wrong answers get the same hint.
        """
        import numpy as np

        assert solutions.keys() == self._is_right.keys(), f"solutions of {[*solutions]}"
        for number, solution in solutions.items():
            is_function = self._kinds[number] == "function"
            spellings = (
                [solution] if is_function else [float(solution), f" {solution!r}", Fraction(solution), np.array([solution])]
            )
            for spelling in spellings:
                said = self._verdict(number, spelling)
                assert said == "right", f"exercise {number}, {spelling!r}: {said}"
            said_of_wrong = [self._verdict(number, answer) for answer in wrong.get(number, ())]
            assert "right" not in said_of_wrong, f"exercise {number}: one of {wrong[number]} is right"
            assert len({*said_of_wrong}) == len(said_of_wrong), f"exercise {number}: {said_of_wrong}"
            for odd in _ODD:
                if not is_function:
                    self._verdict(number, odd)
                elif not callable(odd):
                    assert self._verdict(number, odd) != "right", f"exercise {number}: {odd!r} is right"


def _number(answer: Any) -> float | int | None:
    """The finite number that an answer is, or None."""
    if isinstance(answer, str):
        answer = _of_text(answer)
    if getattr(answer, "size", None) is not None and hasattr(answer, "item"):  # of NumPy, or a torch tensor
        answer = answer.item() if math.prod(answer.shape) == 1 else None
    if answer is None or isinstance(answer, bool | complex):
        return None
    try:
        value = float(answer)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _of_text(text: str) -> float | None:
    """The value of an expression of numbers, such as "2 * (1 + 0.8) / 50", or None."""
    try:
        return _value(ast.parse(text.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return float(_OPERATIONS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return float(_OPERATIONS[type(op)](_value(operand)))
    raise ValueError("not an expression of numbers")


def _shown(answer: Any) -> str:
    text = repr(answer)
    return text if len(text) <= 40 else f"{text[:37]}..."
