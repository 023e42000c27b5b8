"""Classes of the user's own that are saved, registered or not: what is saved loads, and training goes on with its numbers.

A file never makes the program import anything: a class is found if it is registered, or defined already.
"""

import json
import sys

import pytest
import torch
from replicas import Remote

from tristep import CheckpointManager, Trainer, initializer, kvstore, lr_find, lr_scheduler
from tristep.trainer.lr_scheduler import LRScheduler

pytestmark = pytest.mark.usefixtures("clean_registry")


# ---- schedules, each with the rates of updates 1, 2, ... in plain Python ------------------------------------------------


class Falling(LRScheduler):
    def __call__(self, num_update):
        return 0.1 / (1 + num_update)


class Cosine(LRScheduler):  # a name by which a schedule of tristep's is found
    def __init__(self, max_update=3):
        super().__init__()
        self.max_update = max_update

    def __call__(self, num_update):
        return 1.0 / (self.max_update + num_update)


class Private(LRScheduler):
    """It does not keep its argument under that name, and changes when it is called, as MXNet's own schedules do."""

    def __init__(self, every):
        super().__init__(0.8)
        self._every, self._dropped = every, 0

    def __call__(self, num_update):
        while num_update > self._dropped + self._every:
            self._dropped += self._every
            self.base_lr *= 0.5
        return self.base_lr


class Drops(LRScheduler):
    """Its argument is one that JSON would change."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def __call__(self, num_update):
        return [rate for since, rate in self.rates.items() if since <= num_update][-1]


def wavy(n):
    return 1 + n % 3


SCHEDULES = {
    "no arguments": (Falling, lambda n: 0.1 / (1 + n)),
    "a built-in name": (Cosine, lambda n: 1 / (3 + n)),
    "private argument": (lambda: Private(2), lambda n: 0.8 * 0.5 ** ((n - 1) // 2)),
    "dict of numbers": (lambda: Drops({0: 0.5, 3: 0.25, 6: 0.125}), lambda n: 0.5 ** (1 + n // 3)),
    "lambda": (lambda: lambda n: 0.2 / n, lambda n: 0.2 / n),
    "function": (lambda: wavy, wavy),
}
unlike = pytest.mark.parametrize("registered", [False, True], ids=["not registered", "registered"])


def _started(kind, registered):
    """Return a trainer with a schedule, and a function that takes steps with it and returns the learning rates, exactly."""
    make, _ = SCHEDULES[kind]
    schedule = make()
    if registered and isinstance(schedule, LRScheduler) and not type(schedule).__module__.startswith("tristep."):
        lr_scheduler.register(type(schedule))
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    trainer = Trainer([weight], "sgd", {"lr_scheduler": schedule})

    def rates(count):
        found = []
        for _ in range(count):
            with torch.no_grad():
                weight.zero_()
            weight.grad = -torch.ones_like(weight)
            trainer.step(1)
            found.append(weight.item())
        return found

    return trainer, rates


@pytest.mark.filterwarnings("ignore:scheduler 'cosine' now means")
@pytest.mark.parametrize("way", ["states", "dict", "checkpoint", "back", "learning-rate finder"])
@unlike
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_with_its_rates(kind, registered, way, tmp_path):
    expected = [SCHEDULES[kind][1](n) for n in range(1, 9)]
    trainer, rates = _started(kind, registered)
    assert rates(4) == pytest.approx(expected[:4], rel=1e-12)
    other, rates_of_other = _started(kind, registered)
    if way == "states":
        trainer.save_states(tmp_path / "states")
        other.load_states(tmp_path / "states")
    elif way == "dict":
        other.load_state_dict(json.loads(json.dumps(trainer.state_dict())))
    elif way == "checkpoint":
        with CheckpointManager(tmp_path / "run", trainer, asynchronous=False) as manager:
            manager.save()
        assert other.resume(tmp_path / "run").step == 4
    elif way == "back":  # to an earlier state of the same trainer
        trainer.save_states(tmp_path / "states")
        assert rates(3) == pytest.approx(expected[4:7], rel=1e-12)
        trainer.load_states(tmp_path / "states")
        rates_of_other = rates
    else:
        (weight,) = trainer.replicas[0].params

        def step():
            weight.grad = -torch.ones_like(weight)
            trainer.step(1)
            return 1.0

        lr_find(trainer, step, n=4)
        rates_of_other = rates
    assert rates_of_other(4) == pytest.approx(expected[4:], rel=1e-12)


@pytest.mark.parametrize("kind", ["no arguments", "a built-in name"])
def test_a_defined_schedule_need_not_be_there(kind, tmp_path):
    trainer, rates = _started(kind, False)
    rates(4)
    trainer.save_states(tmp_path / "states")
    other = Trainer([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], "sgd")
    other.load_states(tmp_path / "states")
    assert [other.optimizer.lr_scheduler(n) for n in range(5, 9)] == pytest.approx(rates(4), rel=1e-12)


@pytest.mark.parametrize("kind", ["private argument", "dict of numbers"])
def test_a_schedule_that_cannot_be_made_again_must_be_there(kind, tmp_path):
    trainer, rates = _started(kind, False)
    rates(4)
    trainer.save_states(tmp_path / "states")
    saved, name = trainer.state_dict()["lr_scheduler"], type(trainer.optimizer.lr_scheduler).__name__
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    for other in (Trainer([weight], "sgd"), Trainer([weight], "sgd", {"lr_scheduler": Falling()})):
        before = other.optimizer.lr_scheduler
        with pytest.raises(ValueError, match=f"had a {name} as its lr_scheduler, which cannot be saved.*give it that"):
            other.load_states(tmp_path / "states")
        assert (other.optimizer.lr_scheduler, other.optimizer.num_update) == (before, 0)
    other, _ = _started(kind, False)
    before = dict(vars(other.optimizer.lr_scheduler))
    for odd in (None, [1], {"__class__": 1}, {"a": {}}, {"_base_lr": "x"}, {"_base_lr": -1.0}, {"_position": 1}):
        with pytest.raises((TypeError, ValueError), match=f"state of {name}"):
            other.load_state_dict({**trainer.state_dict(), "lr_scheduler": {**saved, "state": odd}})
        assert vars(other.optimizer.lr_scheduler) == before


def test_a_file_imports_nothing():
    assert "tabnanny" not in sys.modules
    for name in ("tabnanny:Whatever", "tabnanny:NannyNag", "Whatever", "a:b:c", ":", ""):
        with pytest.raises(ValueError, match="registered"):
            lr_scheduler.from_config({"class": name, "kwargs": {}})
    with pytest.raises(ValueError, match="this initializer is not registered: define or import its class before"):
        initializer.create('["tabnanny:Whatever", {}]')
    assert "tabnanny" not in sys.modules


def test_a_class_is_found_in_another_module_if_there_is_one():
    def define(module, rate):
        return type("Twin", (LRScheduler,), {"__module__": module, "__call__": lambda self, n: rate})

    first = define("train", 1.0)
    config = first().to_config()
    assert config["class"] == "train:Twin"
    script = {**config, "class": "__main__:Twin"}  # as where train.py itself was run
    assert type(lr_scheduler.from_config(script)) is first
    second = define("other", 2.0)
    assert type(lr_scheduler.from_config(config)) is first
    with pytest.raises(ValueError, match="other:Twin and train:Twin have that name: write @register above the one"):
        lr_scheduler.from_config(script)
    lr_scheduler.register(second)
    assert second().to_config()["class"] == "Twin"
    assert type(lr_scheduler.from_config(second().to_config())) is second
    assert type(lr_scheduler.from_config(config)) is first


# ---- initializers ------------------------------------------------------------------------------------------------------


class Sevens(initializer.Initializer):
    def __init__(self, factor=1):
        super().__init__(factor=factor)
        self.factor = factor

    def _init_weight(self, name, arr):
        arr.fill_(7 * self.factor)


class Zero(Sevens):  # a name that tristep has
    pass


@pytest.mark.filterwarnings("ignore:initializer 'zero' now means")
@unlike
@pytest.mark.parametrize("klass", [Sevens, Zero])
def test_an_initializer_is_made_again(klass, registered):
    if registered:
        initializer.register(klass)
    made = initializer.create(klass(factor=2).dumps())
    assert (type(made), made) == (klass, klass(factor=2))
    lstm = torch.nn.LSTM(3, 1)
    fused = initializer.create(initializer.FusedRNN(klass(3), 1, 1, "lstm").dumps())
    initializer.initialize(lstm, fused)
    assert lstm.weight_ih_l0.eq(21).all()


# ---- stores ------------------------------------------------------------------------------------------------------------


def _twins():
    nets = [torch.nn.Linear(2, 1) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    return nets


def _step(nets, trainer):
    for net in nets:
        net.zero_grad()
        net(torch.ones(3, 2)).sum().backward()
    trainer.step(3)


class Forgetful(Remote):
    save_optimizer_states = kvstore.KVStore.save_optimizer_states


class Onesided(Remote):
    load_optimizer_states = kvstore.KVStore.load_optimizer_states


@unlike
@pytest.mark.parametrize("klass", [Forgetful, Onesided])
def test_a_store_that_cannot_save_is_refused_at_the_first_step_and_before_a_file_is_written(klass, registered, tmp_path):
    store = kvstore.register(klass).__name__.lower() if registered else klass()
    nets = _twins()
    trainer = Trainer(nets, "adam", kvstore=store)
    (tmp_path / "states").write_bytes(b"before")
    lacks = "save" if klass is Forgetful else "load"
    with CheckpointManager(tmp_path / "run", trainer, nets, save_interval_steps=1000) as manager:
        _step(nets, trainer)
        with pytest.raises(TypeError, match=f"{klass.__name__} updates, but does not define {lacks}_optimizer_states"):
            manager.step()
    with pytest.raises(TypeError, match="define both, or use update_on_kvstore=False"):
        trainer.save_states(tmp_path / "states")
    assert (tmp_path / "states").read_bytes() == b"before"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["states"]
    fine = Trainer(_twins(), "adam", kvstore=klass(), update_on_kvstore=False)
    fine.save_states(tmp_path / "states")
    fine.load_states(tmp_path / "states")
