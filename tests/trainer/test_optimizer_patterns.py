"""Patterns that give parameters to optimizers, and the rates of these."""

import re

import pytest
from refused_calls import several_layers

import tristep

TWO = [("ndim<2", "adam"), ("*", "sgd", {"learning_rate": 0.01, "momentum": 0.9})]


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
    trainer = tristep.Trainer(several_layers(), [(pattern, "adam"), ("*", "sgd")])
    rows = trainer.optimizer.table()[1:]
    assert [row[0] for row in rows if row[2] == "adam"] == expected


def test_rates_are_set_together_or_each():
    trainer = tristep.Trainer(several_layers(), TWO)
    trainer.set_learning_rate(0.05)
    assert [part.learning_rate for part in trainer.optimizer.optimizers] == [0.005, 0.05]
    assert trainer.learning_rate == 0.05
    trainer.optimizer.optimizers[0].set_learning_rate(0.5)
    assert trainer.learning_rate == 0.05
    with pytest.raises(AttributeError, match=r"no 'momentum'; optimizers\[1\] has it"):
        print(trainer.optimizer.momentum)
