"""Rules as they are written: names, words, helpers, what is refused and how, notebook cells, and redefinition."""

import copy
import gc
import importlib.util
import linecache
import math
import pickle
import sys

import numpy as np
import pytest
import torch

from tristep.kernels import Update, jit, language, rule, rules, tl, update

F32, F64 = torch.float32, torch.float64


def run_rule(place, rule, w, g, hyper=(), state=(), dtype=F32):
    """The new weight, and the new states, after one step from these numbers."""
    weight, gradient = place.tensor(w, dtype), place.tensor(g, dtype)
    states = [tuple(place.tensor(values, dtype) for values in state)]
    place.run(rule, [weight], [gradient], states, [[1.0, *hyper]])
    return weight.cpu().double().numpy(), [tensor.cpu().double().numpy() for tensor in states[0]]


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
    assert repr(found) == f"<rule {name}: state ({', '.join(state)}), hyper ({', '.join(hyper)})>"


def test_names_of_the_rules_that_come_with_the_package():
    assert rules.rmsprop_centered.state == ("n", "mean", "delta")
    assert rules.sgd.state == ()
    assert rules.signum.hyper == ("lr", "wd", "clip", "momentum", "one_minus_momentum", "wd_lh")


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
    arguments = {"where": "(x > g, x, g)"} | dict.fromkeys(("maximum", "minimum"), "(x, g)")
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
def test_words_mean_what_they_mean_in_numpy(place, word_rules, ulps, dtype):
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


def test_helpers_of_another_module_and_under_another_name(place, write_rules):
    lender = write_rules(HELPERS)
    text = f"import sys\nlent = sys.modules[{lender.__name__!r}].squared\n\n"
    text += "@rule\ndef borrower(w, g, state, hyper):\n    return lent(g), state\n"
    assert list(run_rule(place, write_rules(text).borrower, [0.0, 0.0], [3.0, -4.0])[0]) == [9.0, 16.0]


def test_rules_and_helpers_can_be_called_on_tensors(write_rules):
    module = write_rules(HELPERS)
    assert module.squared(torch.tensor([3.0])).tolist() == [9.0]
    weight, (m,) = module.helped(torch.tensor([1.0]), torch.tensor([2.0]), (torch.tensor([4.0]),), (0.5,))
    assert (weight.tolist(), m.tolist()) == ([-2.0], [6.0])
    assert module.squared(torch.tensor([0.1], dtype=F64)).dtype == F64


def test_the_language_may_come_from_triton_itself(place, write_rules):
    pytest.importorskip("triton", reason="Triton has builds for Linux only")
    text = "import triton.language as tl\n\n@rule\ndef its_own(w, g, state, hyper):\n    return tl.sqrt(w), state\n"
    assert list(run_rule(place, write_rules(text).its_own, [4.0], [0.0])[0]) == [2.0]


# What is refused: the text of a rule, and what the message must say.

REFUSED = {
    "an unknown name": (
        "    return w - factor * g, state",
        "'refused' uses the name 'factor'.*pass numbers as hyper-parameters",
    ),
    "a number of the module": ("    return w - NUMBER * g, state", r"uses the name 'NUMBER' \(float\)"),
    "a plain function": ("    return plain(w), state", r"uses the name 'plain' \(function\).*marked with @jit"),
    "torch": ("    return torch.sqrt(w), state", r"uses the name 'torch' \(module\)"),
    "a built-in function": ("    return abs(w), state", "uses the name 'abs'.*Did you mean tl.abs?"),
    "an unknown word": ("    return tl.sqroot(w), state", r"uses tl.sqroot; rules know abs, .*\. Did you mean sqrt"),
    "a word of Triton's alone": ("    return tl.sum(w), state", "uses tl.sum; rules know abs"),
    "an attribute": ("    return w.T, state", r"uses w\.T: values have no attributes"),
    "a method": ("    return w.sum() * g, state", r"uses w\.sum: values have no attributes"),
    "a keyword of a word": ("    return tl.where(w > g, w, b=g), state", r"contains 'tl.where\(w > g, w, b=g\)'"),
    "a power": ("    return w ** 2.0, state", r"contains 'w \*\* 2.0', which not all engines"),
    "a remainder": ("    return w % 2.0, state", "contains 'w % 2.0'"),
    "a change in place": ("    w += g\n    return w, state", r"contains 'w \+= g'"),
    "a condition": ("    if w > 0.0:\n        w = g\n    return w, state", "contains 'if w > 0.0:'.*tl.where for a choice"),
    "a choice": ("    return w if w > 0.0 else g, state", "contains 'w if w > 0.0 else g'"),
    "a loop": ("    for i in g:\n        w = w + i\n    return w, state", "contains 'for i in g:'"),
    "and": ("    return tl.where(w > 0.0 and g > 0.0, w, g), state", "contains 'w > 0.0 and g > 0.0'"),
    "not": ("    return tl.where(not w, w, g), state", "contains 'not w'"),
    "a double comparison": ("    return tl.where(0.0 < w < 1.0, w, g), state", "contains '0.0 < w < 1.0'"),
    "a double assignment": ("    a = b = w\n    return a + b, state", "contains 'a = b = w'"),
    "an element": ("    return w - hyper[0] * g, state", r"contains 'hyper\[0\]'"),
    "hyper not unpacked": ("    lr = hyper\n    return w - lr * g, state", "'refused' must unpack hyper into names"),
    "a tuple within a tuple": (
        "    a, (b, c) = hyper\n    return w, state",
        r"contains '\(?a, \(b, c\)\)? = hyper'",  # brackets by Python 3.10
    ),
    "a starred name": ("    a, *b = hyper\n    return w, state", r"contains '\*b'"),
    "state not unpacked": ("    m = state\n    return w, (m,)", "'refused' must unpack state into names"),
    "no return": ("    w = w - g", "'refused' must end by returning"),
    "an empty return": ("    return", "'refused' must end by returning"),
    "two returns": ("    return w, state\n    return g, state", "'refused' returns more than once"),
    "no state returned": (
        "    return w",
        "'refused' returns 'w': it must return the new weight and a tuple of the 0 new states",
    ),
    "too few states": ("    m, n = state\n    return w, (m,)", r"returns '\(w, \(m,\)\)'.*2 new states.*\(new_m, new_n,\)"),
    "too many states": ("    return w, (g,)", r"returns '\(w, \(g,\)\)'.*0 new states, as in `return w, state`"),
    "a state that is no tuple": ("    (m,) = state\n    return w, m", r"returns '\(w, m\)'.*1 new state,.*\(new_m,\)"),
    "three things": ("    (m,) = state\n    return w, g, (m,)", r"returns '\(w, g, \(m,\)\)'"),
}
SIGNATURES = {
    "three arguments": ("w, g, state", r"rule 'refused' takes \(w, g, state\): it must have four arguments"),
    "five arguments": ("w, g, state, hyper, t", r"takes \(w, g, state, hyper, t\): it must have four arguments"),
    "the two further ones in another order": ("w, g, state, hyper, index, sums", "sums and index after them, in this order"),
    "a starred argument": ("w, g, state, *hyper", r"takes \(w, g, state, \*hyper\): only plain arguments"),
    "a keyword argument": ("w, g, state, hyper, *, t=1.0", r"takes \(w, g, state, hyper, \*, t=1.0\): only plain arguments"),
    "a default from elsewhere": ("w, g, state, hyper=NUMBER", "uses the name 'NUMBER'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(write_rules, what):
    body, message = REFUSED[what]
    text = f"import torch\nNUMBER = 0.5\ndef plain(x):\n    return x\n\n@rule\ndef refused(w, g, state, hyper):\n{body}\n"
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
    with pytest.raises(TypeError, match=r"'helper' uses tl.sqr; .*Did you mean sqrt"):
        write_rules("@jit\ndef helper(x):\n    return tl.sqr(x)\n")


def test_what_a_rule_may_not_be_made_of():
    with pytest.raises(TypeError, match="@jit and @rule take a plain Python function, got builtin_function_or_method"):
        rule(math.sqrt)
    with pytest.raises(TypeError, match="got Rule"):
        rule(rules.sgd)
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


# Cells of a notebook.


@pytest.fixture
def shell(monkeypatch, tmp_path):
    """An IPython shell: a function that runs a cell in it and gives its names."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython")
    config = pytest.importorskip("traitlets.config").Config({"HistoryManager": {"enabled": False}})
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for name in ("displayhook", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts a module of its own there
    shell = interactiveshell.InteractiveShell(config=config)

    def run_cell(text):
        shell.run_cell(text, store_history=True).raise_error()
        return shell.user_ns

    yield run_cell
    shell.run_line_magic("reset", "-f")
    gc.collect()


@pytest.fixture
def executed():
    """The same without IPython: cells are executed, and their text is registered as notebooks do."""
    names, cells = {"__name__": "__main__"}, []

    def run_cell(text):
        cells.append(f"<cell {len(cells)} of {id(cells)}>")
        linecache.cache[cells[-1]] = len(text), None, text.splitlines(keepends=True), cells[-1]
        exec(compile(text, cells[-1], "exec"), names)
        return names

    yield run_cell
    for cell in cells:
        del linecache.cache[cell]


@pytest.fixture(params=["shell", "executed"])
def run_cell(request):
    return request.getfixturevalue(request.param)


CELL = """
@rule
def step(w, g, state, hyper):
    (lr,) = hyper
    return w - lr * scaled(g), state
"""


def test_a_rule_typed_in_a_cell(place, run_cell):
    run_cell("from tristep.kernels import jit, rule, tl")
    run_cell("@jit\ndef scaled(g):\n    return 2.0 * g\n")
    step = run_cell(CELL)["step"]
    assert list(run_rule(place, step, [5.0, 6.0], [1.0, 2.0], (0.5,))[0]) == [4.0, 4.0]


def test_a_rule_typed_anew_in_a_cell_takes_effect(place, run_cell):
    """Under the same name, with the same hyper-parameters, in a cell that differs by one figure, or only in a helper."""
    run_cell("from tristep.kernels import jit, rule, tl")
    run_cell("@jit\ndef scaled(g):\n    return 2.0 * g\n")
    first = run_cell(CELL)["step"]
    assert run_rule(place, first, [5.0], [1.0], (0.5,))[0] == [4.0]
    second = run_cell(CELL.replace("w - lr", "w + lr"))["step"]
    assert run_rule(place, second, [5.0], [1.0], (0.5,))[0] == [6.0]
    run_cell("@jit\ndef scaled(g):\n    return 4.0 * g\n")
    third = run_cell(CELL)["step"]
    assert run_rule(place, third, [5.0], [1.0], (0.5,))[0] == [3.0]
    assert run_rule(place, first, [5.0], [1.0], (0.5,))[0] == [4.0]  # a rule keeps the helpers that it was defined with


def test_functions_are_bound_under_names_that_tell_their_texts_apart(write_rules):
    """Triton 3.5 looks kernels up by module and name; those of one text may share one."""
    text = "@jit\ndef scaled(g):\n    return {} * g\n\n\n@rule\ndef mine(w, g, state, hyper):\n    return scaled(g), state\n"
    found = [write_rules(text.format(factor)).mine for factor in ("2.0", "3.0", "2.0")]
    first, second, third = (each.bind("names", tl, lambda fn: fn).__qualname__ for each in found)
    assert first == third != second
    assert first.startswith("mine")


def test_refusals_in_a_cell_name_the_rule(run_cell):
    run_cell("from tristep.kernels import jit, rule, tl")
    with pytest.raises(TypeError, match="'step' uses the name 'scaled'"):
        run_cell(CELL)


# Copies.


def test_rules_are_pickled_by_name():
    assert pickle.loads(pickle.dumps(rules.adam)) is rules.adam
    assert b"adam" in pickle.dumps(rules.adam)
    assert len(pickle.dumps(rules.adam)) < 100
    assert copy.deepcopy({"rule": rules.adam})["rule"] is rules.adam
    assert copy.copy(rules.adam) is rules.adam


def test_a_rule_that_its_name_does_not_lead_to_is_not_pickled(write_rules):
    @rule
    def local(w, g, state, hyper):
        return w - g, state

    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(local)
    assert copy.deepcopy(local) is local
    module = write_rules("@rule\ndef twice(w, g, state, hyper):\n    return w - g, state\n")
    first = module.twice
    assert pickle.loads(pickle.dumps(first)) is first
    module.twice = rule(module.twice.fn)
    with pytest.raises(pickle.PicklingError, match="twice"):
        pickle.dumps(first)
    assert pickle.loads(pickle.dumps(module.twice)) is module.twice


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


@pytest.mark.sample(4, "cpu")
@pytest.mark.parametrize("what", CONSTANTS)
def test_constants_leave_float32_arithmetic_in_float32(place, write_rules, what):
    """In float32, (w + 1) - 1 is 0 for a small w. In float64 it is w again."""
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
    assert list(run_rule(place, rule, [1e-9, 2e-9], [0.0, 0.0], (1.0,))[0]) == [0.0, 0.0]
    weight, _ = run_rule(place, rule, [1e-9, 2e-9], [0.0, 0.0], (1.0,), dtype=F64)
    np.testing.assert_allclose(weight, [1e-9, 2e-9], rtol=1e-6)  # and float64 arithmetic in float64


def test_a_variable_may_have_the_name_that_a_literal_gets(place, write_rules):
    text = "@rule\ndef scaled(w, number0, state, hyper):\n    number1 = w * 3.0\n    return number1 - 0.5 * number0, state\n"
    assert list(run_rule(place, write_rules(text).scaled, [1.0, 2.0], [4.0, 8.0])[0]) == [1.0, 2.0]


def test_hyper_parameters_of_float64_weights_are_float64(place, write_rules):
    text = "@rule\ndef just(w, g, state, hyper):\n    (x,) = hyper\n    return x + 0.1 + 0.0 * w, state\n"
    assert run_rule(place, write_rules(text).just, [0.0], [0.0], (0.1,), dtype=F64)[0] == [0.2]


def test_other_values_need_no_other_loop(write_rules):
    """On the CPU engine; test_launches.py has the same for the GPU's kernels."""
    loops = pytest.importorskip("tristep.kernels.backends.cpu.loops", reason="needs numba").loops
    text = "@rule\ndef descend(w, g, state, hyper):\n    (lr,) = hyper\n    return w - lr * g, state\n"
    rule = write_rules(text).descend
    for rate in (0.5, 1.0, 0.0, math.inf, 1e-30):
        for shape in [(3,), (2, 2)]:
            update(rule, [torch.zeros(shape)], [torch.ones(shape)], [()], {"lr": rate}, engine="cpu")
    assert sum(key[0] is rule for key in loops) == 1
    update(rule, [torch.zeros(3, dtype=F64)], [torch.ones(3)], [()], {"lr": 0.5}, engine="cpu")  # other types do
    assert sum(key[0] is rule for key in loops) == 2


@pytest.mark.sample(0)
def test_importing_the_language_imports_no_compiler(fresh_python):
    code = "import sys, tristep.kernels, tristep.kernels.language; print('numba' in sys.modules, 'triton' in sys.modules)"
    loaded_by_torch = fresh_python("-c", "import sys, torch; print('triton' in sys.modules)").split()
    assert fresh_python("-c", code).split() == ["False", *loaded_by_torch]


def test_a_rule_is_needed_and_not_a_function():
    with pytest.raises(TypeError, match="rule must be made with @rule or @tensor_rule, got function"):
        Update(rules.sgd.fn, [torch.zeros(1)], [()])
    with pytest.raises(TypeError, match="rule must be made with @rule or @tensor_rule, got Function"):
        Update(jit(rules.sgd.fn), [torch.zeros(1)], [()])


def test_the_compilers_are_looked_for_without_being_imported(monkeypatch):
    from tristep.kernels.backends import has_numba, has_triton

    assert has_triton() == (importlib.util.find_spec("triton") is not None)
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not has_triton()
    assert not has_numba()
