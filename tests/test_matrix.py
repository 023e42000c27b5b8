"""The choice of cases: what the quick tier promises, and that slices are the rest of it."""

import importlib.util
import itertools
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

spec = importlib.util.spec_from_file_location("matrix_to_test", Path(__file__).parent / "matrix.py")
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)

RULES, ENGINES, TYPES = [f"rule{k}" for k in range(17)], ["triton", "cpu", "eager"], ["f8", "f4", "f2", "b2"]
PRODUCT = [
    {"rule": rule, "engine": engine, "dtype": dtype} for rule, engine, dtype in itertools.product(RULES, ENGINES, TYPES)
]


class Case:
    """As much of an item of pytest as the choice looks at."""

    def __init__(self, params, marks, name="test_it"):
        self.nodeid = f"tests/test_file.py::{name}[{'-'.join(params.values())}]" if params else f"tests/test_file.py::{name}"
        self.marks = marks
        if params:
            self.callspec = SimpleNamespace(params=params, marks=[])

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)


def cases(all_params, *marks, name="test_it"):
    return [Case(params, [mark.mark for mark in marks], name) for params in all_params]


def chosen(items):
    quick = matrix.quick_tier(items)
    return [item.callspec.params for item in items if item in quick]


@pytest.mark.parametrize("name", ["test_one", "test_other", "test_third", "test_fourth"])
def test_every_value_occurs_and_none_much_more_often_than_others(name):
    found = chosen(cases(PRODUCT, name=name))
    assert len(found) == len(RULES)
    assert {params["rule"] for params in found} == set(RULES)
    assert {params["engine"] for params in found} in ({"cpu", "eager"}, {"triton", "eager"})  # the other in other tests
    for values in ("engine", "dtype"):
        counts = Counter(params[values] for params in found)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert {params["dtype"] for params in found} == set(TYPES)


def test_cover_has_every_combination():
    found = chosen(cases(PRODUCT, pytest.mark.cover("rule", "engine")))
    assert Counter((params["rule"], params["engine"]) for params in found) == dict.fromkeys(
        itertools.product(RULES, ENGINES), 1
    )
    assert {params["dtype"] for params in found} == set(TYPES)


def test_values_given_in_pairs_stay_pairs():
    pairs = [{"a": "x", "b": "1"}, {"a": "x", "b": "2"}, {"a": "y", "b": "1"}, {"a": "y", "b": "2"}]
    assert len(chosen(cases(pairs))) == 2
    for names in ("a, b", ("a", "b")):
        assert chosen(cases(pairs, pytest.mark.parametrize(names, []))) == pairs


@pytest.mark.parametrize("count", [0, 1, 5, 10_000])
def test_sample_says_how_many(count):
    assert len(chosen(cases(PRODUCT, pytest.mark.sample(count)))) == min(count, len(PRODUCT))
    single = cases([{}], pytest.mark.sample(count))
    assert len(matrix.quick_tier(single)) == min(count, 1)


def test_cases_with_a_word_may_be_few():
    found = chosen(cases(PRODUCT, pytest.mark.sample(2, "triton")))
    assert Counter(params["engine"] for params in found)["triton"] == 2
    assert {params["rule"] for params in found} == set(RULES)
    pairs = chosen(cases(PRODUCT, pytest.mark.sample(2, "triton"), pytest.mark.cover("rule", "engine")))
    assert Counter(params["engine"] for params in pairs) == {"triton": 2, "cpu": 17, "eager": 17}


def test_a_value_may_be_left_to_the_full_tier():
    items = cases(PRODUCT)
    for item in items:
        item.callspec.marks = [pytest.mark.sample(0).mark] if item.callspec.params["rule"] == "rule3" else []
    assert {params["rule"] for params in chosen(items)} == set(RULES) - {"rule3"}
    assert chosen([item for item in items if item.callspec.marks]) == []


def test_the_choice_depends_on_names_alone():
    items = cases(PRODUCT)
    shuffled = random.Random(0).sample(items, len(items))
    assert {item.nodeid for item in matrix.quick_tier(items)} == {item.nodeid for item in matrix.quick_tier(shuffled)}


def test_an_unknown_parameter_is_named():
    with pytest.raises(pytest.UsageError, match=r"mark cover names \['engin'\]"):
        matrix.quick_tier(cases(PRODUCT, pytest.mark.cover("rule", "engin")))


def select(items, asked, *arguments):
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(getoption=lambda name: asked, args=list(arguments), hook=hook)
    kept = list(items)
    matrix.select(config, kept)
    assert sorted(item.nodeid for item in kept + left_out) == sorted(item.nodeid for item in items)
    return [item.nodeid for item in kept]


def test_quick_and_rest_and_quick_and_all_slices_are_everything():
    items = cases(PRODUCT) + cases([{}], name="test_alone") + cases([{}], pytest.mark.sample(0), name="test_late")
    everything = sorted(item.nodeid for item in items)
    quick, rest = select(items, "quick"), select(items, "rest")
    slices = [select(items, f"{k}/5") for k in range(1, 6)]
    assert sorted(quick + rest) == everything == sorted(select(items, "full"))
    assert sorted(sum(slices, quick)) == everything
    assert {len(cases) for cases in slices} <= {(len(rest) - 2) // 5 + extra for extra in range(4)}
    assert "tests/test_file.py::test_late" in rest
    assert sorted(select(items, "quick", "tests/test_file.py::test_it")) == everything  # asked for by name


def test_what_the_quick_tier_runs_eagerly_is_run_again():
    items = cases(PRODUCT)
    for item in items:
        item.fixturenames = ["eager_in_quick_tier"]
    everything = sorted(item.nodeid for item in items)
    assert len(select(items, "quick")) == len(RULES)
    slices = [select(items, f"{k}/3") for k in range(3)]
    assert sorted(select(items, "rest")) == everything == sorted(itertools.chain(*slices))


@pytest.mark.parametrize("asked", ["all", "1/0", "1/2/3", "-1/4"])
def test_another_word_is_refused(asked):
    with pytest.raises(pytest.UsageError, match="must be quick, full, rest, or a slice"):
        select(cases(PRODUCT), asked)
