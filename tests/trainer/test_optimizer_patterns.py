"""Patterns that give parameters to optimizers, what is refused, and how it is shown."""

import re

import pytest
from torch import nn

import tristep

TWO = [("ndim<2", "adam"), ("*", "sgd", {"learning_rate": 0.01, "momentum": 0.9})]


def make_net():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


PATTERNS = [
    ("0.*", ["0.weight"]),
    ("*.bias", ["1.bias", "2.bias", "3.bias"]),
    ("ndim<2&!*bias", ["2.weight"]),
    ("shape[0]==8 & ndim==2", ["1.weight"]),
    ("shape[1]>=6", ["0.weight", "1.weight", "3.weight"]),
    ("numel<=8|0.w?ight", ["0.weight", "1.bias", "2.weight", "2.bias", "3.bias"]),
    ("layer==Embedding|layer==LayerNorm", ["0.weight", "2.weight", "2.bias"]),
    ("layer!=Linear", ["0.weight", "2.weight", "2.bias"]),
    ("!" * 3001 + " ! !0.*", ["1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"]),
    (re.compile(r"^[13]\.w"), ["1.weight", "3.weight"]),
    (lambda parameter: parameter.tensor.numel() == 54, ["0.weight"]),
]


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS, ids=[str(i) for i in range(len(PATTERNS))])
def test_patterns(pattern, expected):
    trainer = tristep.Trainer(make_net(), [(pattern, "adam"), ("*", "sgd")])
    rows = trainer.optimizer.table()[1:]
    assert [row[0] for row in rows if row[2] == "adam"] == expected


WRONG = [
    ([("nowhere*", "adam"), ("*", "sgd")], ValueError, "'nowhere\\*' gets no parameter: no parameter matches it"),
    ([("*", "adam"), ("0.*", "sgd")], ValueError, "'0.\\*' gets no parameter: earlier patterns take all .* '0.weight'"),
    ([("0.*", "adam")], ValueError, "no pattern takes '1.weight'"),
    ([("ndim<two", "adam")], ValueError, "optimizer\\[0\\].*compared with an integer"),
    ([("ndims<2", "adam"), ("*", "sgd")], ValueError, "unknown 'ndims'.*Did you mean 'ndim'"),
    ([("a||b", "adam")], ValueError, "nothing on one side"),
    ([("!" * 3000, "adam")], ValueError, "nothing on one side"),
    ([(3, "adam")], TypeError, "pattern=3: must be a string"),
    ([("*", "adam", {"momentum": 1})], TypeError, "optimizer\\[0\\]: Adam has no argument 'momentum'"),
    ([("*", "adm")], ValueError, "optimizer\\[0\\].*adam"),
    ([("*",)], TypeError, "must be \\(pattern, optimizer\\)"),
    ([], ValueError, "at least one"),
    ([("*", [("*", "sgd")])], TypeError, "is a list of optimizers inside the list"),
    ([("*", "sgd", {"begin_num_update": 3})], ValueError, "begin_num_update=3 is for all"),
]


@pytest.mark.parametrize(("entries", "kind", "words"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_entries_are_refused(entries, kind, words):
    with pytest.raises(kind, match=words):
        tristep.Trainer(make_net(), entries)


def test_patterns_of_layers_need_a_module():
    with pytest.raises(ValueError, match="give params as a module"):
        tristep.Trainer(list(make_net().parameters()), [("layer==Linear", "adam"), ("*", "sgd")])


def test_the_table_is_printed_and_shown():
    to_html = pytest.importorskip("tristep.viz.views.reprs", reason="pictures need matplotlib").to_html
    trainer = tristep.Trainer(make_net(), TWO)
    lines = str(trainer.optimizer).splitlines()
    assert lines[0].split() == ["parameter", "shape", "optimizer", "learning", "rate", "wd", "pattern"]
    assert lines[1].split() == ["0.weight", "(9,", "6)", "sgd", "0.01", "0", "*"]
    assert len(lines) == 8
    for shown in (trainer, trainer.optimizer):
        assert "adam</td>" in to_html(shown)
        assert "ndim&lt;2" in to_html(shown)


def test_rates_are_set_together_or_each():
    trainer = tristep.Trainer(make_net(), TWO)
    trainer.set_learning_rate(0.05)
    assert [part.learning_rate for part in trainer.optimizer.optimizers] == [0.005, 0.05]
    assert trainer.learning_rate == 0.05
    trainer.optimizer.optimizers[0].set_learning_rate(0.5)
    assert trainer.learning_rate == 0.05
    with pytest.raises(AttributeError, match=r"no 'momentum'; optimizers\[1\] has it"):
        print(trainer.optimizer.momentum)
