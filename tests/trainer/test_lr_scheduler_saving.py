"""Learning-rate schedules: by name, user-defined, with a state; saved and loaded; and the examples of the docstrings."""

import doctest
import importlib
import json
import pkgutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as torchs

from tristep import Trainer
from tristep.trainer import lr_scheduler
from tristep.trainer.lr_scheduler import (
    FactorScheduler,
    FunctionScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    create,
    from_config,
    from_torch,
    register,
    sequence,
)

pytestmark = pytest.mark.usefixtures("clean_registry")


def _through_json(schedule):
    return from_config(json.loads(json.dumps(schedule.to_config())))


# ---- by name ---------------------------------------------------------------------------------------------------------


# ---- functions -------------------------------------------------------------------------------------------------------


def test_schedules_made_with_functions_are_saved_by_name():
    def halves(n):
        return 0.5**n

    def steps(optimizer, size):
        return torchs.StepLR(optimizer, size, 0.5)

    def made():
        return sequence((FunctionScheduler(halves, base_lr=2.0), 3), (halves, 2), from_torch(steps, size=2))

    unsaved = made()
    with pytest.raises(TypeError, match="function of FunctionScheduler=<function .*: is not registered, so it cannot be"):
        unsaved.to_config()
    register(halves)
    register(steps)
    schedule = made()
    config = json.loads(json.dumps(schedule.to_config()))
    assert from_config(config) == schedule
    assert from_config(config)(np.arange(9)).tolist() == [2.0, 1.0, 0.5, 1.0, 0.5, 0.01, 0.01, 0.01, 0.005]
    config["kwargs"]["schedulers"][0]["kwargs"]["function"] = "halve"
    with pytest.raises(ValueError, match="function='halve': no function is registered by that name.*Did you mean 'halves'"):
        from_config(config)


# ---- user-defined schedules ------------------------------------------------------------------------------------------


def test_user_schedule_saves_and_warms_up():
    @register
    class Sawtooth(LRScheduler):
        def __init__(self, period, **kwargs):
            super().__init__(**kwargs)
            self.period = period

        def __call__(self, num_update):
            if num_update < self.warmup_steps:
                return self.get_warmup_lr(num_update)
            return self.base_lr * (1 - num_update % self.period / self.period)

    schedule = create("sawtooth", period=4, base_lr=0.8, warmup_steps=2)
    assert [schedule(n) for n in range(6)] == pytest.approx([0.0, 0.4, 0.4, 0.2, 0.8, 0.6])
    assert _through_json(schedule) == schedule


class Stateful(LRScheduler):
    """As MXNet's documents write schedules, and as its own FactorScheduler works: it changes when it is called."""

    def __init__(self, step, factor, stop_factor_lr=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.step, self.factor, self.stop_factor_lr = step, factor, stop_factor_lr
        self.count = 0

    def __call__(self, num_update):
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        while num_update > self.count + self.step:
            self.count += self.step
            self.base_lr *= self.factor
            if self.base_lr < self.stop_factor_lr:
                self.base_lr = self.stop_factor_lr
        return self.base_lr


warmups = pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 5, "warmup_begin_lr": 0.05}], ids=["none", "warm-up"])


@warmups
def test_base_lr_is_the_present_learning_rate_and_may_be_set_as_in_mxnet(warmup):
    """The next learning rate is the one that was set, until the next drop, as in MXNet's loop."""
    given = {"step": 3, "factor": 0.1, "base_lr": 1.0, **warmup}
    theirs, ours = Stateful(**given), FactorScheduler(**given)
    several = MultiFactorScheduler([3 * k for k in range(1, 20)], 0.1, base_lr=1.0, **warmup)
    for n in range(1, 30):
        rate = pytest.approx(theirs(n), rel=1e-12)
        assert (ours(n), several(n)) == (rate, rate)
        rate = pytest.approx(theirs.base_lr, rel=1e-12)
        assert (ours.base_lr, several.base_lr) == (rate, rate)
        if n in (8, 12, 20):
            for schedule in (theirs, ours, several):
                schedule.base_lr = 0.5
            assert ours(n) == several(n) == 0.5
            restored = _through_json(ours)
            assert restored == ours
            np.testing.assert_array_equal(restored(np.arange(n, 40)), ours(np.arange(n, 40)))
        if n == 16:
            for schedule in (theirs, ours, several):
                schedule.base_lr *= 0.5
    assert ours.warmup_final_lr == theirs.warmup_final_lr == 1.0


def test_base_lr_set_during_the_warmup_and_by_start_from():
    """Drops are then counted from the start again."""
    schedule = FactorScheduler(3, 0.5, base_lr=1.0, warmup_steps=2)
    schedule(10)
    schedule.base_lr = 0.25
    assert (schedule.base_lr, schedule(13)) == (0.25, 0.125)
    schedule(0)
    schedule.base_lr = 0.8
    assert [schedule(n) for n in (3, 4, 10)] == [0.8, 0.4, 0.1]
    schedule.start_from(0.5)
    assert schedule == FactorScheduler(3, 0.5, base_lr=0.5, warmup_steps=2)
    assert schedule.base_lr == 0.5


@pytest.mark.parametrize(
    "state", [{"_kept": 1}, {"step": 7}, {"since": 1}, {"since": -1, "base_lr": 0.1}, {"__class__": "x"}]
)
def test_state_that_no_schedule_saves_is_refused(state):
    config = FactorScheduler(step=5, factor=0.5, base_lr=0.1).to_config()
    with pytest.raises((TypeError, ValueError), match=next(iter(state)) + "|base_lr"):
        from_config(config | {"state": state})


# ---- sequences and saved files ---------------------------------------------------------------------------------------


def test_trainer_saves_a_sequence_with_its_parts():
    net = torch.nn.Linear(2, 1)
    schedule = sequence((PolyScheduler(5, 0.1), 5), from_torch(torchs.ExponentialLR, gamma=0.9))
    trainer = Trainer(net, "sgd", {"lr_scheduler": schedule})
    resumed = Trainer(net, "sgd")
    resumed.load_state_dict(json.loads(json.dumps(trainer.state_dict())))
    assert resumed.optimizer.lr_scheduler == schedule
    assert schedule != PolyScheduler(5, 0.1)


@pytest.mark.parametrize("trained", [3, 4])
def test_a_saved_schedule_that_has_ended_replaces_a_longer_one_with_a_warning(trained):
    def made(max_update):
        weight = torch.nn.Parameter(torch.ones(1))
        schedule = lr_scheduler.CosineScheduler(max_update, base_lr=0.5)
        trainer = Trainer([weight], "sgd", {"lr_scheduler": schedule})
        for _ in range(trained if max_update == 4 else 0):
            weight.grad = torch.ones(1)
            trainer.step(1)
        return trainer

    saved, resumed = made(4).state_dict(), made(8)
    words = "saved CosineScheduler replaces .* ended at max_update=4, .* until update 8, set trainer.optimizer.lr_scheduler"
    with pytest.warns(UserWarning, match=words) if trained == 4 else nullcontext():
        resumed.load_state_dict(saved)
    assert resumed.optimizer.lr_scheduler.max_update == 4
    made(4).load_state_dict(saved)  # without a warning
    made(2).load_state_dict(saved)


def test_schedules_that_are_nested_too_deeply_are_refused():
    """In a file, before anything has changed, and where one is saved."""
    schedule = lr_scheduler.create("poly", max_update=10)
    config = schedule.to_config()
    for _ in range(200):
        config = {"class": "SequenceScheduler", "kwargs": {"schedulers": [config], "starts": []}}
    trainer = Trainer([torch.nn.Parameter(torch.ones(1))], "sgd", {"lr_scheduler": schedule})
    state = trainer.state_dict() | {"lr_scheduler": config}
    for load in (lambda: lr_scheduler.from_config(config), lambda: trainer.load_state_dict(state)):
        with pytest.raises(ValueError, match="config is nested too deeply"):
            load()
    assert trainer.optimizer.lr_scheduler is schedule
    for _ in range(60):
        schedule = lr_scheduler.SequenceScheduler([schedule], [])
    assert lr_scheduler.from_config(schedule.to_config()) == schedule
    for _ in range(10):
        schedule = lr_scheduler.SequenceScheduler([schedule], [])
    with pytest.raises(TypeError, match="nested too deeply, .*: it cannot be saved"):
        schedule.to_config()


def test_sequence_has_no_base_lr():
    schedule = sequence((PolyScheduler(5), 5), PolyScheduler(5))
    assert not hasattr(schedule, "base_lr")
    with pytest.raises(AttributeError, match="set it on one of its schedulers"):
        schedule.base_lr = 0.5
    with pytest.warns(UserWarning, match="learning_rate=0.5 has no effect"):
        Trainer(torch.nn.Linear(2, 1), "sgd", {"lr_scheduler": schedule, "learning_rate": 0.5})
    schedule.schedulers[0].base_lr = 0.5
    assert schedule(0) == 0.5


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(lr_scheduler.__path__)])
def test_docstring_examples(name):
    module = importlib.import_module(f"tristep.trainer.lr_scheduler.{name}")
    failed, attempted = doctest.testmod(module, extraglobs=vars(lr_scheduler))
    assert attempted > 5 or name == "config"
    assert failed == 0
