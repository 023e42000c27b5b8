"""Columns of multipliers give the bits of Python's numbers, and those of parameters that are trained one by one."""

import math
import operator

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer, lr_scheduler, optimizer
from tristep.trainer.optimizer import plan
from tristep.trainer.optimizer.columns import Column, column, table_of

NUMBERS = [0.1, 1 / 3, 1e-300, 1e300, 0.0, 7.0, 1e-8, 2.5]


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_arithmetic_has_the_bits_of_pythons(operation):
    values = column(NUMBERS)
    for other in (0.3, 1e300, 3, -1e-9):
        found = operation(values, other), operation(other, values + 1.0), operation(values, values + 1.0)
        expected = (
            [operation(each, other) for each in NUMBERS],
            [operation(other, each + 1.0) for each in NUMBERS],
            [operation(each, each + 1.0) for each in NUMBERS],
        )
        for result, numbers in zip(found, expected, strict=True):
            assert type(result) is Column
            assert result.tobytes() == np.array(numbers).tobytes()
    assert (-values).tolist() == [-each for each in NUMBERS]


REFUSED = {
    "power": lambda c: c**2,
    "comparison": lambda c: c > 0.0,
    "equality": lambda c: c == 0.0,
    "truth": lambda c: 1.0 if c else 0.0,
    "min": lambda c: min(c, 1.0),
    "float": float,
    "root": math.sqrt,
    "NumPy's root": np.sqrt,
    "NumPy's where": lambda c: np.where(c, 1.0, 0.0),
    "sum": lambda c: c.sum(),
    "division by zero": lambda c: 1.0 / c,
    "in place": lambda c: operator.iadd(c, 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_differ_is_refused(name):
    with pytest.raises((TypeError, ValueError, FloatingPointError)):
        REFUSED[name](column(NUMBERS))


def test_equal_numbers_need_no_column():
    assert column([0.5, 0.5]) == 0.5
    assert table_of([1.0, 2.0], 3) == [1.0, 2.0]
    assert table_of([1.0, column([2.0, 3.0])], 2).tolist() == [[1.0, 2.0], [1.0, 3.0]]


class Squared(optimizer.RuleOptimizer):
    """Its rate is a power of the given one, which columns do not have."""

    rule = tristep.kernels.rules.sgd

    def hyper(self, t, lr, wd):
        return {"lr": lr**1.5 if lr > 0.0 else 0.0}


NAMES = (*["sgd", "adam", "adamw", "radam", "ftml", "adafactor", "ftrl", "lamb", "adadelta", "schedulefreeadamw"], Squared)
OPTIONS = (
    {},
    {"decoupled_wd": True},
    {"ema_decay": 0.9, "cautious": True},
)


@pytest.fixture
def formed(monkeypatch):
    """Whether rows were formed as tables, of each step."""
    found, form = [], plan.HyperRows.form

    def noted(self, *args):
        rows = form(self, *args)
        found.append(any(isinstance(row, np.ndarray) for _, row in rows))
        return rows

    monkeypatch.setattr(plan.HyperRows, "form", noted)
    return found


def trained(params, name, arguments, scheduled=False):
    arguments = dict(arguments)
    if scheduled:
        arguments["lr_scheduler"] = lr_scheduler.FactorScheduler(2, 0.5, base_lr=arguments.pop("learning_rate"))
    made = name(**arguments) if isinstance(name, type) else optimizer.create(name, **arguments)
    trainer = Trainer(params, made, engine="eager")
    for step in range(4):
        for k, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + getattr(param, "place", k))
            param.grad = torch.randn(param.shape, generator=generator)
        trainer.step(3)
    return [param.detach() for param in params]


def parameters():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(9)]
    for k, param in enumerate(params):
        param.place, param.lr_mult, param.wd_mult = k, 1.0 / (1 + k), float(k % 3)
    return params


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("name", NAMES)
def test_multipliers_of_many_are_those_of_each_alone(name, scheduled, formed):
    found = trained(parameters(), name, {"learning_rate": 0.05, "wd": 0.1}, scheduled)
    of_all = list(formed)
    alone = [trained([param], name, {"learning_rate": 0.05, "wd": 0.1}, scheduled)[0] for param in parameters()]
    assert all(map(torch.equal, found, alone))
    assert all(of_all) == (name in ("sgd", "adam", "adamw", "radam", "lamb", "adadelta"))
    assert any(of_all) == all(of_all)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_take_columns(options, formed):
    arguments = {"learning_rate": 0.05, "wd": 0.1, "momentum": 0.9, **options}
    found = trained(parameters(), "sgd", arguments)
    assert all(formed)
    alone = [trained([param], "sgd", arguments)[0] for param in parameters()]
    assert all(map(torch.equal, found, alone))


def test_a_rate_of_zero_is_refused_by_name():
    params = parameters()
    params[4].lr_mult = 0.0
    with pytest.raises(ValueError, match="a learning rate of 0, by schedule or lr_mult"):
        trained(params, "ftrl", {"learning_rate": 0.1})
