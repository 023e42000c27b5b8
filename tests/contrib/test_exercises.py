"""`Exercises`: answers as students type them."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from tristep import viz


@pytest.fixture
def exercises():
    return viz.Exercises(
        is_right={
            1: lambda rate: abs(rate - 1 / 25) < 1e-6,
            2: lambda step: [0.0, 0.2, 0.4][step] == 0.4,
            3: lambda make: make(2) == 4,
            4: lambda number: number == -0.5,
        },
        hints={
            1: lambda rate: f"{0.04 / rate:.3g} times too small",
            2: lambda step: "count again",
            3: lambda make: f"2 becomes {make(2)}",
            4: lambda number: "which sign?",
        },
        kinds={2: "count", 3: "function", 4: "number"},
    )


RIGHT = [0.04, 1 / 25, "0.04", " 1 / 25", "(2 - 1) * 5^-2", "+4e-2", Fraction(1, 25), Decimal("0.04"), np.float32(0.04)]


@pytest.mark.parametrize("answer", [*RIGHT, np.array([[0.04]]), torch.tensor(0.04, dtype=torch.float64)], ids=repr)
def test_a_number_is_right_in_any_spelling(exercises, answer):
    assert exercises.verdict(1, answer) == "right"


@pytest.mark.parametrize(
    "answer",
    [
        0,
        -1,
        "text",
        "",
        "1 / 0",
        "2 ** 10 ** 10",
        "'a' * 3",
        "print(1)",
        float("nan"),
        float("inf"),
        True,
        1j,
        [],
        [0.04],
        {},
    ]
    + [np.array([1.0, 2.0]), torch.zeros(0), "9" * 5000, "(" * 2000],
    ids=lambda answer: repr(answer)[:30],
)
def test_what_is_no_number_of_the_kind_gets_a_sentence(exercises, answer):
    said = exercises.verdict(1, answer)
    assert said.startswith("not yet: the answer must be a number above 0, and this is ")
    assert len(said) < 110


def test_a_count_may_be_typed_as_a_quotient_and_is_whole(exercises):
    assert exercises.verdict(2, 1 / 0.5) == "right"
    assert exercises.verdict(2, 1) == "not yet: count again"
    assert exercises.verdict(2, 1.5) == "not yet: the answer must be a whole number above 0, and this is 1.5"
    assert exercises.verdict(4, "-1 / 2") == "right"


def test_each_answer_gets_a_verdict_whatever_the_others_are(exercises, capsys):
    exercises.check({1: 0.02, 2: 7, 3: lambda n: n / 0, 5: 1})
    assert capsys.readouterr().out.splitlines() == [
        "exercise 1: not yet: 2 times too small",
        "exercise 2: not yet: trying it ended with IndexError: list index out of range",
        "exercise 3: not yet: trying it ended with ZeroDivisionError: division by zero",
        "exercise 4: open",
        "exercise 5: there is none of this number",
    ]


@pytest.mark.parametrize(
    ("is_right", "hint", "wrong"),
    [
        (lambda step: step == 3, str, [1, 3]),
        (lambda step: step == 2, str, [1, 2]),
        (lambda step: step == 2, lambda step: "count again", [1, 3]),
        (lambda step: [1, 2, 3][step] == 3, str, [1, 0]),
    ],
    ids=["solution is wrong", "wrong is right", "one hint", "raises at 1e9"],
)
def test_prove_finds_a_check_that_is_mistaken(is_right, hint, wrong):
    exercises = viz.Exercises({1: is_right}, {1: hint}, {1: "count"})
    with pytest.raises((AssertionError, IndexError)):
        exercises.prove({1: 2}, {1: wrong})


def test_prove_accepts_what_holds():
    viz.Exercises({1: lambda step: step == 2}, {1: str}, {1: "count"}).prove({1: 2}, {1: [1, 3]})


@pytest.mark.parametrize(
    "arguments",
    [({1: bool}, {2: str}), ({1: bool}, {1: str}, {2: "count"}), ({1: bool}, {1: str}, {1: "whole"})],
    ids=["hints", "kinds", "kind"],
)
def test_exercises_that_do_not_go_together_are_refused(arguments):
    with pytest.raises(ValueError, match="kinds"):
        viz.Exercises(*arguments)
