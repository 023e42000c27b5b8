"""Rules typed in notebook cells: redefinition, refusals, pickling."""

import copy
import gc
import linecache
import pickle
import sys

import pytest
from rule_steps import run_rule

from tristep.kernels import rule, rules


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


def test_refusals_in_a_cell_name_the_rule(run_cell):
    run_cell("from tristep.kernels import jit, rule, tl")
    with pytest.raises(TypeError, match="'step' uses the name 'scaled'"):
        run_cell(CELL)


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
