"""The language of rules: names, functions, helpers, literals, and values of hyper-parameters."""

import ast
import math
import sys

import numpy as np
import pytest
import torch
import ulps
from rule_steps import run_rule

from tristep.kernels import language

F32, F64 = torch.float32, torch.float64

# Names.


NAMED = """
@rule
def none_at_all(w, g, state, hyper):
    return w - g, state

@rule
def by_other_arguments(weight, slope, memory, numbers):
    '''Arguments may have any names, and there may be a docstring.'''
    average, = memory
    rate, beta = numbers
    average = beta * average + slope
    return weight - rate * average, (average,)

@rule
def in_the_middle(w, g, state, hyper):
    twice = g + g
    (lr,) = hyper
    step = lr * twice
    first, second = state
    return w - step, (second, first)

@rule
def annotated(w: torch.Tensor, g: "values", state: tuple, hyper: tuple) -> tuple:
    (lr,) = hyper
    return w - lr * g, state
"""


@pytest.mark.parametrize(
    ("name", "state", "hyper"),
    [
        ("none_at_all", (), ()),
        ("by_other_arguments", ("average",), ("rate", "beta")),
        ("in_the_middle", ("first", "second"), ("lr",)),
        ("annotated", (), ("lr",)),
    ],
)
def test_names_are_those_of_the_lines_that_unpack(write_rules, name, state, hyper):
    found = getattr(write_rules(f"import torch\n{NAMED}"), name)
    assert (found.name, found.state, found.hyper) == (name, state, hyper)


@pytest.mark.sample(2)
def test_rules_with_names_of_their_own_run(place, write_rules):
    module = write_rules(f"import torch\n{NAMED}")
    assert run_rule(place, module.none_at_all, [5.0], [2.0])[0] == [3.0]
    weight, (average,) = run_rule(place, module.by_other_arguments, [5.0], [2.0], (0.25, 0.5), [[4.0]])
    assert (weight, average) == ([4.0], [4.0])
    weight, states = run_rule(place, module.in_the_middle, [5.0], [2.0], (0.25,), [[1.0], [2.0]])
    assert (weight, states) == ([4.0], [[2.0], [1.0]])
    assert run_rule(place, module.annotated, [5.0], [2.0], (0.5,))[0] == [4.0]


# The words of tl, each with its judge, and by how many ulps the engines' libraries may be off.


JUDGES = {
    "abs": (np.abs, 0),
    "ceil": (np.ceil, 0),
    "clamp": (lambda x: np.clip(x, -2.0, 3.0), 0),
    "cos": (np.cos, 4),
    "exp": (np.exp, 12),  # GPUs multiply x, here up to 8, into a power of 2
    "exp2": (np.exp2, 4),
    "floor": (np.floor, 0),
    "log": (np.log, 4),
    "log2": (np.log2, 4),
    "maximum": (np.maximum, 0),
    "minimum": (np.minimum, 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 4),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 12),
    "sin": (np.sin, 4),
    "sqrt": (np.sqrt, 3),
    "where": (lambda x, y: np.where(x > y, x, y), 0),
}
OF_TWO = ("maximum", "minimum", "where")
SPECIAL = [0.0, 1.0, math.inf, -math.inf, math.nan]


OPS = [word for word in language.OPS if word != "normal"]  # which test_random.py judges


@pytest.fixture
def word_rules(write_rules):
    """Two rules with a state for each word, to take its result: of the weight, and of the hyper-parameter x."""
    arguments = {"clamp": "(x, -2.0, 3.0)", "where": "(x > g, x, g)"} | dict.fromkeys(("maximum", "minimum"), "(x, g)")
    names = ", ".join(f"of_{word}" for word in OPS)
    results = ", ".join(f"tl.{word}{arguments.get(word, '(x)')}" for word in OPS)
    spread = ", ".join(f"tl.{word}{arguments.get(word, '(x)')} + 0.0 * g" for word in OPS)
    text = f"""
        @rule
        def of_values(x, g, state, hyper):
            {names} = state
            return x, ({results})

        @rule
        def of_a_hyper_parameter(w, g, state, hyper):
            {names} = state
            (x,) = hyper
            return w, ({spread})
    """
    return write_rules(_dedent(text))


def test_every_word_has_a_judge():
    assert sorted(JUDGES) == sorted(OPS)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_words_mean_what_they_mean_in_numpy(place, word_rules, dtype):
    rng = np.random.default_rng(2)
    w, g = (place.tensor(rng.uniform(-8, 8, 1030), dtype) for _ in range(2))
    states = tuple(torch.zeros_like(w) for _ in OPS)
    place.run(word_rules.of_values, [w], [g], [states], [[1.0]])
    for word, got in zip(OPS, states, strict=True):
        judge, allowed = JUDGES[word]
        with np.errstate(all="ignore"):
            expected = judge(ulps.numpy_of(w), ulps.numpy_of(g)) if word in OF_TWO else judge(ulps.numpy_of(w))
        # A result near 0 may be off by some ulps of 1.
        scale = np.maximum(np.abs(expected), 1.0) if word in ("sin", "cos", "log", "log2") else None
        ulps.assert_close(got, expected, scale=scale, arithmetic=dtype, ulps=allowed, what=word)


def test_words_of_a_hyper_parameter(place, word_rules):
    """On some engines that is a number and no tensor."""
    x, g = 0.7, np.array([0.2, 3.0])
    _, results = run_rule(place, word_rules.of_a_hyper_parameter, [9.0, 9.0], g, (x,), [[9.0, 9.0]] * len(OPS))
    for word, got in zip(OPS, results, strict=True):
        judge, _ = JUDGES[word]
        expected = judge(np.full(2, x), g) if word in OF_TWO else judge(np.full(2, x))
        np.testing.assert_allclose(got, expected, rtol=2e-6, err_msg=word)


def test_words_of_zero_infinity_and_nan(place, word_rules):
    w, g = np.repeat(SPECIAL, len(SPECIAL)), np.tile(SPECIAL, len(SPECIAL))
    _, results = run_rule(place, word_rules.of_values, w, g, state=[w] * len(OPS))
    for word, got in zip(OPS, results, strict=True):
        judge, _ = JUDGES[word]
        with np.errstate(all="ignore"):
            expected = judge(w, g) if word in OF_TWO else judge(w)
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7, err_msg=word)  # also NaN and infinity alike


def test_operators(place, write_rules):
    text = """
        @rule
        def operators(w, g, state, hyper):
            a, b = hyper
            both = (w > a) & (g <= b)
            either = (w == a) | ~(g != b)
            return tl.where(both, -w / g, tl.where(either, w - g * a, (w + b) * 2.0)), state
    """
    rng = np.random.default_rng(5)
    w, g = rng.integers(-3, 4, 300).astype(float), rng.integers(1, 4, 300).astype(float)
    expected = np.where((w > 1) & (g <= 2), -w / g, np.where((w == 1) | (g == 2), w - g, (w + 2) * 2))
    weight, _ = run_rule(place, write_rules(_dedent(text)).operators, w, g, (1.0, 2.0))
    np.testing.assert_allclose(weight, expected, rtol=5e-7)


def _dedent(text):
    return text.replace("\n        ", "\n")


# Helper functions.


HELPERS = """
@jit
def squared(x):
    return x * x

@jit
def blend(old, new, beta=0.75):
    '''A helper that calls another, and has a default.'''
    return beta * old + (1.0 - beta) * squared(new)

@jit
def both(w, m, lr):
    return w - lr * m, (m,)

@rule
def helped(w, g, state, hyper):
    (m,) = state
    (lr,) = hyper
    m = blend(m, g) + blend(0.0, g, beta=0.5)
    return both(w, m, lr)
"""


def test_helpers_may_call_helpers_and_have_defaults(place, write_rules):
    weight, (m,) = run_rule(place, write_rules(HELPERS).helped, [1.0, 2.0], [3.0, -4.0], (0.5,), [[1.0, 0.0]])
    g = np.array([3.0, -4.0])
    expected = 0.75 * np.array([1.0, 0.0]) + 0.25 * g**2 + 0.5 * g**2
    np.testing.assert_allclose(m, expected)
    np.testing.assert_allclose(weight, np.array([1.0, 2.0]) - 0.5 * expected)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_comparisons_of_helpers_count_as_numbers_and_stay_comparisons(place, write_rules, dtype):
    """Of a helper that returns one, and of one that takes one as the condition of a choice."""
    text = """
        @jit
        def above(x, limit=0.5):
            return x > limit

        @jit
        def chosen(condition, a, b):
            return tl.where(~condition, b, a)

        @jit
        def halves(x):
            return above(x), 0.5 * above(x)

        @reduction
        def counts(w, g, state, hyper):
            return (above(g), g == w)

        @rule(reduction=counts)
        def voted(w, g, state, hyper, sums):
            many, equal = sums
            one, half = halves(g)
            sign = above(g, 0.0) - (g < 0.0)
            return w + chosen(one & above(g, 1.0), sign + half, -sign * 0.1) + tl.where(one, 0.3, 0.1) * many * equal, state
    """
    g = np.array([-1.0, 0.7, 2.0, 0.0])
    one, sign = g > 0.5, np.sign(g)
    expected = np.where(g > 1, sign + 0.5 * one, -sign * 0.1) + np.where(one, 0.3, 0.1) * 2 * 1
    weight, _ = run_rule(place, write_rules(_dedent(text)).voted, [0.0] * 4, g, dtype=dtype)
    np.testing.assert_allclose(weight, expected, rtol=1e-6 if dtype == F32 else 1e-15)


def test_rules_of_the_package_are_compiled_as_they_are_written():
    """No conversion is written into them, which could change their bits."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("tristep.kernels")]
    ours = {each for module in modules for each in vars(module).values() if isinstance(each, language.Function)}
    assert len(ours) > 100
    assert [each for each in ours if "tristep_tl" in ast.unparse(each.tree)] == []


def test_a_rule_may_return_one_number_for_all_elements(place, write_rules):
    """A literal, and hyper-parameters alone."""
    text = """
        @rule
        def alone(w, g, state, hyper):
            a, b, c = state
            (lr,) = hyper
            return lr, (0.1, lr * 2, b + 1)
    """
    weight, states = run_rule(place, write_rules(_dedent(text)).alone, [1.0, 2.0], [1.0, 1.0], (0.25,), [[5.0, 6.0]] * 3)
    np.testing.assert_allclose([weight, *states], [[0.25] * 2, [0.1] * 2, [0.5] * 2, [6.0, 7.0]], rtol=1e-7)


# Constants, and values that change.


CONSTANTS = {
    "a float": "(w + 1.0) - 1.0",
    "an int": "(w + 1) - 1",
    "a folded constant": "(w + 0.5 * 2.0) - 1.0",
    "a negative constant": "(w - -1.0) - 1.0",
    "a tuple": "(w + a) - b",
    "a constant of a helper": "plus_one(w) - 1.0",
    "a default of a helper": "plus(w) - 1.0",
    "a choice": "(w + tl.where(w > 0.0, 1.0, 2.0)) - 1.0",
    "a maximum": "(w + tl.maximum(w, 1.0)) - 1.0",
    "a word of a constant": "(w + tl.sqrt(1.0 + 0.0 * w)) - 1.0",
    "a word's own constant": "(w + 2.0 * tl.sigmoid(0.0 * w)) - tl.rsqrt(0.0 * w + 1.0)",
    "a hyper-parameter": "(w + one) - one",
}


@pytest.mark.sample(5)
@pytest.mark.sample(4, "cpu")
@pytest.mark.parametrize("what", CONSTANTS)
def test_constants_leave_float32_arithmetic_in_float32(place, write_rules, what):
    """In float32, (w + 1) - 1 is the same for all small w, and 0 if functions are exact. In float64 it is w again."""
    text = f"""
        @jit
        def plus_one(x):
            return x + 1.0

        @jit
        def plus(x, y=1.0):
            return x + y

        @rule
        def vanish(w, g, state, hyper):
            (one,) = hyper
            a, b = 1.0, 1.0
            return {CONSTANTS[what]}, state
    """
    rule = write_rules(_dedent(text)).vanish
    first, second = run_rule(place, rule, [1e-9, 2e-9], [0.0, 0.0], (1.0,))[0]
    assert first == second
    assert abs(first) <= (1e-6 if place.is_approximate else 0.0)
    weight, _ = run_rule(place, rule, [1e-9, 2e-9], [0.0, 0.0], (1.0,), dtype=F64)
    np.testing.assert_allclose(weight, [1e-9, 2e-9], rtol=1e-6)  # and float64 arithmetic in float64


def test_a_variable_may_have_the_name_that_a_literal_gets(place, write_rules):
    text = "@rule\ndef scaled(w, number0, state, hyper):\n    number1 = w * 3.0\n    return number1 - 0.5 * number0, state\n"
    assert list(run_rule(place, write_rules(text).scaled, [1.0, 2.0], [4.0, 8.0])[0]) == [1.0, 2.0]


def test_hyper_parameters_of_float64_weights_are_float64(place, write_rules):
    text = "@rule\ndef just(w, g, state, hyper):\n    (x,) = hyper\n    return x + 0.1 + 0.0 * w, state\n"
    assert run_rule(place, write_rules(text).just, [0.0], [0.0], (0.1,), dtype=F64)[0] == [0.2]
