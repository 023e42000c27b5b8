"""Saved states: training goes on to the bit after loading."""

import copy

import pytest
import torch
from saved_states import (
    MATRICES,
    SHAPES,
    WAYS,
    Averaged,
    Cautious,
    are_equal,
    make_gradients,
    make_params,
    take_step,
    twins_of,
)
from torch.nn import Parameter

from tristep import CheckpointManager, Trainer, lr_scheduler
from tristep.trainer.optimizer import SGD, register

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

OPTIMIZERS = {
    "momentum": ("sgd", {"momentum": 0.9, "wd": 0.1}),
    "adam": ("adam", {"beta1": 0.8, "clip_gradient": 0.5}),
    "rmsprop centered": ("rmsprop", {"centered": True}),
    "nadam": ("nadam", {"schedule_decay": 0.1}),
    "sgld": ("sgld", {"seed": 3}),
    "dcasgd momentum": ("dcasgd", {"lamda": 0.5, "momentum": 0.9}),
    "lars": ("lars", {"momentum": 0.9, "lr_scheduler": 0.5}),
    "lbsgd": ("lbsgd", {"momentum": 0.9, "batch_scale": 2, "updates_per_epoch": 1}),
    "lbsgd lars": ("lbsgd", {"momentum": 0.9, "batch_scale": 4, "warmup_strategy": "lars"}),
    "groupadagrad": ("groupadagrad", {"eps": 0.01}),
    "test": ("test", {"rescale_grad": -0.1}),
    "per-tensor state": ("cautious", {"learning_rate": 0.1, "momentum": 0.5}),
    "mxnet's form": ("averaged", {"learning_rate": 0.1, "decay": 0.7}),
}


@pytest.fixture(autouse=True)
def _registered(clean_registry):
    register(Averaged)
    register(Cautious)


@WAYS
@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_bit(name, dtype, multi_precision, way, tmp_path, everything):
    optimizer, kwargs = OPTIMIZERS[name]
    kwargs = kwargs | {"multi_precision": multi_precision}
    if "lr_scheduler" in kwargs:  # the rate falls at every step
        kwargs["lr_scheduler"] = lr_scheduler.FactorScheduler(1, kwargs["lr_scheduler"], base_lr=0.5)
    shapes = MATRICES if optimizer == "groupadagrad" else SHAPES
    params = make_params(dtype, shapes=shapes)
    trainer = Trainer(params, optimizer, kwargs)
    for _ in range(3):
        take_step(trainer, params, make_gradients(params))
    resumed = twins_of(params)
    other = Trainer(resumed, optimizer, kwargs)
    way(trainer, other, tmp_path)
    now = everything(trainer, []), everything(other, [])
    assert now[0] == now[1]
    for _ in range(3):
        gradients = make_gradients(params)
        take_step(trainer, params, gradients)
        take_step(other, resumed, gradients)
        assert are_equal(params, resumed)
    assert everything(trainer, []) == everything(other, [])
    assert not are_equal(params, make_params(dtype, shapes=shapes))
    assert {tuple(state.shape) for state in trainer.state_dict()["state"]["body"].values()} <= {(3, 5), (3, 1), ()}


@WAYS
def test_every_engine_reads_what_every_engine_wrote(engine, device, way, tmp_path):
    params = make_params(device=device)
    trainer = Trainer(params, "adam", {"wd": 0.1}, engine=engine)
    take_step(trainer, params, make_gradients(params))
    resumed = twins_of(params)
    other = Trainer(resumed, "adam", engine="eager")
    way(trainer, other, tmp_path)
    gradients = make_gradients(params)
    take_step(trainer, params, gradients)
    take_step(other, resumed, gradients)
    for name, param in params.items():
        torch.testing.assert_close(resumed[name], param, rtol=1e-6, atol=1e-7)


@WAYS
def test_settings_and_counts_become_the_saved_ones(way, tmp_path):
    params = make_params()
    trainer = Trainer(params, "sgd", {"learning_rate": 0.3, "momentum": 0.5, "wd": 0.25, "begin_num_update": 7})
    take_step(trainer, params, make_gradients(params))
    for param in list(params.values())[1:]:
        param.grad = torch.ones_like(param)
    trainer.step(1, ignore_stale_grad=True)
    trainer.set_learning_rate(0.4)
    other = Trainer(twins_of(params), "sgd", {"learning_rate": 9.0, "lr_scheduler": None})
    way(trainer, other, tmp_path)
    assert other.optimizer.settings() == trainer.optimizer.settings()
    assert (other.learning_rate, other.optimizer.momentum, other.optimizer.wd) == (0.4, 0.5, 0.25)
    assert other.state_dict()["counts"] == {"body": 8, "head": 9, "nothing": 9, "scale": 9} == trainer.state_dict()["counts"]
    assert other.optimizer.num_update == 9


def test_the_optimizer_stays_the_same_object_and_multipliers_stay(tmp_path):
    params = make_params()
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    take_step(trainer, params, make_gradients(params))
    trainer.save_states(tmp_path / "a")
    other, optimizer = twins_of(params), SGD()
    second = Trainer(other, optimizer)
    other["body"].lr_mult = 0.5
    optimizer.set_lr_mult({1: 3.0})
    second.load_states(tmp_path / "a")
    assert second.optimizer is optimizer
    assert other["body"].lr_mult == 0.5
    assert optimizer.lr_mult == {1: 3.0}
    before = {name: param.detach().clone() for name, param in other.items()}
    take_step(second, other, {name: torch.ones_like(param) for name, param in other.items()}, batch_size=1)
    moved = {name: float((before[name] - other[name].detach()).mean()) for name in ("body", "head", "scale")}
    assert moved == pytest.approx({"body": 0.5, "head": 3.0, "scale": 1.0}, rel=1e-5)  # in the order of names: body, head


@WAYS
@pytest.mark.parametrize("name", ["adam", "nadam", "lars"])  # the last two carry numbers from step to step
def test_a_state_from_before_the_first_step_makes_a_used_trainer_new(name, way, tmp_path):
    params = make_params()
    resumed = twins_of(params)
    new, used = Trainer(params, name), Trainer(resumed, name, {"begin_num_update": 2})
    for _ in range(3):
        take_step(used, resumed, make_gradients(params))
    way(new, used, tmp_path)
    assert used.optimizer.num_update == 0
    assert set(used.state_dict()["counts"].values()) == {0}
    assert used.optimizer.host_state() == new.optimizer.host_state()
    with torch.no_grad():
        for name, param in resumed.items():
            param.copy_(params[name])
    gradients = make_gradients(params)
    take_step(new, params, gradients)
    take_step(used, resumed, gradients)
    assert are_equal(params, resumed)


def test_a_loaded_dict_is_copied():
    params = make_params()
    trainer = Trainer(params, "adam")
    take_step(trainer, params, make_gradients(params))
    other = Trainer(twins_of(params), "adam")
    other.load_state_dict(trainer.state_dict())
    before = other.state_dict()["state"]["head"]["mean"].clone()
    take_step(trainer, params, make_gradients(params))
    assert torch.equal(other.state_dict()["state"]["head"]["mean"], before)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("name", ["adam", "averaged"])
def test_a_model_converted_before_loading_goes_on_like_one_converted_while_training(
    way, dtype, multi_precision, name, tmp_path
):
    """States are float32 for both types. With multi_precision, master copies come and go with the type."""
    for first, second in ((torch.float32, dtype), (dtype, torch.float32)):
        one = torch.nn.ParameterDict(make_params(first))
        kwargs = {"wd": 0.1, "multi_precision": multi_precision}
        trainer = Trainer(one, name, kwargs)
        for _ in range(2):
            take_step(trainer, dict(one), make_gradients(one))
        other = copy.deepcopy(one)
        one.to(second)
        other.to(second)
        resumed = Trainer(other, name, kwargs)
        way(trainer, resumed, tmp_path)
        for _ in range(2):
            gradients = make_gradients(one)
            take_step(trainer, dict(one), gradients)
            take_step(resumed, dict(other), gradients)
        assert {param.dtype for param in other.values()} == {second}
        assert are_equal(dict(one), dict(other))


@WAYS
def test_memory_formats_may_differ(way, tmp_path):
    weight = Parameter(torch.randn(2, 3, 4, 5))
    trainer = Trainer([("w", weight)], "adam")
    take_step(trainer, {"w": weight}, {"w": torch.randn(2, 3, 4, 5)})
    other = Parameter(weight.detach().clone().to(memory_format=torch.channels_last))
    resumed = Trainer([("w", other)], "adam")
    way(trainer, resumed, tmp_path)
    assert resumed.state_dict()["state"]["w"]["var"].stride() == other.stride() != weight.stride()
    gradient = torch.randn(2, 3, 4, 5)
    take_step(trainer, {"w": weight}, {"w": gradient})
    take_step(resumed, {"w": other}, {"w": gradient})
    assert torch.equal(weight, other)


def _falling(num_update):
    return 0.1 / num_update


@pytest.mark.parametrize(
    "schedule", [_falling, lr_scheduler.FunctionScheduler(_falling, base_lr=1.0)], ids=["plain", "FunctionScheduler"]
)
def test_a_plain_callable_is_not_saved_but_must_be_there(tmp_path, everything, schedule):
    params = make_params()
    trainer = Trainer(params, "sgd", {"lr_scheduler": schedule})
    take_step(trainer, params, make_gradients(params))
    trainer.save_states(tmp_path / "a")
    for kwargs in ({}, {"lr_scheduler": lr_scheduler.PolyScheduler(10)}):
        without = Trainer(twins_of(params), "sgd", kwargs)
        before = everything(without, [])
        with pytest.raises(
            ValueError, match="had a .*(callable|Scheduler) as its lr_scheduler, .* this trainer has (None|Poly)"
        ):
            without.load_states(tmp_path / "a")
        assert everything(without, []) == before
    other = Trainer(twins_of(params), "sgd", {"lr_scheduler": schedule})
    other.load_states(tmp_path / "a")
    assert other.optimizer.lr_scheduler is schedule
    assert other.learning_rate == 0.1
    plain = Trainer(params, "sgd", {"learning_rate": 0.7})
    other.load_state_dict(plain.state_dict())
    assert other.learning_rate == 0.7


def test_lazy_models_are_run_before_their_states_are_loaded(tmp_path):
    def make():
        net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 1))
        return net, Trainer(net, "adam")

    (net, trainer), (later, other) = make(), make()
    other.load_state_dict(trainer.state_dict())  # nothing to compare yet
    net(torch.ones(2, 3)).sum().backward()
    trainer.step(2)
    trainer.save_states(tmp_path / "a")
    CheckpointManager(tmp_path / "run", trainer, net, asynchronous=False).save()
    with pytest.raises(ValueError, match="'0.weight', '0.bias' of params not initialized yet: run the model once"):
        other.load_states(tmp_path / "a")
    with pytest.raises(ValueError, match="'0.weight' is not initialized yet: run the model once"):
        other.resume(tmp_path / "run", later)
    later(torch.ones(2, 3))
    other.load_states(tmp_path / "a")
    assert set(other.state_dict()["counts"].values()) == {1}
