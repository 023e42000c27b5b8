"""Rules typed in notebook cells take effect when they are typed anew."""

import gc
import sys

import pytest
from rule_steps import run_rule


@pytest.fixture
def run_cell(monkeypatch, tmp_path):
    """An IPython shell: a function that runs a cell in it and gives its names."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython")
    config = pytest.importorskip("traitlets.config").Config({"HistoryManager": {"enabled": False}})
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for name in ("displayhook", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts a module of its own there
    shell = interactiveshell.InteractiveShell(config=config)

    def run(text):
        shell.run_cell(text, store_history=True).raise_error()
        return shell.user_ns

    yield run
    shell.run_line_magic("reset", "-f")
    gc.collect()


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
