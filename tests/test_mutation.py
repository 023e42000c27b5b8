"""The mutants of `benchmarks/mutants.py`: each is one fault, and none is where a fault would mean nothing."""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = '''"""A docstring, of 1 + 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING and not 1 + 1:
    from somewhere import array

LIMIT: "array[1 + 1]" = 10
ROOM = 2 * 512


@rule(most=1 + 1)
def decayed(w, g, state, hyper):
    """What is less by 1 * 2, and äöü."""
    mean, var = state
    (lr,) = hyper
    return w - lr * (mean + g) / (var + 1e-8), (mean, var)  # für alle


def first(values: list[int], limit: int = 3) -> bool:
    if not values or len(values) < limit:
        raise ValueError(f"{len(values) + 1} values: must be " + "more than" * (2 + 1))
    values[0] -= 2.5 if values[1] else 0
    values.sort()
    return is_small(values[0])


class Plan:
    size = 7

    def __repr__(self):
        return "Plan" + str(self.size + 1)

    def step(self):
        self.size = self.size + 1

        def inner():
            return "x" + "y", self.size

        return inner
'''


@pytest.fixture(scope="module")
def module():
    """The module `benchmarks/mutants.py`."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield __import__("mutants")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        del sys.modules["mutants"]


@pytest.fixture
def tree(tmp_path, module, monkeypatch):
    """A folder whose product is one module; its group is the only one."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "some.py").write_text(PRODUCT, encoding="utf-8")
    monkeypatch.setattr(module, "GROUPS", {"some": ("kernels/*.py",)})
    monkeypatch.setattr(module, "TUNING", {"kernels/some.py": {"ROOM": "how much at a time"}})
    return tmp_path


def all_of(module, tree):
    return module.mutants(tree, count=1000)


def test_the_same_seed_draws_the_same_and_fewer_are_the_first_of_more(module, tree):
    found = module.mutants(tree, seed=1, count=12)
    assert len({mutant.key for mutant in found}) == 12
    assert module.mutants(tree, seed=1, count=12) == found
    assert module.mutants(tree, seed=1, count=5) == found[:5]
    assert module.mutants(tree, seed=2, count=12) != found


def test_each_is_one_change_of_the_text_and_compiles(module, tree):
    source = PRODUCT.encode()
    for mutant in all_of(module, tree):
        mutated = mutant.applied(source)
        compile(mutated, "mutated", "exec")
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
        assert mutated.count(b"\n") == source.count(b"\n")
        assert source[mutant.start : mutant.end].decode() == mutant.old
        assert mutated.endswith(source[mutant.end :])
        assert mutated.startswith(source[: mutant.start])


def test_what_is_changed_and_what_is_not(module, tree):
    found = all_of(module, tree)
    # All that there is to change stands on these lines: nothing in messages, annotations, decorators and the like.
    lines = PRODUCT.splitlines()
    changed = Counter(lines[mutant.line - 1].strip() for mutant in found)
    assert changed == {
        'LIMIT: "array[1 + 1]" = 10': 1,
        "return w - lr * (mean + g) / (var + 1e-8), (mean, var)  # für alle": 7,
        "def first(values: list[int], limit: int = 3) -> bool:": 1,
        "if not values or len(values) < limit:": 4,
        "values[0] -= 2.5 if values[1] else 0": 7,
        "values.sort()": 1,
        "return is_small(values[0])": 2,
        "size = 7": 1,
        "self.size = self.size + 1": 3,
        'return "x" + "y", self.size': 1,
    }
    edits = {(mutant.kind, mutant.old, mutant.new) for mutant in found}
    assert {
        ("arithmetic", "mean + g", "mean - g"),
        ("swapped", "(mean, var)", "(var, mean)"),
        ("boundary", "len(values) < limit", "len(values) <= limit"),
        ("comparison", "len(values) < limit", "len(values) >= limit"),
        ("and/or", "not values or len(values) < limit", "not values and len(values) < limit"),
        ("condition", "is_small(values[0])", "not is_small(values[0])"),
        ("constant", "2.5", "5.0"),
        ("deleted", "values.sort()", "pass"),
    } <= edits


def test_functions_tell_that_they_are_called_and_mutants_in_which_they_are(module, tree):
    scopes = {mutant.scope.name: mutant.scope for mutant in all_of(module, tree)}
    assert set(scopes) == {"", "decayed", "first", "Plan", "Plan.step", "Plan.step.inner"}
    assert [name for name, scope in scopes.items() if scope.compiled] == ["decayed"]
    assert {name for name, scope in scopes.items() if not scope.function} == {"", "Plan"}
    text = ast.unparse(module.instrumented(PRODUCT.encode(), "kernels/some.py"))
    told = [line.split("'")[1] for line in text.splitlines() if "__seen__" in line]
    assert told == [f"kernels/some.py:{name}" for name in ("first", "Plan.__repr__", "Plan.step", "Plan.step.inner")]
    compiled = "@cached(numba.njit)\ndef added(a, b):\n    return a + b"
    assert ast.unparse(module.instrumented(compiled.encode(), "kernels/some.py")) == compiled


def test_a_mutant_meets_the_tests_that_call_its_function(module, tree):
    by_scope = {mutant.scope.name: mutant for mutant in all_of(module, tree)}
    called = {
        "first": "kernels/some.py:first",
        "Plan.step": "kernels/some.py:Plan.step",
        "decayed": "kernels/backends/cpu/launch.py:run",
    }
    for scope, function in called.items():
        assert by_scope[scope].is_met([function])
        assert not any(by_scope[scope].is_met([other]) for other in called.values() if other != function)
    assert by_scope[""].is_met([])
    assert by_scope["Plan"].is_met([])


def test_what_is_left_out_is_there(module):
    for file, names in module.TUNING.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for name in names:
            assert name.rpartition(".")[2] in text, (file, name)
