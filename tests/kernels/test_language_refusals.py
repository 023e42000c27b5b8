"""What a rule or a helper may not contain or be made of, and that the error says so."""

import math

import pytest

from tristep.kernels import rule, tl

REFUSED = {
    "an unknown name": (
        "    return w - factor * g, state",
        "'refused' uses the name 'factor'.*pass numbers as hyper-parameters",
    ),
    "a number of the module": ("    return w - NUMBER * g, state", r"uses the name 'NUMBER' \(float\)"),
    "a built-in function": ("    return abs(w), state", "uses the name 'abs'.*Did you mean tl.abs?"),
    "an unknown word": ("    return tl.sqroot(w), state", "uses tl.sqroot, which rules do not know. Did you mean 'sqrt'"),
    "an attribute": ("    return w.T, state", r"uses w\.T: values have no attributes"),
    "a keyword of a word": ("    return tl.where(w > g, w, b=g), state", r"contains 'tl.where\(w > g, w, b=g\)'"),
    "a power": ("    return w ** 2.0, state", r"contains 'w \*\* 2.0', which not all engines"),
    "a condition": ("    if w > 0.0:\n        w = g\n    return w, state", "contains 'if w > 0.0:'.*tl.where for a choice"),
    "a double comparison": ("    return tl.where(0.0 < w < 1.0, w, g), state", "contains '0.0 < w < 1.0'"),
    "a double assignment": ("    a = b = w\n    return a + b, state", "contains 'a = b = w'"),
    "an element": ("    return w - hyper[0] * g, state", r"contains 'hyper\[0\]'"),
    "hyper not unpacked": ("    lr = hyper\n    return w - lr * g, state", "'refused' must unpack hyper into names"),
    "a tuple within a tuple": (
        "    a, (b, c) = hyper\n    return w, state",
        r"contains '\(?a, \(b, c\)\)? = hyper'",  # brackets by Python 3.10
    ),
    "state not unpacked": ("    m = state\n    return w, (m,)", "'refused' must unpack state into names"),
    "no return": ("    w = w - g", "'refused' must end by returning"),
    "an empty return": ("    return", "'refused' must end by returning"),
    "two returns": ("    return w, state\n    return g, state", "'refused' returns more than once"),
    "no state returned": (
        "    return w",
        "'refused' returns 'w': it must return the new weight and a tuple of the 0 new states, as in `return w, state`",
    ),
    "too few states": ("    m, n = state\n    return w, (m,)", r"returns '\(w, \(m,\)\)'.*2 new states.*\(new_m, new_n,\)"),
    "too many states": ("    return w, (g,)", r"returns '\(w, \(g,\)\)'.*0 new states, as in `return w, state`"),
    "a state that is no tuple": ("    (m,) = state\n    return w, m", r"returns '\(w, m\)'.*1 new state,.*\(new_m,\)"),
    "three things": ("    (m,) = state\n    return w, g, (m,)", r"returns '\(w, g, \(m,\)\)'"),
}
SIGNATURES = {
    "three arguments": ("w, g, state", r"rule 'refused' takes \(w, g, state\): it must have four arguments"),
    "the two further ones in another order": ("w, g, state, hyper, index, sums", "sums and index after them, in this order"),
    "a keyword argument": ("w, g, state, hyper, *, t=1.0", r"takes \(w, g, state, hyper, \*, t=1.0\): only plain arguments"),
    "a default from elsewhere": ("w, g, state, hyper=NUMBER", "uses the name 'NUMBER'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(write_rules, what):
    body, message = REFUSED[what]
    text = f"NUMBER = 0.5\n\n@rule\ndef refused(w, g, state, hyper):\n{body}\n"
    with pytest.raises(TypeError, match=f"(?s){message}"):
        write_rules(text)


@pytest.mark.parametrize("what", SIGNATURES)
def test_refused_as_arguments_are(write_rules, what):
    arguments, message = SIGNATURES[what]
    with pytest.raises(TypeError, match=message):
        write_rules(f"NUMBER = 0.5\n@rule\ndef refused({arguments}):\n    return w, state\n")


def test_helpers_are_refused_for_the_same_reasons(write_rules):
    with pytest.raises(TypeError, match=r"'helper' contains 'x \*\* 2.0'"):
        write_rules("@jit\ndef helper(x):\n    return x ** 2.0\n")


def test_what_a_rule_may_not_be_made_of():
    with pytest.raises(TypeError, match="@jit or @rule must be a plain Python function, got builtin_function_or_method"):
        rule(math.sqrt)
    with pytest.raises(TypeError, match="'<lambda>' must be written with def"):
        rule(lambda w, g, state, hyper: (w, state))
    with pytest.raises(TypeError, match="'<lambda>' must be written with def"):
        [
            rule(lambda w, g, state, hyper: (w, state)),  # a line which is no statement of its own
        ]


def test_a_rule_may_not_use_what_belongs_to_a_function_around_it():
    factor, other = 2.0, 3.0
    with pytest.raises(TypeError, match="'closure' uses factor, other of an enclosing function: .*hyper-parameter"):

        @rule
        def closure(w, g, state, hyper):
            return w - factor * other * g, state


def test_a_rule_without_source_is_refused():
    names = {"rule": rule, "tl": tl}
    with pytest.raises(TypeError, match="the source of 'lost' cannot be found.*in a file or in a notebook cell"):
        exec("@rule\ndef lost(w, g, state, hyper):\n    return w, state\n", names)
