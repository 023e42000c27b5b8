"""Rules typed in notebook cells take effect when they are typed anew."""

import gc
import linecache
import sys
from pathlib import Path

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


def test_a_rule_is_what_it_was_when_it_was_defined(place, write_rules):
    """Whatever its file says at the first step."""
    module = write_rules(
        "@jit\ndef twice(g):\n    return 2.0 * g\n\n@rule\ndef kept(w, g, state, hyper):\n    return w - twice(g), state\n"
    )
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("2.0", "-7.0").replace("w - ", "w + "), encoding="utf-8")
    linecache.checkcache()
    assert run_rule(place, module.kept, [5.0], [1.0])[0] == [3.0]


@pytest.mark.parametrize(("old", "new"), [("2.0", "3.0"), ("twice", "other"), ("(w, g", "(x, g")])
def test_a_file_that_has_changed_before_the_definition_is_refused(tmp_path, old, new):
    """While a script imports its packages, say."""
    text = "from tristep.kernels import jit\n\n@jit\ndef twice(w, g):\n    return 2.0 * g\n"
    file = tmp_path / "edited.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(TypeError, match="the text of 'twice' in .*edited.py is not the one that Python has loaded"):
        exec(compile(text, str(file), "exec"), {"__name__": "edited"})
