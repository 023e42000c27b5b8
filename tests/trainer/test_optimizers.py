"""Optimizers: settings, host state, and the updater.

The judges are torch.optim and NumPy in float64. MXNet's own numbers are in test_golden_optimizers.py.
"""

import doctest
import math

import numpy as np
import pytest
import torch
from optimizer_training import train_by_hand
from torch.nn import Parameter
from trainer_cases import values_of

from tristep import Trainer
from tristep.trainer import trainer as trainer_module
from tristep.trainer.optimizer import (
    LARS,
    SGD,
    SGLD,
    Nadam,
    RMSProp,
    base,
    create,
    get_updater,
    registered,
    rule_optimizer,
)

pytestmark = pytest.mark.usefixtures("clean_registry")


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "groupadagrad", "adadelta", "adamax", "nadam", "dcasgd", "sgld"])
def test_a_limit_of_gradients_that_is_not_positive_is_none(name):
    """As in MXNet's kernels."""
    found = []
    for clip in (None, 0.0, -0.3):
        weight = torch.ones(2, 2)
        get_updater(create(name, clip_gradient=clip))(0, torch.tensor([[5.0, -0.1], [1.0, 0.0]]), weight)
        found.append(weight)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], torch.ones(2, 2))


def test_repr_and_settings_are_plain_numbers():
    made = RMSProp(centered=True, wd=np.float64(0.5))
    made.gamma1 = np.float32(0.75)
    made.cache = [1, 2]
    settings = made.settings()
    assert settings["gamma1"] == 0.75
    assert {type(value) for value in settings.values()} <= {bool, int, float, str, type(None)}
    assert "cache" not in settings


def test_docstring_examples():
    for module, least in ((base, 2), (rule_optimizer, 2), (trainer_module, 6)):
        failed, attempted = doctest.testmod(module)
        assert attempted >= least
        assert failed == 0


def _trained(name, lr_mult=1.0, **arguments):
    torch.manual_seed(0)
    weight = Parameter(torch.randn(4, 3))
    weight.lr_mult = lr_mult
    trainer = Trainer([weight], name, arguments)
    for _ in range(4):
        weight.grad = torch.randn(4, 3)
        trainer.step(1)
    return weight.detach()


def test_a_multiplier_and_a_schedule_are_the_rate_of_all_that_reads_one():
    """Half the rate is half the learning rate: in states that start from it, too. At a rate of 0 a weight stays."""
    ours = {name: klass for name, klass in registered().items() if klass.__module__.startswith("tristep.")}
    assert len(ours) > 40
    torch.manual_seed(0)
    start, wrong = torch.randn(4, 3), []
    for name, klass in ours.items():
        rate = klass().lr
        expected = _trained(name, learning_rate=rate / 2)
        first = 0 if getattr(klass, "reads_rate_first", False) else 1
        found = {
            "lr_mult": _trained(name, lr_mult=0.5, learning_rate=rate),
            "schedule": _trained(name, lr_scheduler=lambda n, rate=rate, first=first: rate / 2 if n >= first else 9 * rate),
        }
        wrong += [(name, how) for how, weight in found.items() if not torch.equal(weight, expected)]
        if name in ("ftrl", "ftml", "adadelta", "test"):  # divide by the rate, and refuse 0; or ignore it, as in MXNet
            continue
        if not torch.equal(_trained(name, lr_mult=0.0, learning_rate=rate), start):
            wrong.append((name, "a rate of 0"))
    assert wrong == []


@pytest.mark.parametrize("where", ["multiplier", "schedule", "hyper-parameter", "launch"])
@pytest.mark.parametrize("make", [lambda: Nadam(), lambda: LARS(momentum=0.9)], ids=["Nadam", "LARS"])
def test_a_step_that_fails_carries_nothing_on(make, where, everything, monkeypatch):
    params = [Parameter(torch.linspace(1, 2, 4)) for _ in range(3)]
    made = make()
    made.lr_scheduler = lambda num_update: 0.1 / num_update
    trainer = train_by_hand(params, made, [[torch.ones(4)] * 3] * 2)
    for param in params:
        param.grad = torch.full((4,), 0.5)
    before, carried = everything(trainer, params), made.host_state()
    assert carried == ((made.m_schedule,) if isinstance(made, Nadam) else (0.05, 0.5))

    def fail(*_, **__):
        raise RuntimeError("not today")

    with monkeypatch.context() as patch:
        if where == "multiplier":
            patch.setattr(params[2], "lr_mult", math.nan, raising=False)
        elif where == "schedule":
            patch.setattr(made, "lr_scheduler", fail)
        elif where == "launch":
            patch.setattr(type(trainer.replicas[0].plan.update), "__call__", fail)
        else:
            good = made.hyper_of
            patch.setattr(made, "hyper_of", lambda index, *others: fail() if index == 2 else good(index, *others))
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match="not today|lr_mult of parameter '2'=nan"):
                trainer.step(1)
            assert made.host_state() == carried
    assert everything(trainer, params) == before
    trainer.step(1)
    assert made.host_state() != carried


@pytest.mark.sample(1)
@pytest.mark.sample(0, "triton")
@pytest.mark.golden("sgld")
@pytest.mark.golden("sgld", version=2)
def test_the_noise_of_sgld_has_mxnets_moments(golden, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    config = golden.config
    n = config["draws"]
    weight = torch.full((n,), config["weight"], device=device)
    get_updater(SGLD(**config["kwargs"]))(0, torch.full((n,), config["gradient"], device=device), weight)
    (moved,) = values_of(weight)
    moved -= config["weight"]
    error = config["standard_error_of_mean"]
    assert abs(moved.mean() - config["displacement_mean"]) < 5 * math.sqrt(2) * error  # both are estimates
    assert moved.std() == pytest.approx(config["displacement_std"], rel=5 * math.sqrt(1 / n))
    z = (moved - moved.mean()) / moved.std()
    assert abs((z**3).mean()) < 5 * math.sqrt(6 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(24 / n)
    assert len(np.unique(moved)) > 0.9 * n
    assert abs((z[1:] * z[:-1]).mean()) < 5 / math.sqrt(n)  # neighbours know nothing of each other


def test_layerwise_rates_and_names():
    """LARS scales neither gamma, beta nor bias, and by its rule only weights decay."""
    names = {0: "a_weight", 1: "a_bias", 2: "a_gamma"}
    made = LARS(learning_rate=0.5, eta=0.1, wd=0.2, param_idx2name=names)
    weights = [torch.full((4,), 2.0) for _ in range(3)]
    get_updater(made)([0, 1, 2], [torch.ones(4)] * 3, weights)
    scaled = 2 - 0.5 * 0.1 * 4 / (2 + 0.2 * 4) * (1 + 0.2 * 2)
    assert [weight.tolist() for weight in weights] == [[pytest.approx(x)] * 4 for x in (scaled, 1.5, 1.5)]


def test_states_belong_to_the_index_not_to_the_tensor():
    updater = get_updater(SGD(learning_rate=1.0, momentum=0.5))
    first, second = torch.zeros(2), torch.zeros(2)
    updater(0, torch.ones(2), first)
    updater(0, torch.ones(2), second)
    updater(1, torch.ones(2), first)
    assert second.tolist() == [-1.5] * 2  # momentum from before
    assert first.tolist() == [-2.0] * 2  # none for a new index
    assert set(updater.states) == {0, 1}


def test_the_updater_refuses_what_does_not_fit():
    with pytest.raises(TypeError, match=r"optimizer must be an Optimizer, got str; see optimizer.create\(name\)"):
        get_updater("sgd")
    updater = get_updater(SGD())
    weights = [torch.ones(2), torch.ones(2)]
    with pytest.raises(ValueError, match="2 indices came with 1 gradients and 2 weights"):
        updater([0, 1], [torch.ones(2)], weights)
    with pytest.raises(ValueError, match=r"gradient of '1' is \(3,\) on cpu: its weight is \(2,\) on cpu"):
        updater([0, 1], [torch.ones(2), torch.ones(3)], weights)
    assert [weight.tolist() for weight in weights] == [[1.0, 1.0]] * 2
    assert updater.optimizer.num_update == 0
