"""Optimizers: update counts, learning rates, schedules and multipliers; the judge is NumPy in float64."""

import copy
import math

import numpy as np
import pytest
import torch
from optimizer_training import PlainAdam, train_by_hand
from torch.nn import Parameter
from trainer_cases import values_of

from tristep import Trainer, lr_scheduler
from tristep.trainer import optimizer as optimizers
from tristep.trainer.optimizer import LBSGD, SGD, Adam, Nadam, create, get_updater, registered

pytestmark = pytest.mark.usefixtures("clean_registry")


def test_counts_are_kept_per_index():
    made = SGD()
    updater = get_updater(made)
    weights = {index: torch.zeros(2) for index in (0, 3, "head")}
    for index in (0, 3, 3, "head", 3):
        updater(index, torch.ones(2), weights[index])
    assert made.counts == {0: 1, 3: 3, "head": 1}
    assert made.num_update == 3
    made._update_count([0, "head"])
    made._update_count("new")
    assert made.counts == {0: 2, 3: 3, "head": 2, "new": 1}
    assert made.num_update == 3


@pytest.mark.sample(0, "cpu", "triton")
def test_begin_num_update_moves_the_schedule_and_the_bias_correction(engine, device):
    asked = []

    def schedule(num_update):
        asked.append(num_update)
        return 0.1 / num_update

    weight = Parameter(torch.full((3,), 2.0, device=device))
    made = Adam(lr_scheduler=schedule, begin_num_update=10, epsilon=1e-3)
    assert made.num_update == 10
    assert made.learning_rate == pytest.approx(0.01)
    asked.clear()
    train_by_hand([weight], made, [[torch.ones_like(weight)]] * 2, engine)
    assert asked == [11, 12]
    assert made.counts == {0: 12}
    w, mean, var = 2.0, 0.0, 0.0
    for t in (11, 12):
        mean, var = 0.9 * mean + 0.1, 0.999 * var + 0.001
        w -= 0.1 / t * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * mean / (math.sqrt(var) + 1e-3)
    np.testing.assert_allclose(values_of(weight)[0], w, rtol=1e-6)


def test_the_default_rate_is_the_classes_own_and_no_scheduler_is_overruled():
    rates = {
        0.001: ("adam", "adamw", "adabelief", "nadam", "rmsprop", "lamb", "lans"),
        0.002: ("adamax",),
        0.01: ("sgd", "ccsgd", "nag", "sgld", "signum", "dcasgd", "adagrad", "groupadagrad", "ftml", "lars", "lbsgd"),
        0.1: ("ftrl",),
    }
    for rate, names in rates.items():
        assert {create(name).lr for name in names} == {rate}
    for name in registered():
        assert create(name, lr_scheduler=lr_scheduler.FactorScheduler(10, base_lr=0.7)).learning_rate == 0.7


def test_a_given_rate_becomes_the_schedulers_base_lr_with_a_warning():
    schedule = lr_scheduler.PolyScheduler(100, base_lr=0.4, pwr=1)
    with pytest.warns(
        UserWarning, match=r"learning_rate=0.2 replaces base_lr=0.4 of PolyScheduler\(max_update=100"
    ) as caught:
        made = SGD(learning_rate=0.2, lr_scheduler=schedule)
    assert caught[0].filename == __file__
    assert (schedule.base_lr, made.learning_rate) == (0.2, 0.2)
    assert schedule(50) == pytest.approx(0.1)
    SGD(learning_rate=0.2, lr_scheduler=schedule)  # the same rate: no warning


def test_a_scheduler_of_another_kind_gets_its_base_lr_too():
    """MXNet takes any callable with base_lr."""

    class Schedule:
        base_lr = 0.4

        def __call__(self, num_update):
            return self.base_lr

    with pytest.warns(UserWarning, match=r"learning_rate=0.2 replaces base_lr=0.4"):
        made = SGD(learning_rate=0.2, lr_scheduler=Schedule())
    assert made.learning_rate == 0.2
    with pytest.warns(UserWarning, match=r"learning_rate=0.2 has no effect: .*<lambda>.* decides the rate"):
        made = SGD(learning_rate=0.2, lr_scheduler=lambda num_update: 0.4)
    assert made.learning_rate == 0.4


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize(("size", "factor"), [(1e-4, 0.01), (0.3, 0.3), (1e4, 100.0)])
def test_lbsgds_factor_by_layer_has_mxnets_limits(size, factor, engine, device):
    """sqrt(sum w^2 / (sum g^2 + wd sum w^2 + 1e-18)), between 0.01 and 100 (MXNet 1.9.1, `LBSGD._get_lars`)."""
    weight = torch.nn.Parameter(torch.full((6,), size, device=device))
    trainer = Trainer([weight], "lbsgd", {"learning_rate": 0.5, "warmup_strategy": "lars"}, engine=engine)
    weight.grad = torch.ones(6, device=device)
    trainer.step(1)
    np.testing.assert_allclose(weight.detach().cpu(), size - 0.5 * factor, rtol=1e-5)


def test_reading_the_rate_changes_nothing():
    """MXNet's FactorScheduler drops for good when it is asked for a late update."""
    made = SGD(lr_scheduler=lr_scheduler.FactorScheduler(1, factor=0.5, base_lr=1.0))
    made.num_update = 5
    assert made.learning_rate == 0.0625
    made.num_update = 0
    assert made.learning_rate == 1.0


@pytest.mark.parametrize("given", [-0.5, "fast"])
def test_a_schedule_must_give_a_rate(given, everything):
    """Else the step changes nothing, in both forms of optimizers; nor does reading the rate."""
    for made in (SGD(momentum=0.5), PlainAdam(), Nadam(), LBSGD()):
        params = [Parameter(torch.ones(3)) for _ in range(2)]
        trainer = train_by_hand(params, made, [[torch.ones(3)] * 2])
        made.lr_scheduler = lambda num_update: given if num_update >= 1 else 1.0
        for param in params:
            param.grad = torch.ones(3)
        before = everything(trainer, params)
        asked = 1 if isinstance(made, LBSGD) else 2
        with pytest.raises((ValueError, TypeError)) as caught:
            trainer.step(1)
        assert str(caught.value).startswith(f"lr_scheduler({asked})={given!r}: must be ")
        assert everything(trainer, params) == before
        with pytest.raises(caught.type, match=r"lr_scheduler\(1\)=.*: must be"):
            trainer.learning_rate  # noqa: B018
        made.lr_scheduler = lambda num_update: np.float32(0.5)
        trainer.step(1)
        assert made.num_update == 2


def test_a_copy_of_an_optimizer_counts_by_itself():
    made = optimizers.create("sgd")
    made._update_count(0)
    other = copy.copy(made)
    other._update_count([0, 1])
    assert (made.counts, made.num_update) == ({0: 1}, 1)
    assert (other.counts, other.num_update) == ({0: 2, 1: 1}, 2)


def test_multipliers_come_from_the_parameter_then_the_index_then_the_name():
    weight = Parameter(torch.zeros(1))
    made = SGD(param_idx2name={0: "a_weight", 1: "b_weight"}, param_dict={0: weight})
    assert made.multipliers(0) == made.multipliers(1) == made.multipliers(2) == (1.0, 1.0)
    made.set_lr_mult({"a_weight": 2.0, "b_weight": 3.0})
    made.set_wd_mult({"a_weight": 0.2, "b_weight": 0.3})
    assert (made.multipliers(0), made.multipliers(1)) == ((2.0, 0.2), (3.0, 0.3))
    made.set_lr_mult({0: 4.0, "a_weight": 2.0})
    made.set_wd_mult({0: 0.4, "a_weight": 0.2})
    assert (made.multipliers(0), made.multipliers(1)) == ((4.0, 0.4), (1.0, 1.0))
    weight.lr_mult, weight.wd_mult = 5.0, 0.0
    assert made.multipliers(0) == (5.0, 0.0)


@pytest.mark.sample(0, "cpu", "triton")
def test_multipliers_reach_the_update(engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    made = SGD(learning_rate=0.5, wd=0.25, param_idx2name={0: "a_weight", 1: "a_bias", 2: "b_weight"})
    made.set_lr_mult({"b_weight": 0.5, 3: 2.0})
    made.set_wd_mult({"b_weight": 2.0})
    weights = [torch.ones(3, device=device) for _ in range(4)]
    get_updater(made)(list(range(4)), [torch.ones(3, device=device) for _ in range(4)], weights)
    # 1 - lr lr_mult (1 + wd wd_mult); the bias does not decay, by its name
    assert [weight.tolist() for weight in weights] == [[x] * 3 for x in (0.375, 0.5, 0.625, -0.25)]


@pytest.mark.parametrize("which", ["lr_mult", "wd_mult"])
def test_a_bad_multiplier_of_a_parameter_is_named_and_nothing_is_changed(which, everything):
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    trainer = train_by_hand(params, SGD(momentum=0.5, wd=0.1), [[torch.ones(3)] * 2])
    setattr(params[1], which, -1.0)
    for param in params:
        param.grad = torch.ones(3)
    before = everything(trainer, params)
    with pytest.raises(ValueError, match=f"{which} of parameter '1'=-1.0: must be finite and 0 or more"):
        trainer.step(1)
    assert everything(trainer, params) == before
