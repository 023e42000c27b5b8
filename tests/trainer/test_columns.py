"""Columns of multipliers give the bits of parameters that are trained one by one."""

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer, lr_scheduler, optimizer
from tristep.trainer.optimizer import plan


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
