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
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(write_rules, what):
    body, message = REFUSED[what]
    text = f"NUMBER = 0.5\n\n@rule\ndef refused(w, g, state, hyper):\n{body}\n"
    with pytest.raises(TypeError, match=f"(?s){message}"):
        write_rules(text)


def test_a_rule_may_not_use_what_belongs_to_a_function_around_it():
    factor, other = 2.0, 3.0
    with pytest.raises(TypeError, match="'closure' uses factor, other of an enclosing function: .*hyper-parameter"):

        @rule
        def closure(w, g, state, hyper):
            return w - factor * other * g, state
