"""What a rule or a helper may not contain or be made of, and that the error says so."""

import pytest

from tristep.kernels import rule

REFUSED = {
    "an unknown name": (
        "    return w - factor * g, state",
        "'refused' uses the name 'factor'.*pass numbers as hyper-parameters",
    ),
    "a number of the module": ("    return w - NUMBER * g, state", r"uses the name 'NUMBER' \(float\)"),
    "a power": ("    return w ** 2.0, state", r"contains 'w \*\* 2.0', which not all engines"),
    "a condition": ("    if w > 0.0:\n        w = g\n    return w, state", "contains 'if w > 0.0:'.*tl.where for a choice"),
    "a double comparison": ("    return tl.where(0.0 < w < 1.0, w, g), state", "contains '0.0 < w < 1.0'"),
    "two returns": ("    return w, state\n    return g, state", "'refused' returns more than once"),
    "too few states": ("    m, n = state\n    return w, (m,)", r"returns '\(w, \(m,\)\)'.*2 new states.*\(new_m, new_n,\)"),
    "a new state that is not returned": (
        "    (m,) = state\n    m = 0.9 * m + g\n    return w - m, state",
        r"rule 'refused' computes a new 'm' and returns 'state', which has the old one.*return w, \(m,\)",
    ),
    "a state's name twice": ("    m, m = state\n    return w, (m, m)", "'refused' has the name 'm' twice"),
    "the gradient's name again": ("    (g,) = state\n    return w, (g,)", "'refused' has the name 'g' twice"),
    "too few arguments of a word": ("    return tl.maximum(w), state", r"`tl.maximum\(w\)`, with 1 .*: tl.maximum takes 2"),
    "an argument that a helper lacks": (
        "    return w - added(g), state",
        r"missing a required argument: 'y'; it takes \(x, y\)",
    ),
    "a tuple in arithmetic": ("    return w - both(w, g), state", r"computes with `both\(w, g\)`, a tuple: unpack it first"),
    "a comparison given to a helper that computes": (
        "    return w - added(g > 0.0, g), state",
        r"'added' contains `x \+ y`, which computes with `x`, a comparison: pass tl.where\(..., 1.0, 0.0\) to it",
    ),
    "a helper's comparison among results": ("    return both(w, g)", "has a comparison among what is returned: unpack it"),
    "a choice by a number": (
        "    return tl.where(g, w, g), state",
        "where `g` is a number: it must be .*such as `g != 0.0`",
    ),
    "a text": ("    return w - 'g', state", "contains `'g'`, which is no number"),
    "a name before its assignment": ("    a = b\n    b = w\n    return a, state", "`b`, which is not assigned before"),
    "keys that are literals": (
        "    return w + tl.normal(1.0, 2.0, index), state",
        "'refused' makes keys of tl.normal of literals alone: they must be hyper-parameters",
    ),
    "a key made of the gradient": (
        "    (key,) = hyper\n    return w + noise(key, g, index), state",
        "makes keys of tl.normal of g: they must be hyper-parameters",
    ),
    "noise of another index": (
        "    (key,) = hyper\n    return w + tl.normal(key, 0.0, g), state",
        "`tl.normal.*whose third argument must be `index`",
    ),
}
HELPERS = """
NUMBER = 0.5

@jit
def added(x, y):
    return x + y

@jit
def both(w, g):
    return g > 0.0, ()

@jit
def noise(key0, key1, index):
    return tl.normal(key0, key1, index)
"""


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(write_rules, what):
    body, message = REFUSED[what]
    arguments = "w, g, state, hyper" + ", index" * (", index)" in body)
    text = f"{HELPERS}\n\n@rule\ndef refused({arguments}):\n{body}\n"
    with pytest.raises(TypeError, match=f"(?s){message}"):
        write_rules(text)


def test_a_rule_may_not_use_what_belongs_to_a_function_around_it():
    factor, other = 2.0, 3.0
    with pytest.raises(TypeError, match="'closure' uses factor, other of an enclosing function: .*hyper-parameter"):

        @rule
        def closure(w, g, state, hyper):
            return w - factor * other * g, state
